"""Messages between two processes over a socket: between the ranks of a Generator, between fgserve and its engines, and
between a pool and its processes.

A message is any object that can be pickled; its length precedes it. At each end a thread receives, so that the end of a
connection is noticed at once, whatever the rest of the process is doing. This module does not import torch.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from queue import SimpleQueue
from typing import Any

from fastgen.processes.errors import DepartedError, portable

HEAD = struct.Struct("!Q")  # length of the pickle that follows, in bytes
SILENT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a spawned process: the arguments of its main function, and fastgen's log level."""

    arguments: dict[str, Any]
    log_level: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The last message of a process that ends because it raised an error.

    A Channel also delivers it for a message that cannot be unpickled, and Peers for the end of a connection, with error
    None. trace: the formatted traceback.
    """

    error: Exception | None
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(portable(error), "".join(traceback.format_exception(error)))


def frame(message: object) -> bytes:
    """Return a message as it is sent: its length and its pickle."""
    data = pickle.dumps(message, protocol=5)
    return HEAD.pack(len(data)) + data


class Channel:
    """One end of a connection.

    deliver: a thread calls it with each message, in order, and with None at the end of the connection.
    """

    def __init__(self, connection: socket.socket, deliver: Callable[[Any], None]) -> None:
        self._connection = connection
        self._unsent = bytearray()
        # The thread does not refer to the channel, so that the channel can be collected with its owner.
        self._thread = threading.Thread(
            target=_receive_all, args=(connection, deliver), name="fastgen-channel", daemon=True
        )
        self._thread.start()

    def send(self, message: object, wait: bool = True) -> None:
        """Send a message. Raises OSError if the connection has ended.

        wait: return only when the connection has taken the whole message. Otherwise the rest is sent with the next
        message, or by `flush`.
        """
        self.write(frame(message), wait)

    def write(self, data: bytes, wait: bool = True) -> None:
        """Send a message that `frame` has packed; see `send`."""
        self._unsent += data
        if wait:
            self.flush()
            return
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]

    def flush(self) -> None:
        """Send the unsent bytes, and wait until the connection has taken them."""
        data, self._unsent = self._unsent, bytearray()
        try:
            self._connection.sendall(data)
        except BaseException:  # nothing can be sent after part of a message
            self._shut_down()
            raise

    def close(self) -> None:
        """End the connection and the thread."""
        self._shut_down()
        if threading.current_thread() is not self._thread:  # a garbage collection in that thread may close the channel
            self._thread.join(1.0)
        self._connection.close()

    def _shut_down(self) -> None:
        with suppress(OSError):  # it has ended already
            self._connection.shutdown(socket.SHUT_RDWR)


def _notice_silence(connection: socket.socket) -> None:
    """End a TCP connection SILENT_SECONDS after the other host has vanished without closing it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for name, value in (
            (socket.TCP_KEEPIDLE, 3),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, name, value)


def _receive_all(connection: socket.socket, deliver: Callable[[Any], None]) -> None:
    with connection.makefile("rb") as file:
        while (data := _read(file)) is not None:
            try:
                message = pickle.loads(data)  # noqa: S301 (from our own process)
            except Exception as error:
                deliver(Failed.of(error))
                return
            deliver(message)
    deliver(None)


def _read(file: BufferedReader) -> bytes | None:
    """Return the pickle of the next message; None at the end of the connection."""
    with suppress(OSError):
        head = file.read(HEAD.size)
        if len(head) == HEAD.size:
            (size,) = HEAD.unpack(head)
            data = file.read(size)
            if len(data) == size:
                return data
    return None


class Peers:
    """The channels of one rank: the leader has one to each follower, a follower has one to the leader, rank 0.

    failures: (rank, Failed) in order of arrival, also for connections that have ended. on_failure: a channel's thread
    calls it at each failure.
    """

    def __init__(self) -> None:
        self.failures: list[tuple[int, Failed]] = []
        self.on_failure: Callable[[], None] = lambda: None
        self._channels: dict[int, Channel] = {}
        self._incoming: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._closing = False

    def __len__(self) -> int:
        return len(self._channels)

    def add(self, rank: int, connection: socket.socket) -> None:
        """Add a connection to a rank, and own it from now on."""
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_silence(connection)
        self._channels[rank] = Channel(connection, partial(self._take, rank))

    def send(self, message: object) -> None:
        """Send a message to all of them. If a connection has ended, the thread of its channel reports its rank's
        failure."""
        data = frame(message)
        for channel in self._channels.values():
            with suppress(OSError):
                channel.write(data)

    def send_to(self, rank: int, message: object) -> None:
        """Send a message to one of them, as `send` does."""
        data = frame(message)
        with suppress(OSError):
            self._channels[rank].write(data)

    def receive(self, timeout: float | None = None) -> tuple[int, Any]:
        """Return (rank of the sender, message) for the next message or failure. Raises queue.Empty if none arrives
        within `timeout` seconds."""
        return self._incoming.get(timeout=timeout)

    def first_failure(self, patience: float = 0.0) -> tuple[int, Failed] | None:
        """Return the first failure that is not the consequence of another rank's failure. If none arrives within
        `patience` seconds, return the first failure of any kind."""
        deadline = time.monotonic() + patience
        while True:
            for failure in self.failures:
                if not isinstance(failure[1].error, DepartedError):
                    return failure
            if time.monotonic() >= deadline:
                return self.failures[0] if self.failures else None
            time.sleep(0.005)

    def close(self) -> None:
        """End all connections."""
        self._closing = True
        for channel in self._channels.values():
            channel.close()

    def _take(self, rank: int, message: Any) -> None:
        if message is None:
            if self._closing or any(failed_rank == rank for failed_rank, _ in self.failures):
                return
            message = Failed(None)
        if isinstance(message, Failed):
            self.failures.append((rank, message))
            self.on_failure()
        self._incoming.put((rank, message))
