"""packed.py and mkl_linear.py: packed linear layers give the same bits for any number of rows and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastgen.model.packed import packing


@pytest.mark.skipif(packing(torch.float32) is None, reason="products of this processor have no known bits")
@pytest.mark.parametrize("instructions", [pytest.param("AVX2", marks=pytest.mark.long), "AVX512"])
def test_products_on_the_cpu_have_the_same_bits_for_any_number_of_rows_and_threads(instructions: str) -> None:
    """MKL and oneDNN take the instructions that the variables name where the CPU has them, and older ones elsewhere."""
    program = Path(__file__).parent.parent / "products_program.py"
    isa = {"ONEDNN_MAX_CPU_ISA": "AVX2"} if instructions == "AVX2" else {}
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": instructions, **isa}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr
