"""RMSNorm, optionally after an addition to the residual stream (of this rank's result, or of the sum over all ranks),
and optionally with the result in fp8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels import rope
from fastgen.kernels.allreduce import add_in_order
from fastgen.kernels.fp8 import E4M3, quantize, quantized
from fastgen.kernels.launch import Kernel, jit, tl


@dataclass(frozen=True)
class RMSNorm:
    """The parameters of an RMSNorm (https://arxiv.org/abs/1910.07467). weight: [N]."""

    weight: Tensor
    eps: float


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
            y = rms_norm(y, self.norm.weight, self.norm.eps)
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
            part.copy_(rms_norm(part.contiguous(), weight, self.eps))
            first += len(weight)
        return qkv


@jit()
def normed(x, weight, eps, N: tl.constexpr, DTYPE: tl.constexpr):
    """Return the RMSNorm of a row in DTYPE. x, weight: float32 [BLOCK], of which the first N numbers are the row's and
    the others are zeros."""
    scale = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    rounded = (x * scale).to(DTYPE).to(tl.float32)  # rounded twice, as in transformers
    return (rounded * weight).to(DTYPE)


@jit("eps")
def _rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, scales_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
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
    x = normed(x, weight, eps, N, x_ptr.dtype.element_ty)
    if scales_ptr is not None:
        x, scale = quantized(x.to(tl.float32))
        tl.store(scales_ptr + tl.program_id(0), scale)
    tl.store(out_ptr + at, x, mask=here)


def _rms_norm_launch(
    x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    rows, size = x.shape
    assert x.is_contiguous()
    assert weight.shape == (size,)
    assert delta is None or (delta.shape == x.shape and delta.is_contiguous())
    out = torch.empty_like(x, dtype=None if scales is None else E4M3)
    block = power_of_two(size)
    pdl = Chip.of(x.device).dependent_launch
    _rms_norm_kernel[(rows,)](
        x, x if delta is None else delta, weight, out, scales, eps, size, block, delta is not None, pdl,
        num_warps=min(max(block // 1024, 1), 16), launch_pdl=pdl,
    )  # fmt: skip
    return out


def _rms_norm_twin(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """Return the RMSNorm of x [T, N] over its last dimension, computed in float32, times weight [N], in x's dtype.

    delta: [T, N], which is first added to x in place, or None.
    """
    if delta is not None:
        x += delta
    if x.is_cuda:
        return rope.normed(x, weight, eps)
    # This has fewer operations than F.rms_norm. In a step of few tokens, calling an operation is most of its cost.
    exact = x.float()
    size = torch.linalg.vector_norm(exact, 2, -1, True)
    scale = torch.addcmul(_constant(eps), size, size, value=1 / x.shape[1]).rsqrt_()
    return (exact * scale).to(x.dtype).mul_(weight)


@lru_cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=torch.float32)


rms_norm = Kernel(_rms_norm_launch, _rms_norm_twin)


def _fp8_launch(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scales = x.new_empty(len(x), dtype=torch.float32)
    return _rms_norm_launch(x, weight, eps, delta, scales), scales


def _fp8_twin(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of `rms_norm` in fp8, float8_e4m3fn [T, N], and the scales of its rows, float32 [T]."""
    values, scales = quantize.twin(_rms_norm_twin(x, weight, eps, delta))
    return values, scales


rms_norm_fp8 = Kernel(_fp8_launch, _fp8_twin)


@jit("eps")
def _sum_norm_kernel(
    x_ptr, y_ptr, stage_ptr, weight_ptr, out_ptr, stride, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Sum and normalize one row of N numbers per program. stride: number of elements between the ranks' parts of the
    stage."""
    column = tl.arange(0, BLOCK)
    here = column < N
    at = tl.program_id(0).to(tl.int64) * N + column
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(y_ptr + at, mask=here, other=0.0).to(tl.float32)
        else:
            total += tl.load(stage_ptr + rank * stride.to(tl.int64) + at, mask=here, other=0.0).to(tl.float32)
    x = total + tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    x = x.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + at, x, mask=here)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)
        x = normed(x.to(tl.float32), weight, eps, N, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, x, mask=here)


def _sum_norm_launch(
    x: Tensor, y: Tensor, stage: Tensor, rank: int, weight: Tensor | None, eps: float, out: Tensor
) -> None:
    _check(x, y, stage, weight, out)
    rows, size = x.shape
    block = power_of_two(size)
    _sum_norm_kernel[(rows,)](
        x, y, stage, x if weight is None else weight, out, stage.stride(0), eps,
        rank, len(stage), size, block, weight is not None, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip


def _sum_norm_twin(
    x: Tensor, y: Tensor, stage: Tensor, rank: int, weight: Tensor | None, eps: float, out: Tensor
) -> None:
    """Add the sum over all ranks to x [T, N], and write rms_norm(x) * weight, or x if weight is None, to out [T, N].

    y: [T, N], this rank's summand. stage: [ranks, any number >= T, N], whose first T rows are the summands of the other
    ranks (this rank's part is not read). weight: [N]. All tensors are contiguous and have the same dtype. The sum is
    computed in the order of the ranks, in float32, and rounded once.
    """
    _check(x, y, stage, weight, out)
    add_in_order(x, [y if other == rank else rows[: len(x)] for other, rows in enumerate(stage)])
    out.copy_(x if weight is None else rms_norm.twin(x, weight, eps))


def _check(x: Tensor, y: Tensor, stage: Tensor, weight: Tensor | None, out: Tensor) -> None:
    assert x.shape == y.shape == out.shape
    assert stage.shape[1] >= len(x) > 0
    assert stage.shape[2:] == x.shape[1:]
    assert weight is None or weight.shape == x.shape[1:]
    assert {x.dtype, y.dtype, stage.dtype} == {out.dtype}
    assert all(tensor.is_contiguous() for tensor in (x, y, stage, out))


sum_norm = Kernel(_sum_norm_launch, _sum_norm_twin)
