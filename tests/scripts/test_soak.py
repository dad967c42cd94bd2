"""scripts/bench/soak.py floods a server, whose answers are the same as without the flood, and leaves nothing in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import soak

FEW = ["--requests", "50", "--connections", "20", "--slow", "4"]
POOL = ["--page-size", "16", "--num-pages", "120"]  # so small that requests wait and are preempted


def test_the_memory_of_a_kv_pool_is_told_from_the_rest() -> None:
    mappings = [("[heap]", 120_000, 100_500), ("", 4_000_000, 70_000), ("/lib/libc.so", 900, 0), ("", 8192, 12)]
    smaps = "".join(
        f"7f00-7f01 rw-p 0 00:00 0  {name}\nSize:  {size:12} kB\nRss:  9 kB\nAnonymous: {used:8} kB\nVmFlags: rd\n"
        for name, size, used in mappings
    )
    assert soak.memory_mb(smaps) == (100.512, 70)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_small_flood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soak.main([*FEW, "--out", str(tmp_path), "--serve", "bundled", *POOL])
    report = json.loads((tmp_path / "serve-flood.json").read_text())
    report["slow_readers"]["p99_ratio"] = 1.0  # a time, while other tests run
    assert soak.faults(report) == [], capsys.readouterr().out
    assert report["ends"] == {"right": 58, "left": 32, "refused": 10}
    for changed in ("drift", "slow_readers"):
        wrong = report | {changed: {"mb_percent": 6, "p99_ratio": 2.1}}
        assert len(soak.faults(wrong)) == 1
    for each in ({"trouble": ["lost"]}, {"held": {"pages_used": 1}}):
        assert len(soak.faults(report | {"rounds": [report["rounds"][0] | each], "tracebacks": 2})) == 2
