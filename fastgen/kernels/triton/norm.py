"""RMSNorm, optionally after an addition to the residual stream, and optionally with the result in fp8: see the twins in
fastgen.kernels.norm and fastgen.kernels.fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.fp8_pages import E4M3
from fastgen.kernels.norm import RMSNorm
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.triton.quantize import quantized


@jit()
def normed(x, weight, eps, N: tl.constexpr, DTYPE: tl.constexpr, CENTERED: tl.constexpr):
    """Return the RMSNorm of a row in DTYPE. x, weight: float32 [BLOCK], of which the first N numbers are the row's and
    the others are zeros. CENTERED: see RMSNorm."""
    scale = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    return weighted(x * scale, weight, DTYPE, CENTERED).to(DTYPE)


@jit()
def weighted(x, weight, DTYPE: tl.constexpr, CENTERED: tl.constexpr):
    """Return x * weight, or if CENTERED, x * (1 + weight), in float32. Otherwise x is first rounded to DTYPE, so that
    the result is rounded twice, as in transformers."""
    return x * (weight + 1) if CENTERED else x.to(DTYPE).to(tl.float32) * weight


@jit("eps")
def _rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, scales_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, CENTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalize one row of N numbers per program. scales_ptr: the scales of a result in fp8, else None."""
    column = tl.arange(0, BLOCK)
    here = column < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)  # no kernel of a step writes it
    if PDL:
        tl.extra.cuda.gdc_wait()
    # A thread holds 8 numbers, as in _sum_norm_kernel, even if a result in fp8 could be stored 16 at a time: the layout
    # is the order in which the squares are summed.
    at = tl.max_contiguous(tl.program_id(0).to(tl.int64) * N + column, 8)
    x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + at, mask=here, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, x, mask=here)
        x = x.to(tl.float32)
    x = normed(x, weight, eps, N, x_ptr.dtype.element_ty, CENTERED)
    if scales_ptr is not None:
        x, scale = quantized(x.to(tl.float32))
        tl.store(scales_ptr + tl.program_id(0), scale)
    tl.store(out_ptr + at, x, mask=here)


def rms_norm(x: Tensor, norm: RMSNorm, delta: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    rows, size = x.shape
    assert x.is_contiguous()
    assert norm.weight.shape == (size,)
    assert delta is None or (delta.shape == x.shape and delta.is_contiguous())
    out = torch.empty_like(x, dtype=None if scales is None else E4M3)
    block = power_of_two(size)
    pdl = Chip.of(x.device).dependent_launch
    _rms_norm_kernel[(rows,)](
        x, x if delta is None else delta, norm.weight, out, scales, norm.eps, size, block, delta is not None,
        norm.centered, pdl, num_warps=min(max(block // 1024, 1), 16), launch_pdl=pdl,
    )  # fmt: skip
    return out


def rms_norm_fp8(x: Tensor, norm: RMSNorm, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scales = x.new_empty(len(x), dtype=torch.float32)
    return rms_norm(x, norm, delta, scales), scales
