"""The protocol of tensor parallelism between ranks that are threads: spawned followers, and ranks of a program."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hash_model import make_config
from torch import Tensor

from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import Shard
from fastgen.processes.channel import Peers
from fastgen.ranks import protocol, start
from fastgen.ranks.protocol import Follower, Leader, Spawned
from fastgen.ranks.weights import SharedMemory
from fastgen.request import Batch, LaneStart, SamplingParams, StepResult

pytestmark = pytest.mark.timeout(60)


def batch(step: int) -> Batch:
    params = SamplingParams(mask=lambda: None)  # type: ignore[arg-type]  # does not pickle
    return Batch(decodes=(step,), starts=(LaneStart(0, params, 0, 0, 1, frozenset(), ()),))


class FakeRunner:
    """A runner whose token in each step is the lane; at lane 99 it raises an error. fails: a method, and its error."""

    config = make_config()

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.log: list[tuple[str, Any]] = []
        self.fails: tuple[str, Exception] = ("", ValueError())

    def launch(self, batch: Batch) -> Any:
        assert len(batch.starts) == (self.rank == 0)
        self.log.append(("launch", batch.decodes[0]))
        if batch.decodes[0] == 99:
            raise LookupError("no such lane")
        return SimpleNamespace(step=batch.decodes[0])

    def collect(self, launched: Any) -> StepResult:
        return StepResult(tokens=[launched.step])

    @property
    def weights(self) -> FakeRunner:
        return self

    def synchronize(self) -> None:
        self._do("synchronize", 0)

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int:
        self._do("sleep", (tags, keep_weights))
        return 100 + self.rank

    def wake(self, tags: Collection[str]) -> None:
        self._do("wake", tags)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._do(name, (tensor.dtype, tensor.tolist()))
        self._do("written", 0)

    def close(self) -> None:
        pass

    def _do(self, name: str, value: Any) -> None:
        self.log.append((name, value))
        if self.fails[0] == name:
            raise self.fails[1]


class FakeGroup:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.process_group = rank, size, object()
        self.interrupted = threading.Event()

    def interrupt(self) -> None:
        self.interrupted.set()

    def leave(self) -> None:
        self.process_group = None  # type: ignore[assignment]


class FakeSpawned(Spawned):
    """Followers that are threads."""

    def describe_exit(self, rank: int) -> str:
        return "was killed"


class Program:
    """A leader in this thread, and followers in other threads. follow: what each follower does; None: it replays the
    leader's steps, as a spawned one does."""

    def __init__(self, follow: Callable[[Follower], Any] | None = None, size: int = 3) -> None:
        self.followers, self.runners = {}, [FakeRunner(rank) for rank in range(size)]
        self.groups: list[Any] = [FakeGroup(rank, size) for rank in range(size)]
        peers = Peers()
        peers.on_failure = self.groups[0].interrupt
        build: list[Any] = [lambda runner=runner: runner for runner in self.runners]
        self.outcomes: dict[int, Any] = {}
        self.memory = SharedMemory()
        self.spawned = FakeSpawned([], self.memory) if follow is None else None
        for rank in range(1, size):
            ours, its = socket.socketpair()
            peers.add(rank, ours)
            theirs = Peers()
            theirs.add(0, its)
            self.followers[rank] = Follower(build[rank], theirs, self.groups[rank])
        self.leader = Leader(build[0], peers, self.groups[0], self.spawned)
        run = follow or (lambda follower: follower.run(self.memory.file))
        self._threads = [threading.Thread(target=self._run, args=(run, rank), daemon=True) for rank in self.followers]
        for thread in self._threads:
            thread.start()

    def _run(self, follow: Callable[[Follower], Any], rank: int) -> None:
        try:
            self.outcomes[rank] = follow(self.followers[rank])
        except BaseException as error:
            self.outcomes[rank] = error

    def join(self) -> list[Any]:
        """Close all ranks. Return the results of the followers' functions."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        closing = [threading.Thread(target=each.close, daemon=True) for each in (self.leader, *self.followers.values())]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protocol, "CLOSING_SECONDS", 1000.0)  # none waits for it when all are closing
            for thread in reversed(closing):
                thread.start()
            for thread in closing:
                thread.join(30)
                assert not thread.is_alive()
        assert self.groups[0].process_group is None
        return [self.outcomes[rank] for rank in sorted(self.outcomes)]

    def logs(self) -> list[tuple[str, Any]]:
        """Return the work that the ranks have done since the last call; check that it is the same on all."""
        self.leader.synchronize()
        first = self.runners[0].log.copy()
        for runner in self.runners:
            assert runner.log == first
            runner.log.clear()
        return first[:-1]


# ------------------------------------------------------------------------------------------- spawned followers


class Odd(Exception):  # noqa: N818
    """An error that cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"odd {one} {two}")


@pytest.mark.parametrize(
    ("where", "error", "kind"),
    [
        ("sleep", ValueError("odd 1 2"), ValueError),
        ("wake", torch.OutOfMemoryError("odd 1 2"), torch.OutOfMemoryError),
        ("synchronize", Odd(1, 2), RuntimeError),
    ],
)
def test_all_ranks_sleep_and_wake_and_an_error_of_one_is_raised_here_but_ends_none(
    where: str, error: Exception, kind: type[Exception]
) -> None:
    program = Program()
    program.leader.launch(batch(1))
    assert program.leader.weights.sleep(["weights"], keep_weights=True) == 100 + 101 + 102
    program.leader.weights.wake(["weights"])
    assert program.logs() == [("launch", 1), ("sleep", (("weights",), True)), ("wake", ("weights",))]
    program.runners[1].fails = (where, error)
    with pytest.raises(kind, match="odd 1 2") as raised:  # noqa: PT012
        program.leader.weights.sleep(["kv_cache"], keep_weights=True)
        program.leader.weights.wake(["kv_cache"])
        program.leader.synchronize()
    assert "raised on rank 1" in raised.value.__notes__
    assert program.leader.collect(program.leader.launch(batch(2))).tokens == [2]
    program.leader.close()


def test_an_error_of_a_spawned_follower_in_an_update_ends_all_and_is_raised_here() -> None:
    program, weights = Program(), {"small": torch.arange(3.0), "large": torch.arange(5000.0).view(50, 100).double()}
    shards = {name: Shard.whole(torch.empty(tensor.shape, device="meta")) for name, tensor in weights.items()}
    program.runners[1].fails = ("large", MemoryError("too little"))
    with pytest.raises(MemoryError, match="too little") as raised:
        program.leader.weights.update(WeightUpdate(weights, shards), lambda: None)
    assert "on rank 1:" in raised.value.__notes__[0]
    assert "Traceback" in raised.value.__notes__[0]
    program.leader.synchronize()  # does nothing
    with pytest.raises(RuntimeError, match=r"no longer agree.*too little"):
        program.leader.launch(batch(1))
    first, second = program.join()
    assert isinstance(first, MemoryError)
    assert isinstance(second, MemoryError | RuntimeError)  # this thread may already have closed the memory


# ------------------------------------------------------------------------------------------- ranks of a program
# (ranks_program.py makes their ordinary calls.)


@pytest.mark.parametrize("where", ["in the call", "while the ranks meet"])
def test_an_interrupt_is_raised_on_all_ranks_and_the_next_call_is_right_again(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(follower: Follower) -> Any:
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            follower.call("generate")
        return follower.call("score")

    def interrupted() -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    program = Program(follow)
    if where == "while the ranks meet":
        monkeypatch.setattr(program.leader._peers, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.leader.call("generate", interrupted)
    assert program.leader.call("score", lambda: 5) == 5
    assert program.join() == [5, 5]


def given(tensors: str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, whose names are letters; at a "!", fail."""
    for name in tensors:
        if name == "!":
            raise LookupError("lost")
        yield name, torch.ones(2)


@pytest.mark.parametrize(
    ("first", "second", "partial", "kind", "text"),
    [
        ("ab", "b", False, ValueError, "missing 1 of 2 tensors: a"),
        ("a", "b", True, ValueError, "rank 1 gives other tensors than rank 0: a, b"),
        ("ab", "b once", False, ValueError, "missing 1 of 2 tensors: a"),
        ("a once", "ab once", True, ValueError, "rank 1 gives other tensors than rank 0: b"),
        ("ab", "abx once", False, ValueError, "x"),
        ("ab", "ab! once", False, LookupError, "lost"),
    ],
)
def test_each_rank_checks_the_tensors_of_its_program(
    first: str, second: str, partial: bool, kind: type[Exception], text: str
) -> None:
    """Errors are found before anything is written, except in tensors that come once, from an iterator."""

    def update_from(tensors: str, partial: bool) -> WeightUpdate:
        names, once = tensors.removesuffix(" once"), tensors.endswith(" once")
        shards = {name: Shard.whole(torch.empty(2, device="meta")) for name in "ab"}
        return WeightUpdate(given(names) if once else list(given(names)), shards, partial)

    update, begun = update_from(first, partial), list[bool]()
    program = Program(lambda follower: follower.call("update", update=update_from(second, False)), size=2)

    def work() -> None:
        program.leader.weights.update(update, lambda: begun.append(True))

    with pytest.raises(kind, match=text):
        program.leader.call("update", work)
    assert text in str(program.join()[0])
    assert bool(begun) == second.endswith(" once")
    assert bool(begun) == any(("written", 0) in runner.log for runner in program.runners)


def test_who_does_not_know_the_key_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "CONNECT_SECONDS", 0.7)
    monkeypatch.setattr(start, "KEY_SECONDS", 0.1)
    keys = [os.urandom(start.KEY_BYTES) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        strange = [socket.create_connection(address) for _ in range(4)]  # they connect before the right one
        strange[0].sendall(keys[0][::-1])
        strange[1].sendall(keys[0][:5])  # and strange[2] sends nothing
        strange[3].close()
        right = socket.create_connection(address)
        right.sendall(keys[0])
        peers = start._accept(server, {keys[0]: 1})
        assert len(peers) == 1
        for other in strange[:3]:
            with other, suppress(ConnectionResetError):
                assert other.recv(1) == b""
        peers.close()
        with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] have not connected in 0.7 s"):
            start._accept(server, {keys[0]: 1, keys[1]: 2})
