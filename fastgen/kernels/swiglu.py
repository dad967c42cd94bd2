"""silu(gate) * up, of the two halves of a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.launch import Chip, Kernel, jit, tl

BLOCK = 2048


@jit()
def _swiglu_kernel(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program a row and BLOCK columns of N."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < N
    gate = tl.load(x_ptr + row * 2 * N + column, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + column, mask=here, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * N + column, out.to(out_ptr.dtype.element_ty), mask=here)


def _launch(x: Tensor) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    assert x.shape[1] == 2 * size
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    pdl = Chip.of(x.device).dependent_launch
    options = {"launch_pdl": True} if pdl else {}
    _swiglu_kernel[(rows, -(-size // BLOCK))](x, out, size, BLOCK, pdl, num_warps=4, **options)
    return out


def _twin(x: Tensor) -> Tensor:
    """silu(gate) * up [T, I] of x [T, 2 I], which holds gate, then up."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x).

    On the CPU in float32 from exp: F.silu rounds otherwise where a thread's share of a tensor ends within a vector.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.silu(x)
    return x / x.neg().exp_().add_(1)


swiglu = Kernel(_launch, _twin)
