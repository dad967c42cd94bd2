"""processor.py: what /proc/cpuinfo says about the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.device import processor


@pytest.fixture
def describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file that is read instead of /proc/cpuinfo."""
    monkeypatch.setattr(processor, "_INFO", tmp_path / "cpuinfo")
    processor.features.cache_clear()
    yield tmp_path / "cpuinfo"
    processor.features.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "flags", "intel", "fast"),
    [
        ("AuthenticAMD", "avx512f avx512_bf16", False, True),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_tile", True, False),
        ("GenuineIntel", "avx2", True, False),
    ],
)
def test_the_vendor_and_the_instructions(vendor: str, flags: str, intel: bool, fast: bool, describe: Path) -> None:
    describe.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags} sse2\n")
    assert processor.is_intel() is intel
    assert processor.has_amx() is ("amx_bf16" in flags)
    found, why = processor.fast_bfloat16()
    assert found is fast
    assert ("AMX" if "amx" in flags else "AVX512-BF16") in why
