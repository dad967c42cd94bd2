"""What comes behind a product's sums, before they are rounded; for kernels in Triton and in Gluon.

T tokens, N outputs. acc, a, b: float32, a row a token; token: its number, [TOKENS, 1]. What is behind T and N is not
stored.
"""

from __future__ import annotations

from fastgen.kernels.launch import jit, tl
from fastgen.kernels.rope import turn


@jit()
def finish_rows(acc, token, row, bias_ptr, out_ptr, T, N, ADD: tl.constexpr):
    """Store acc [TOKENS, ROWS], of the weight's rows `row`, or add it to what is there."""
    here = (token < T) & (row < N)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[None, :]
    out_ptr += token.to(tl.int64) * N + row[None, :]
    if ADD:
        acc += tl.load(out_ptr, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=here)


@jit()
def finish_pairs(
    a, b, token, head, at, bias_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, T, N,
    HALF: tl.constexpr, KV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """SwiGLU or rope of the pairs (a, b) [TOKENS, ROWS / 2], which stand at places `at` of halves of heads."""
    head, at = head[None, :], at[None, :]
    row = head * 2 * HALF + at
    there = (row < N) & (at < HALF)
    if bias_ptr is not None:
        a += tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
        b += tl.load(bias_ptr + row + HALF, mask=there, other=0.0).to(tl.float32)
    here = there & (token < T)
    if KV > 0:
        a = a.to(out_ptr.dtype.element_ty).to(tl.float32)
        b = b.to(out_ptr.dtype.element_ty).to(tl.float32)
        turn(
            a, b, token.to(tl.int64), head, at, here, here, here, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
            keys_ptr, values_ptr, N // (2 * HALF) - 2 * KV, KV, HALF, P,
        )  # fmt: skip
    else:
        out = a / (1 + tl.exp(-a)) * b
        tl.store(out_ptr + token.to(tl.int64) * HALF + at, out.to(out_ptr.dtype.element_ty), mask=here)
