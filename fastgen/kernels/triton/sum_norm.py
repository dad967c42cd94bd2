"""The addition of the sum over all ranks to the residual stream, followed by RMSNorm: see the twin in
fastgen.kernels.sum_norm."""

from __future__ import annotations

from torch import Tensor

from fastgen.device.chip import power_of_two
from fastgen.kernels.sum_norm import check
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.triton.norm import normed


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
        x = normed(x.to(tl.float32), weight, eps, N, out_ptr.dtype.element_ty, False)
    tl.store(out_ptr + at, x, mask=here)


def sum_norm(x: Tensor, y: Tensor, stage: Tensor, rank: int, weight: Tensor | None, eps: float, out: Tensor) -> None:
    check(x, y, stage, weight, out)
    rows, size = x.shape
    block = power_of_two(size)
    _sum_norm_kernel[(rows,)](
        x, y, stage, x if weight is None else weight, out, stage.stride(0), eps,
        rank, len(stage), size, block, weight is not None, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
