"""scripts/tune/compile_kernels.py: the kernels of a Generator, compiled for a GPU that is not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastgen.kernels.launch import triton

SCRIPT = Path(__file__).parents[2] / "scripts" / "tune" / "compile_kernels.py"
KERNELS = {
    "attention", "batch_invariant", "drafts", "epilogue", "norm", "rope", "sampling", "scoring", "state", "truncation",
    "work_tiles",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_a_generator_is_compiled_for_ampere() -> None:
    """With the interpreter a kernel may do what the compiler, or a card's shared memory, does not allow."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, str(SCRIPT), "--smoke"], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.match(r"RTX A5000: (\d+) kernels of (.*), at most (\d+) of 101376 bytes of shared memory\n", ran.stdout)
    assert found is not None, ran.stdout
    assert int(found[1]) > 15
    assert set(found[2].split()) >= KERNELS
    assert 32768 < int(found[3]) <= 101376
