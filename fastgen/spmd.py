"""Tensor parallelism inside a program that has ranks already (torchrun): every rank calls the same methods.

Rank 0, the `Leader`, does what is called, and runs its own part of each step; the others, the `Follower`s, replay its
steps until it sends what the call returns or raises. A call begins when all ranks have made it.
"""

from __future__ import annotations

import hmac
import itertools
import os
import pickle
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Generator as PyGenerator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from fastgen.asking import Asker, Do, Done, do
from fastgen.exchange import DepartedError
from fastgen.links import Answer, Draw, Failed, Launch, Link, Links, Message, Settle, Settled
from fastgen.parallel import Group, host
from fastgen.processes import portable
from fastgen.request import Batch, StepResult
from fastgen.runner import Launched, Runner
from fastgen.transfer import TakePart, TookPart, check_agreement, take_part
from fastgen.weights import Update
from fastgen.workers import CONSEQUENCES, Handle, Replay, eagerness

T = TypeVar("T")

HEARING = 5.0  # seconds in which who connects has to say who it is
PATIENCE = 60.0  # seconds that the leader waits for the followers to connect
CLOSED = "this Generator is closed; make a new one"
MEETING = 1.0  # seconds that a rank which closes waits for the others to
LISTENING = 8.0  # seconds that a follower whom others have left waits for the leader to say why
POLL = 50e-6  # seconds between two looks at a step that runs


@dataclass(frozen=True, slots=True)
class Call(Answer):
    """From a follower: its program calls this. Numbers count the calls, as an interrupted one leaves messages."""

    name: str


@dataclass(frozen=True, slots=True)
class Return(Message):
    """To all followers: what the call returns, pickled."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Raise(Message):
    """To all followers: the call raises."""

    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Closing(Message):
    """From a follower: it closes, and waits until all do: what a rank sends last, others may still read."""


@dataclass(frozen=True, slots=True)
class Step(Handle):
    """And what rank 0's own runner has of it."""

    launched: Launched


# ------------------------------------------------------------------------------------------------ the ranks


class Member(ABC):
    """What each rank has: calls that all make together, until one closes, or the ranks no longer agree."""

    _broken: BaseException | None = None
    _end: weakref.finalize[..., Any]

    @abstractmethod
    def call(self, name: str, function: Callable[[], T], update: Update | None = None) -> T:
        """What a function of the leader's returns or raises, on all ranks; all must call this name. update: this
        rank's, where it updates weights."""

    def iterate(self, name: str, items: PyGenerator[T, None, None]) -> PyGenerator[T, None, None]:
        """The items of the leader's generator, on all ranks; leaving early, which all must do at the same item, closes
        it."""
        try:
            while item := self.call(f"next of {name}", lambda: _next(items)):
                yield item[0]
        except GeneratorExit:
            if self._end.alive and self._broken is None:
                self.call(f"end of {name}", items.close)
            raise

    def close(self) -> None:
        """End the connections and the group, when all ranks close, or after MEETING. More calls do nothing."""
        self._end()

    def _check(self) -> None:
        if self._broken is not None:
            told = f"{type(self._broken).__name__}: {self._broken}"
            raise RuntimeError(f"the ranks no longer agree, make new Generators: {told}") from self._broken
        if not self._end.alive:
            raise RuntimeError(CLOSED)

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """What all ranks must do wholly, or others wait for it in a collective."""
        try:
            yield
        except BaseException as error:
            self._broken = self._fail(error)
            if self._broken is error:
                raise
            raise self._broken from error

    @abstractmethod
    def _fail(self, error: BaseException) -> BaseException:
        """End what the ranks have together, after an error; returns what began it."""


class Leader(Member, Asker):
    """Rank 0: used as a Runner is, within `call`. build: makes its runner, on all ranks at once; tell: what the others
    are told at the end of each call.

    What a rank raises in its part of a step, or in `build`, is raised on all, and a RuntimeError where one is gone.
    After that, or when a step was cut short, the ranks no longer agree: their group has ended, and each call raises a
    RuntimeError.
    """

    def __init__(
        self, build: Callable[[], Runner], links: Links, group: Group, tell: Callable[[], Any] = lambda: None
    ) -> None:
        self._tell = tell
        self._links = links
        self._group = group
        self._asked = group.size - 1
        self._numbers = itertools.count()
        self._calls = 0
        self._calling = False
        try:
            with self._agreeing():
                self._runner = build()
        except BaseException:
            links.close()
            raise
        self.config = self._runner.config
        self._end = weakref.finalize(self, _end, self._runner, links, group, _meet_followers, os.getpid())

    def call(self, name: str, function: Callable[[], T], update: Update | None = None) -> T:
        """Calls within it are its own."""
        if self._calling:
            return function()
        try:
            self._calling = True
            self._calls += 1
            self._meet(name)
            value = function()
            data = pickle.dumps((value, self._tell()))  # now, as the caller may change it
            self._links.send(Return(self._calls, data))
            return value
        except BaseException as error:
            self._links.send(Raise(self._calls, portable(error)))
            raise
        finally:
            self._calling = False

    def launch(self, batch: Batch) -> Step:
        """Run a step on all ranks."""
        self._check()
        number = next(self._numbers)
        with self._agreeing():
            self._links.send(Launch(number, batch))
            return Step(number, batch, self._runner.launch(batch))

    def sample(self, step: Step, masks: np.ndarray) -> None:
        """Draw the tokens of a launched step whose batch is masked; masks: int32 [R, ceil(V / 32)]."""
        self._check()
        with self._agreeing():
            self._links.send(Draw(step.number, None))
            self._runner.sample(step.launched, masks)

    def collect(self, step: Step) -> StepResult:
        """Wait for a step, and read it; raises where a follower fails meanwhile."""
        arrived = step.launched.arrived
        while arrived is not None and not arrived.query():  # type: ignore[no-untyped-call]
            self._check()
            time.sleep(POLL)
        try:
            result = self._runner.collect(step.launched)
        except DepartedError as error:
            raise self._fail(error) from error
        self._check()  # where a rank has failed, NCCL was made to end, with anything
        return result

    def update_weights(self, update: Update, begin: Callable[[], None]) -> None:
        """See Runner. Each rank checks and writes what its own program has given; what one raises is raised."""
        self._take_part(update, write=False)
        begin()
        self._take_part(update, write=True)

    def _take_part(self, update: Update, write: bool) -> None:
        self._check()
        asked = TakePart(next(self._numbers), write, update.partial)
        self._links.send(asked)
        mine = take_part(asked, update, self._runner)
        check_agreement({0: mine, **self._answers(TookPart, asked.number)}, wrote=write)

    def _do(self, asked: Do) -> dict[int, Done]:
        self._check()
        self._links.send(asked)
        return {0: do(asked, self._runner), **self._answers(Done, asked.number)}

    def settle(self) -> None:
        """Wait until nothing is on its way on any rank. Does nothing where the ranks no longer agree."""
        if self._broken is not None:
            return
        number = next(self._numbers)
        self._links.send(Settle(number))
        self._runner.settle()
        self._answers(Settled, number)

    def _meet(self, name: str) -> None:
        """Wait until all ranks have called this."""
        self._check()
        called = self._answers(Call, self._calls)
        for rank in sorted(called):
            if called[rank].name != name:
                raise RuntimeError(f"rank {rank} called {called[rank].name} where rank 0 called {name}")

    def _fail(self, error: BaseException) -> BaseException:
        failed = self._links.first_failure(CONSEQUENCES) if isinstance(error, DepartedError) else None
        if failed is not None:
            # A copy, or the threads of `links` would hold the frames of this one, and so the leader itself.
            error = _gone(failed.rank) if failed.error is None else portable(failed.error)
            if failed.trace:
                error.add_note(f"on rank {failed.rank}:\n{failed.trace}")
        self._broken = error
        self._links.send(Failed(0, portable(error)))
        self._group.leave()
        return error

    def _receive(self) -> tuple[int, Message]:
        while not self._links.failures:
            found = self._links.receive(1.0)
            if found is not None and isinstance(found[1], Closing):
                raise self._fail(_gone(found[0]))
            if found is not None and not isinstance(found[1], Failed):
                return found
        raise self._fail(DepartedError())

    def _check(self) -> None:
        super()._check()
        if self._links.failures:
            raise self._fail(DepartedError())


class Follower(Member):
    """Any other rank. It raises what the leader does. After an interrupt, or an error in its part of a step or in
    `build`, the ranks no longer agree, as with the leader. told: what rank 0 told at the end of the last call."""

    def __init__(self, build: Callable[[], Runner], link: Link, group: Group) -> None:
        self._link = link
        self._group = group
        self._calls = 0
        self.told: Any = None
        try:
            with self._agreeing():
                runner = build()
        except BaseException:
            link.close()
            raise
        self.config = runner.config
        link.eager = eagerness(runner.config.device, group.size)
        self._runner = runner
        self._replay = Replay(runner, link)
        self._end = weakref.finalize(self, _end, runner, link, group, _meet_leader, os.getpid())

    def call(self, name: str, function: object = None, update: Update | None = None) -> Any:
        self._check()
        self._calls += 1
        with self._agreeing():
            with suppress(OSError):  # rank 0 is gone, or has sent why it ends
                self._link.send(Call(self._calls, name))
            outcome = self._follow(update)
        if isinstance(outcome, Raise):
            raise outcome.error
        value, self.told = pickle.loads(outcome.data)
        return value

    def _follow(self, update: Update | None) -> Return | Raise:
        """Replay until a call has ended."""
        while not isinstance(message := self._link.receive(), Failed | None):
            if isinstance(message, TakePart):
                assert update is not None
                took = take_part(message, update, self._runner)
                self._link.send(replace(took, error=None if took.error is None else portable(took.error)))
            elif not isinstance(message, Return | Raise):
                self._replay.take(message)
            elif message.number == self._calls:
                return message
        raise _cause(message)

    def _fail(self, error: BaseException) -> BaseException:
        with suppress(OSError):  # rank 0 may be gone
            self._link.send(Failed.of(self._group.rank, error))
        self._group.leave()
        return self._hear(error) if isinstance(error, DepartedError) else error

    def _hear(self, error: BaseException) -> BaseException:
        """What the leader says that an error comes of."""
        deadline = time.monotonic() + LISTENING
        with suppress(TimeoutError):
            while not isinstance(
                message := self._link.receive(max(deadline - time.monotonic(), 0)), Failed | Raise | None
            ):
                continue
            return _cause(message)
        return error


def _cause(message: Failed | Raise | None) -> Exception:
    if message is None or message.error is None:
        return _gone(0)
    return message.error


def _gone(rank: int) -> RuntimeError:
    return RuntimeError(f"rank {rank} is gone; make new Generators")


def _next(items: Iterator[T]) -> list[T]:
    try:
        return [next(items)]
    except StopIteration:
        return []


EndsT = TypeVar("EndsT", Links, Link)


def _end(runner: Runner, ends: EndsT, group: Group, meet: Callable[[EndsT, int], None], owner: int) -> None:
    """meet: waits until all ranks, of so many, close."""
    if os.getpid() != owner:  # a fork, which has no say in this
        return
    try:
        if group.process_group is not None:
            runner.close()
            meet(ends, group.size)
    finally:
        ends.close()
        group.leave()


def _meet_followers(links: Links, ranks: int) -> None:
    missing, deadline = ranks - 1, time.monotonic() + MEETING
    while missing and not links.failures and (left := deadline - time.monotonic()) > 0:
        found = links.receive(left)
        missing -= found is not None and isinstance(found[1], Closing)


def _meet_leader(link: Link, ranks: int) -> None:
    with suppress(OSError, TimeoutError):
        link.send(Closing())
        deadline = time.monotonic() + MEETING
        while not isinstance(link.receive(max(deadline - time.monotonic(), 0)), Failed | None):
            continue


# ------------------------------------------------------------------------------------------------ the connections


def connect(group: dist.ProcessGroup, failed: Callable[[], None] = lambda: None) -> Links | Link:
    """Connect the ranks of a process group: the leader's ends on its rank 0, and its own end on each other. failed:
    called by a thread when another rank fails.

    Called by all ranks. Rank 0 listens at a port that is free, for this host alone where all ranks are on it; whoever
    connects must know a key, which the group tells. Raises RuntimeError where a rank does not connect.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    alone = len(set(_gather(host(), group))) == 1
    if rank == 0:
        with socket.create_server(("127.0.0.1" if alone else "", 0)) as server:
            key, port = os.urandom(32), server.getsockname()[1]
            _gather((key, [(name, port) for name in (["127.0.0.1"] if alone else _names())]), group)
            return _accept(server, key, size, failed)
    key, addresses = _gather(None, group)[0]
    reached = _reach(addresses)
    reached.sendall(key + rank.to_bytes(4, "big"))
    return Link(_ready(reached), failed)


def _gather(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What each rank says."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _names() -> list[str]:
    """Where other hosts may reach this one."""
    names = [socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # there may be no way out
        probe.connect(("192.0.2.1", 9))  # sends nothing; it tells which of our addresses faces other hosts
        names.insert(0, probe.getsockname()[0])
    return names


def _reach(addresses: list[tuple[str, int]]) -> socket.socket:
    failures = []
    for address in addresses:
        try:
            return socket.create_connection(address, PATIENCE / 4)
        except OSError as error:
            failures.append(f"{address}: {error}")
    raise RuntimeError(f"rank 0 can not be reached at {'; '.join(failures)}")


def _accept(server: socket.socket, key: bytes, size: int, failed: Callable[[], None] = lambda: None) -> Links:
    """Wait for all ranks. Who does not know the key is sent away."""
    links, missing = Links(failed), set(range(1, size))
    deadline = time.monotonic() + PATIENCE
    try:
        while missing:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                other = server.accept()[0]
            except TimeoutError as error:
                raise RuntimeError(f"ranks {sorted(missing)} have not connected in {PATIENCE:g} s") from error
            rank = _known(other, key)
            if rank in missing:
                links.add(rank, _ready(other))
                missing.discard(rank)
            else:
                other.close()
    except BaseException:
        links.close()
        raise
    return links


def _known(other: socket.socket, key: bytes) -> int:
    """The rank of who has connected; -1 for somebody who does not say the key in time."""
    other.settimeout(HEARING)
    try:
        said = b""
        while len(said) < len(key) + 4 and (more := other.recv(len(key) + 4 - len(said))):
            said += more
    except OSError:
        return -1
    known = hmac.compare_digest(said[: len(key)], key) and len(said) == len(key) + 4
    return int.from_bytes(said[len(key) :], "big") if known else -1


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
