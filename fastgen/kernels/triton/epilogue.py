"""Epilogues of matrix products: bias, residual addition, SwiGLU and rope, for kernels in Triton and in Gluon.

The epilogue of a fused product works on its float32 sums. It has two parts, so that its inputs can be loaded (`read_`)
while the product is summed. After a product by cuBLAS, SwiGLU is a separate kernel, as GeGLU and the gate of attention
always are.

T tokens, N outputs. token: [TOKENS, 1], rows of the result. row: [ROWS], rows of the weight. Pairs of rows are given as
positions `at` within the halves of heads `head`, both [ROWS / 2]. Rows beyond T and N are neither read nor stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.epilogue import GELU_CUBIC, GELU_SLOPE
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.triton.rope import look_up, turn


@jit()
def read_rows(token, row, bias_ptr, out_ptr, T, N, ADD: tl.constexpr):
    """Load the bias, and the numbers to which the product is added; without these, return numbers that are not used."""
    bias = row
    before = row
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row, mask=row < N, other=0.0)
    if ADD:
        here = (token < T) & (row < N)[None, :]
        before = tl.load(out_ptr + (token.to(tl.int64) * N + row[None, :]), mask=here, other=0.0)
    return bias, before


@jit()
def finish_rows(acc, read, token, row, bias_ptr, out_ptr, T, N, ADD: tl.constexpr):
    """Store acc, float32 [TOKENS, ROWS], or if ADD, add it to `out`."""
    acc = added(acc, read, bias_ptr, ADD)
    here = (token < T) & (row < N)[None, :]
    tl.store(out_ptr + (token.to(tl.int64) * N + row[None, :]), acc.to(out_ptr.dtype.element_ty), mask=here)


@jit()
def added(acc, read, bias_ptr, ADD: tl.constexpr):
    """Return acc, float32 [TOKENS, ROWS], plus the bias, and if ADD, plus the numbers that `read_rows` loaded from
    `out`.
    """
    bias, before = read
    if bias_ptr is not None:
        acc += bias.to(tl.float32)[None, :]
    if ADD:
        acc += before.to(tl.float32)
    return acc


@jit()
def read_pairs(
    token, head, at, bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, T, N, HALF: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Load the bias of both rows of each pair, and for rope the result of `look_up`."""
    head, at = head[None, :], at[None, :]
    row = head * 2 * HALF + at
    there = (row < N) & (at < HALF)
    bias_a = row
    bias_b = row
    found = row, row, row
    if bias_ptr is not None:
        bias_a = tl.load(bias_ptr + row, mask=there, other=0.0)
        bias_b = tl.load(bias_ptr + row + HALF, mask=there, other=0.0)
    if KV > 0:
        here = there & (token < T)
        found = look_up(token.to(tl.int64), at, here, here, positions_ptr, slots_ptr, cos_ptr, sin_ptr, HALF)
    return bias_a, bias_b, found


@jit()
def finish_pairs(
    a, b, read, token, head, at, bias_ptr, out_ptr, keys_ptr, values_ptr, T, N,
    HALF: tl.constexpr, KV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute and store SwiGLU or rope of the pairs (a, b), float32 [TOKENS, ROWS / 2]."""
    bias_a, bias_b, found = read
    head, at = head[None, :], at[None, :]
    here = (head * 2 * HALF + at < N) & (at < HALF) & (token < T)
    if bias_ptr is not None:
        a += bias_a.to(tl.float32)
        b += bias_b.to(tl.float32)
    if KV > 0:
        a = a.to(out_ptr.dtype.element_ty).to(tl.float32)
        b = b.to(out_ptr.dtype.element_ty).to(tl.float32)
        turn(
            a, b, found, token.to(tl.int64), head, at, here, out_ptr, keys_ptr, values_ptr,
            N // (2 * HALF) - 2 * KV, KV, HALF, P,
        )  # fmt: skip
    else:
        tl.store(out_ptr + token.to(tl.int64) * HALF + at, gated(a, b).to(out_ptr.dtype.element_ty), mask=here)


@jit()
def gated(gate, up):
    """Return SwiGLU of gate and up in float32."""
    return gate / (1 + tl.exp(-gate)) * up


BLOCK = 2048  # columns per program


@jit()
def _gated_kernel(
    x_ptr, out_ptr, N: tl.constexpr, GELU: tl.constexpr, CUBIC: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK of the N columns of a row per program: SwiGLU, or if GELU, GeGLU."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < N
    gate = tl.load(x_ptr + row * 2 * N + column, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + column, mask=here, other=0.0).to(tl.float32)
    slope = SLOPE * gate * (1 + CUBIC * gate * gate) if GELU else gate
    y = gate / (1 + tl.exp(-slope)) * up
    tl.store(out_ptr + row * N + column, y.to(out_ptr.dtype.element_ty), mask=here)


def swiglu(x: Tensor) -> Tensor:
    return _gated(x, False)


def geglu(x: Tensor) -> Tensor:
    return _gated(x, True)


def _gated(x: Tensor, gelu: bool) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    assert x.shape[1] == 2 * size
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    pdl = Chip.of(x.device).dependent_launch
    _gated_kernel[(rows, -(-size // BLOCK))](
        x, out, size, gelu, GELU_CUBIC, GELU_SLOPE, BLOCK, pdl, num_warps=4, launch_pdl=pdl
    )
    return out


@jit()
def _gate_kernel(x_ptr, gate_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute BLOCK of the N columns of a row per program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, here = tl.program_id(0).to(tl.int64) * N + column, column < N
    x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x / (1 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=here)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    (rows, size), out, pdl = x.shape, torch.empty_like(x), Chip.of(x.device).dependent_launch
    assert gate.shape == x.shape
    assert x.is_contiguous()
    assert gate.is_contiguous()
    _gate_kernel[(rows, -(-size // BLOCK))](x, gate, out, size, BLOCK, pdl, num_warps=4, launch_pdl=pdl)
    return out
