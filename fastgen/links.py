"""Messages between the process that schedules and the ranks.

An interrupt (Ctrl-C) may come to the main thread at any point, and must not leave a message half sent, or sent to some
ranks alone. So the main thread only puts messages into a queue, which no interrupt cuts in two; a thread sends them,
and one thread a connection receives. No message is lost or doubled, and each connection keeps their order.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from fastgen.arch import ModelConfig
from fastgen.config import EngineConfig
from fastgen.request import Batch, SamplingParams, StepResult

NOTED = 256  # the latest launches whose receipt a rank remembers


class Message:
    """What goes over a connection; immutable."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Start(Message):
    """To a rank, first: what to be. options: of EngineConfig.make, without device and memory; device: "cpu" or "cuda";
    log_level: of fastgen's log."""

    rank: int
    size: int
    model_config: ModelConfig
    options: dict[str, Any]
    folder: Path
    load: str
    device: str
    log_level: int


@dataclass(frozen=True, slots=True)
class Port(Message):
    """From rank 0, and on to the others: where the ranks meet on this host."""

    port: int


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """From a rank: its runner is built."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Launch(Message):
    """To all ranks: run a step. Numbers only grow."""

    number: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Draw(Message):
    """To all ranks: sample a launched step whose batch is masked; the masks (int32 [R, ceil(V / 32)]) go to rank 0."""

    number: int
    masks: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Result(Message):
    """From rank 0: what a step came to."""

    number: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class Settle(Message):
    """To all ranks: wait until nothing is on its way, and say so."""

    number: int


@dataclass(frozen=True, slots=True)
class Settled(Message):
    """From a rank. received: (number, time.monotonic()) of the latest launches."""

    number: int
    received: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """From a rank: it raised, and ends. time: time.monotonic(). error: None where it ended without a word."""

    rank: int
    time: float
    error: Exception | None
    trace: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failed:
        trace = "".join(traceback.format_exception(error))
        return cls(rank, time.monotonic(), portable(error), trace)


def portable(error: BaseException) -> Exception:
    """An error as it can be sent; a RuntimeError with its text where it can not, or would end the receiver."""
    with suppress(Exception):  # pickling runs the error's own code, which may raise anything
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _reduce_params(params: SamplingParams) -> tuple[Callable[..., SamplingParams], tuple[dict[str, Any]]]:
    """What a rank reads of them. The rest is the caller's business alone, and of types that need not pickle."""
    fields = {key: value for key, value in vars(params).items() if key not in ("mask", "stop", "stop_token_ids")}
    if params.logit_bias is not None:
        fields["logit_bias"] = dict(params.logit_bias)
    return _make_params, (fields,)


def _make_params(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**fields)


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {SamplingParams: _reduce_params}


def _dumps(message: Message) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(message)
    return file.getvalue()


class Links:
    """The leader's ends of the connections to the ranks.

    failures: of ranks that raised, or whose connections ended, as they came in; they are in `receive` too.
    """

    def __init__(self) -> None:
        self.failures: list[Failed] = []
        self._connections: dict[int, Connection] = {}
        self._outgoing: SimpleQueue[Message | Mapping[int, Message] | None] = SimpleQueue()
        self._incoming: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._start(self._send_all)

    def add(self, rank: int, connection: Connection) -> None:
        """Take over a connection to a rank."""
        self._connections[rank] = connection
        self._start(self._receive_all, rank, connection)

    def send(self, message: Message | Mapping[int, Message]) -> None:
        """Send a message to all ranks, or to each its own; returns at once. It must not be changed afterwards."""
        self._outgoing.put(message)

    def receive(self, timeout: float | None = None) -> tuple[int, Message] | None:
        """The next message, after its sender's rank; None where none comes within so many seconds."""
        try:
            return self._incoming.get(timeout=timeout)
        except Empty:
            return None

    def first_failure(self) -> Failed:
        """What began it: a rank that died without a word, else the earliest error; others fail in consequence."""
        return min(self.failures, key=lambda failed: (failed.error is not None, failed.time))

    def close(self) -> None:
        """Send what is to be sent, where it is taken; then end the connections and the threads."""
        self._closing = True
        self._outgoing.put(None)
        if self._threads[0] is not threading.current_thread():
            self._threads[0].join(1.0)
        for connection in self._connections.values():
            with suppress(OSError):  # it is closed, or the other end is gone
                _shut_down(connection)
        for thread in self._threads:
            if thread is not threading.current_thread():  # whose garbage collection closes this
                thread.join(1.0)
        if not any(thread.is_alive() for thread in self._threads):  # else its number could become another file's
            for connection in self._connections.values():
                connection.close()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="fastgen-links", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            parts = self._parts(message)
            try:
                distinct = {id(part): part for part in parts.values()}
                pickled = {key: _dumps(part) for key, part in distinct.items()}
            except Exception as error:
                self._note(Failed.of(0, error))
                return
            for rank, part in parts.items():
                with suppress(OSError):  # it has ended, and the thread that receives from it says so
                    self._connections[rank].send_bytes(pickled[id(part)])

    def _parts(self, message: Message | Mapping[int, Message]) -> Mapping[int, Message]:
        """What each rank is sent."""
        if isinstance(message, Message):
            return dict.fromkeys(self._connections, message)
        return message

    def _receive_all(self, rank: int, connection: Connection) -> None:
        while True:
            try:
                data = connection.recv_bytes()
            except (EOFError, OSError):
                if not self._closing and all(failed.rank != rank for failed in self.failures):
                    self._note(Failed(rank, time.monotonic(), None))
                return
            try:
                message = pickle.loads(data)
            except Exception as error:
                message = Failed.of(rank, error)
            if isinstance(message, Failed):
                self._note(message)
            else:
                self._incoming.put((rank, message))

    def _note(self, failed: Failed) -> None:
        self.failures.append(failed)
        self._incoming.put((failed.rank, failed))


class Link:
    """A rank's end of its connection. A thread receives; when the connection ends, it calls `ended` at once."""

    def __init__(self, connection: Connection, ended: Callable[[], None]) -> None:
        self._connection = connection
        self._ended = ended
        self._incoming: SimpleQueue[Message | Exception | None] = SimpleQueue()
        self._sending = threading.Lock()
        self._received: deque[tuple[int, float]] = deque(maxlen=NOTED)
        threading.Thread(target=self._receive_all, name="fastgen-link", daemon=True).start()

    @property
    def received(self) -> tuple[tuple[int, float], ...]:
        """(number, time.monotonic()) of the latest launches, when they came."""
        return tuple(self._received)

    def send(self, message: Message) -> None:
        """Send a message, from any thread; raises OSError where nobody is there."""
        data = _dumps(message)
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for the next message; None at the end. Raises what came up when it was read, and queue.Empty after so
        many seconds."""
        message = self._incoming.get(timeout=timeout)
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        """End the connection; the thread closes it."""
        with suppress(OSError):  # it has ended
            _shut_down(self._connection)

    def _receive_all(self) -> None:
        try:
            while True:
                message: Message = pickle.loads(self._connection.recv_bytes())
                if isinstance(message, Launch):
                    self._received.append((message.number, time.monotonic()))
                self._incoming.put(message)
        except (EOFError, OSError):
            self._ended()
        except Exception as error:
            self._incoming.put(error)
        finally:
            self._incoming.put(None)
            with self._sending:
                self._connection.close()


def _shut_down(connection: Connection) -> None:
    """End a connection for all who hold it, forks of this process and threads that wait in it too."""
    with socket.socket(fileno=os.dup(connection.fileno())) as held:
        held.shutdown(socket.SHUT_RDWR)
