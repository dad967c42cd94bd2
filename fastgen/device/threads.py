"""The number of threads that a step uses on the CPU.

torch distributes an operation over OpenMP's threads, which wait for each other actively. If another process takes the
core of one thread, the others wait for milliseconds at the end of operations that take microseconds, and a step has
hundreds of these. Therefore a step uses at most as many threads as there are cores that other processes do not use, and
at most as many as the quota of a container allows to run all the time.

The limit is set in OpenMP and MKL for the calling thread only. torch's own setting and the other threads of the program
are not affected. With the products of `model/packed.py`, the bits of a step do not depend on the number of threads.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fastgen.device.mkl import library_function, mkl_function

INTERVAL = 0.25
"""Length in seconds of the intervals over which the use of the cores is measured."""

SLACK = 0.3
"""Number of cores that other processes can use before a step uses one thread less."""

PATIENCE = 4
"""Number of intervals after which a core that other processes have left counts as free again. With a thread too few a
step takes at most twice the time, with one too many up to ten times."""

PAUSE = 0.05
"""Length in seconds of a pause between two steps after which a step looks for processes that run. The time of pauses up
to INTERVAL belongs to the interval that is measured; a longer one begins a new interval."""

LOOKS, WAIT = 10, 0.001
"""Maximum number of times that a step after a pause looks for processes that run, and the seconds between two looks.
OpenMP's threads of another program still wait actively, for milliseconds, after the program's last operation."""

_STAT, _LOAD = Path("/proc/stat"), Path("/proc/loadavg")
_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_HAS_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
# Without MKL, the sums of F.linear depend on the number of threads, so this number is not changed. Windows has no table
# of the functions of all loaded libraries.
_SET_OPENMP = library_function(None, "omp_set_num_threads") if _HAS_MKL and sys.platform != "win32" else None
_SET_MKL = mkl_function("MKL_Set_Num_Threads_Local")  # returns the number that was set, or 0


@contextmanager
def at_most(threads: int) -> Iterator[None]:
    """Let torch use at most `threads` threads for operations of the calling thread in this block, if this is
    possible.
    """
    before = torch.get_num_threads()
    if before <= threads or _SET_OPENMP is None:
        yield
        return
    mkl = 0
    try:
        _SET_OPENMP(threads)
        mkl = _SET_MKL(threads) if _SET_MKL else 0
        yield
    finally:
        if _SET_MKL:
            _SET_MKL(mkl)
        _SET_OPENMP(before)


class FreeCores:
    """A count of the cores that this process may use and other processes do not use, as far as Linux tells."""

    def __init__(self) -> None:
        self._quota = _quota()
        self.count = self._usable()
        self._better = 0  # number of intervals in a row in which more cores were free
        self._measured = self._times()
        self._ended = -math.inf  # when the last step ended

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step in this block, with as many threads as there are free cores."""
        pause = time.monotonic() - self._ended
        if pause > PAUSE:
            others = _running_others()
            if not others or len(_cores()) == os.cpu_count():  # else the others may run on other cores
                self.count = max(min(len(_cores()) - others, self._usable()), 1)
            if not others or pause > INTERVAL:
                self._measured = self._times()
        with at_most(self.update()):
            yield
        self._ended = time.monotonic()

    def update(self) -> int:
        """Return the number of free cores, at least 1. It is measured again if INTERVAL has passed."""
        if time.monotonic() - self._measured[0] >= INTERVAL:
            (start, busy_before, own_before), (now, busy, own) = self._measured, self._times()
            others = (busy - busy_before - (own - own_before)) / (now - start)
            free = max(min(int(len(_cores()) - others + SLACK), self._usable()), 1)
            self._better = self._better + 1 if free > self.count else 0
            if free < self.count or self._better == PATIENCE:
                self.count, self._better = free, 0
            self._measured = now, busy, own
        return self.count

    def _usable(self) -> int:
        """Return how many cores this process may use all the time, at least 1."""
        return max(int(min(len(_cores()), self._quota + SLACK)), 1)

    def _times(self) -> tuple[float, float, float]:
        """Return the time, for how many seconds these cores have been busy, and for how many this process has run."""
        busy = 0.0
        if _STAT.exists():
            lines = (line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu"))
            used = {name: sum(map(int, times[:8])) - int(times[3]) - int(times[4]) for name, *times in lines}
            busy = sum(used.get(f"cpu{core}", 0) for core in _cores()) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, time.process_time()


def _running_others() -> int:
    """Return how many other threads of the machine run or wait for a core, as far as Linux tells: the minimum of LOOKS
    looks, or 0 at the first that sees none."""
    fewest = sys.maxsize if _LOAD.exists() else 0
    for look in range(LOOKS):
        if fewest == 0:
            break
        if look:
            time.sleep(WAIT)
        running, _, _ = _LOAD.read_text().split()[3].partition("/")
        fewest = min(fewest, int(running) - 1)
    return fewest


def _cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _quota() -> float:
    """Return how many cores the quotas of this process's control groups allow, infinity without any. A group's quota
    also holds for the groups below it; a container sees its own group as the first one.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files and, for version 1,
    https://docs.kernel.org/scheduler/sched-bwc.html
    """
    quotas = [math.inf]
    for line in _OWN_CGROUPS.read_text().splitlines() if _OWN_CGROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / ("cpu" if controllers else "")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                quotas.append(_quota_of(folder))
    return min(quotas)


def _quota_of(group: Path) -> float:
    """Return how many cores the quota of one control group allows, infinity without one."""
    limits = group / "cpu.max", group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
    words = [word for file in limits if file.exists() for word in file.read_text().split()]
    quota, period = words if len(words) == 2 else ("max", "0")
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
