"""A trainer whose ranks shard the weights (FSDP), with one Generator of all ranks, and with one on each rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FAMILIES, Checkpoint

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def test_what_fsdp_trains_is_what_generates(checkpoint: Checkpoint) -> None:
    folder = checkpoint("Qwen2", **FAMILIES["qwen2"][1])
    program = str(Path(__file__).parent.parent / "fsdp_program.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run([*torchrun, program, str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
