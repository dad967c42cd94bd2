"""The merge of a low-rank adapter into a weight: see the twin in fastgen.kernels.merge."""

from __future__ import annotations

from torch import Tensor

from fastgen.device.chip import current
from fastgen.kernels.launch import triton
from fastgen.kernels.merge import check
from fastgen.kernels.triton.jit import jit, tl

ROWS, COLUMNS, DEPTH = 128, 64, 32
"""Rows and columns of a program's tile, and the number of ranks that it multiplies at once. A thread on Hopper then
takes 128 registers, so two programs fit on a multiprocessor."""


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


def merge(out: Tensor, base: Tensor, a: Tensor, b: Tensor) -> None:
    check(out, base, a, b)
    rows, columns = out.shape
    grid = triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS)
    strides = (tensor.stride(0) for tensor in (out, base, a, b))
    with current(out.device):
        _merge_kernel[grid](
            out, base, a, b, rows, columns, len(a), *strides, ROWS, COLUMNS, DEPTH, num_warps=8, num_stages=1
        )
