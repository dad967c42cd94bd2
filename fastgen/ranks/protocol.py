"""The protocol of tensor parallelism: rank 0, the `Leader`, schedules, and `Follower`s, the others, replay its steps.

The leader sends each step to all followers before it launches the step itself, so that all ranks make the same
collectives in the same order. Followers reply to nothing but Invoke and updates of the weights. There are two uses:

- `tensor_parallel`: the leader's process starts the followers, which do nothing but `run`.
- `tp_group`: a program has the ranks (SPMD), and each of them makes the same calls. A call begins when all ranks have
  made it; the leader does it, and a follower replays the leader's steps until it gets what the call returns or raises.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import subprocess
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from collections.abc import Generator as PyGenerator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastgen.engine.interrupts import DeferredInterrupt
from fastgen.engine.runner import Launched, Runner
from fastgen.model.weights import Update
from fastgen.parallel.errors import DepartedError, portable, raise_first
from fastgen.parallel.group import Group
from fastgen.ranks.channel import Failed, Peers
from fastgen.ranks.messages import (
    Call,
    Closing,
    Invoke,
    Launch,
    NoMoreWeights,
    Raise,
    Reply,
    Return,
    Sample,
    WriteOwn,
    WriteSent,
)
from fastgen.ranks.processes import end, ending
from fastgen.ranks.weights import SharedMemory, Weight, Written, check_agreement, check_or_write, received
from fastgen.request import Batch, StepResult

T = TypeVar("T")

CLOSED = "this Generator is closed; make a new one"
CONSEQUENCES = 3.0  # seconds in which the leader hears of the failure that another failure comes of
LISTENING = 8.0  # seconds in which a follower hears from the leader what a failure comes of
MEETING = 1.0  # seconds that a rank which closes waits for the others to close
POLL = 50e-6  # seconds between two looks at a step that runs


@dataclass(frozen=True)
class Spawned:
    """Followers that were started. processes: of ranks 1, 2, ...; memory: for the tensors of updates."""

    processes: list[subprocess.Popen[bytes]]
    memory: SharedMemory

    def end(self, tell: Callable[[], None]) -> None:
        """End all processes. tell: ends their connections, and so those that see it."""
        end(self.processes, tell)
        self.memory.close()

    def ending(self, rank: int) -> str:
        """Say how a rank's process ended."""
        process = self.processes[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return ending(process.returncode)


def error_of(rank: int, failed: Failed, spawned: Spawned | None = None) -> Exception:
    """Return an error to raise for another rank's failure."""
    if failed.error is None:
        how = "is gone" if spawned is None else spawned.ending(rank)
        return RuntimeError(f"rank {rank} {how}; make a new Generator")
    error = portable(failed.error)  # a raised one holds the frames that it came through
    if failed.trace:
        error.add_note(f"on rank {rank}:\n{failed.trace}")
    return error


def invoke(asked: Invoke, runner: Runner) -> Reply:
    """Call a method of this rank's runner. Where there is too little memory, the reply has the error, and all ranks go
    on; other errors are raised."""
    try:
        return Reply(asked.number, getattr(runner, asked.method)(*asked.arguments))
    except (ValueError, torch.OutOfMemoryError) as error:
        return Reply(asked.number, error=portable(error))


class Member(ABC):
    """One rank. A rank that fails ends what all have together; then each call raises a RuntimeError."""

    def __init__(self, build: Callable[[], Runner], peers: Peers, group: Group, spawned: Spawned | None = None) -> None:
        self._peers = peers
        self._group = group
        self._spawned = spawned
        self._broken: BaseException | None = None
        self._calls = 0
        try:
            with self._agreeing():
                self._runner = build()
        except BaseException:
            peers.close()
            raise
        self.config = self._runner.config
        self._end = weakref.finalize(self, _end, self._runner, peers, group, spawned, os.getpid())

    @abstractmethod
    def call(self, name: str, function: Callable[[], T], update: Update | None = None) -> T:
        """Return, on all ranks, what the leader's function returns, or raise what it raises; all must call this name.
        update: of this rank's program, where the call updates weights."""

    def iterate(self, name: str, items: PyGenerator[T, None, None]) -> PyGenerator[T, None, None]:
        """Yield the items of the leader's generator, on all ranks. All must leave early at the same item, which closes
        the generator."""
        try:
            while item := self.call(f"next of {name}", lambda: _next(items)):
                yield item[0]
        except GeneratorExit:
            if self._end.alive and self._broken is None:
                self.call(f"end of {name}", items.close)
            raise

    def close(self) -> None:
        """End the connections, the group, and processes that were started. More calls do nothing."""
        self._end()

    def _check(self) -> None:
        if self._broken is not None:
            cause = f"{type(self._broken).__name__}: {self._broken}"
            raise RuntimeError(f"the ranks no longer agree, make a new Generator: {cause}") from self._broken
        if not self._end.alive:
            raise RuntimeError(CLOSED)

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """All ranks must complete what is within, or others would wait for this one in a collective."""
        try:
            yield
        except BaseException as error:
            self._broken = self._fail(error)
            if self._broken is error:
                raise
            raise self._broken from error

    @abstractmethod
    def _fail(self, error: BaseException) -> BaseException:
        """End what the ranks have together, after an error; return the first error, which may be another rank's."""


class Leader(Member):
    """Rank 0: used as a Runner is.

    build: makes the runner, on all ranks at once. spawned: the followers, where they were started; else calls are made
    with `call`. status: followers get its result at the end of each call.

    What a rank raises in its part of a step, or in `build`, is raised on all, and a RuntimeError where a rank is gone.
    """

    def __init__(
        self,
        build: Callable[[], Runner],
        peers: Peers,
        group: Group,
        spawned: Spawned | None = None,
        status: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__(build, peers, group, spawned)
        self._status = status
        self._numbers = itertools.count()
        self._calling = False

    def call(self, name: str, function: Callable[[], T], update: Update | None = None) -> T:
        """See Member; calls within a call are the leader's own."""
        if self._calling:
            return function()
        try:
            self._calling = True
            self._calls += 1
            self._meet(name)
            value = function()
            data = pickle.dumps((value, self._status()))  # now, as the caller may change it
            self._peers.send(Return(self._calls, data))
            return value
        except BaseException as error:
            self._peers.send(Raise(self._calls, portable(error)))
            raise
        finally:
            self._calling = False

    def launch(self, batch: Batch) -> Launched:
        """Launch a step on all ranks."""
        self._check_all()
        with self._agreeing():
            self._peers.send(Launch(replace(batch, starts=())))
            return self._runner.launch(batch)

    def sample(self, launched: Launched, masks: np.ndarray) -> None:
        """Draw the tokens of the last step, whose batch is masked. masks: int32 [R, ceil(V / 32)]."""
        self._check_all()
        with self._agreeing():
            self._peers.send(Sample())
            self._runner.sample(launched, masks)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step, and read it; raises where a follower fails meanwhile."""
        while launched.arrived is not None and not launched.arrived.query():  # type: ignore[no-untyped-call]
            self._check_all()
            time.sleep(POLL)
        try:
            result = self._runner.collect(launched)
        except DepartedError as error:
            raise self._fail(error) from error
        self._check_all()  # where a rank has failed, its collectives were interrupted, and the result is wrong
        return result

    def settle(self) -> None:
        """Wait until nothing is on its way on any rank. Does nothing where the ranks no longer agree."""
        if self._broken is None and self._end.alive:
            self._invoke("settle")

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int:
        """See Runner; returns the bytes of all ranks."""
        return sum(self._invoke("sleep", tuple(tags), keep_weights))

    def wake(self, tags: Collection[str]) -> None:
        """See Runner."""
        self._invoke("wake", tuple(tags))

    def update_weights(self, update: Update, begin: Callable[[], None]) -> None:
        """See Runner. Followers that were started get the tensors from here; the programs of others give the same."""
        if self._spawned is not None:
            self._check_all()
            update.check()
            begin()
            self._write_and_send(update, self._spawned.memory)
        else:
            self._write_own(update, write=False)
            begin()
            self._write_own(update, write=True)

    def _write_and_send(self, update: Update, memory: SharedMemory) -> None:
        """Write an update on all ranks, one tensor after the other."""

        def sent() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in update.tensors():
                weight = Weight.of(next(self._numbers), name, tensor, memory)
                self._peers.send(weight)
                yield name, tensor
                self._replies(weight.number)
                del tensor

        asked = WriteSent(next(self._numbers))
        self._peers.send(asked)
        try:
            self._runner.write_weights(sent())
        finally:
            self._peers.send(NoMoreWeights())
        self._replies(asked.number)
        memory.clear()

    def _write_own(self, update: Update, write: bool) -> None:
        self._check_all()
        asked = WriteOwn(next(self._numbers), write, update.partial)
        self._peers.send(asked)
        mine = check_or_write(update, self._runner, write)
        others: dict[int, Written] = {rank: reply.value for rank, reply in self._replies(asked.number).items()}
        check_agreement({0: mine, **others}, wrote=write)

    def _invoke(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the runner on each rank; return the results, or raise the error of the lowest rank."""
        self._check_all()
        asked = Invoke(next(self._numbers), method, arguments)
        self._peers.send(asked)
        replies = {0: invoke(asked, self._runner), **self._replies(asked.number)}
        raise_first({rank: reply.error for rank, reply in replies.items()})
        return [reply.value for reply in replies.values()]

    def _meet(self, name: str) -> None:
        """Wait until all ranks have called this."""
        self._check_all()
        called = self._gather(lambda message: isinstance(message, Call) and message.number == self._calls)
        for rank in sorted(called):
            if called[rank].name != name:
                raise RuntimeError(f"rank {rank} called {called[rank].name} where rank 0 called {name}")

    def _replies(self, number: int) -> dict[int, Reply]:
        """Wait for each follower's reply to a message."""
        return self._gather(lambda message: isinstance(message, Reply) and message.number == number)

    def _gather(self, wanted: Callable[[object], bool]) -> dict[int, Any]:
        """Wait for a message of each follower; skip others."""
        found: dict[int, Any] = {}
        while len(found) < len(self._peers):
            rank, message = self._peers.receive()
            if isinstance(message, Failed):
                raise self._fail(DepartedError())
            if isinstance(message, Closing):
                raise self._fail(error_of(rank, Failed(None)))
            if wanted(message):
                found[rank] = message
        return found

    def _check_all(self) -> None:
        self._check()
        if self._peers.failures:
            raise self._fail(DepartedError())

    def _fail(self, error: BaseException) -> BaseException:
        found = self._peers.first_failure(CONSEQUENCES) if isinstance(error, DepartedError) else None
        if found is not None:
            error = error_of(*found, self._spawned)
        self._broken = error
        self._peers.send(Failed(portable(error)))
        self._group.leave()
        if self._spawned is not None:
            self._spawned.end(self._peers.close)
        return error


class Follower(Member):
    """Any other rank. status: the leader's, at the end of the last call."""

    def __init__(self, build: Callable[[], Runner], peers: Peers, group: Group) -> None:
        super().__init__(build, peers, group)
        self.status: Any = None
        self._unsampled: Launched | None = None

    def call(self, name: str, function: object = None, update: Update | None = None) -> Any:
        self._check()
        self._calls += 1
        with self._agreeing():
            self._peers.send(Call(self._calls, name))
            outcome = self._replay(update)
        if isinstance(outcome, Raise):
            raise outcome.error
        value, self.status = pickle.loads(outcome.data)
        return value

    def run(self, memory: int) -> None:
        """Replay the leader's steps until it raises or closes, which is raised here. memory: the number of the file
        with the tensors of updates."""
        with self._agreeing():
            self._replay(None, memory)

    def _replay(self, update: Update | None, memory: int = -1) -> Return | Raise:
        """Do what the leader says, until this call ends."""
        while True:
            message = self._next()
            match message:
                case Launch():
                    launched = self._runner.launch(message.batch)
                    self._unsampled = launched if message.batch.masked else None
                case Sample():
                    assert self._unsampled is not None
                    self._runner.sample(self._unsampled, None)
                    self._unsampled = None
                case Invoke():
                    self._unsampled = None  # an interrupt may have kept its step from being sampled
                    self._peers.send(invoke(message, self._runner))
                case WriteOwn():
                    assert update is not None
                    update.partial = message.partial
                    written = check_or_write(update, self._runner, message.write)
                    error = None if written.error is None else portable(written.error)
                    self._peers.send(Reply(message.number, replace(written, error=error)))
                case WriteSent():
                    self._runner.write_weights(received(self._next, self._reply, SharedMemory(memory)))
                    self._reply(message.number)
                case Return() | Raise() if message.number == self._calls:
                    return message

    def _next(self) -> Any:
        _, message = self._peers.receive()
        if isinstance(message, Failed):
            raise error_of(0, message)
        return message

    def _reply(self, number: int) -> None:
        self._peers.send(Reply(number))

    def _fail(self, error: BaseException) -> BaseException:
        self._peers.send(Failed.of(error))
        self._group.leave()
        found = self._peers.first_failure(LISTENING) if isinstance(error, DepartedError) else None
        return error if found is None else error_of(*found)


def _next(items: Iterator[T]) -> list[T]:
    try:
        return [next(items)]
    except StopIteration:
        return []


def _end(runner: Runner, peers: Peers, group: Group, spawned: Spawned | None, owner: int) -> None:
    """End a rank. owner: the process whose it is; a fork of it ends nothing."""
    if os.getpid() != owner:
        return
    try:
        if group.process_group is not None:
            runner.close()
            if spawned is None:
                _meet_to_close(peers, leads=group.rank == 0)
    finally:
        if spawned is None:
            peers.close()
        else:
            spawned.end(peers.close)
        group.leave()


def _meet_to_close(peers: Peers, leads: bool) -> None:
    """Wait until all ranks close, or for MEETING: the leader for all followers, a follower for the leader."""
    if not leads:
        peers.send(Closing())
    missing, deadline = len(peers), time.monotonic() + MEETING
    while missing and not peers.failures and (left := deadline - time.monotonic()) > 0:
        with suppress(TimeoutError):
            missing -= isinstance(peers.receive(left)[1], Closing)
    if leads:
        peers.send(Closing())


# ------------------------------------------------------------------------------------------------ calls on all ranks


class _HasTeam(Protocol):
    """A class with methods that all ranks call. _team: None, but in a tp_group."""

    _interrupt: DeferredInterrupt

    @property
    def _team(self) -> Leader | Follower | None: ...


P = ParamSpec("P")
S = TypeVar("S", bound=_HasTeam)


def on_all_ranks(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method that all ranks of a tp_group call: rank 0 runs it, the others replay its steps, and all return
    the same. Ctrl-C is deferred meanwhile."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> T:
        with self._interrupt:
            if self._team is None:
                return method(self, *args, **options)
            result: T = self._team.call(method.__name__.lstrip("_"), lambda: method(self, *args, **options))
            return result

    return call
