"""Properties of the CPU, as far as Linux tells: its maker, and how it multiplies bfloat16. Needs no torch."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_INFO = Path("/proc/cpuinfo")


@cache
def features() -> frozenset[str]:
    """Return the words that describe the CPU."""
    return frozenset((_INFO.read_text() if _INFO.exists() else platform.processor()).replace(",", " ").split())


def is_intel() -> bool:
    """Return whether Intel has made this CPU."""
    return "GenuineIntel" in features()


def has_amx() -> bool:
    """Return whether this CPU multiplies bfloat16 by AMX. oneDNN then sums products in an order that depends on the
    batch."""
    return "amx_bf16" in features()


def fast_bfloat16() -> tuple[bool, str]:
    """Return whether this CPU computes steps in bfloat16 much faster than in float32 and as deterministically, and
    why."""
    if has_amx():
        return False, "with AMX, the bits of fast products in bfloat16 depend on the batch"
    if "avx512_bf16" in features():
        return True, "this CPU has AVX512-BF16"
    return False, "this CPU has no AVX512-BF16"
