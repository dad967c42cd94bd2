"""The number of threads that a step uses on the CPU.

torch distributes an operation over OpenMP's threads, which wait for each other actively. If another process takes the
core of one thread, the others wait for milliseconds at the end of operations that take microseconds, and a step has
hundreds of these. Therefore a step uses at most as many threads as there are cores that other processes do not use.

The limit is set in OpenMP and MKL for the calling thread only. torch's own setting and the other threads of the program
are not affected. With the products of `model/packed.py`, the bits of a step do not depend on the number of threads.
"""

from __future__ import annotations

import os
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

PAUSE = 0.05
"""Length in seconds of a pause between two steps after which all cores are free if nothing else runs. The time of
pauses up to INTERVAL belongs to the interval that is measured; a longer one begins a new interval."""

LOOKS, WAIT = 10, 0.001
"""Maximum number of times that a step after a pause looks for processes that run, and the seconds between two looks.
OpenMP's threads of another program still wait actively, for milliseconds, after the program's last operation."""

_STAT, _LOAD = Path("/proc/stat"), Path("/proc/loadavg")

_HAS_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
# Without MKL, the sums of F.linear depend on the number of threads, so this number is not changed.
_SET_OPENMP = library_function(None, "omp_set_num_threads") if _HAS_MKL else None
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
        self.count = len(_cores())  # all cores, until the first interval has passed
        self._measured = self._times()
        self._ended = self._measured[0]  # when the last step ended

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step in this block, with as many threads as there are free cores."""
        pause, cores = time.monotonic() - self._ended, len(_cores())
        # Whether processes that ran before this step have ended, or wait. It matters if they count: in the number of
        # free cores, or in an interval that a short pause belongs to.
        only = pause > PAUSE and _is_only_one(LOOKS if self.count < cores or pause <= INTERVAL else 1)
        if only:
            self.count = cores
        if only or pause > INTERVAL:
            self._measured = self._times()
        with at_most(self.update()):
            yield
        self._ended = time.monotonic()

    def update(self) -> int:
        """Return the number of free cores, at least 1. It is measured again if INTERVAL has passed."""
        if time.monotonic() - self._measured[0] >= INTERVAL:
            (start, busy_before, own_before), (now, busy, own) = self._measured, self._times()
            others = (busy - busy_before - (own - own_before)) / (now - start)
            self.count = max(int(len(_cores()) - others + SLACK), 1)
            self._measured = now, busy, own
        return self.count

    def _times(self) -> tuple[float, float, float]:
        """Return the time, for how many seconds these cores have been busy, and for how many this process has run."""
        busy = 0
        if _STAT.exists():
            lines = (line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu"))
            used = {name: sum(map(int, times[:8])) - int(times[3]) - int(times[4]) for name, *times in lines}
            busy = sum(used.get(f"cpu{core}", 0) for core in _cores())
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()


def _is_only_one(looks: int) -> bool:
    """Return whether this thread is the only one of the machine that runs or waits for a core, at one of so many looks,
    as far as Linux tells."""
    for look in range(looks if _LOAD.exists() else 0):
        if look:
            time.sleep(WAIT)
        if _LOAD.read_text().split()[3].startswith("1/"):
            return True
    return False


def _cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
