"""device/threads.py: a step uses as many threads as there are free cores, and the caller's setting does not change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_ids

from fastgen import Generator, SamplingParams
from fastgen.device import threads

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("free", [1, 2])
def test_a_step_uses_the_free_cores_and_does_not_change_other_threads(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the step fails."""
    own, others = [], []

    def seen(*args: Any) -> Any:
        own.append(torch.get_num_threads())
        other = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        other.start()
        other.join()
        raise RuntimeError("made up")

    with Generator() as gen:
        monkeypatch.setattr(gen._runner.model, "run_layers", seen)
        monkeypatch.setattr(threads.FreeCores, "update", lambda self: free)
        with pytest.raises(RuntimeError, match="made up"):
            gen.generate(random_ids(20), PARAMS)
    assert (torch.get_num_threads(), own, others) == (2, [free], [2])


def test_no_bit_depends_on_the_number_of_threads_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_ids(length, seed=length) for length in (1, 20, 70, 130)]
    with Generator() as gen:
        alone = [gen.generate(prompt, PARAMS)[0].completions for prompt in prompts]
        for counts in ((1,), (2,), (1, 2), (2, 1, 1, 2, 2)):
            turns = cycle(counts)
            monkeypatch.setattr(threads.FreeCores, "update", lambda self, turns=turns: next(turns))
            assert [output.completions for output in gen.generate(prompts, PARAMS)] == alone


def test_cores_that_other_processes_do_not_use_are_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process may use three of four cores. A tick is 10 ms; the fields are user, nice, system, idle, ..."""
    stat, now, own = tmp_path / "stat", [0.0], [0.0]

    def write(*used: int) -> None:
        cores = "".join(
            f"cpu{core} {ticks // 2} 0 {ticks - ticks // 2} 77 5 0 0 0 3 0\n" for core, ticks in enumerate(used)
        )
        stat.write_text(f"cpu  1 2 3 4 5 6 7 8 9 10\n{cores}intr 1 2\n")

    monkeypatch.setattr(threads, "_STAT", stat)
    monkeypatch.setattr(threads, "_cores", lambda: {0, 1, 2})
    monkeypatch.setattr(threads.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threads.time, "process_time", lambda: own[0])
    write(0, 0, 0, 0)
    free = threads.FreeCores()
    assert free.update() == 3
    now[0], own[0] = 1.0, 2.0  # it ran on two cores itself; others used one, and the one it may not use
    write(100, 100, 100, 100)
    assert free.update() == 2
    now[0] = 1.1
    write(1000, 1000, 1000, 1000)  # too early to measure
    assert free.update() == 2
    now[0], own[0] = 2.0, 2.0
    write(200, 200, 200, 200)
    assert free.update() == 1
    found = []
    for second in range(1, threads.PATIENCE + 1):
        now[0], own[0] = 2.0 + second, 2.0 + 2.8 * second
        write(*[200 + 100 * second] * 3, 200)
        found.append(free.update())
    assert found == [1] * (threads.PATIENCE - 1) + [3]
    now[0], own[0] = now[0] + 1, own[0] + 1
    write(*[300 + 100 * threads.PATIENCE] * 3, 200)
    assert free.update() == 1


def test_processes_that_run_between_two_steps_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, busy, load = [0.0], [0.0], tmp_path / "loadavg"
    monkeypatch.setattr(threads, "_LOAD", load)
    monkeypatch.setattr(threads.FreeCores, "_times", lambda self: (now[0], busy[0], 0.0))
    monkeypatch.setattr(threads, "_cores", lambda: {0, 1})
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    free, found = threads.FreeCores(), []
    within = [(at / 100, at / 100 - 0.1, 1) for at in range(24, 52, 4)]  # others use one core from 0.2 on
    for at, used, others in ((0.1, 0.0, 0), (0.2, 0.1, 0), *within, (0.9, 0.5, 1), (1.3, 0.9, 0)):
        load.write_text(f"0.98 3.96 5.27 {others + 1}/119 29369\n")
        now[0], busy[0] = at, used
        with free.step():
            found.append(torch.get_num_threads())
    assert found == [2] * 8 + [1, 1, 2]


@pytest.mark.parametrize("machine", [2, 4])
def test_a_core_is_not_free_if_another_process_runs_during_short_bursts_of_steps(
    machine: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bursts of 0.1 s with pauses of 0.1 s, in which another process uses one core all the time. That is measured over
    the pauses too, if this process may use two of four cores; otherwise the first step knows it."""
    now, load = [0.0], tmp_path / "loadavg"
    load.write_text("0.98 3.96 5.27 2/119 29369\n")
    monkeypatch.setattr(threads, "_LOAD", load)
    monkeypatch.setattr(threads.FreeCores, "_times", lambda self: (now[0], now[0], 0.0))
    monkeypatch.setattr(threads, "_cores", lambda: {0, 1})
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threads.os, "cpu_count", lambda: machine)
    free, found = threads.FreeCores(), []
    for at in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5):
        now[0] = at
        with free.step():
            found.append(torch.get_num_threads())
    assert found == ([2, 2, 2, 1, 1, 1] if machine == 4 else [1] * 6)


def test_a_step_after_a_pause_looks_again_for_processes_that_are_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process uses one core all the time."""
    now, ends, waited = [0.0], [0.0], [0.0]

    def sleep(seconds: float) -> None:
        waited[0] += seconds
        now[0] += seconds

    load = SimpleNamespace(exists=lambda: True, read_text=lambda: f"0.9 3.9 5.2 {1 + (now[0] < ends[0])}/119 29369\n")
    monkeypatch.setattr(threads, "_LOAD", load)
    monkeypatch.setattr(threads.FreeCores, "_times", lambda self: (now[0], now[0], 0.0))
    monkeypatch.setattr(threads, "_cores", lambda: {0, 1})
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threads.time, "sleep", sleep)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 2)
    free = threads.FreeCores()

    def step(at: float, end: float) -> tuple[int, float]:
        """Run a step at a time, with another process up to `end`; return its threads, and how long it has waited."""
        now[0], ends[0], waited[0] = at, end, 0.0
        with free.step():
            return torch.get_num_threads(), round(waited[0], 4)

    during = [step(at / 100, 9.0) for at in range(0, 32, 4)]
    assert (during[0], during[-1]) == ((1, 0.009), (1, 0.0))
    assert step(1.0, 9.0) == (1, 0.009)
    assert step(2.0, 2.0035) == (2, 0.004)
    assert step(3.0, 9.0) == (1, 0.009)  # although all cores counted as free
    assert step(3.2, 3.2035) == (2, 0.004)  # the pause would belong to the interval that is measured
    assert step(3.3, 3.2) == (2, 0.0)


def test_a_step_uses_no_more_threads_than_a_quota_allows_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In version 2 of control groups, in version 1, and with both; a group is limited by the groups above it."""
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    monkeypatch.setattr(threads, "_OWN_CGROUPS", own)
    monkeypatch.setattr(threads, "_CGROUPS", groups)
    monkeypatch.setattr(threads, "_LOAD", tmp_path / "absent")
    monkeypatch.setattr(threads, "_STAT", tmp_path / "absent")
    monkeypatch.setattr(threads, "_cores", lambda: set(range(8)))

    def cores(text: str, limits: dict[str, str]) -> int:
        own.write_text(f"{text}\n")
        for name, limit in limits.items():
            (groups / name).parent.mkdir(parents=True, exist_ok=True)
            (groups / name).write_text(f"{limit}\n")
        return threads.FreeCores().count

    assert cores("0::/", {}) == 8
    assert cores("0::/a/b", {"cpu.max": "max 100000"}) == 8
    assert cores("0::/a/b", {"a/b/cpu.max": "370000 100000"}) == 4
    assert cores("0::/a/b", {"a/cpu.max": "150000 100000"}) == 1
    assert cores("0::/c", {}) == 8
    assert cores("0::/c", {"cpu.max": "20000 100000"}) == 1
    assert cores("9:cpuset:/\n1:cpu,cpuacct:/d", {}) == 8
    assert cores("1:cpu,cpuacct:/d", {"cpu/d/cpu.cfs_quota_us": "-1", "cpu/d/cpu.cfs_period_us": "100000"}) == 8
    assert cores("1:cpu,cpuacct:/d", {"cpu/d/cpu.cfs_quota_us": "200000"}) == 2
    assert cores("1:cpu:/docker/id", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}) == 3
    with (free := threads.FreeCores()).step():
        assert free.update() == 3
    load = tmp_path / "loadavg"
    monkeypatch.setattr(threads, "_LOAD", load)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads.FreeCores, "_times", lambda self: (time.monotonic(), 0.0, 0.0))
    for others, expected in ((4, 3), (6, 2), (9, 1)):  # other containers use cores that the quota leaves
        load.write_text(f"0.98 3.96 5.27 {others + 1}/119 29369\n")
        with (free := threads.FreeCores()).step():
            assert free.count == expected


def test_mkl_is_limited_even_if_the_program_has_set_a_number() -> None:
    """torch.set_num_threads sets MKL's own number for the calling thread, which overrides OpenMP's."""
    if threads._SET_MKL is None:
        pytest.skip("this torch has no MKL")
    with threads.at_most(1):
        assert threads._SET_MKL(1) == 1
    assert threads._SET_MKL(2) == 2
