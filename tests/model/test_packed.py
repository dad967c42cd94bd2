"""packed.py and mkl_linear.py: packed linear layers give the same bits for any number of rows and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastgen.kernels.native.calls import multiplies
from fastgen.model import packed
from fastgen.model.native_linear import NativeLinear
from fastgen.model.onednn_linear import OneDnnLinear
from fastgen.model.packed import packing


@pytest.mark.skipif(packing(torch.float32) is None, reason="packed layers need AVX, and MKL or oneDNN in torch")
@pytest.mark.parametrize(
    ("instructions", "options"),
    [("AVX512", ["few"]), *(pytest.param(each, [], marks=pytest.mark.long) for each in ("AVX2", "AVX512"))],
)
def test_products_on_the_cpu_have_the_same_bits_for_any_number_of_rows_and_threads(
    instructions: str, options: list[str]
) -> None:
    """MKL, oneDNN and torch take the instructions that the variables name where the CPU has them, and older ones
    elsewhere."""
    program = Path(__file__).parent.parent / "products_program.py"
    isa = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"} if instructions == "AVX2" else {}
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": instructions, **isa}
    command = [sys.executable, str(program), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.skipif(not multiplies("bfloat16"), reason="the kernel does not run on this CPU")
def test_amx_multiplies_unless_bits_must_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "has_amx", lambda: True)
    assert packing(torch.bfloat16) is OneDnnLinear
    assert packing(torch.bfloat16, deterministic=True) is NativeLinear
