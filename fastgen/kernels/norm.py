"""RMSNorm, optionally after an addition to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fastgen.kernels import rope
from fastgen.kernels.launch import Kernel


@dataclass(frozen=True)
class RMSNorm:
    """The parameters of an RMSNorm (https://arxiv.org/abs/1910.07467). weight: [N]. centered: the norm is multiplied by
    1 + weight, in float32, as in Gemma."""

    weight: Tensor
    eps: float
    centered: bool = False


@dataclass(frozen=True)
class BranchEnd:
    """The operations on the output of attention or of the MLP before it is added to the residual stream.

    norm: an RMSNorm of the output, or None. factor: a number by which it is multiplied.
    """

    norm: RMSNorm | None
    factor: float = 1.0

    def apply(self, y: Tensor) -> Tensor:
        """Return the end of the branch for its output y [T, N], which may be overwritten."""
        if self.norm is not None:
            y = rms_norm(y, self.norm)
        return y if self.factor == 1 else y.mul_(self.factor)


@dataclass(frozen=True)
class WideNorm:
    """The RMSNorms over all query heads together, and over all key heads. q, k: weights [H D] and [K D]."""

    q: Tensor
    k: Tensor
    eps: float

    def apply(self, qkv: Tensor) -> Tensor:
        """Norm the queries and keys of qkv [T, (H + 2 K) D] in place, and return it."""
        first = 0
        for weight in (self.q, self.k):
            part = qkv[:, first : first + len(weight)]
            part.copy_(rms_norm(part.contiguous(), RMSNorm(weight, self.eps)))
            first += len(weight)
        return qkv


def _rms_norm_twin(x: Tensor, norm: RMSNorm, delta: Tensor | None = None) -> Tensor:
    """Return the RMSNorm of x [T, N] over its last dimension, computed in float32, times the weight, in x's dtype.

    delta: [T, N], which is first added to x in place, or None.
    """
    if delta is not None:
        x += delta
    if x.is_cuda:
        return rope.normed(x, norm.weight, norm.eps, norm.centered)
    # This has fewer operations than F.rms_norm. In a step of few tokens, calling an operation is most of its cost.
    exact = x.float()
    size = torch.linalg.vector_norm(exact, 2, -1, True)
    scale = torch.addcmul(_constant(norm.eps), size, size, value=1 / x.shape[1]).rsqrt_()
    if norm.centered:
        return (exact * scale).mul_(norm.weight.float() + 1).to(x.dtype)
    return (exact * scale).to(x.dtype).mul_(norm.weight)


@lru_cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=torch.float32, device="cpu")


rms_norm = Kernel(_rms_norm_twin, "fastgen.kernels.triton.norm:rms_norm", "fastgen.kernels.native.calls:rms_norm")
