"""Quantization of rows to fp8: see the twin in fastgen.kernels.fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.fp8_pages import E4M3
from fastgen.kernels.triton.jit import jit, tl

FEW = 2  # maximum number of rows per processor for which more warps quantize each row


@jit()
def _quantize_kernel(
    x_ptr, values_ptr, scales_ptr, N: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Quantize one row of N numbers per program."""
    column = tl.arange(0, BLOCK)
    here = column < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * N + column, mask=here, other=0.0).to(tl.float32)
    values, scale = quantized(x, EXACT)
    tl.store(values_ptr + row * N + column, values, mask=here)
    tl.store(scales_ptr + row, scale)


@jit()
def quantized(x, EXACT: tl.constexpr = False):
    """Return x in E4M3 and its scale. x: float32 [BLOCK], a row followed by zeros. EXACT: see the twin."""
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")))  # tl.max ignores NaN
    scale = tl.maximum(tl.div_rn(largest, 448.0), 1 / (448.0 * 512))
    x = tl.div_rn(x, scale) if EXACT else x * tl.div_rn(1.0, scale)
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv), scale


def quantize(x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    assert x.is_contiguous()
    values, scales = torch.empty_like(x, dtype=E4M3), x.new_empty(rows, dtype=torch.float32)
    chip, block = Chip.of(x.device), power_of_two(size)
    pdl = chip.dependent_launch
    warps = min(max(block // 1024, 1), 8) if rows > FEW * chip.processors else 16
    _quantize_kernel[(rows,)](x, values, scales, size, block, exact, pdl, num_warps=warps, launch_pdl=pdl)
    return values, scales
