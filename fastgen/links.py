"""Messages between the process that schedules and the ranks.

An interrupt (Ctrl-C) may come to the main thread at any point, and must not leave a message half sent, or sent to some
ranks alone. So the main thread only puts messages into a queue, which no interrupt cuts in two; a thread sends them,
and one thread a connection receives. No message is lost or doubled, and each connection keeps their order.

That thread runs when the main thread lets it: Python switches between busy threads every 5 ms. So the main thread waits
until a message is sent, about 50 us, before it goes on.
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
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from fastgen.arch import ModelConfig
from fastgen.config import EngineConfig
from fastgen.exchange import DepartedError
from fastgen.processes import portable
from fastgen.request import Batch, SamplingParams, StepResult

NOTED = 256  # the latest launches whose receipt a rank remembers
SENDING = 1e-3  # seconds that a message's sending is waited for: a rank that is slow to read delays nobody for longer


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
    """To all ranks: run a step. Numbers only grow. again: its decodes are those of the launch before, and left out."""

    number: int
    batch: Batch
    again: bool = False


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
class StartTrace(Message):
    """To rank 0: record all that follows."""


@dataclass(frozen=True, slots=True)
class WriteTrace(Message):
    """To rank 0: write what was recorded since StartTrace, and say so."""

    number: int
    path: Path


@dataclass(frozen=True, slots=True)
class TraceWritten(Message):
    """From rank 0. error: why it is not; None where it is."""

    number: int
    error: str | None


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
    """From a rank: it raised, and ends; in a tp_group, to all followers too: what ends them all. error: None where it
    ended without a word."""

    rank: int
    error: Exception | None
    trace: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failed:
        return cls(rank, portable(error), "".join(traceback.format_exception(error)))

    @property
    def is_consequence(self) -> bool:
        """Whether it comes of what another rank did."""
        return isinstance(self.error, DepartedError)


def _reduce_params(params: SamplingParams) -> tuple[Callable[..., SamplingParams], tuple[dict[str, Any]]]:
    """What a rank reads of them. The rest is the caller's business alone, and of types that need not pickle."""
    values = {key: value for key, value in vars(params).items() if key not in ("mask", "stop", "stop_token_ids")}
    if params.logit_bias is not None:
        values["logit_bias"] = dict(params.logit_bias)
    return _make_params, (values,)


def _make_params(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


_batch_fields = attrgetter(*(each.name for each in fields(Batch)))


def _reduce_launch(launch: Launch) -> tuple[Callable[..., Launch], tuple[Any, ...]]:
    """In a quarter of the time that a dataclass takes by itself."""
    return _make_launch, (launch.number, launch.again, *_batch_fields(launch.batch))


def _make_launch(number: int, again: bool, *values: Any) -> Launch:
    return Launch(number, Batch(*values), again)


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {SamplingParams: _reduce_params, Launch: _reduce_launch}


def _dumps(message: Message) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(message)
    return file.getvalue()


class Links:
    """The leader's ends of the connections to the ranks.

    failures: of ranks that raised, or whose connections ended, as they came in; they are in `receive` too.
    failed: called then, by a thread.
    """

    def __init__(self, failed: Callable[[], None] = lambda: None) -> None:
        self.failures: list[Failed] = []
        self._failed = failed
        self._sending = threading.Lock()  # held by nobody: the thread releases it when all that is queued is sent
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
        """Send a message to all ranks, or to each its own; returns when it is sent, and after SENDING at the latest.

        It must not be changed afterwards. An interrupt while this waits does not keep it from being sent.
        """
        self._sending.acquire(blocking=False)  # it is held now, by whomever
        self._outgoing.put(message)
        self._sending.acquire(timeout=SENDING)

    def receive(self, timeout: float | None = None) -> tuple[int, Message] | None:
        """The next message, after its sender's rank; None where none comes within so many seconds."""
        try:
            return self._incoming.get(timeout=timeout)
        except Empty:
            return None

    def first_failure(self, patience: float = 0.0) -> Failed | None:
        """What began it: of all failures the first that is no other's consequence. While there is none, waits so many
        seconds for it; then it is the first of all."""
        deadline = time.monotonic() + patience
        while True:
            cause = next((failed for failed in self.failures if not failed.is_consequence), None)
            if cause is not None or time.monotonic() >= deadline:
                return cause or next(iter(self.failures), None)
            time.sleep(0.005)

    def close(self) -> None:
        """Send what is to be sent, where it is taken; then end the connections and the threads."""
        if threading.current_thread() in self._threads:  # whose garbage collection closes this
            threading.Thread(target=self.close, name="fastgen-close").start()
            return
        self._closing = True
        self._outgoing.put(None)
        self._threads[0].join(1.0)
        for connection in self._connections.values():
            with suppress(OSError):  # it is closed, or the other end is gone
                _shut_down(connection)
        for thread in self._threads:
            thread.join(1.0)
        if not any(thread.is_alive() for thread in self._threads):  # else its number could become another file's
            for connection in self._connections.values():
                connection.close()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="fastgen-links", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _send_all(self) -> None:
        decodes: tuple[int, ...] = ()  # of the launch before
        while (message := self._outgoing.get()) is not None:
            if isinstance(message, Launch):
                again, decodes = message.batch.decodes is decodes, message.batch.decodes
                if again:
                    message = Launch(message.number, replace(message.batch, decodes=()), again)
            parts = self._parts(message)
            try:
                distinct = {id(part): part for part in parts.values()}
                pickled = {key: _dumps(part) for key, part in distinct.items()}
            except Exception as error:
                self._note(Failed.of(0, error))
                continue
            for rank, part in parts.items():
                with suppress(OSError):  # it has ended, and the thread that receives from it says so
                    self._connections[rank].send_bytes(pickled[id(part)])
            if self._outgoing.empty() and self._sending.locked():
                self._sending.release()

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
                    self._note(Failed(rank, None))
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
        self._failed()


class Link:
    """A rank's end of its connection. A thread receives; when the connection ends, or brings a Failed, it calls
    `ended` at once."""

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
        """The next message; None at the end. Raises what came up when it was read, and TimeoutError where nothing
        comes within so many seconds."""
        try:
            message = self._incoming.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        """End the connection; the thread closes it."""
        with suppress(OSError):  # it has ended
            _shut_down(self._connection)

    def _receive_all(self) -> None:
        decodes: tuple[int, ...] = ()
        try:
            while True:
                message: Message = pickle.loads(self._connection.recv_bytes())
                if isinstance(message, Launch):
                    if message.again:
                        message = Launch(message.number, replace(message.batch, decodes=decodes))
                    decodes = message.batch.decodes
                    self._received.append((message.number, time.monotonic()))
                self._incoming.put(message)
                if isinstance(message, Failed):
                    self._ended()
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
