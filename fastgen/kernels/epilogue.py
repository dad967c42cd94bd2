"""SwiGLU, after a product whose kernel does not compute it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.launch import Kernel


def _twin(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, I], where x [T, 2 I] is contiguous and holds gate followed by up."""
    gate, up = x.chunk(2, dim=-1)
    if x.is_cuda:
        return F.silu(gate).mul_(up)
    # Computed with exp, because F.silu rounds differently where a thread's part of a tensor ends within a vector.
    gate = gate.float()
    weight = gate.neg().exp_().add_(1)
    return torch.div(gate, weight, out=weight).mul_(up).to(x.dtype)


swiglu = Kernel(_twin, "fastgen.kernels.triton.epilogue:swiglu")
