"""What the CPU is, as far as Linux tells: who made it, and whether it multiplies bfloat16 fast. torch is not needed."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_INFO = Path("/proc/cpuinfo")


@cache
def _info() -> frozenset[str]:
    """Return the words that describe the CPU."""
    return frozenset((_INFO.read_text() if _INFO.exists() else platform.processor()).replace(",", " ").split())


def is_intel() -> bool:
    """Return whether Intel has made this CPU."""
    return "GenuineIntel" in _info()


def fast_bfloat16() -> str | None:
    """Return the instructions by which this CPU multiplies bfloat16 faster than float32, or None if it has none."""
    if "amx_bf16" in _info():
        return "AMX"
    return "AVX512-BF16" if "avx512_bf16" in _info() else None
