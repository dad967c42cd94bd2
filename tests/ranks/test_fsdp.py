"""A trainer whose ranks shard the weights (FSDP) beside one Generator of all ranks, and one on each."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FAMILIES, Checkpoint

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def test_what_fsdp_trains_is_what_generates(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(FAMILIES["qwen2"][0], **FAMILIES["qwen2"][1])
    program = str(Path(__file__).parent.parent / "fsdp_program.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run([*torchrun, program, str(tmp_path), str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    first, second = (pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(2))
    for found in (first, second):
        assert max(found["differences"]) < 1e-4
        assert found["untouched"]
        assert found["version"] == 1
        assert found["sum"].item() == 2
        for old_and_new in found["answers"]:
            half = len(old_and_new) // 2
            assert old_and_new[:half] != old_and_new[half:]
    assert first["answers"] == second["answers"]
