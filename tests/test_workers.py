"""Ranks: messages in order through any interrupt, and what is raised where a rank fails; with threads for ranks."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen import links, workers
from fastgen.config import EngineConfig
from fastgen.links import Link, Port, Start
from fastgen.parallel import Part
from fastgen.request import Batch, StepResult
from fastgen.weights import Update
from fastgen.workers import Ranks, serve

pytestmark = pytest.mark.timeout(60)

CONFIG = EngineConfig("cpu", "float32", 128, 4, 64, 16, 8, "reference")
MODEL: Any = None  # what the fakes are told of a model


def batch(step: int, masked: bool = False) -> Batch:
    return Batch((step,), (), (), (), masked)


class FakeRunner:
    """A step's only token is its lane; with a mask, the mask's first word is added."""

    def __init__(self, start: Start) -> None:
        self.config = CONFIG
        self.rank = start.rank
        self.fails: tuple[int, str, BaseException] = start.options.get("fails", (-1, "", ValueError()))
        self.log: list[tuple[str, Any]] = []

    def launch(self, batch: Batch) -> Any:
        self.log.append(("launch", batch.decodes[0]))
        self._maybe_fail("launch")
        return SimpleNamespace(batch=batch, added=None if batch.masked else 0)

    def sample(self, launched: Any, masks: np.ndarray | None) -> None:
        self.log.append(("sample", launched.batch.decodes[0]))
        assert launched.batch.masked
        assert (masks is None) == (self.rank > 0)
        launched.added = 0 if masks is None else int(masks[0, 0])
        self._maybe_fail("sample")

    def collect(self, launched: Any) -> StepResult:
        assert self.rank == 0
        self._maybe_fail("collect")
        return StepResult([launched.batch.decodes[0] + launched.added], [], [], [])

    def write_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.log.append((name, (tensor.dtype, tensor.tolist())))
            self._maybe_fail(name)
        self.log.append(("written", None))

    def settle(self) -> None:
        self.log.append(("settle", None))
        self._maybe_fail("settle")

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int:
        self.log.append(("sleep", (tags, keep_weights)))
        self._maybe_fail("sleep")
        return 100 + self.rank

    def wake(self, tags: Collection[str]) -> None:
        self.log.append(("wake", tags))
        self._maybe_fail("wake")

    def _maybe_fail(self, where: str) -> None:
        if self.fails[:2] == (self.rank, where):
            raise self.fails[2]


class Threads:
    """Ranks as threads of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runner: Callable[[Start], Any] = FakeRunner) -> None:
        self.runners: dict[int, Any] = {}
        self.runner = runner
        self.left: list[int] = []
        monkeypatch.setattr(workers, "spawn", self._spawn)
        monkeypatch.setattr(workers, "CONSEQUENCES", 0.05)

    def ranks(self, size: int = 2, **options: Any) -> Ranks:
        return Ranks(size, MODEL, options, Path("model"), "dummy", "cpu")

    def check_logs(self, expected: list[Any]) -> None:
        """What every rank has done; only rank 0 is waited for by others."""
        deadline = time.monotonic() + 10
        while any(runner.log != expected for runner in self.runners.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for runner in self.runners.values():
            assert runner.log == expected

    def _spawn(self, program: Any, processes: Any, shared: int) -> socket.socket:
        ours, its = socket.socketpair()
        threading.Thread(target=serve, args=(its, self._build, self.left.append), daemon=True).start()
        return ours

    def _build(self, start: Start, link: Link) -> Any:
        assert (start.folder, start.load, start.device) == (Path("model"), "dummy", "cpu")
        if start.rank == 0:
            link.send(Port(7))
        else:
            assert link.receive() == Port(7)
        if start.options.get("fails", ())[:2] == (start.rank, "build"):
            raise start.options["fails"][2]
        self.runners[start.rank] = self.runner(start)
        return self.runners[start.rank]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def test_steps_are_replayed_by_all_and_read_from_rank_0(threads: Threads) -> None:
    ranks = threads.ranks(3)
    assert ranks.config == CONFIG
    before, total = ranks.launch(batch(0)), 40
    for step in range(1, total):
        masked = step % 3 == 0
        launched = ranks.launch(batch(step, masked))
        assert launched.batch == batch(step, masked)
        wanted = before.batch.decodes[0] + 1000 * before.batch.masked
        assert ranks.collect(before).tokens == [wanted]
        if masked:
            ranks.sample(launched, np.full((1, 2), 1000, dtype=np.int32))
        before = launched
    ranks.collect(before)
    ranks.settle()
    steps = [[("launch", step), *([("sample", step)] if step and step % 3 == 0 else [])] for step in range(total)]
    for runner in threads.runners.values():
        assert runner.log == [*itertools.chain.from_iterable(steps), ("settle", None)]
    ranks.close()


def test_the_next_step_is_launched_while_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    another = threading.Event()

    class Slow(FakeRunner):
        def launch(self, batch: Batch) -> Any:
            if self.rank == 0 and batch.decodes[0] == 1:
                another.set()
            return super().launch(batch)

        def collect(self, launched: Any) -> StepResult:
            assert another.wait(10)
            return super().collect(launched)

    ranks = Threads(monkeypatch, Slow).ranks()
    first, second = ranks.launch(batch(0)), ranks.launch(batch(1))
    assert [ranks.collect(step).tokens for step in (first, second)] == [[0], [1]]
    ranks.close()


def test_what_was_given_up_is_not_read_later(threads: Threads) -> None:
    ranks = threads.ranks()
    lost = [ranks.launch(batch(0)), ranks.launch(batch(1, masked=True))]
    ranks.settle()
    assert ranks.collect(ranks.launch(batch(2))).tokens == [2]
    ranks.launch(batch(3))  # interrupts take the Settle too
    ranks.launch(batch(4, masked=True))  # and a Draw
    last = ranks.launch(batch(5, masked=True))
    ranks.sample(last, np.full((1, 1), 10, dtype=np.int32))
    assert ranks.collect(last).tokens == [15]
    for step in lost:
        with pytest.raises(AssertionError, match="given up"):
            ranks.collect(step)
    ranks.close()


@contextmanager
def interrupts(source: random.Random, where: tuple[str, ...]) -> Iterator[list[str]]:
    """KeyboardInterrupts at odd times, wherever the main thread is in these files. Yields where they came."""
    hits: list[str] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename in where:
                hits.append(frame.f_code.co_name)
                raise KeyboardInterrupt
            frame = frame.f_back

    def shoot() -> None:
        while not over.wait(source.uniform(0, 0.002)):
            signal.pthread_kill(main, signal.SIGUSR1)

    over, main = threading.Event(), threading.get_ident()
    before = signal.signal(signal.SIGUSR1, interrupt)
    shooter = threading.Thread(target=shoot, daemon=True)
    shooter.start()
    try:
        yield hits
    finally:
        over.set()
        shooter.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_storm_of_interrupts_loses_no_message_and_doubles_none(threads: Threads) -> None:
    source = random.Random(0)
    ranks = threads.ranks(3)
    launched: list[int] = []
    collected = settled = 0
    before, lost = None, False
    with interrupts(source, (workers.__file__, links.__file__)) as hits:
        start = time.monotonic()
        for step in itertools.count():
            if time.monotonic() > start + 1:
                break
            try:
                if lost:
                    ranks.settle()
                    settled += 1
                lost = False
                masked = source.random() < 0.3
                now = ranks.launch(batch(step, masked))
                launched.append(step)
                if before is not None:
                    wanted = before.batch.decodes[0] + 10**6 * before.batch.masked
                    assert ranks.collect(before).tokens == [wanted]
                    collected += 1
                if masked:
                    ranks.sample(now, np.full((1, 2), 10**6, dtype=np.int32))
                before = now
            except KeyboardInterrupt:
                before, lost = None, True
    ranks.settle()
    assert min(len(hits), collected, settled) > 20, (len(hits), collected, settled)
    logs = [runner.log for runner in threads.runners.values()]
    assert logs[0] == logs[1] == logs[2]
    replayed = [step for what, step in logs[0] if what == "launch"]
    assert replayed == sorted(set(replayed)), "in order, and none twice"
    assert set(launched) <= set(replayed)
    assert ranks.collect(ranks.launch(batch(-5))).tokens == [-5]
    ranks.close()


WEIGHTS = {
    "small": torch.arange(3.0),
    "large": torch.arange(5000.0).view(50, 100).double(),
    "cut": torch.arange(12.0).view(3, 4).bfloat16()[:, 1:3],
}
PARTS = {name: Part.whole(torch.empty(tensor.shape, device="meta")) for name, tensor in WEIGHTS.items()}
ARRIVED: list[tuple[str, Any]] = [(name, (tensor.dtype, tensor.tolist())) for name, tensor in WEIGHTS.items()]


def test_weights_come_to_all_ranks_and_steps_go_on(threads: Threads) -> None:
    ranks, begun = threads.ranks(3), []
    for _ in range(2):
        ranks.collect(ranks.launch(batch(1)))
        ranks.update_weights(Update(WEIGHTS, PARTS), lambda: begun.append(True))
        assert os.fstat(ranks._shared.file).st_size == 0, "the memory is given back"
    ranks.collect(ranks.launch(batch(2)))
    threads.check_logs([("launch", 1), *ARRIVED, ("written", None), ("settle", None)] * 2 + [("launch", 2)])
    with pytest.raises(ValueError, match="missing 1 of 3 tensors: small"):
        ranks.update_weights(Update(dict(list(WEIGHTS.items())[1:]), PARTS), lambda: begun.append(False))
    assert begun == [True, True]
    assert ranks.collect(ranks.launch(batch(3))).tokens == [3]
    ranks.close()
    with pytest.raises(RuntimeError, match="closed"):
        ranks.update_weights(Update(WEIGHTS, PARTS), lambda: begun.append(False))
    assert begun == [True, True]


def test_an_update_that_is_cut_short_leaves_the_ranks_in_step(threads: Threads) -> None:
    def cut() -> Iterator[tuple[str, Tensor]]:
        yield from list(WEIGHTS.items())[:2]
        raise KeyboardInterrupt

    ranks = threads.ranks(2)
    with pytest.raises(KeyboardInterrupt):
        ranks.update_weights(Update(cut(), PARTS), lambda: None)
    ranks.settle()
    ranks.update_weights(Update(iter(WEIGHTS.items()), PARTS), lambda: None)
    assert ranks.collect(ranks.launch(batch(3))).tokens == [3]
    first, settled = [*ARRIVED[:2], ("written", None)], ("settle", None)
    threads.check_logs([*first, settled, *ARRIVED, ("written", None), settled, ("launch", 3)])
    ranks.close()


def test_all_ranks_sleep_and_wake(threads: Threads) -> None:
    ranks = threads.ranks(3)
    ranks.launch(batch(1))
    assert ranks.sleep(["weights"], keep_weights=True) == 100 + 101 + 102
    ranks.wake(["weights"])
    assert ranks.collect(ranks.launch(batch(2))).tokens == [2]
    threads.check_logs([("launch", 1), ("sleep", (("weights",), True)), ("wake", ("weights",)), ("launch", 2)])
    ranks.close()
    with pytest.raises(RuntimeError, match="closed"):
        ranks.sleep(["weights"], keep_weights=True)


@pytest.mark.parametrize("error", [ValueError("too little"), torch.OutOfMemoryError("too little")])
def test_a_rank_with_too_little_memory_ends_none(error: Exception, threads: Threads) -> None:
    where = "sleep" if isinstance(error, ValueError) else "wake"
    ranks = threads.ranks(2, fails=(1, where, error))
    with pytest.raises(type(error), match="too little") as raised:  # noqa: PT012
        ranks.sleep(["kv_cache"], keep_weights=True)
        ranks.wake(["kv_cache"])
    assert "raised on rank 1" in raised.value.__notes__
    assert ranks.collect(ranks.launch(batch(2))).tokens == [2]
    ranks.close()


def test_a_rank_that_can_not_sleep_ends_all(threads: Threads) -> None:
    ranks = threads.ranks(2, fails=(1, "sleep", LookupError("lost")))
    with pytest.raises(LookupError, match="lost"):
        ranks.sleep(["kv_cache"], keep_weights=True)
    with pytest.raises(RuntimeError, match=r"Generator is broken.*lost"):
        ranks.launch(batch(1))


def test_a_rank_that_can_not_take_a_weight_ends_all(threads: Threads) -> None:
    ranks = threads.ranks(2, fails=(1, "large", MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        ranks.update_weights(Update(WEIGHTS, PARTS), lambda: None)
    with pytest.raises(RuntimeError, match=r"Generator is broken.*full"):
        ranks.launch(batch(1))


class Odd(Exception):  # noqa: N818
    """Does not pickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"odd {one} {two}")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["build", "launch", "sample", "collect", "settle"])
def test_what_a_rank_raises_is_raised_here(threads: Threads, rank: int, where: str) -> None:
    rank = 0 if where == "collect" else rank
    options = {"fails": (rank, where, ValueError("page_size is 0; it must be at least 1"))}
    if where == "build":
        with pytest.raises(ValueError, match="page_size is 0"):
            threads.ranks(2, **options)
        return
    ranks = threads.ranks(2, **options)
    with pytest.raises(ValueError, match="page_size is 0") as raised:
        call_all(ranks)
    assert f"on rank {rank} of 2" in raised.value.__notes__[0]
    assert "Traceback" in raised.value.__notes__[0]
    ranks.settle()  # nothing is on its way
    for call in (lambda: ranks.launch(batch(1)), lambda: ranks.collect(workers.Handle(9, batch(1))), ranks.delays):
        with pytest.raises(RuntimeError, match=r"Generator is broken.*page_size is 0") as later:
            call()
        assert later.value.__cause__ is raised.value


def call_all(ranks: Ranks) -> None:
    step = ranks.launch(batch(0, masked=True))
    ranks.sample(step, np.zeros((1, 1), dtype=np.int32))
    ranks.collect(step)
    ranks.settle()


@pytest.mark.parametrize("error", [Odd(1, 2), SystemExit("odd 1 2"), KeyboardInterrupt("odd 1 2")])
def test_an_error_that_can_not_cross_comes_as_text(threads: Threads, error: BaseException) -> None:
    class Local(FakeRunner):
        def _maybe_fail(self, where: str) -> None:
            if where == "collect":
                raise error

    threads.runner = Local
    ranks = threads.ranks()
    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: odd 1 2"):
        ranks.collect(ranks.launch(batch(0)))


def test_a_failure_is_noticed_by_the_next_launch(threads: Threads) -> None:
    ranks = threads.ranks(2, fails=(1, "launch", ValueError("bad")))
    ranks.launch(batch(0))
    while not ranks._links.failures:
        time.sleep(0.005)
    with pytest.raises(ValueError, match="bad"):
        ranks.launch(batch(1))


def test_a_message_that_can_not_be_sent_is_raised_and_the_ranks_go_on(threads: Threads) -> None:
    ranks = threads.ranks()
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        ranks.launch(Batch((lambda: 0,), (), (), (), False))  # type: ignore[arg-type]
    assert ranks.collect(ranks.launch(batch(5))).tokens == [5]
    ranks.close()


def test_delays_are_of_the_latest_launches(threads: Threads) -> None:
    ranks = threads.ranks()
    for step in range(300):
        ranks.collect(ranks.launch(batch(step)))
    delays = ranks.delays()
    assert len(delays) == links.NOTED
    assert all(0 < delay < 5 for delay in delays)
    assert sorted(delays)[len(delays) // 2] < 0.05
    ranks.close()


@pytest.mark.parametrize(
    ("device", "cores", "eager"), [("cuda:1", 9, workers.EAGER), ("cuda:1", 8, 0.0), ("cpu", 99, 0.0)]
)
def test_ranks_are_eager_where_cores_are_to_spare(
    device: str, cores: int, eager: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert workers.eagerness(device, ranks=4) == eager


def test_a_launch_costs_the_caller_little(threads: Threads) -> None:
    ranks = threads.ranks()
    wide, times = Batch(tuple(range(512)), (), (), (), False), []
    for _ in range(100):
        start = time.thread_time()
        step = ranks.launch(wide)
        times.append(time.thread_time() - start)
        ranks.collect(step)
    assert sorted(times)[50] < 100e-6
    ranks.close()
