"""Messages between two processes over a socket: between the ranks of a Generator, and between fgserve and its engines.

A message is any object that pickles, sent behind its length. Each end has a thread that receives, so that the end of a
connection is detected at once, whatever the rest of the process does. This module does not import torch.
"""

from __future__ import annotations

import pickle
import socket
import struct
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

HEAD = struct.Struct("!Q")  # bytes of the message that follows


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a process that was started: the arguments of its main function, and the level of fastgen's
    log."""

    arguments: dict[str, Any]
    log_level: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The last message of a process: it raised an error, and ends.

    A channel also delivers it for a message that cannot be read, and Peers for the end of a connection (error: None).
    """

    error: Exception | None
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(portable(error), "".join(traceback.format_exception(error)))


def frame(message: object) -> bytes:
    """Return the bytes of a message on a connection: its length and its pickle."""
    data = pickle.dumps(message, protocol=5)
    return HEAD.pack(len(data)) + data


class Channel:
    """An end of a connection.

    deliver: called by a thread with each message, in order, and with None at the end of the connection.
    """

    def __init__(self, connection: socket.socket, deliver: Callable[[Any], None]) -> None:
        self._connection = connection
        self._unsent = bytearray()
        # The thread holds no reference to the channel, so that the channel ends with its owner.
        self._thread = threading.Thread(
            target=_receive_all, args=(connection, deliver), name="fastgen-channel", daemon=True
        )
        self._thread.start()

    def send(self, message: object, wait: bool = True) -> None:
        """Send a message. Raises OSError where the connection has ended.

        wait: return when the connection has taken all of the message; else the rest follows with the next message, or
        with `flush`.
        """
        self.write(frame(message), wait)

    def write(self, data: bytes, wait: bool = True) -> None:
        """Send a frame, as `send` does."""
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
        except BaseException:  # nothing can follow a part of a message
            self._shut_down()
            raise

    def close(self) -> None:
        """End the connection and the thread."""
        self._shut_down()
        if threading.current_thread() is not self._thread:  # a garbage collection in the thread may close the channel
            self._thread.join(1.0)
        self._connection.close()

    def _shut_down(self) -> None:
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)


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
    """Return the next message, pickled; None at the end of the connection."""
    with suppress(OSError):
        head = file.read(HEAD.size)
        if len(head) == HEAD.size:
            (size,) = HEAD.unpack(head)
            data = file.read(size)
            if len(data) == size:
                return data
    return None


class Peers:
    """The channels of one rank to others: of the leader to all followers, of a follower to the leader, rank 0.

    failures: (rank, Failed) in the order of arrival, including ranks whose connections have ended. on_failure: called
    by a thread at each failure.
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
        """Take over a connection to a rank."""
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channels[rank] = Channel(connection, partial(self._take, rank))

    def send(self, message: object) -> None:
        """Send a message to all. A connection that has ended is a failure of its rank, which the thread of its channel
        reports."""
        data = frame(message)
        for channel in self._channels.values():
            with suppress(OSError):
                channel.write(data)

    def receive(self, timeout: float | None = None) -> tuple[int, Any]:
        """Return the rank of a sender and its next message, failures included. Raises queue.Empty where none comes
        within `timeout` seconds."""
        return self._incoming.get(timeout=timeout)

    def first_failure(self, patience: float = 0.0) -> tuple[int, Failed] | None:
        """Return the first failure that is not the consequence of another rank's. Where there is none within `patience`
        seconds, return the first failure of any kind."""
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
            if self._closing or any(known == rank for known, _ in self.failures):
                return
            message = Failed(None)
        if isinstance(message, Failed):
            self.failures.append((rank, message))
            self.on_failure()
        self._incoming.put((rank, message))
