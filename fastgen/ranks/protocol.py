"""The protocol of tensor parallelism: rank 0, the `Leader`, schedules the steps; the other ranks, the `Follower`s,
replay them.

The leader sends each step to all followers before it launches the step itself, so all ranks run the same collectives in
the same order. Followers reply only to RPCs (`Invoke`) and to updates of the weights. The protocol has two uses:

- `tensor_parallel`: the leader's process spawns the followers, which do nothing but `run`.
- `tp_group`: the ranks belong to a program (SPMD), and every rank makes the same calls. A call begins when all ranks
  have made it. The leader executes it, and each follower replays the leader's steps until it receives the result.

Followers replay Batches instead of running the same scheduler as rank 0. Schedulers on all ranks would make only two
messages unnecessary (Batch and SAMPLE, about 40 lines with their tests). In return, every rank would have to read each
step's tokens back to its host, and rank 0 would have to send arrivals, aborts, ends decided by text or masks, changes
of the scheduler by updates of the weights, and, at each reset after an exception, the tokens known so far. That is more
code than it replaces.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from collections.abc import Generator as PyGenerator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from operator import attrgetter
from queue import Empty
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastgen.engine.runner import Runner
from fastgen.engine.step import Launched
from fastgen.model.live_weights import LiveWeights
from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import Tensors
from fastgen.parallel.rank_group import RankGroup
from fastgen.processes.channel import Failed, Peers
from fastgen.processes.errors import DepartedError, portable, raise_first
from fastgen.processes.spawning import describe_exit, end_processes
from fastgen.ranks.weights import SharedMemory, Weight, check_same_names
from fastgen.request import Batch, StepResult

T = TypeVar("T")

CAUSE_SECONDS = 3.0  # how long the leader waits for the failure that caused another one
CAUSE_SECONDS_OF_FOLLOWER = 8.0  # how long a follower waits for the leader to report the cause
CLOSING_SECONDS = 1.0  # how long a closing rank waits for the others to close


# ------------------------------------------------------------------------------------------------ messages


class Signal(Enum):
    """Messages without data.

    READY: sent by a spawned follower that is about to join the group. SAMPLE: sent to followers, which receive the
    tokens of the last step; its batch is masked. END_OF_WEIGHTS: sent to followers when an update is complete, or was
    cut short. CLOSING: sent by each rank that closes. Ranks leave the group only when all are closing, since others may
    still be reading their data.
    """

    READY = auto()
    SAMPLE = auto()
    END_OF_WEIGHTS = auto()
    CLOSING = auto()


@dataclass(frozen=True, slots=True)
class Invoke:
    """An RPC. To followers: `method` is a method of the runner, or of its `weights`. From a follower: its program calls
    `method` of the Generator, which the leader executes for all ranks.

    number: identifies the Result. An interrupted RPC leaves messages in the queue, which are skipped by their number.
    """

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteGiven:
    """Sent to followers: check the tensors that the follower's program has given, or write them."""

    number: int
    write: bool
    partial: bool


@dataclass(frozen=True, slots=True)
class WriteSent:
    """Sent to followers: write the tensors that follow, each a Weight, until END_OF_WEIGHTS. A follower replies with a
    Result after it has read each tensor, and with another one after it has written them all."""

    number: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result of the message with this number. For a call that all ranks make, the leader sends it, and the value is
    (what the call returns, the leader's status)."""

    number: int
    value: Any = None
    error: Exception | None = None


# ------------------------------------------------------------------------------------------------ ranks


@dataclass(frozen=True)
class Spawned:
    """The followers that the leader's process has spawned.

    processes: the processes of ranks 1, 2, ... memory: the shared memory for the tensors of updates.
    """

    processes: list[subprocess.Popen[bytes]]
    memory: SharedMemory

    def end(self, disconnect: Callable[[], None]) -> None:
        """End all processes. disconnect: a function that closes their connections."""
        end_processes(self.processes, disconnect)
        self.memory.close()

    def describe_exit(self, rank: int) -> str:
        process = self.processes[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return describe_exit(process.returncode)


def error_of(rank: int, failed: Failed, spawned: Spawned | None = None) -> Exception:
    """Return the error to raise on this rank for another rank's failure."""
    if failed.error is None:
        how = "is gone" if spawned is None else spawned.describe_exit(rank)
        return RuntimeError(f"rank {rank} {how}; make a new Generator")
    error = portable(failed.error)  # a copy, without the frames of earlier raises
    if failed.trace:
        error.add_note(f"on rank {rank}:\n{failed.trace}")
    return error


def perform(request: Invoke | WriteGiven, runner: Runner, update: WeightUpdate | None) -> Result:
    """Execute a request on this rank. An error becomes part of the result, and the ranks keep running."""
    try:
        if isinstance(request, Invoke):
            return Result(request.number, attrgetter(request.method)(runner)(*request.arguments))
        assert update is not None
        update.partial = request.partial
        if request.write:
            runner.weights.write(update.tensors())
        else:
            update.check()
        return Result(request.number, frozenset(update.names))
    except Exception as error:
        return Result(request.number, error=error)


class Rank(ABC):
    """A rank, with the interface of a Team. If it fails, the group ends, and every later call on any rank raises a
    RuntimeError."""

    follows = False
    status: Any = None

    def __init__(
        self, build: Callable[[], Runner], peers: Peers, group: RankGroup, spawned: Spawned | None = None
    ) -> None:
        self._peers = peers
        self._group = group
        self._spawned = spawned
        self._failure: str | None = None  # text only: an exception would keep this object, and so GPU memory, alive
        self._calls = 0
        try:
            with self._failing_together():
                if peers.failures:  # from before there was a group to interrupt
                    raise DepartedError
                self._runner = build()
        except BaseException:
            peers.close()
            raise
        self.config = self._runner.config
        self._end = weakref.finalize(self, _end, self._runner, peers, group, spawned, os.getpid())

    @abstractmethod
    def call(self, name: str, function: Callable[[], T], update: WeightUpdate | None = None) -> T:
        """Return the value of the leader's function, or raise its error, on all ranks, which must all make a call of
        this name. update: the update that this rank's program has given, if the call updates weights."""

    def iterate(self, name: str, items: PyGenerator[T, None, None]) -> PyGenerator[T, None, None]:
        """Yield the items of the leader's generator on all ranks. Leaving early closes the generator; all ranks must
        then leave at the same item."""
        try:
            while item := self.call(f"next of {name}", lambda: list(itertools.islice(items, 1))):
                yield item[0]
        except GeneratorExit:
            if self._end.alive and self._failure is None:
                self.call(f"end of {name}", items.close)
            raise

    def close(self) -> None:
        """End the connections, the group and the spawned processes. Further calls do nothing."""
        self._end()

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the ranks no longer agree, make a new Generator: {self._failure}")
        if not self._end.alive:
            raise RuntimeError("this Generator is closed; make a new one")

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Make all ranks fail after an error within the block; the others would wait for this rank in a collective."""
        try:
            yield
            return
        except BaseException as error:
            cause = self._fail(error)
            if cause is error:
                raise
        raise cause  # outside `except`, where its __context__ would keep the frames of the consequence alive

    @abstractmethod
    def _fail(self, error: BaseException) -> BaseException:
        """End the group after an error. Return the error that caused it, which may have been raised on another rank."""


class Leader(Rank):
    """Rank 0, with the interface of a Runner.

    build: a function that makes the runner; all ranks run it at the same time. spawned: the followers, if this process
    spawned them; otherwise calls are made with `call`. status: a function whose result is sent to the followers at the
    end of each call.

    An error on any rank, in its part of a step or in `build`, is raised on all ranks; if a rank is gone, a RuntimeError
    is.
    """

    def __init__(
        self,
        build: Callable[[], Runner],
        peers: Peers,
        group: RankGroup,
        spawned: Spawned | None = None,
        status: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__(build, peers, group, spawned)
        self._status = status
        self._numbers = itertools.count()
        self._calling = False

    def call(self, name: str, function: Callable[[], T], update: WeightUpdate | None = None) -> T:
        """See Rank. A call within a call is executed only on this rank."""
        if self._calling:
            return function()
        try:
            self._calling = True
            self._calls += 1
            self.check_all()
            for rank, called in sorted(self._gather(Invoke, self._calls).items()):
                if called.method != name:
                    raise RuntimeError(f"rank {rank} called {called.method} while rank 0 called {name}")
            value = function()
            self._peers.send(Result(self._calls, (value, self._status())))
            return value
        except BaseException as error:
            self._peers.send(Result(self._calls, error=portable(error)))
            raise
        finally:
            self._calling = False

    def launch(self, batch: Batch) -> Launched:
        """Launch a step on all ranks."""
        self.check_all()
        with self._failing_together():
            self._peers.send(replace(batch, starts=()))  # only rank 0 samples
            return self._runner.launch(batch)

    def sample(self, launched: Launched, masks: np.ndarray | None) -> None:
        """Draw the tokens of the last step, whose batch is masked. masks: int32 [R, ceil(V / 32)], a bit per token."""
        self.check_all()
        with self._failing_together():
            self._peers.send(Signal.SAMPLE)
            self._runner.sample(launched, masks)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step and return its results. A follower's failure ends the wait (`RankGroup.interrupt`)."""
        try:
            result = self._runner.collect(launched)
        except DepartedError as error:
            cause = self._fail(error)
        else:
            self.check_all()  # after a failure, which interrupts the collectives, the result is wrong
            return result
        raise cause

    def synchronize(self) -> None:
        """Wait for all launched work on all ranks. Do nothing after a failure."""
        if self._failure is None and self._end.alive:
            self.invoke("synchronize")

    @property
    def weights(self) -> WeightsOfRanks:
        """The weights of all ranks."""
        return WeightsOfRanks(self, self._runner.weights, self._spawned)

    def send_update(self, update: WeightUpdate, memory: SharedMemory) -> None:
        """Write an update on all ranks, tensor by tensor, through `memory`."""
        request = WriteSent(next(self._numbers))

        def sent() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in update.tensors():
                self._peers.send(Weight.of(name, tensor, memory))
                yield name, tensor
                self._gather(Result, request.number)
                del tensor

        self._peers.send(request)
        try:
            self._runner.weights.write(sent())
        finally:
            self._peers.send(Signal.END_OF_WEIGHTS)
        self._gather(Result, request.number)
        memory.clear()

    def write_given(self, update: WeightUpdate, write: bool) -> None:
        """On all ranks, check or write the tensors that the rank's program has given."""
        names = self._perform_on_all(WriteGiven(next(self._numbers), write, update.partial), update)
        check_same_names(names, written=write)

    def invoke(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the runner, or of its `weights`, on every rank; return the results, ordered by rank."""
        return list(self._perform_on_all(Invoke(next(self._numbers), method, arguments)).values())

    def _perform_on_all(self, request: Invoke | WriteGiven, update: WeightUpdate | None = None) -> dict[int, Any]:
        """Execute a request on all ranks. Return {rank: value}, or raise the error of the lowest rank."""
        self.check_all()
        self._peers.send(request)
        results = {0: perform(request, self._runner, update), **self._gather(Result, request.number)}
        raise_first({rank: result.error for rank, result in results.items()})
        return {rank: result.value for rank, result in results.items()}

    def _gather(self, kind: type[Invoke | Result], number: int) -> dict[int, Any]:
        """Wait for every follower's message of this kind and number. Skip other messages, which an interrupted RPC may
        have left."""
        messages: dict[int, Any] = {}
        while len(messages) < len(self._peers):
            rank, message = self._peers.receive()
            if isinstance(message, Failed):
                raise self._fail(DepartedError())
            if message is Signal.CLOSING:
                raise self._fail(error_of(rank, Failed(None)))
            if isinstance(message, kind) and message.number == number:
                messages[rank] = message
        return messages

    def check_all(self) -> None:
        """Raise an error if any rank has failed, or if this one is closed."""
        self._check()
        if self._peers.failures:
            raise self._fail(DepartedError())

    def _fail(self, error: BaseException) -> BaseException:
        failure = self._peers.first_failure(CAUSE_SECONDS) if isinstance(error, DepartedError) else None
        if failure is not None:
            error = error_of(*failure, self._spawned)
        self._failure = f"{type(error).__name__}: {error}"
        self._peers.send(Failed(portable(error)))
        self._group.leave()
        if self._spawned is not None:
            self._spawned.end(self._peers.close)
        return error


@dataclass(frozen=True)
class WeightsOfRanks:
    """The weights of all ranks, with the interface of LiveWeights. own: the leader's weights."""

    leader: Leader
    own: LiveWeights
    spawned: Spawned | None

    @property
    def adapted(self) -> frozenset[str]:
        return self.own.adapted

    def update(self, update: WeightUpdate, begin: Callable[[], None]) -> None:
        """Write the same update on all ranks. Spawned followers receive the tensors from the leader; the ranks of a
        program each write the tensors that their own program has given."""
        if self.spawned is not None:
            self.leader.check_all()
            update.check()
            begin()
            self.leader.send_update(update, self.spawned.memory)
        else:
            self.leader.write_given(update, write=False)
            begin()
            self.leader.write_given(update, write=True)

    def keep_bases(self, layers: Collection[str], place: str) -> None:
        self.leader.invoke("weights.keep_bases", tuple(layers), place)

    def update_drafter(self, named: Tensors) -> None:
        """Raise ValueError: a head drafts only on one GPU."""
        raise ValueError("there is no head that drafts, since that needs tensor_parallel=1")

    def find_not_finite(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain.from_iterable(self.leader.invoke("weights.find_not_finite"))))

    def checksums(self) -> list[dict[str, str]]:
        """Return the checksums of each rank's weights."""
        return list(itertools.chain.from_iterable(self.leader.invoke("weights.checksums")))

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int:
        """Return the number of bytes freed on all ranks together."""
        return sum(self.leader.invoke("weights.sleep", tuple(tags), keep_weights))

    def wake(self, tags: Collection[str]) -> None:
        self.leader.invoke("weights.wake", tuple(tags))


class Follower(Rank):
    """Any rank but 0."""

    follows = True

    def __init__(self, build: Callable[[], Runner], peers: Peers, group: RankGroup) -> None:
        super().__init__(build, peers, group)
        self._unsampled: Launched | None = None

    @property
    def weights(self) -> LiveWeights:
        """The weights of this rank."""
        return self._runner.weights

    def call(self, name: str, function: object = None, update: WeightUpdate | None = None) -> Any:
        self._check()
        self._calls += 1
        with self._failing_together():
            self._peers.send(Invoke(self._calls, name))
            result = self._replay(update)
        if result.error is not None:
            raise result.error
        value, self.status = result.value
        return value

    def run(self, memory: int) -> None:
        """Replay the leader's steps until the leader fails or closes, which raises an error here.

        memory: file descriptor of the shared memory for the tensors of updates.
        """
        with self._failing_together():
            self._replay(None, memory)

    def _replay(self, update: WeightUpdate | None, memory: int = -1) -> Result:
        """Execute the leader's messages until the current call ends; return its result."""
        while True:
            message = self._next()
            match message:
                case Batch():
                    launched = self._runner.launch(message)
                    self._unsampled = launched if message.masked else None
                case Signal.SAMPLE:
                    assert self._unsampled is not None
                    self._runner.sample(self._unsampled, None)
                    self._unsampled = None
                case Invoke() | WriteGiven():
                    self._unsampled = None  # an interrupt may have prevented the sampling
                    result = perform(message, self._runner, update)
                    self._peers.send(result if result.error is None else replace(result, error=portable(result.error)))
                case WriteSent():
                    self._runner.weights.write(self._receive(message.number, SharedMemory(memory)))
                    self._peers.send(Result(message.number))
                case Result() if message.number == self._calls:
                    return message

    def _receive(self, number: int, memory: SharedMemory) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the leader sends, and confirm each one when the next is asked for."""
        while isinstance(weight := self._next(), Weight):
            yield weight.name, weight.read(memory)
            if weight.rebuild is not None:
                torch.cuda.synchronize()
            self._peers.send(Result(number))

    def _next(self) -> Any:
        _, message = self._peers.receive()
        if isinstance(message, Failed):
            raise error_of(0, message)
        return message

    def _fail(self, error: BaseException) -> BaseException:
        self._peers.send(Failed.of(error))
        self._group.leave()
        if isinstance(error, DepartedError):
            failure = self._peers.first_failure(CAUSE_SECONDS_OF_FOLLOWER)
            error = error if failure is None else error_of(*failure)
        self._failure = f"{type(error).__name__}: {error}"
        return error


def _end(runner: Runner, peers: Peers, group: RankGroup, spawned: Spawned | None, owner: int) -> None:
    """End a rank. owner: id of the process that made it; in a fork of that process, nothing is ended."""
    if os.getpid() != owner:
        return
    try:
        if group.process_group is not None:
            runner.close()
            if spawned is None:
                _wait_for_closing(peers, leads=group.rank == 0)
    finally:
        if spawned is None:
            peers.close()
        else:
            spawned.end(peers.close)
        group.leave()


def _wait_for_closing(peers: Peers, leads: bool) -> None:
    """Wait until all ranks are closing, for at most CLOSING_SECONDS: the leader waits for all followers, a follower for
    the leader."""
    if not leads:
        peers.send(Signal.CLOSING)
    missing, deadline = len(peers), time.monotonic() + CLOSING_SECONDS
    while missing and not peers.failures and (left := deadline - time.monotonic()) > 0:
        with suppress(Empty):
            missing -= peers.receive(left)[1] is Signal.CLOSING
    if leads:
        peers.send(Signal.CLOSING)
