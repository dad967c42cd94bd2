"""The memory of this process."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress


def used_memory() -> int:
    """Return the bytes of memory that this process uses, or 0 if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_heap() -> None:
    """Keep freed memory of the process's heap for later use, up to 256 MiB at its end, and allocate blocks of up to 32
    MiB there. By itself, glibc returns most of it at once, so that each layer of a step on the CPU gets new pages from
    the system, which zeroes them: in float32 that took 10 % of a prefill. `trim_heap` still returns all of it."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # the C library is not glibc
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_TRIM_THRESHOLD, 2**28)
            mallopt(_MMAP_THRESHOLD, 2**25)


def trim_heap() -> None:
    """Return free memory of the process's heap to the system. By itself, glibc keeps holes between used blocks."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)
