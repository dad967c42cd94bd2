"""The merge of a low-rank adapter into a weight, which reads the base once and rounds the sum once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.kernels.launch import Kernel

_AT_ONCE = 1 << 22  # maximum number of elements that the twin merges at a time


def _twin(out: Tensor, base: Tensor, a: Tensor, b: Tensor) -> None:
    """Write base + b^T a to out, with the sum computed in float32 and rounded once.

    out, base: [N, K] of the same dtype; they may be the same tensor. a: float32 [R, K]. b: float32 [R, N]. The last
    dimension of all tensors is contiguous.
    """
    check(out, base, a, b)
    rows = max(_AT_ONCE // out.shape[1], 1)
    for part, kept, left in zip(*(x.split(rows) for x in (out, base, b.t())), strict=True):
        part.copy_(torch.addmm(kept.float(), left, a))  # cuBLAS rounds products in bfloat16 before it adds


def check(out: Tensor, base: Tensor, a: Tensor, b: Tensor) -> None:
    assert (base.shape, base.dtype) == (out.shape, out.dtype)
    assert (a.dtype, b.dtype) == (torch.float32, torch.float32)
    assert out.shape == (b.shape[1], a.shape[1])
    assert len(a) == len(b) > 0
    assert all(tensor.stride(1) == 1 for tensor in (out, base, a, b))


merge = Kernel(_twin, "fastgen.kernels.triton.merge:merge")
