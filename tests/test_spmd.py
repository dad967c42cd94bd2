"""Ranks that a program has already: collective calls, and how they fail together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastgen import spmd, workers
from fastgen.config import EngineConfig
from fastgen.links import Link, Links
from fastgen.request import Batch, StepResult
from fastgen.spmd import Follower, Leader

pytestmark = pytest.mark.timeout(60)


def batch(step: int, masked: bool = False) -> Batch:
    return Batch((step,), (), (), (), masked)


class FakeRunner:
    """A step's token is its lane; it raises at lane 99."""

    config = EngineConfig("cpu", "float32", 128, 4, 64, 16, 8, "reference")

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
        return StepResult([launched.step], [], [], [])

    def settle(self) -> None:
        self.log.append(("settle", 0))

    def close(self) -> None:
        pass


class FakeGroup:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.process_group = rank, size, object()

    def leave(self) -> None:
        self.process_group = None  # type: ignore[assignment]


class Program:
    """A leader in this thread, and followers in others that each run a function, and close."""

    def __init__(self, follow: Callable[[Follower], Any], size: int = 3) -> None:
        links = Links()
        self.followers, self.runners = {}, [FakeRunner() for _ in range(size)]
        self.groups: list[Any] = [FakeGroup(rank, size) for rank in range(size)]
        build: list[Any] = [lambda runner=runner: runner for runner in self.runners]
        self.outcomes: dict[int, Any] = {}
        for rank in range(1, size):
            ours, its = socket.socketpair()
            links.add(rank, ours)
            self.followers[rank] = Follower(build[rank], Link(its, lambda: None), self.groups[rank])
        self.leader = Leader(build[0], links, self.groups[0])
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
        for follower in self.followers.values():  # which waits for the leader
            thread = threading.Thread(target=follower.close, daemon=True)
            thread.start()
        start = time.monotonic()
        self.leader.close()
        assert time.monotonic() - start < spmd.MEETING / 2, "all closed"
        assert all(group.process_group is None for group in self.groups[:1])
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
            follower.call("score" if follower._group.rank == 1 else "generate")
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

    program = Program(lambda follower: (take(follower.iterate("stream", items())), follower.call("stats")))
    assert take(program.leader.iterate("stream", items())) == list(range(6))[:leave]  # type: ignore[arg-type]
    assert closed == [True]
    assert program.leader.call("stats", lambda: 7) == 7
    assert program.join() == [(list(range(6))[:leave], 7)] * 2
    assert program.runners[0].log == program.runners[1].log == program.runners[2].log


def test_an_error_of_a_generator_is_raised_on_all_ranks() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("bad")

    program = Program(lambda follower: list(follower.iterate("stream", items())))
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
    program = Program(lambda follower: follower.close() if follower._group.rank == 2 else follower.call("stats"))
    with pytest.raises(RuntimeError, match="rank 2 is gone"):
        program.leader.call("stats", lambda: 1)
    assert "rank 2 is gone" in str(program.join()[0])
    for call in (lambda: program.leader.call("stats", lambda: 1), lambda: program.followers[1].call("stats")):
        with pytest.raises(RuntimeError, match=r"no longer agree.*rank 2 is gone"):
            call()


def test_a_leader_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd, "MEETING", 0.05)
    program = Program(lambda follower: follower.call("stats"))
    program.leader.close()
    assert [str(outcome) for outcome in program.join()] == ["rank 0 is gone; make new Generators"] * 2


PROGRAM = """
import gc, json, os, signal, sys, threading, time
from contextlib import contextmanager, suppress
from pathlib import Path
import torch, torch.distributed as dist
from fastgen import Generator, SamplingParams, placement, spmd
from fastgen.links import Link, Settle

rank, size, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
"""

CONNECT = """
for hosts in range(2):
    found = spmd.connect(dist.new_group([1, 2, 0]))
    if isinstance(found, Link):
        found.send(found.receive())
        assert found.receive() is None
    else:
        found.send({other: Settle(other) for other in range(1, size)})
        print(sorted((rank, message.number) for rank, message in (found.receive(10) for _ in range(size - 1))))
        found.close()
    spmd.host = lambda: ("host", str(rank // 2))
    spmd._names = lambda: ["127.0.0.1"]
spmd.host = lambda: ("host", "")
"""

TRAINER = (
    CONNECT
    + """
def make():
    return Generator(folder, load="dummy", device="cpu", num_pages=16, max_seqs=4, seed=0, tp_group=dist.group.WORLD)

def resources():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()

def answers(gen):
    return gen.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))[0].completions[0].token_ids

@contextmanager
def expected(kind, text, seconds=5):
    start = time.monotonic()
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError("nothing is raised")
    assert time.monotonic() - start < seconds
    total = torch.ones(1)
    dist.all_reduce(total)  # the program's own group goes on
    assert total == size

def fail(*arguments):
    raise LookupError(f"rank {rank} can not")

def check_resources():
    dist.barrier()
    for _ in range(100):  # threads that end
        if resources() == before:
            break
        time.sleep(0.02)
    assert resources() == before, (resources(), before)

with make() as gen:
    answers(gen)  # tqdm starts a thread
before = resources()
for number in range(8):  # made and closed
    with make() as gen:
        first = answers(gen) if number == 0 else first
check_resources()
gen = make()
assert answers(gen) == first
del gen  # not closed
check_resources()
for failing in range(size):
    gen = make()
    answers(gen)
    if rank == failing:
        runner = gen._runner._runner if rank == 0 else gen._runner._replay._runner
        runner.model.forward = fail
    with expected(LookupError, f"rank {failing} can not"):
        answers(gen)
    with expected(RuntimeError, "no longer agree"):
        answers(gen)
    del gen
    check_resources()
build_rank = placement.build_rank
for failing in (0, 2):
    placement.build_rank = fail if rank == failing else build_rank
    with expected(LookupError, f"rank {failing} can not"):
        make()
placement.build_rank = build_rank
check_resources()
with make() as gen:
    assert answers(gen) == first
gen = make()
if rank == 1:
    gen._runner._replay._runner.model.forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    answers(gen)
except RuntimeError as error:
    print(error, flush=True)
assert time.monotonic() - start < 5
os._exit(0)
"""
)

MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16,
    "intermediate_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def run_ranks(program: str, folder: Path, size: int = 3) -> list[subprocess.Popen[str]]:
    """A program of several ranks."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + program, str(rank), str(size), str(folder / "store"), str(folder)],
            env={**os.environ, "PYTHONPATH": str(Path(workers.__file__).parent.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def test_a_program_goes_on_whatever_its_generators_come_to(tmp_path: Path) -> None:
    """Connections on one host and on several; Generators, some that are not closed, and each rank's failures, in
    one program, whose own group and resources stay as they are; then a rank is killed."""
    processes = run_ranks(TRAINER, tmp_path)
    said = [process.communicate(timeout=55) for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0], said
    gone = "rank 1 is gone; make new Generators\n"
    assert [out for out, _ in said] == ["[(1, 1), (2, 2)]\n" * 2 + gone, "", gone]


def test_who_does_not_know_the_key_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd, "PATIENCE", 0.7)
    monkeypatch.setattr(spmd, "HEARING", 0.1)
    with spmd.socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        strange = [spmd._reach([address]) for _ in range(4)]
        strange[0].sendall(b"x" * 32 + (1).to_bytes(4, "big"))
        strange[1].sendall(b"k" * 32 + (5).to_bytes(4, "big"))
        strange[2].sendall(b"k")  # and nothing more
        strange[3].close()
        right = spmd._reach([address])
        right.sendall(b"k" * 32 + (1).to_bytes(4, "big"))
        links = spmd._accept(server, b"k" * 32, 2)
        assert list(links._connections) == [1]
        for other in strange[:3]:
            with other, suppress(ConnectionResetError):
                assert other.recv(1) == b""
        links.close()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] have not connected in 0.7 s"):
            spmd._accept(server, b"k" * 32, 3)
        assert time.monotonic() - start < 5
