"""The sum of what all ranks have for some tokens, added to the residual stream, and the RMSNorm that comes next."""

from __future__ import annotations

from torch import Tensor

from fastgen.kernels.allreduce import add_in_order
from fastgen.kernels.launch import Kernel, jit, tl, triton
from fastgen.kernels.norm import normed, rms_norm


@jit("eps")
def _sum_norm_kernel(
    x_ptr, y_ptr, stage_ptr, weight_ptr, out_ptr, stride, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A program a row of N. stride: elements from one rank's rows in the stage to the next one's."""
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


def _launch(x: Tensor, y: Tensor, stage: Tensor, rank: int, weight: Tensor | None, eps: float, out: Tensor) -> None:
    """x [T, N] += the sum over the ranks, in their order, in float32, and rounded once; out [T, N] = rms_norm(x) *
    weight, or x itself where weight [N] is None.

    y: [T, N], what this rank has; stage: [ranks, S, N], in whose first T rows is what the others have (S >= T; its own
    are not read). All contiguous and of one dtype.
    """
    _check(x, y, stage, weight, out)
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    _sum_norm_kernel[(rows,)](
        x, y, stage, x if weight is None else weight, out, stage.stride(0), eps,
        rank, len(stage), size, block, weight is not None, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip


def _twin(x: Tensor, y: Tensor, stage: Tensor, rank: int, weight: Tensor | None, eps: float, out: Tensor) -> None:
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


sum_norm = Kernel(_launch, _twin)
