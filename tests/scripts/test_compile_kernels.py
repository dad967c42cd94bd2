"""scripts/tune/compile_kernels.py: the kernels of a Generator, compiled for a GPU that is not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastgen.kernels.launch import triton

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "tune" / "compile_kernels.py"
sys.path.insert(0, str(SCRIPTS / "tune"))


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_spills_are_those_that_are_accepted() -> None:
    import compile_kernels

    for path in (SCRIPTS / "results").glob("kernels-compiled-*.json"):
        for name, chip in json.loads(path.read_text())["chips"].items():
            assert compile_kernels.faults(name, chip["kernels"]) == []
    fine = {"kernel": "fastgen.kernels.triton.norm._rms_norm_kernel", "shared": 16, "spilled": 8, "late": False}
    faults = [fine | {"spilled": 16}, fine | {"kernel": "new", "spilled": 8}, fine | {"shared": 1 << 18}]
    faults.append(fine | {"late": True})
    assert compile_kernels.faults("H200", [fine, *faults]) == faults


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
    assert {"attention", "batch_invariant", "drafts", "norm", "rope", "sampling"} <= set(found[2].split())
    assert 16384 < int(found[3]) <= 101376
