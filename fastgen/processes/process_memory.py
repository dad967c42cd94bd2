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


def trim_heap() -> None:
    """Return free memory of the process's heap to the system. By itself, glibc keeps holes between used blocks."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)
