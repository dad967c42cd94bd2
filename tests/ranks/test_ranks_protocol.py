"""The protocol of tensor parallelism with spawned ranks and with ranks of a program, and common failures."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hash_model import make_config
from torch import Tensor

import fastgen
from fastgen.model.weights import Shard, Update
from fastgen.processes.channel import Peers
from fastgen.ranks import protocol, start
from fastgen.ranks.protocol import Follower, Leader, Spawned
from fastgen.ranks.weights import SharedMemory
from fastgen.request import Batch, LaneStart, SamplingParams, StepResult

pytestmark = pytest.mark.timeout(60)


def batch(step: int, masked: bool = False) -> Batch:
    params = SamplingParams(mask=lambda: None)  # type: ignore[arg-type]  # does not pickle
    return Batch(decodes=(step,), starts=(LaneStart(0, params, 0, 0, 1, frozenset(), ()),), masked=masked)


class FakeRunner:
    """A runner whose step's token is its lane; it raises at lane 99. fails: a method, and the error that it raises."""

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

    def sample(self, launched: Any, masks: np.ndarray | None) -> None:
        self.log.append(("sample", launched.step))
        launched.step += 0 if masks is None else int(masks[0, 0])

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
    """A leader in this thread, and followers in other threads, which each run a function and close; None: spawned
    followers."""

    def __init__(self, follow: Callable[[Follower], Any] | None = None, size: int = 3) -> None:
        self.followers, self.runners = {}, [FakeRunner(rank) for rank in range(size)]
        self.groups: list[Any] = [FakeGroup(rank, size) for rank in range(size)]
        peers = Peers()
        peers.on_failure = self.groups[0].interrupt
        build: list[Any] = [lambda runner=runner: runner for runner in self.runners]
        self.outcomes: dict[int, Any] = {}
        self.memory = SharedMemory.make()
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
        """Return the results of the followers' functions."""
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for follower in self.followers.values():  # which waits for the leader
            thread = threading.Thread(target=follower.close, daemon=True)
            thread.start()
        start = time.monotonic()
        self.leader.close()
        assert time.monotonic() - start < protocol.CLOSING_SECONDS / 2, "all closed"
        assert all(group.process_group is None for group in self.groups[:1])
        return [self.outcomes[rank] for rank in sorted(self.outcomes)]

    def logs(self) -> list[tuple[str, Any]]:
        """Return the work of each rank, which is the same on all."""
        self.leader.synchronize()
        first = self.runners[0].log.copy()
        for runner in self.runners:
            assert runner.log == first
            runner.log.clear()
        return first[:-1]


# Followers that were started


def test_started_followers_replay_each_step() -> None:
    program = Program()
    steps = []
    for step in range(6):
        launched = program.leader.launch(batch(step, masked=step % 3 == 0))
        steps.append(("launch", step))
        if step % 3 == 0:
            program.leader.sample(launched, np.full((1, 1), 100, dtype=np.int32))
            steps.append(("sample", step))
        assert program.leader.collect(launched).tokens == [step + 100 * (step % 3 == 0)]
    program.leader.launch(batch(6, masked=True))  # an exception keeps it from being sampled
    assert program.logs() == [*steps, ("launch", 6)]
    program.leader.launch(batch(7))
    program.leader.close()
    assert program.memory.file == -1
    for call in (lambda: program.leader.launch(batch(1)), lambda: program.leader.weights.sleep([], keep_weights=True)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    program.leader.synchronize()
    assert [str(outcome) for outcome in program.join()] == ["rank 0 is gone; make a new Generator"] * 2


WEIGHTS = {
    "small": torch.arange(3.0),
    "large": torch.arange(5000.0).view(50, 100).double(),
    "cut": torch.arange(12.0).view(3, 4).bfloat16()[:, 1:3],
}
PARTS = {name: Shard.whole(torch.empty(tensor.shape, device="meta")) for name, tensor in WEIGHTS.items()}
ARRIVED: list[tuple[str, Any]] = [(name, (tensor.dtype, tensor.tolist())) for name, tensor in WEIGHTS.items()]


def test_started_followers_get_weights_and_steps_go_on() -> None:
    program, begun = Program(), []
    for _ in range(2):
        program.leader.weights.update(Update(WEIGHTS, PARTS), lambda: begun.append(True))
        assert os.fstat(program.memory.file).st_size == 0, "the memory is given back"
        program.leader.collect(program.leader.launch(batch(1)))
        assert program.logs() == [*ARRIVED, ("written", 0), ("launch", 1)]
    with pytest.raises(ValueError, match="missing 1 of 3 tensors: small"):
        program.leader.weights.update(Update(dict(list(WEIGHTS.items())[1:]), PARTS), lambda: begun.append(False))
    assert begun == [True, True]
    assert program.logs() == []
    program.leader.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LookupError("lost")])
def test_an_update_that_is_cut_short_leaves_the_ranks_in_step(error: BaseException) -> None:
    def cut() -> Iterator[tuple[str, Tensor]]:
        yield from list(WEIGHTS.items())[:2]
        raise error

    program = Program()
    with pytest.raises(type(error)):
        program.leader.weights.update(Update(cut(), PARTS), lambda: None)
    program.leader.synchronize()
    program.leader.weights.update(Update(iter(WEIGHTS.items()), PARTS), lambda: None)
    assert program.leader.collect(program.leader.launch(batch(3))).tokens == [3]
    program.leader.synchronize()
    first, synchronized = ARRIVED[:2], ("synchronize", 0)
    for runner in program.runners:
        cut_short = [*first, synchronized] if runner.rank == 0 else [*first, ("written", 0), synchronized]
        assert runner.log == [*cut_short, *ARRIVED, ("written", 0), ("launch", 3), synchronized]
    program.leader.close()


def test_all_ranks_sleep_and_wake() -> None:
    program = Program()
    program.leader.launch(batch(1))
    assert program.leader.weights.sleep(["weights"], keep_weights=True) == 100 + 101 + 102
    program.leader.weights.wake(["weights"])
    assert program.leader.collect(program.leader.launch(batch(2))).tokens == [2]
    assert program.logs() == [
        ("launch", 1), ("sleep", (("weights",), True)), ("wake", ("weights",)), ("launch", 2),
    ]  # fmt: skip
    program.leader.close()


class Odd(Exception):  # noqa: N818
    """An error that does not pickle."""

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
def test_an_error_of_an_rpc_is_raised_here_and_ends_no_rank(
    where: str, error: Exception, kind: type[Exception]
) -> None:
    program = Program()
    program.runners[1].fails = (where, error)
    with pytest.raises(kind, match="odd 1 2") as raised:  # noqa: PT012
        program.leader.weights.sleep(["kv_cache"], keep_weights=True)
        program.leader.weights.wake(["kv_cache"])
        program.leader.synchronize()
    assert "raised on rank 1" in raised.value.__notes__
    assert program.leader.collect(program.leader.launch(batch(2))).tokens == [2]
    program.leader.close()


def test_an_error_of_a_started_follower_in_an_update_ends_all_and_is_raised_here() -> None:
    program = Program()
    program.runners[1].fails = ("large", MemoryError("too little"))
    with pytest.raises(MemoryError, match="too little") as raised:
        program.leader.weights.update(Update(WEIGHTS, PARTS), lambda: None)
    assert "on rank 1:" in raised.value.__notes__[0]
    assert "Traceback" in raised.value.__notes__[0]
    program.leader.synchronize()  # does nothing
    with pytest.raises(RuntimeError, match=r"no longer agree.*too little"):
        program.leader.launch(batch(1))
    first, second = program.join()
    assert isinstance(first, MemoryError)
    assert isinstance(second, MemoryError | RuntimeError)  # the memory may be closed, as it is a thread here


def test_a_failure_keeps_no_runner_alive() -> None:
    program = Program()
    kept = weakref.ref(program.leader)
    program.followers[2]._peers.close()
    while not program.leader._peers.failures:
        time.sleep(0.005)
    with pytest.raises(RuntimeError, match="rank 2 was killed"):
        program.leader.launch(batch(1))
    gc.disable()  # an exception that the leader kept would make a cycle with its frames
    try:
        program.leader.close()
        del program.leader
        assert kept() is None
    finally:
        gc.enable()


def test_a_started_follower_that_dies_is_noticed_by_the_next_launch() -> None:
    program = Program()
    program.followers[2]._peers.close()
    while not program.leader._peers.failures:
        time.sleep(0.005)
    with pytest.raises(RuntimeError, match="rank 2 was killed; make a new Generator"):
        program.leader.launch(batch(1))


def test_a_rank_that_is_gone_before_the_build_ends_the_start() -> None:
    (ours, its), peers = socket.socketpair(), Peers()
    peers.add(1, ours)
    its.close()
    while not peers.failures:
        time.sleep(0.005)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        Leader(lambda: pytest.fail("it waits for rank 1"), peers, FakeGroup(0, 2))  # type: ignore[arg-type]


def test_a_launch_costs_the_leader_little() -> None:
    program = Program(size=2)
    program.runners[0].launch = lambda batch: None  # type: ignore[method-assign]
    wide, times = Batch(decodes=tuple(range(512))), []
    for _ in range(100):
        start = time.thread_time()
        program.leader.launch(wide)
        times.append(time.thread_time() - start)
    assert sorted(times)[50] < 100e-6
    program.leader.close()


# The ranks of a program


def test_a_call_returns_the_same_on_all_ranks_and_its_steps_run_on_all() -> None:
    def work() -> list[int]:
        found = []
        for step in range(6):
            launched = program.leader.launch(batch(step, masked=step == 3))
            if step == 3:
                program.leader.sample(launched, np.full((1, 1), 100, dtype=np.int32))
            found += program.leader.collect(launched).tokens
        program.leader.call("abort", program.leader.synchronize)  # is announced to nobody
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

    def interrupted() -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(program.leader._peers, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.leader.call("generate", lambda: 1)
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
            program.leader.synchronize()
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
    program.runners[0].launch = program.runners[2].launch = lambda batch: None  # type: ignore[method-assign]

    def collect(launched: Any) -> StepResult:
        """Wait as in a collective that rank 1 has left."""
        assert program.groups[0].interrupted.wait(10)
        return StepResult()

    program.runners[0].collect = collect  # type: ignore[method-assign]

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
    monkeypatch.setattr(protocol, "CAUSE_SECONDS", 0.05)
    program = Program(lambda follower: follower.call("generate"))
    for rank in (1, 2):
        program.runners[rank].launch = lambda batch: None  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="no such lane"):
        program.leader.call("generate", lambda: program.leader.launch(batch(99)))
    program.leader.synchronize()  # waits for nobody
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
    monkeypatch.setattr(protocol, "CLOSING_SECONDS", 0.05)
    program = Program(lambda follower: follower.call("stats"))
    program.leader.close()
    assert [str(outcome) for outcome in program.join()] == ["rank 0 is gone; make a new Generator"] * 2


PROGRAM = """
import gc, json, os, signal, sys, threading, time
from contextlib import contextmanager, suppress
from pathlib import Path
import torch, torch.distributed as dist
from fastgen import Generator, SamplingParams
from fastgen.ranks import start

rank, size, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
"""

CONNECT = """
start._public_address = lambda: "127.0.0.1"
for one_host in (True, False):
    found = start.connect(dist.new_group([1, 2, 0]), one_host)
    if rank == 0:
        found.send("hello")
        print(sorted(found.receive(10) for _ in range(size - 1)))
        found.close()
    else:
        found.send(found.receive(10)[1])
        assert found.receive()[1].error is None
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
    begun = time.monotonic()
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError("nothing is raised")
    assert time.monotonic() - begun < seconds
    total = torch.ones(1)
    dist.all_reduce(total)  # the program's own group goes on
    assert total == size

def fail(*arguments):
    raise LookupError(f"rank {rank} cannot")

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
        gen._runner._runner.model.forward = fail
    with expected(LookupError, f"rank {failing} cannot"):
        answers(gen)
    with expected(RuntimeError, "no longer agree"):
        answers(gen)
    del gen
    check_resources()
build_rank = start.build_rank
for failing in (0, 2):
    start.build_rank = fail if rank == failing else build_rank
    with expected(LookupError, f"rank {failing} cannot"):
        make()
start.build_rank = build_rank
check_resources()
with make() as gen:
    assert answers(gen) == first
gen = make()
if rank == 1:
    gen._runner._runner.model.forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
begun = time.monotonic()
try:
    answers(gen)
except RuntimeError as error:
    print(error, flush=True)
assert time.monotonic() - begun < 5
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
    """Start a program of several ranks."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + program, str(rank), str(size), str(folder / "store"), str(folder)],
            env={**os.environ, "PYTHONPATH": str(Path(fastgen.__file__).parent.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def test_a_program_goes_on_whatever_its_generators_come_to(tmp_path: Path) -> None:
    """One program connects its ranks on one host and on several, makes Generators, closes only some, and sees each rank
    fail. The program's own group and resources stay as they are; then a rank is killed."""
    processes = run_ranks(TRAINER, tmp_path)
    said = [process.communicate(timeout=55) for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0], said
    gone = "rank 1 is gone; make a new Generator\n"
    assert [out for out, _ in said] == ["[(1, 'hello'), (2, 'hello')]\n" * 2 + gone, "", gone]


def test_who_does_not_know_the_key_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "CONNECT_SECONDS", 0.7)
    monkeypatch.setattr(start, "KEY_SECONDS", 0.1)
    keys = [os.urandom(start.KEY_BYTES) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        strange = [socket.create_connection(address) for _ in range(4)]
        strange[0].sendall(b"x" * start.KEY_BYTES)
        strange[1].sendall(keys[0][::-1])
        strange[2].sendall(keys[0][:5])  # and nothing more
        strange[3].close()
        right = socket.create_connection(address)
        right.sendall(keys[0])
        peers = start._accept(server, {keys[0]: 1})
        assert list(peers._channels) == [1]
        for other in strange[:3]:
            with other, suppress(ConnectionResetError):
                assert other.recv(1) == b""
        peers.close()
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] have not connected in 0.7 s"):
            start._accept(server, {keys[0]: 1, keys[1]: 2})
        assert time.monotonic() - begun < 5
