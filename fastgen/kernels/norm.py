"""RMSNorm, with the addition to the residual stream that comes before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.launch import Chip, Kernel, jit, tl, triton


@dataclass(frozen=True)
class RMSNorm:
    """https://arxiv.org/abs/1910.07467 with a weight [N]."""

    weight: Tensor
    eps: float


@jit()
def normed(x, weight, eps, N: tl.constexpr, DTYPE: tl.constexpr):
    """A row x [BLOCK] of N, zeros behind them, normed and times a weight [BLOCK]; both float32, the result DTYPE."""
    scale = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    rounded = (x * scale).to(DTYPE).to(tl.float32)  # here too, as transformers does
    return (rounded * weight).to(DTYPE)


@jit("eps")
def _rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row of N."""
    column = tl.arange(0, BLOCK)
    here = column < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)  # which no kernel of a step writes
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * N + column
    x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + at, mask=here, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, x, mask=here)
        x = x.to(tl.float32)
    tl.store(out_ptr + at, normed(x, weight, eps, N, out_ptr.dtype.element_ty), mask=here)


def _launch(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    rows, size = x.shape
    assert x.is_contiguous()
    assert weight.shape == (size,)
    assert delta is None or (delta.shape == x.shape and delta.is_contiguous())
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    pdl = Chip.of(x.device).dependent_launch
    options = {"launch_pdl": True} if pdl else {}
    _rms_norm_kernel[(rows,)](
        x, x if delta is None else delta, weight, out, eps, size, block, delta is not None, pdl,
        num_warps=min(max(block // 1024, 1), 16), **options,
    )  # fmt: skip
    return out


def _twin(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension of x [T, N], in float32; `delta` is first added to x, in place."""
    if delta is not None:
        x += delta
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


rms_norm = Kernel(_launch, _twin)
