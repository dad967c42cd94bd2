"""The merge of a low-rank adapter into a weight, which reads the base once and rounds the sum once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import current
from fastgen.kernels.launch import Kernel, jit, tl, triton

ROWS, COLUMNS, DEPTH = 128, 64, 32
"""Rows and columns of a program's tile, and the number of ranks that it multiplies at once. A thread on Hopper then
takes 128 registers, so two programs fit on a multiprocessor."""

_AT_ONCE = 1 << 22  # maximum number of elements that the twin merges at a time


@jit()
def _high(x):
    """Return float32 numbers rounded to the 11 bits of them that tensor cores use. Of x - _high(x), tensor cores use
    all bits but the last."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@jit("rank")
def _merge_kernel(
    out_ptr, base_ptr, a_ptr, b_ptr, rows, columns, rank, out_stride, base_stride, a_stride, b_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Merge one tile per program. The strides are distances between rows."""
    first_row, row = tl.program_id(1) * ROWS, tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_here, column_here = first_row + row < rows, column < columns
    here = row_here[:, None] & column_here[None, :]
    base_ptr += first_row.to(tl.int64) * base_stride
    base = tl.load(base_ptr + row[:, None] * base_stride + column[None, :], mask=here, other=0.0)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rank, DEPTH):
        at = first + tl.arange(0, DEPTH)
        b_at, a_at = at[None, :] * b_stride + (first_row + row)[:, None], at[:, None] * a_stride + column[None, :]
        b = tl.load(b_ptr + b_at, mask=row_here[:, None] & (at < rank)[None, :], other=0.0)
        a = tl.load(a_ptr + a_at, mask=(at < rank)[:, None] & column_here[None, :], other=0.0)
        b_high, a_high = _high(b), _high(a)
        # The fourth product, of both remainders, would be 2**-22 of the whole: one or two units of float32.
        product = tl.dot(b - b_high, a_high, product, input_precision="tf32")
        product = tl.dot(b_high, a - a_high, product, input_precision="tf32")
        product = tl.dot(b_high, a_high, product, input_precision="tf32")
    merged = (base.to(tl.float32) + product).to(out_ptr.dtype.element_ty)
    out_ptr += first_row.to(tl.int64) * out_stride
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], merged, mask=here)


def _merge_launch(out: Tensor, base: Tensor, a: Tensor, b: Tensor) -> None:
    _check(out, base, a, b)
    rows, columns = out.shape
    grid = triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS)
    strides = (tensor.stride(0) for tensor in (out, base, a, b))
    with current(out.device):
        _merge_kernel[grid](
            out, base, a, b, rows, columns, len(a), *strides, ROWS, COLUMNS, DEPTH, num_warps=8, num_stages=1
        )


def _merge_twin(out: Tensor, base: Tensor, a: Tensor, b: Tensor) -> None:
    """Write base + b^T a to out, with the sum computed in float32 and rounded once.

    out, base: [N, K] of the same dtype; they may be the same tensor. a: float32 [R, K]. b: float32 [R, N]. The last
    dimension of all tensors is contiguous.
    """
    _check(out, base, a, b)
    rows = max(_AT_ONCE // out.shape[1], 1)
    for part, kept, left in zip(*(x.split(rows) for x in (out, base, b.t())), strict=True):
        part.copy_(torch.addmm(kept.float(), left, a))  # cuBLAS rounds products in bfloat16 before it adds


def _check(out: Tensor, base: Tensor, a: Tensor, b: Tensor) -> None:
    assert (base.shape, base.dtype) == (out.shape, out.dtype)
    assert (a.dtype, b.dtype) == (torch.float32, torch.float32)
    assert out.shape == (b.shape[1], a.shape[1])
    assert len(a) == len(b) > 0
    assert all(tensor.stride(1) == 1 for tensor in (out, base, a, b))


merge = Kernel(_merge_launch, _merge_twin)
