"""SwiGLU, after a product whose kernel does not compute it; GeGLU and the gate of attention, which none does."""

from __future__ import annotations

import math

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


def _geglu_twin(x: Tensor) -> Tensor:
    """Return gelu(gate) * up, [T, I], where x [T, 2 I] is contiguous and holds gate followed by up.

    gelu is the approximation by tanh (https://arxiv.org/abs/1606.08415), as gate times a sigmoid, for the reason given
    above.
    """
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid = gate.square().mul_(GELU_CUBIC).add_(1).mul_(gate).mul_(-GELU_SLOPE).exp_().add_(1).reciprocal_()
    return sigmoid.mul_(gate).mul_(up).to(x.dtype)


def _gate_twin(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), [T, N] in x's dtype. x, gate: [T, N], contiguous."""
    return torch.div(x, gate.float().neg_().exp_().add_(1)).to(x.dtype)


GELU_CUBIC, GELU_SLOPE = 0.044715, 2 * (2 / math.pi) ** 0.5
swiglu = Kernel(_twin, "fastgen.kernels.triton.epilogue:swiglu")
geglu = Kernel(_geglu_twin, "fastgen.kernels.triton.epilogue:geglu")
sigmoid_gate = Kernel(_gate_twin, "fastgen.kernels.triton.epilogue:sigmoid_gate")
