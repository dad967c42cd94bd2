"""Messages between the process that schedules and the ranks.

A step must be told within 150 us, and to wake a thread takes 30 to 100. So the thread that schedules sends a step
itself, and the thread of a rank that runs it receives it, which for a while does not even sleep (`Link.eager`).

An interrupt (Ctrl-C) may come to the thread that schedules at any point, and must not leave a message half sent, or
sent to some ranks alone. What is to be sent to all ranks is noted in one piece, and how much of it a connection has
taken is noted in the same call that sends it (`_Part`), so what an interrupt cuts short goes on with the next message.
No message is lost or doubled, and each connection keeps their order.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from fastgen.arch import ModelConfig
from fastgen.config import EngineConfig
from fastgen.exchange import DepartedError
from fastgen.processes import portable
from fastgen.request import Batch, LaneStart, Prefill, SamplingParams, Score, StepResult

NOTED = 256  # the latest launches whose receipt a rank remembers
LENGTH = struct.Struct("<Q")  # of a message, which it begins with
STUCK = 0.5  # seconds without a byte taken, after which a rank is cut off where others have failed, or all is closed


class Message:
    """What goes over a connection; immutable."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Answer(Message):
    """From a rank: what came of the message of this number."""

    number: int


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
class Settled(Answer):
    """received: (number, time.monotonic()) of the latest launches."""

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


UNSENT = ("mask", "stop", "stop_token_ids", "logit_bias")
SENT = tuple(each.name for each in fields(SamplingParams) if each.name not in UNSENT)
"""What a rank reads of them, beside the biases. The rest is the caller's business alone, and may be of any type."""

_params_fields = attrgetter(*SENT)
_start_fields = attrgetter("lane", "seed", "index", "prompt_len", "stop_ids", "token_ids")


def _dumps(message: Message, again: bool = False) -> bytes:
    """What goes over a connection: a LENGTH, and so many bytes. again: the decodes are those of the launch before."""
    data = pickle.dumps(_flat(message, again) if isinstance(message, Launch) else message, protocol=5)
    return LENGTH.pack(len(data)) + data


def _loads(data: bytes, decodes: tuple[int, ...] = ()) -> Message:
    """decodes: of the launch before."""
    found = pickle.loads(data)
    return found if isinstance(found, Message) else _launch(decodes, *found)


def _flat(launch: Launch, again: bool) -> tuple[Any, ...]:
    """A Launch as values of Python's own types, and the tokens of all chunks in one. Objects and arrays take 4 times as
    long, most of all where the processor has done other things since the last step."""
    batch = launch.batch
    scores = [chunk.score and _flat_score(chunk.score) for chunk in batch.prefills]
    chunks = [(x.lane, x.start, len(x.tokens), x.sample, x.forks) for x in batch.prefills]
    groups = [[*group] for _, group in groupby(batch.starts, lambda start: id(start.params))]  # samples share them
    starts = [(_flat_params(group[0].params), [*map(_start_fields, group)]) for group in groups]
    tokens = b"".join([chunk.tokens.data for chunk in batch.prefills])
    moves = batch.pages, batch.fresh, batch.saves, batch.loads, batch.copies
    return launch.number, None if again else batch.decodes, batch.masked, tokens, chunks, scores, starts, *moves


def _launch(
    before: tuple[int, ...],
    number: int,
    decodes: tuple[int, ...] | None,
    masked: bool,
    tokens: bytes,
    chunks: list[tuple[Any, ...]],
    scores: list[tuple[Any, ...] | None],
    starts: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]],
    pages: tuple[tuple[int, int, tuple[int, ...]], ...],
    *moves: Any,
) -> Launch:
    ids, at, prefills, begun = np.frombuffer(tokens, np.int32), 0, [], []
    for (lane, start, count, sample, forks), score in zip(chunks, scores, strict=True):
        mine, at = ids[at : at + count], at + count
        prefills.append(Prefill(lane, start, mine, sample, None if score is None else _score(*score), forks))
    for values, group in starts:
        params = _params(*values)
        begun += [LaneStart(lane, params, *rest) for lane, *rest in group]
    decodes = before if decodes is None else decodes
    return Launch(number, Batch(decodes, tuple(prefills), tuple(begun), pages, masked, *moves))


def _flat_params(params: SamplingParams) -> tuple[Any, ...]:
    return None if params.logit_bias is None else dict(params.logit_bias), *_params_fields(params)


def _params(bias: dict[int, float] | None, *values: Any) -> SamplingParams:
    params = object.__new__(SamplingParams)  # what is not sent is as the class has it; `replace` takes 10 times as long
    vars(params).update(zip(SENT, values, strict=True), logit_bias=bias)
    return params


def _flat_score(score: Score) -> tuple[int, bytes, int, float]:
    return score.row, score.targets.tobytes(), score.top, score.temperature


def _score(row: int, targets: bytes, top: int, temperature: float) -> Score:
    return Score(row, np.frombuffer(targets, np.int32), top, temperature)


def _read(connection: socket.socket) -> bytes:
    """The next message, without its LENGTH; raises EOFError at the end."""
    (length,) = LENGTH.unpack(_read_exactly(connection, LENGTH.size))
    return _read_exactly(connection, length)


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = connection.recv(length, socket.MSG_WAITALL)
    while len(data) < length:  # at the end, and where a signal came
        more = connection.recv(length - len(data), socket.MSG_WAITALL)
        if not more:
            raise EOFError
        data += more
    return data


@dataclass(slots=True)
class _Part:
    """A message on its way to one rank; without data, the end of what is sent to it."""

    connection: socket.socket
    data: memoryview
    taken: list[int] = field(default_factory=list)  # bytes, of each call

    def send(self) -> bool:
        """Send what the connection takes; whether that was all."""
        if not self.data:
            self.connection.shutdown(socket.SHUT_WR)
            return True
        # One call both sends and notes: an interrupt comes before it or behind it, or ends it before a byte is taken.
        self.taken.extend(map(self.connection.send, [self.data[sum(self.taken) :]]))
        return sum(self.taken) == len(self.data)


class Links:
    """The leader's ends of the connections to the ranks.

    failures: of ranks that raised, or whose connections ended, as they came in; they are in `receive` too.
    failed: called then, by a thread.
    """

    def __init__(self, failed: Callable[[], None] = lambda: None) -> None:
        self.failures: list[Failed] = []
        self._failed = failed
        self._connections: dict[int, socket.socket] = {}
        self._unsent: deque[_Part] = deque()
        self._decodes: tuple[int, ...] | None = None  # of the launch before
        self._incoming: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self._closing = False
        self._threads: list[threading.Thread] = []  # that receive

    def add(self, rank: int, connection: socket.socket) -> None:
        """Take over a connection to a rank."""
        timeout = struct.pack("ll", int(STUCK), int(STUCK % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._connections[rank] = connection
        thread = threading.Thread(target=self._receive_all, args=(rank, connection), name="fastgen-links", daemon=True)
        self._threads.append(thread)
        thread.start()

    def send(self, message: Message | Mapping[int, Message]) -> None:
        """Send a message to all ranks, or to each its own, and wait until the connections have taken it.

        What an interrupt keeps from being sent is sent with the next message. Behind a Failed nothing more is sent.
        """
        decodes, self._decodes = self._decodes, None  # after an interrupt the next launch goes out whole
        again = False
        if isinstance(message, Launch):
            again, decodes = message.batch.decodes is decodes, message.batch.decodes
        each = dict.fromkeys(self._connections, message) if isinstance(message, Message) else message
        distinct = {id(part): part for part in each.values()}
        pickled = {key: memoryview(_dumps(part, again)) for key, part in distinct.items()}
        parts = [_Part(self._connections[rank], pickled[id(part)]) for rank, part in each.items()]
        if isinstance(message, Failed):
            parts += [_Part(connection, memoryview(b"")) for connection in self._connections.values()]
        self._unsent.extend(parts)
        self._decodes = decodes
        self._send_all()

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
        self._send_all()
        for connection in self._connections.values():
            with suppress(OSError):  # the other end is gone
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(1.0)
        if not any(thread.is_alive() for thread in self._threads):  # else its number could become another file's
            for connection in self._connections.values():
                connection.close()

    def _send_all(self) -> None:
        while self._unsent:
            part = self._unsent[0]
            try:
                done = part.send()
            except BlockingIOError:  # after STUCK seconds
                done = self._closing or bool(self.failures)
                if done:
                    with suppress(OSError):
                        part.connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has ended, and the thread that receives from it says so
                done = True
            if done:
                self._unsent.popleft()

    def _receive_all(self, rank: int, connection: socket.socket) -> None:
        while True:
            try:
                data = _read(connection)
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
    """A rank's end of its connection. When nothing more will come over it, a thread calls `ended` at once, whatever the
    rank does and has not read.

    eager: seconds in which `receive` looks for a message again and again before it sleeps; who sleeps has it 100 us
    later.
    """

    def __init__(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._sending = threading.Lock()
        self._decodes: tuple[int, ...] = ()
        self.eager = 0.0
        self._received: deque[tuple[int, float]] = deque(maxlen=NOTED)
        self._watch = threading.Thread(target=_watch, args=(connection, ended), name="fastgen-link", daemon=True)
        self._watch.start()

    @property
    def received(self) -> tuple[tuple[int, float], ...]:
        """(number, time.monotonic()) of the latest launches, when `receive` had them."""
        return tuple(self._received)

    def send(self, message: Message) -> None:
        """Send a message, from any thread; raises OSError where nobody is there."""
        data = _dumps(message)
        with self._sending:
            self._connection.sendall(data)

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None at the end. Raises TimeoutError where nothing comes within so many seconds. For one
        thread, which can receive nothing more after an interrupt."""
        deadline = time.monotonic() + self.eager
        while not self._poll.poll(0) and time.monotonic() < deadline:
            pass
        if timeout is not None and not self._poll.poll(1e3 * timeout):
            raise TimeoutError
        try:
            data = _read(self._connection)
        except (EOFError, OSError):
            return None
        message = _loads(data, self._decodes)
        if isinstance(message, Launch):
            self._decodes = message.batch.decodes
            self._received.append((message.number, time.monotonic()))
        return message

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._watch:  # whose garbage collection closes this
            self._watch.join(1.0)
        self._connection.close()


def _watch(connection: socket.socket, ended: Callable[[], None]) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    ended()
