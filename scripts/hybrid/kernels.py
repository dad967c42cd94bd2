"""Gated DeltaNet on a GPU, in Triton, with the same bits in prefills and decodes: the arithmetic of reference.py.

    T tokens of a sequence from a block border on, L lanes, H value heads, K key heads, D = 128, C blocks of 64 tokens

Prefill, four kernels: `_prepare` normalizes queries and keys, `_invert` computes each block's matrix T, `_scan` goes
from block to block and writes each block's state and what its tokens write, `_outputs` computes all outputs. Decode,
two: `_mix` computes the new rows of T and the weights of the block's tokens, `_apply` what depends on values and state.
`_advance` moves the state of a lane whose block is full.

Prefills multiply tiles of 64 rows, decodes tiles of 16. Both add the products of one output in the same order, in steps
of the matrix instruction (16 tokens or 16 dimensions in bfloat16, 8 in tf32), and zeros add nothing. Every other sum
either goes through `tl.fma` in a loop, or has one summand that is not zero, so that no layout changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, PART, SIZE = 64, 16, 128
HALF = torch.bfloat16


@dataclass
class Lanes:
    """What L sequences keep of one layer; `count` (L) int32 tokens of each one's block have rows."""

    count: Tensor
    state: Tensor  # (L, H, D, D) float32, at the block's start
    state16: Tensor  # (L, H, D, D) bfloat16, the same, rounded, which products read
    keys: Tensor  # (L, 64, K, D) bfloat16, normalized
    strengths: Tensor  # (L, 64, H) float32, beta
    decays: Tensor  # (L, 64, H) float32, sums of logs of decays from the block's first token on
    residuals: Tensor  # (L, 64, H, D) bfloat16
    writes: Tensor  # (L, 64, H, D) bfloat16
    inverse: Tensor  # (L, H, 64, 64) float32, the matrix T

    @classmethod
    def empty(
        cls, lanes: int, heads: int, key_heads: int, device: torch.device | str, half: torch.dtype = HALF
    ) -> Lanes:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(lanes, *shape, dtype=dtype, device=device)

        return cls(
            zeros(dtype=torch.int32),
            zeros(heads, SIZE, SIZE),
            zeros(heads, SIZE, SIZE, dtype=half),
            zeros(BLOCK, key_heads, SIZE, dtype=half),
            zeros(BLOCK, heads),
            zeros(BLOCK, heads),
            zeros(BLOCK, heads, SIZE, dtype=half),
            zeros(BLOCK, heads, SIZE, dtype=half),
            zeros(heads, BLOCK, BLOCK),
        )


@triton.jit(do_not_specialize=["T"])
def _prepare(k, q, keys, queries, T, HEADS: tl.constexpr, D: tl.constexpr):
    """Normalize keys and queries (T, HEADS, D)."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    at = row[:, None] * (HEADS * D) + tl.program_id(1) * D + tl.arange(0, D)[None, :]
    exists = row < T
    if tl.program_id(2) == 0:
        tl.store(keys + at, _normalized(k + at, exists, 1.0), mask=exists[:, None])
    else:
        tl.store(queries + at, _normalized(q + at, exists, D**-0.5), mask=exists[:, None])


@triton.jit
def _normalized(source, exists, scale):
    """Return heads (16, D), each divided by its length."""
    raw = tl.load(source, mask=exists[:, None], other=0.0)
    x = raw.to(tl.float32)
    return (x * (tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * scale)[:, None]).to(raw.dtype)


@triton.jit(do_not_specialize=["T", "kept"])
def _sum_decays(g, decays, T, kept, H: tl.constexpr):
    """Replace g (T, H) by its sums from each block's first token on; the first `kept` sums exist."""
    head = tl.arange(0, H)
    first = tl.program_id(0) * 64
    total = tl.zeros([H], tl.float32)
    for row in range(first, tl.minimum(first + 64, T)):
        total = total + tl.load(g + row * H + head)
        total = tl.where(row < kept, tl.load(decays + row * H + head), total)
        tl.store(decays + row * H + head, total)


@triton.jit
def _solve(lower, columns):
    """Invert I + lower, strictly lower triangular (B, 16, 16), by forward substitution, column by column; only
    rows <= columns are right."""
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    result = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(lower)
    for j in range(columns):
        left = tl.sum(tl.where(column == j, lower, 0.0), 2)
        above = tl.sum(tl.where(row == j, result, 0.0), 1)
        result = tl.fma(-left[:, :, None], above[:, None, :], result)
    return result


@triton.jit
def _decayed(products, decay_rows, decay_columns, row, column, strict: tl.constexpr):
    """Multiply products of rows and columns by the decay between them, and drop columns after the row. Rows that do not
    exist have a decay of 0 and products of 0: exp must be finite there."""
    causal = row[:, None] > column[None, :] if strict else row[:, None] >= column[None, :]
    difference = tl.minimum(decay_rows[:, None] - decay_columns[None, :], 0.0)
    return products * tl.exp(tl.where(causal, difference, -float("inf")))


@triton.jit
def _place_part(diagonal, beside, part):
    """Return 16 rows of T: its block on the diagonal, and -diagonal @ beside to its left."""
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 64)[None, :]
    right = tl.where(column == row + part * 16, 1.0, -beside)
    return tl.dot(diagonal, right, input_precision="tf32")


@triton.jit(do_not_specialize=["T"])
def _invert(keys, decays, strengths, inverse16, inverse, T, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """Compute T of each block: inverse16 (C, H, 64, 64), without the diagonal; also inverse (H, 64, 64) of the last."""
    block, head = tl.program_id(0), tl.program_id(1)
    dim, step, tile = tl.arange(0, D), tl.arange(0, 16), tl.arange(0, 64)
    width: tl.constexpr = H // GROUP * D
    first = block * 64
    source = keys + (head // GROUP) * D + dim[None, :]
    gates = first * H + head
    left = T - first
    k = tl.load(source + (first + tile)[:, None] * width, mask=(tile < left)[:, None], other=0.0)
    decay = tl.load(decays + gates + tile * H, mask=tile < left, other=0.0)
    strength = tl.load(strengths + gates + tile * H, mask=tile < left, other=0.0)
    lower = _decayed(tl.dot(k, tl.trans(k)), decay, decay, tile, tile, True) * strength[:, None]
    four = tl.arange(0, 4)
    same = four[:, None, None, None] == four[None, None, :, None]
    diagonals = _solve(tl.sum(tl.where(same, tl.reshape(lower, [4, 16, 4, 16]), 0.0), 2), 15)
    t0 = tl.zeros([16, 64], tl.float32)
    t1 = t0
    t2 = t0
    for part in tl.static_range(4):
        row = part * 16 + step
        mine = tl.load(source + (first + row)[:, None] * width, mask=(row < left)[:, None], other=0.0)
        decay = tl.load(decays + gates + row * H, mask=row < left, other=0.0)
        strength = tl.load(strengths + gates + row * H, mask=row < left, other=0.0)
        beside = tl.zeros([16, 64], tl.float32)
        for other in tl.static_range(part):
            column = other * 16 + step
            theirs = tl.load(source + (first + column)[:, None] * width, mask=(column < left)[:, None], other=0.0)
            their_decay = tl.load(decays + gates + column * H, mask=column < left, other=0.0)
            lower = _decayed(tl.dot(mine, tl.trans(theirs)), decay, their_decay, row, column, True)
            above = t0 if other == 0 else (t1 if other == 1 else t2)
            beside = tl.dot(lower * strength[:, None], above, beside, input_precision="tf32")
        diagonal = tl.sum(tl.where(four[:, None, None] == part, diagonals, 0.0), 0)
        rows = _place_part(diagonal, beside, part)
        if part == 0:
            t0 = rows
        elif part == 1:
            t1 = rows
        elif part == 2:
            t2 = rows
        square = row[:, None] * 64 + tile[None, :]
        off = tl.where(row[:, None] == tile[None, :], 0.0, rows).to(k.dtype)
        tl.store(inverse16 + (block * H + head) * 4096 + square, off)
        if block == tl.num_programs(0) - 1:
            tl.store(inverse + head * 4096 + square, rows)


@triton.jit
def _moved(state, keys, writes, decay, last):
    """Return the state (D, DV) after a full block of keys (64, D) and writes (64, DV) bfloat16."""
    writes = (writes.to(tl.float32) * tl.exp(last - decay)[:, None]).to(keys.dtype)
    product = tl.dot(tl.trans(keys), writes)
    return tl.fma(state, tl.zeros_like(state) + tl.exp(last), product)


@triton.jit(do_not_specialize=["T", "kept"])
def _scan(
    keys, values, decays, strengths, inverse16, states16, writes, state, state16, kept_residuals, kept_writes,
    T, kept, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through a sequence's blocks: states16 (C, H, D, D) at their starts, writes (T, H, D). Update the lane's state,
    its bfloat16 copy, and the rows of the last block (64, H, D); the first `kept` rows of the first exist there."""
    part, head = tl.program_id(0), tl.program_id(1)
    dim, row, column = tl.arange(0, D), tl.arange(0, 64), tl.arange(0, 64)
    out = part * DV + tl.arange(0, DV)
    width: tl.constexpr = H // GROUP * D
    square = dim[:, None] * D + out[None, :]
    s = tl.load(state + head * (D * D) + square)
    for first in tl.range(0, T, 64, num_stages=STAGES):
        exists = first + row < T
        at = (first + row)[:, None] * (H * D) + head * D + out[None, :]
        lane_at = row[:, None] * (H * D) + head * D + out[None, :]
        k = tl.load(
            keys + (first + row)[:, None] * width + (head // GROUP) * D + dim[None, :], mask=exists[:, None], other=0.0
        )
        v = tl.load(values + at, mask=exists[:, None], other=0.0).to(tl.float32)
        decay = tl.load(decays + (first + row) * H + head, mask=exists, other=0.0)
        strength = tl.load(strengths + (first + row) * H + head, mask=exists, other=0.0)
        mix = tl.load(inverse16 + ((first // 64) * H + head) * 4096 + row[:, None] * 64 + column[None, :])
        s16 = s.to(k.dtype)
        tl.store(states16 + ((first // 64) * H + head) * (D * D) + square, s16)
        r = strength[:, None] * tl.fma(-tl.exp(decay)[:, None] + tl.zeros_like(v), tl.dot(k, s16), v)
        old = (first + row < kept)[:, None]
        r16 = r.to(k.dtype)
        if first < kept:
            r16 = tl.where(old, tl.load(kept_residuals + lane_at), r16)
        w = tl.dot(mix, r16, r).to(k.dtype)
        if first < kept:
            w = tl.where(old, tl.load(kept_writes + lane_at), w)
        tl.store(writes + at, w, mask=exists[:, None])
        if first + 64 <= T:
            last = tl.load(decays + (first + 63) * H + head)
            s = _moved(s, k, w, decay, last)
        else:
            tl.store(kept_residuals + lane_at, r16, mask=exists[:, None])
            tl.store(kept_writes + lane_at, w, mask=exists[:, None])
    tl.store(state + head * (D * D) + square, s)
    tl.store(state16 + head * (D * D) + square, s.to(state16.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def _outputs(
    queries, keys, decays, states16, writes, results, T, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """Compute the outputs (T, H, D) bfloat16 of all tokens from the states at the starts of their blocks."""
    part, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * 64
    dim, row = tl.arange(0, D), tl.arange(0, 64)
    out = part * DV + tl.arange(0, DV)
    width: tl.constexpr = H // GROUP * D
    exists = first + row < T
    source = (first + row)[:, None] * width + (head // GROUP) * D + dim[None, :]
    at = (first + row)[:, None] * (H * D) + head * D + out[None, :]
    q = tl.load(queries + source, mask=exists[:, None], other=0.0)
    k = tl.load(keys + source, mask=exists[:, None], other=0.0)
    decay = tl.load(decays + (first + row) * H + head, mask=exists, other=0.0)
    s16 = tl.load(states16 + ((first // 64) * H + head) * (D * D) + dim[:, None] * D + out[None, :])
    w = tl.load(writes + at, mask=exists[:, None], other=0.0)
    weights = _decayed(tl.dot(q, tl.trans(k)), decay, decay, row, row, False).to(q.dtype)
    acc = tl.dot(q, s16) * tl.exp(decay)[:, None]
    tl.store(results + at, tl.dot(weights, w, acc).to(q.dtype), mask=exists[:, None])


@triton.jit(do_not_specialize=["N", "rows"])
def _prepare_rows(k, q, count, keys, queries, N, rows, HEADS: tl.constexpr, D: tl.constexpr):
    """Normalize keys and queries (L, N, HEADS, D) of N new tokens of each lane; keys go to the lanes' blocks."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    across = tl.program_id(1) * D + tl.arange(0, D)[None, :]
    exists = row < rows
    at = row[:, None] * (HEADS * D) + across
    if tl.program_id(2) == 0:
        lane = row // N
        start = tl.load(count + lane, mask=exists, other=0)
        place = (lane * 64 + start + row % N).to(tl.int64)
        tl.store(keys + place[:, None] * (HEADS * D) + across, _normalized(k + at, exists, 1.0), mask=exists[:, None])
    else:
        tl.store(queries + at, _normalized(q + at, exists, D**-0.5), mask=exists[:, None])


@triton.jit(do_not_specialize=["N"])
def _mix(
    g, beta, count, keys, queries, strengths, decays, inverse, weights,
    N, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add N rows of each lane's block to strengths, decays and T, from its keys, queries (L, N, K, D), and g and beta
    (L, N, H). Write the weights (L, N, H, 64) of the block's tokens in the new tokens' outputs."""
    head, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dim, step, tile = tl.arange(0, D), tl.arange(0, 16), tl.arange(0, 64)
    width: tl.constexpr = H // GROUP * D
    start = tl.load(count + lane)
    across = (head // GROUP) * D + dim[None, :]
    gates = lane * 64 * H + head
    lane_keys = keys + lane * 64 * width + across
    lane_inverse = inverse + (lane * H + head) * 4096
    total = tl.load(decays + gates + (start - 1) * H, mask=start > 0, other=0.0)
    for part in range(start // 16, (start + N - 1) // 16 + 1):
        row = part * 16 + step
        old, fresh = row < start, (row >= start) & (row < start + N)
        source = lane * N + row - start
        mine = tl.load(lane_keys + row[:, None] * width, mask=(old | fresh)[:, None], other=0.0)
        query = tl.load(queries + source[:, None] * width + across, mask=fresh[:, None], other=0.0)
        decay = tl.load(decays + gates + row * H, mask=old, other=0.0)
        strength = tl.load(strengths + gates + row * H, mask=old, other=0.0)
        strength = tl.where(fresh, tl.load(beta + source * H + head, mask=fresh, other=0.0), strength)
        for place in range(tl.maximum(start, part * 16), tl.minimum(start + N, part * 16 + 16)):
            total = total + tl.load(g + (lane * N + place - start) * H + head)
            decay = tl.where(row == place, total, decay)
        tl.store(decays + gates + row * H, decay, mask=fresh)
        tl.store(strengths + gates + row * H, strength, mask=fresh)
        target = weights + (source * H + head)[:, None] * 64
        beside = tl.zeros([16, 64], tl.float32)
        for first in tl.range(0, part * 16, 16, num_stages=STAGES):
            column = first + step
            before = tl.load(lane_keys + column[:, None] * width)
            above = tl.load(
                lane_inverse + column[:, None] * 64 + tile[None, :], mask=(tile < part * 16)[None, :], other=0.0
            )
            old_decay = tl.load(decays + gates + column * H)
            lower = _decayed(tl.dot(mine, tl.trans(before)), decay, old_decay, row, column, True) * strength[:, None]
            beside = tl.dot(lower, above, beside, input_precision="tf32")
            weight = _decayed(tl.dot(query, tl.trans(before)), decay, old_decay, row, column, False)
            tl.store(target + column[None, :], weight.to(mine.dtype), mask=fresh[:, None])
        lower = _decayed(tl.dot(mine, tl.trans(mine)), decay, decay, row, row, True) * strength[:, None]
        last = tl.minimum(start + N - part * 16, 16) - 1
        diagonal = tl.reshape(_solve(tl.reshape(lower, [1, 16, 16]), last), [16, 16])
        rows = _place_part(diagonal, beside, part)
        tl.store(lane_inverse + row[:, None] * 64 + tile[None, :], rows, mask=fresh[:, None])
        weight = _decayed(tl.dot(query, tl.trans(mine)), decay, decay, row, row, False).to(mine.dtype)
        tl.store(target + row[None, :], weight, mask=fresh[:, None])
        tl.debug_barrier()  # the next 16 rows read these


@triton.jit(do_not_specialize=["N"])
def _apply(
    queries, values, weights, count, state16, keys, strengths, decays, residuals, writes, inverse, results,
    N, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Compute outputs (L, N, H, D), and add N rows to residuals and writes, after `_mix`."""
    part_of_d, head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dim, step, tile = tl.arange(0, D), tl.arange(0, 16), tl.arange(0, 64)
    out = part_of_d * DV + tl.arange(0, DV)
    width: tl.constexpr = H // GROUP * D
    start = tl.load(count + lane)
    across = (head // GROUP) * D + dim[None, :]
    gates = lane * 64 * H + head
    lane_rows = lane * 64 * (H * D) + head * D + out[None, :]
    lane_inverse = inverse + (lane * H + head) * 4096
    s16 = tl.load(state16 + (lane * H + head) * (D * D) + dim[:, None] * D + out[None, :])
    for part in range(start // 16, (start + N - 1) // 16 + 1):
        row = part * 16 + step
        old, fresh = (row < start)[:, None], ((row >= start) & (row < start + N))[:, None]
        earlier = tile < part * 16
        source = lane * N + row - start
        earlier_rows = lane_rows + tile[:, None] * (H * D)
        rows = lane_rows + row[:, None] * (H * D)
        r_before = tl.load(residuals + earlier_rows, mask=earlier[:, None], other=0.0)
        w_before = tl.load(writes + earlier_rows, mask=earlier[:, None], other=0.0)
        k = tl.load(keys + (lane * 64 + row)[:, None] * width + across, mask=fresh, other=0.0)
        q = tl.load(queries + source[:, None] * width + across, mask=fresh, other=0.0)
        v = tl.load(values + source[:, None] * (H * D) + head * D + out[None, :], mask=fresh, other=0.0).to(tl.float32)
        r_here = tl.load(residuals + rows, mask=old, other=0.0)
        w_here = tl.load(writes + rows, mask=old, other=0.0)
        decay = tl.load(decays + gates + row * H, mask=row < start + N, other=0.0)
        strength = tl.load(strengths + gates + row * H, mask=row < start + N, other=0.0)
        mix_before = tl.load(lane_inverse + row[:, None] * 64 + tile[None, :], mask=fresh & earlier[None, :], other=0.0)
        mix_here = tl.load(lane_inverse + row[:, None] * 64 + row[None, :], mask=fresh, other=0.0)
        mix_here = tl.where(step[:, None] == step[None, :], 0.0, mix_here)
        weight = weights + (source * H + head)[:, None] * 64
        weight_before = tl.load(weight + tile[None, :], mask=fresh & earlier[None, :], other=0.0)
        weight_here = tl.load(weight + row[None, :], mask=fresh, other=0.0)
        reach = tl.exp(decay)[:, None]
        r = strength[:, None] * tl.fma(-reach + tl.zeros_like(v), tl.dot(k, s16), v)
        r16 = tl.where(fresh, r.to(k.dtype), r_here)
        w = tl.dot(mix_before.to(k.dtype), r_before, r)
        w = tl.dot(mix_here.to(k.dtype), r16, w)
        w16 = tl.where(fresh, w.to(k.dtype), w_here)
        tl.store(residuals + rows, r16, mask=fresh)
        tl.store(writes + rows, w16, mask=fresh)
        acc = tl.dot(weight_before, w_before, tl.dot(q, s16) * reach)
        acc = tl.dot(weight_here, w16, acc)
        at = source[:, None] * (H * D) + head * D + out[None, :]
        tl.store(results + at, acc.to(k.dtype), mask=fresh)
        tl.debug_barrier()  # the next 16 rows read these


@triton.jit
def _advance(
    lanes, state, state16, keys, decays, writes, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr
):
    """Move the states of `lanes` (any), whose blocks are full."""
    part, head, lane = tl.program_id(0), tl.program_id(1), tl.load(lanes + tl.program_id(2))
    dim, row = tl.arange(0, D), tl.arange(0, 64)
    out = part * DV + tl.arange(0, DV)
    square = (lane * H + head) * (D * D) + dim[:, None] * D + out[None, :]
    at = lane * 64 + row
    k = tl.load(keys + (at[:, None] * (H // GROUP) + head // GROUP) * D + dim[None, :])
    w = tl.load(writes + (at[:, None] * H + head) * D + out[None, :])
    decay = tl.load(decays + at * H + head)
    s = _moved(tl.load(state + square), k, w, decay, tl.load(decays + (lane * 64 + 63) * H + head))
    tl.store(state + square, s)
    tl.store(state16 + square, s.to(state16.dtype.element_ty))


@dataclass(frozen=True)
class Tiles:
    """Columns of values per program, warps and pipeline stages. They change no bits."""

    invert_warps: int = 2
    scan_columns: int = 32
    scan_warps: int = 4
    scan_stages: int = 2
    output_columns: int = 64
    output_warps: int = 4
    advance_columns: int = 32
    mix_warps: int = 1
    mix_stages: int = 2
    mix_registers: int | None = None
    apply_columns: int = 64
    apply_warps: int = 4
    apply_registers: int | None = None


DEFAULT = Tiles()


def prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lanes: Lanes, lane: int, tiles: Tiles = DEFAULT
) -> Tensor:
    """Add a sequence's next T tokens to its lane, and return their outputs (T, H, D) bfloat16.

    q, k: (T, K, D) bfloat16, not normalized; v: (T, H, D) bfloat16; g, beta: (T, H) float32."""
    kept = int(lanes.count[lane])
    heads, length = v.shape[1], kept + len(k)
    if kept:  # from the block's border on: the rows that exist are kept, and computed again where that is simpler
        g, beta, v, q = (torch.cat([x.new_zeros(kept, *x.shape[1:]), x]) for x in (g, beta, v, q))
        beta[:kept] = lanes.strengths[lane, :kept]
    keys, queries, decays = torch.empty_like(q), torch.zeros_like(q), torch.empty_like(g)
    keys[:kept], decays[:kept] = lanes.keys[lane, :kept], lanes.decays[lane, :kept]
    blocks = triton.cdiv(length, BLOCK)
    inverse16 = k.new_empty(blocks, heads, BLOCK, BLOCK)
    states16 = k.new_empty(blocks, heads, SIZE, SIZE)
    writes, results = torch.empty_like(v), torch.empty_like(v)
    buffers = (keys, queries, decays, inverse16, states16, writes, results)
    for launch in prefill_launches(q, k, v, g, beta, lanes, lane, kept, buffers, tiles):
        launch()
    left = length % BLOCK
    lanes.keys[lane, :left] = keys[length - left :]
    lanes.decays[lane, :left] = decays[length - left :]
    lanes.strengths[lane, :left] = beta[length - left :]
    lanes.count[lane] = left
    return results[kept:]


def prefill_launches(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lanes: Lanes, lane: int, kept: int,
    buffers: tuple[Tensor, ...], tiles: Tiles,
) -> list[Callable[[], object]]:  # fmt: skip
    """Return the launches of `prefill`, whose first `kept` rows exist in keys and decays of `buffers`."""
    keys, queries, decays, inverse16, states16, writes, results = buffers
    length, heads, key_heads = len(v), v.shape[1], q.shape[1]
    blocks = len(states16)
    shape = {"H": heads, "GROUP": heads // key_heads, "D": SIZE}
    return [
        lambda: _prepare[(triton.cdiv(len(k), 16), key_heads, 2)](
            k, q[kept:], keys[kept:], queries[kept:], len(k), key_heads, SIZE
        ),
        lambda: _sum_decays[(blocks,)](g, decays, length, kept, heads, num_warps=1),
        lambda: _invert[(blocks, heads)](
            keys, decays, beta, inverse16, lanes.inverse[lane], length, **shape, num_warps=tiles.invert_warps
        ),
        lambda: _scan[(SIZE // tiles.scan_columns, heads)](
            keys, v, decays, beta, inverse16, states16, writes, lanes.state[lane], lanes.state16[lane],
            lanes.residuals[lane], lanes.writes[lane], length, kept, **shape,
            DV=tiles.scan_columns, STAGES=tiles.scan_stages, num_warps=tiles.scan_warps,
        ),
        lambda: _outputs[(SIZE // tiles.output_columns, heads, blocks)](
            queries, keys, decays, states16, writes, results, length, **shape,
            DV=tiles.output_columns, num_warps=tiles.output_warps,
        ),
    ]  # fmt: skip


def decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lanes: Lanes, tiles: Tiles = DEFAULT,
    buffers: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute the next N tokens of each lane and return their outputs (L, N, H, D) bfloat16; `lanes.count` stays, so
    that the caller adds how many are accepted. Blocks must have room: drafts end at the border, where `advance` is
    next.

    q, k: (L, N, K, D) bfloat16, not normalized; v: (L, N, H, D) bfloat16; g, beta: (L, N, H) float32. `buffers`
    are like q, (L, N, H, 64) bfloat16, and the outputs."""
    number, new = k.shape[:2]
    buffers = buffers or (torch.empty_like(q), v.new_empty(number, new, v.shape[2], BLOCK), torch.empty_like(v))
    for launch in decode_launches(q, k, v, g, beta, lanes, tiles, buffers):
        launch()
    return buffers[2]


def decode_launches(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lanes: Lanes, tiles: Tiles,
    buffers: tuple[Tensor, Tensor, Tensor],
) -> list[Callable[[], object]]:  # fmt: skip
    """Return the launches of `decode`."""
    queries, weights, results = buffers
    number, new, key_heads = k.shape[:3]
    heads = v.shape[2]
    shape = {"H": heads, "GROUP": heads // key_heads, "D": SIZE}
    return [
        lambda: _prepare_rows[(triton.cdiv(number * new, 16), key_heads, 2)](
            k, q, lanes.count, lanes.keys, queries, new, number * new, key_heads, SIZE
        ),
        lambda: _mix[(heads, number)](
            g, beta, lanes.count, lanes.keys, queries, lanes.strengths, lanes.decays, lanes.inverse, weights, new,
            **shape, STAGES=tiles.mix_stages, num_warps=tiles.mix_warps, maxnreg=tiles.mix_registers,
        ),
        lambda: _apply[(SIZE // tiles.apply_columns, heads, number)](
            queries, v, weights, lanes.count, lanes.state16, lanes.keys, lanes.strengths, lanes.decays,
            lanes.residuals, lanes.writes, lanes.inverse, results, new, **shape, DV=tiles.apply_columns,
            num_warps=tiles.apply_warps, maxnreg=tiles.apply_registers,
        ),
    ]  # fmt: skip


def advance(lanes: Lanes, full: Tensor, tiles: Tiles = DEFAULT) -> None:
    """Move the states of the lanes `full` (any), int64, whose blocks are full, and empty the blocks."""
    launch_advance(lanes, full, tiles)
    lanes.count[full] = 0


def launch_advance(lanes: Lanes, full: Tensor, tiles: Tiles) -> None:
    heads, key_heads = lanes.decays.shape[2], lanes.keys.shape[2]
    _advance[(SIZE // tiles.advance_columns, heads, len(full))](
        full, lanes.state, lanes.state16, lanes.keys, lanes.decays, lanes.writes,
        H=heads, GROUP=heads // key_heads, D=SIZE, DV=tiles.advance_columns,
    )  # fmt: skip
