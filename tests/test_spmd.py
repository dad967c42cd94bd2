"""Ranks that a program has already: collective calls, and how they fail together."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastgen import spmd, workers
from fastgen.links import Launch, Link, Links
from fastgen.request import Batch, StepResult
from fastgen.spmd import Follower, Leader, Raise

pytestmark = pytest.mark.timeout(60)


def batch(step: int, masked: bool = False) -> Batch:
    return Batch((step,), (), (), (), masked)


class FakeRunner:
    """A step's token is its lane; it raises at lane 99."""

    config: Any = "config"

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def launch(self, batch: Batch) -> Any:
        self.log.append(("launch", batch.decodes[0]))
        if batch.decodes[0] == 99:
            raise LookupError("no such lane")
        polls = iter([False, False, True])
        return SimpleNamespace(step=batch.decodes[0], arrived=SimpleNamespace(query=lambda: next(polls, True)))

    def sample(self, launched: Any, masks: np.ndarray | None) -> None:
        self.log.append(("sample", launched.step))
        launched.step += 0 if masks is None else int(masks[0, 0])

    def collect(self, launched: Any) -> StepResult:
        return StepResult([launched.step], [], [])

    def settle(self) -> None:
        self.log.append(("settle", 0))


class Program:
    """A leader in this thread, and followers in others that each run a function."""

    def __init__(self, follow: Callable[[Follower], Any], size: int = 3) -> None:
        links = Links()
        self.followers, self.runners = {}, [FakeRunner() for _ in range(size)]
        self.outcomes: dict[int, Any] = {}
        for rank in range(1, size):
            ours, its = Pipe()
            links.add(rank, ours)
            self.followers[rank] = Follower(self.runners[rank], Link(its, lambda: None), rank)  # type: ignore[arg-type]
        self.leader = Leader(self.runners[0], links, size)  # type: ignore[arg-type]
        self._threads = [
            threading.Thread(target=self._run, args=(follow, rank), daemon=True) for rank in self.followers
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, follow: Callable[[Follower], Any], rank: int) -> None:
        try:
            self.outcomes[rank] = follow(self.followers[rank])
        except BaseException as error:
            self.outcomes[rank] = error

    def join(self) -> list[Any]:
        """What the followers' functions came to."""
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self.leader.close()
        return [self.outcomes[rank] for rank in sorted(self.outcomes)]


def test_a_call_returns_the_same_on_all_ranks_and_its_steps_run_on_all() -> None:
    def work() -> list[int]:
        found = []
        for step in range(6):
            launched = program.leader.launch(batch(step, masked=step == 3))
            if step == 3:
                program.leader.sample(launched, np.full((1, 1), 100, dtype=np.int32))
            found += program.leader.collect(launched).tokens
        program.leader.call("abort", program.leader.settle)  # is announced to nobody
        return found

    program = Program(lambda follower: (follower.call("generate"), follower.call("stats")))
    assert program.leader.call("generate", work) == [0, 1, 2, 103, 4, 5]
    assert program.leader.call("stats", lambda: {"a": 1}) == {"a": 1}
    assert program.join() == [([0, 1, 2, 103, 4, 5], {"a": 1})] * 2
    assert program.runners[0].log == program.runners[1].log == program.runners[2].log
    assert len(program.runners[0].log) == 8


def test_a_value_may_be_changed_as_soon_as_it_is_there() -> None:
    program = Program(lambda follower: [follower.call("get") for _ in range(50)])
    for _ in range(50):
        program.leader.call("get", lambda: [1] * 1000).clear()
    assert program.join() == [[[1] * 1000] * 50] * 2


def test_another_call_raises_on_all_ranks_and_the_next_is_right_again() -> None:
    def follow(follower: Follower) -> Any:
        with pytest.raises(RuntimeError, match="rank 1 called score where rank 0 called generate"):
            follower.call("score" if follower._rank == 1 else "generate")
        return follower.call("score")

    program = Program(follow)
    with pytest.raises(RuntimeError, match="rank 1 called score where rank 0 called generate"):
        program.leader.call("generate", lambda: pytest.fail("it is not run"))
    assert program.leader.call("score", lambda: 5) == 5
    assert program.join() == [5, 5]


@pytest.mark.parametrize("error", [ValueError("top_p is 7"), KeyboardInterrupt()])
def test_what_the_call_raises_is_raised_on_all_and_the_next_is_right_again(error: BaseException) -> None:
    def fail() -> None:
        raise error

    def follow(follower: Follower) -> Any:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        with pytest.raises(kind, match=r"top_p is 7|KeyboardInterrupt"):
            follower.call("generate")
        return follower.call("generate")

    program = Program(follow)
    with pytest.raises(type(error)):
        program.leader.call("generate", fail)
    assert program.leader.call("generate", lambda: 5) == 5
    assert program.join() == [5, 5]


def test_an_interrupt_while_the_ranks_meet_leaves_the_next_call_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(follower: Follower) -> Any:
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            follower.call("generate")
        return follower.call("score")

    program = Program(follow)
    receive = program.leader._receive

    def interrupted() -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(program.leader, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.leader.call("generate", lambda: 1)
    assert program.leader._receive == receive
    assert program.leader.call("score", lambda: 5) == 5
    assert program.join() == [5, 5]


@pytest.mark.parametrize("leave", [None, 3])
def test_a_generator_gives_the_same_items_on_all_ranks(leave: int | None) -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            for step in range(6):
                yield program.leader.collect(program.leader.launch(batch(step))).tokens[0]
        finally:
            program.leader.settle()
            closed.append(True)

    def take(source: Any) -> list[int]:
        found = []
        for item in source:
            found.append(item)
            if len(found) == leave:
                break
        source.close()
        return found

    program = Program(lambda follower: (take(follower.iterate("stream")), follower.call("stats")))
    assert take(program.leader.iterate("stream", items())) == list(range(6))[:leave]  # type: ignore[arg-type]
    assert closed == [True]
    assert program.leader.call("stats", lambda: 7) == 7
    assert program.join() == [(list(range(6))[:leave], 7)] * 2
    assert program.runners[0].log == program.runners[1].log == program.runners[2].log


def test_an_error_of_a_generator_is_raised_on_all_ranks() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("bad")

    program = Program(lambda follower: list(follower.iterate("stream")))
    with pytest.raises(ValueError, match="bad"):
        list(program.leader.iterate("stream", items()))  # type: ignore[arg-type]
    assert [str(outcome) for outcome in program.join()] == ["bad", "bad"]


def test_what_a_follower_raises_in_a_step_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(lambda follower: follower.call("generate"))
    program.runners[0].launch = program.runners[2].launch = lambda batch: SimpleNamespace(  # type: ignore[method-assign]
        arrived=SimpleNamespace(query=lambda: False)  # as in a collective that rank 1 has left
    )

    def work() -> StepResult:
        return program.leader.collect(program.leader.launch(batch(99)))

    with pytest.raises(LookupError, match="no such lane") as raised:
        program.leader.call("generate", work)
    assert "on rank 1" in raised.value.__notes__[0]
    outcomes = program.join()
    assert [type(outcome) for outcome in outcomes] == [LookupError, LookupError]
    for call in (lambda: program.leader.call("stats", lambda: 1), lambda: program.followers[1].call("stats")):
        with pytest.raises(RuntimeError, match=r"no longer agree.*no such lane"):
            call()


@pytest.mark.parametrize("leader", ["is gone", "says"])
def test_what_a_followers_error_comes_of_is_raised(leader: str) -> None:
    program = Program(lambda follower: follower.call("generate"), size=2)
    links = program.leader._links
    assert links.receive(10) is not None  # the call
    links.send(Launch(0, batch(99)))
    if leader == "is gone":
        links.close()
        text = "rank 0 is gone; make new Generators"
    else:
        links.send(Raise(1, RuntimeError("rank 2 is gone")))
        text = "rank 2 is gone"
    (outcome,) = program.join()
    assert (type(outcome), str(outcome)) == (RuntimeError, text)
    assert isinstance(outcome.__cause__, LookupError)
    with pytest.raises(RuntimeError, match=f"no longer agree.*{text}"):
        program.followers[1].call("stats")


def test_a_step_that_only_the_leader_fails_in_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd, "CONSEQUENCES", 0.05)
    program = Program(lambda follower: follower.call("generate"))
    for rank in (1, 2):
        program.runners[rank].launch = lambda batch: None  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="no such lane"):
        program.leader.call("generate", lambda: program.leader.launch(batch(99)))
    program.leader.settle()  # waits for nobody
    with pytest.raises(RuntimeError, match="no longer agree"):
        program.leader.call("generate", lambda: 1)
    assert [type(outcome) for outcome in program.join()] == [LookupError, LookupError]


def test_a_rank_that_is_gone_is_noticed() -> None:
    program = Program(lambda follower: follower.close() if follower._rank == 2 else follower.call("stats"))
    with pytest.raises(RuntimeError, match="rank 2 is gone"):
        program.leader.call("stats", lambda: 1)
    assert "rank 2 is gone" in str(program.join()[0])
    with pytest.raises(RuntimeError, match="no longer agree"):
        program.leader.call("stats", lambda: 1)
    with pytest.raises(RuntimeError, match="rank 0 is gone"):
        program.followers[1].call("stats")


CONNECT = """
import sys, time
import torch.distributed as dist
from fastgen import spmd
from fastgen.links import Link, Settle

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=3)
group = dist.new_group([1, 2, 0])
for hosts in ("one", "several"):
    if hosts == "several":
        spmd._host = lambda: ("host", str(rank // 2))
        spmd._names = lambda: ["127.0.0.1"]
    found = spmd.connect(group)
    if isinstance(found, Link):
        found.send(found.receive())
        assert found.receive() is None
    else:
        found.send({other: Settle(other) for other in range(1, 3)})
        print(sorted((rank, message.number) for rank, message in (found.receive(10) for _ in range(2))))
        found.close()
"""


def test_the_ranks_of_a_group_are_connected_on_one_host_and_on_several(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CONNECT, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": str(Path(workers.__file__).parent.parent), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=50)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert "".join(said) == "[(1, 1), (2, 2)]\n" * 2


def test_who_does_not_know_the_key_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd, "PATIENCE", 0.7)
    with spmd.socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        strange = [spmd._connection(spmd._reach([address])) for _ in range(3)]
        strange[0].send_bytes(b"x" * 32 + (1).to_bytes(4, "big"))
        strange[1].send_bytes(b"k" * 32 + (5).to_bytes(4, "big"))
        strange[2].close()
        right = spmd._connection(spmd._reach([address]))
        right.send_bytes(b"k" * 32 + (1).to_bytes(4, "big"))
        links = spmd._accept(server, b"k" * 32, 2)
        assert list(links._connections) == [1]
        for connection in strange[:2]:
            with pytest.raises((EOFError, OSError)):
                connection.recv_bytes()
        links.close()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] have not connected in 0.7 s"):
            spmd._accept(server, b"k" * 32, 3)
        assert time.monotonic() - start < 5
