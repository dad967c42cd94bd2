"""The kernels of decodes, and of what follows decodes and prefills; see arithmetic.py."""

from __future__ import annotations

from fastgen.kernels.triton.jit import jit, tl
from fastgen.recurrent.arithmetic import (
    convolved,
    decayed,
    diagonal,
    gates_of,
    moved,
    row_of,
    scaled,
    silu,
    unit_factor,
)


@jit("x", "lanes", "kv_lens")
def decode_inputs_kernel(
    x, lanes, kv_lens, taps, steps, decays, inputs, border_inputs, mixed, gates,
    H: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write silu of the convolution, mixed (rows, C), and beta and log decay, gates (rows, 2, H), of decoding tokens
    with x (rows, OUT). Lanes whose kv_len is 0 do not decode."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(kv_lens + row) - 1
    if position < 0:
        return
    exists = c < C
    at = tl.load(lanes + row) * (3 * C) + c
    x0 = tl.load(inputs + at, mask=exists & (position > 2), other=0.0)
    x1 = tl.load(inputs + at + C, mask=exists & (position > 1), other=0.0)
    x2 = tl.load(inputs + at + 2 * C, mask=exists & (position > 0), other=0.0)
    x3 = tl.load(x + row * OUT + c, mask=exists, other=0.0)
    channel = tl.minimum(c, C - 1)
    tl.store(mixed + row * C + c, silu(convolved(x0, x1, x2, x3, taps, channel)).to(x3.dtype), mask=exists)
    tl.store(inputs + at, x1, mask=exists)
    tl.store(inputs + at + C, x2, mask=exists)
    tl.store(inputs + at + 2 * C, x3, mask=exists)
    if position % 64 == 63:
        tl.store(border_inputs + at, x1, mask=exists)
        tl.store(border_inputs + at + C, x2, mask=exists)
        tl.store(border_inputs + at + 2 * C, x3, mask=exists)
    if tl.program_id(1) == 0:
        h = tl.arange(0, HEADS)
        b = tl.load(x + row * OUT + (OUT - 2 * H) + h, mask=h < H, other=0.0).to(tl.float32)
        a = tl.load(x + row * OUT + (OUT - H) + h, mask=h < H, other=0.0).to(tl.float32)
        decay = tl.load(decays + h, mask=h < H, other=0.0).to(tl.float32)
        step = tl.load(steps + h, mask=h < H, other=0.0).to(tl.float32)
        beta, g = gates_of(b, a, decay, step)
        tl.store(gates + row * (2 * H) + h, beta, mask=h < H)
        tl.store(gates + row * (2 * H) + H + h, g, mask=h < H)


@jit()
def _read(
    mixed, own_rows, offsets, rounded, out, D: tl.constexpr, DV: tl.constexpr, DIMS: tl.constexpr, STAGES: tl.constexpr
):
    """Return the product (16, DV) of keys and queries, which begin at `offsets` of mixed, with a head's state."""
    read = tl.zeros([16, DV], tl.float32)
    for first in tl.range(0, D, DIMS, num_stages=STAGES):
        some = first + tl.arange(0, DIMS)
        s16 = tl.load(rounded + some[:, None] * D + out[None, :])
        x = tl.load(mixed + offsets[:, None] + some[None, :], mask=own_rows[:, None], other=0.0)
        read = tl.dot(x, s16, read)
    return read


@jit()
def _store(target, tile, number: tl.constexpr):
    """Store a row of a tile (16, N) at pointers (N)."""
    row = tl.arange(0, 16)[:, None]
    tl.store(target[None, :] + row * 0, tile.to(target.dtype.element_ty), mask=row == number)


@jit()
def _add_earlier(
    acc, x, base, sign, factor, decay, keys, writes, factors, decays,
    WIDTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr, KINDS: tl.constexpr, EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add what a block's tokens before `base` contribute to the rows of acc. The pointers are a head's, in the lane."""
    for first in tl.range(0, base, EARLY, num_stages=STAGES):
        early = first + tl.arange(0, EARLY)
        known = early < base
        k = tl.load(keys[None, :] + early[:, None] * WIDTH, mask=known[:, None], other=0.0)
        w = tl.load(writes[None, :] + early[:, None] * (H * D), mask=known[:, None], other=0.0)
        decay_early = tl.load(decays + early * H, mask=known, other=0.0)
        factor_early = tl.load(factors + early * KINDS, mask=known, other=0.0)
        weight = decayed(tl.dot(x, tl.trans(k)), factor, factor_early, decay, decay_early, known[None, :]) * sign
        acc = tl.dot(weight.to(x.dtype), w, acc)
    return acc


@jit()
def _of_part(x, k_here, t_here, factor_here, decay, decay_here, beta, old, new, D: tl.constexpr):
    """Return the factors of the rows of x, what multiplies the tokens of the part in them, [16, 16], and the token's
    row of T, [16], without its diagonal. old, new: the columns of earlier tokens and of the token itself."""
    step = tl.arange(0, 16)
    is_key, is_query = step == 0, step == 8
    own = tl.dot(x, tl.trans(x))
    factor = unit_factor(diagonal(own, 1))
    factor = tl.where(is_key, factor, factor * D**-0.5)
    factor_here = tl.where(new, tl.sum(tl.where(is_key, factor, 0.0), 0), factor_here)
    weights = tl.dot(x, tl.trans(k_here))
    weights = tl.where(new[None, :], tl.sum(tl.where(is_key[None, :], own, 0.0), 1)[:, None], weights)
    seen = tl.where(is_key[:, None], old[None, :], (old | new)[None, :])
    decay_rows = tl.zeros([16], tl.float32) + decay
    sign = tl.where(is_key, -beta, tl.where(is_query, 1.0, 0.0))[:, None]
    weights = decayed(weights, factor, factor_here, decay_rows, decay_here, seen) * sign
    solved = row_of(tl.dot(tl.where(is_key[:, None], weights, 0.0), t_here, input_precision="tf32"), 0)
    return factor, weights, tl.where(old, solved, 0.0)


@jit()
def decode_kernel(
    mixed, gates, lanes, kv_lens, rounded, keys, factors, strengths, decays, residuals, writes, inverse, results,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DIMS: tl.constexpr, EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the outputs, results (rows, H, D), of decoding tokens, and add their rows to their lanes' blocks."""
    column, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(kv_lens + row)
    if length == 0:
        return
    lane = tl.load(lanes + row).to(tl.int64)
    step, out = tl.arange(0, 16), column * DV + tl.arange(0, DV)
    kinds: tl.constexpr = H // GROUP
    width: tl.constexpr = kinds * D
    is_key, is_query = step == 0, step == 8
    place = (length - 1) % 64
    base = place // 16 * 16
    mixed += row * (2 * width + H * D)
    gates += row * (2 * H) + head
    decays += lane * (64 * H) + head
    strengths += lane * (64 * H) + head
    factors += lane * (64 * kinds) + head // GROUP
    keys += lane * (64 * width) + head // GROUP * D + tl.arange(0, D)
    writes += lane * (64 * H * D) + head * D + out
    residuals += lane * (16 * H * D) + head * D + out
    inverse += (lane * H + head) * 256 + step

    offsets = head // GROUP * D + tl.where(is_key, width, 0)
    x = tl.load(mixed + offsets[:, None] + tl.arange(0, D)[None, :], mask=(is_key | is_query)[:, None], other=0.0)
    of_value = mixed + 2 * width + head * D + out[None, :] + step[:, None] * 0
    value = tl.load(of_value, mask=is_key[:, None], other=0.0).to(tl.float32)
    beta = tl.load(gates)
    decay = tl.load(decays + (place - 1) * H, mask=place > 0, other=0.0) + tl.load(gates + H)
    here = base + step
    old, new = here < place, here == place
    k_here = tl.load(keys[None, :] + here[:, None] * width, mask=old[:, None], other=0.0)
    r_here = tl.load(residuals[None, :] + step[:, None] * (H * D), mask=old[:, None], other=0.0)
    w_here = tl.load(writes[None, :] + here[:, None] * (H * D), mask=old[:, None], other=0.0)
    t_here = tl.load(inverse[None, :] + step[:, None] * 16, mask=old[:, None], other=0.0)
    decay_here = tl.where(new, decay, tl.load(decays + here * H, mask=old, other=0.0))
    factor_here = tl.load(factors + here * kinds, mask=old, other=0.0)

    factor, weights, solved = _of_part(x, k_here, t_here, factor_here, decay, decay_here, beta, old, new, D)
    decay_rows = tl.zeros([16], tl.float32) + decay
    sign = tl.where(is_key, -beta, 1.0)[:, None]

    state = rounded + (lane * H + head) * (D * D)
    read = _read(mixed, is_key | is_query, offsets, state, out, D, DV, DIMS, STAGES) * factor[:, None]
    reach = tl.exp(decay_rows)[:, None]
    acc = tl.where(is_key[:, None], beta * tl.fma(-reach + tl.zeros_like(read), read, value), read * reach)
    acc = _add_earlier(
        acc, x, base, sign, factor, decay_rows, keys, writes, factors, decays, width, H, D, kinds, EARLY, STAGES
    )
    r16 = acc.to(x.dtype)
    r_here = tl.where(new[:, None], row_of(acc, 0)[None, :].to(x.dtype), r_here)
    acc = tl.dot(tl.where(is_key[:, None], solved[None, :], 0.0).to(x.dtype), r_here, acc)
    w16 = acc.to(x.dtype)
    w_here = tl.where(new[:, None], row_of(acc, 0)[None, :].to(x.dtype), w_here)
    acc = tl.dot(tl.where(is_query[:, None], weights, 0.0).to(x.dtype), w_here, acc)

    _store(results + row * (H * D) + head * D + out, acc, 8)
    _store(residuals + (place - base) * (H * D), r16, 0)
    _store(writes + place * (H * D), w16, 0)
    if column == 0:
        _store(inverse + (place - base) * 16, tl.where(new, 1.0, solved)[None, :] + tl.zeros([16, 16], tl.float32), 0)
        tl.store(decays + place * H, decay)
        tl.store(strengths + place * H, beta)
        if head % GROUP == 0:
            _store(keys + place * width, x, 0)
            tl.store(factors + place * kinds + step * 0, factor, mask=is_key)


@jit()
def advance_kernel(
    lanes, kv_lens, state, rounded, keys, factors, decays, writes,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Move the states of decoding lanes whose blocks are full."""
    part, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + number)
    if (length == 0) | (length % 64 != 0):
        return
    lane = tl.load(lanes + number).to(tl.int64)
    dim, row = tl.arange(0, D), tl.arange(0, 64)
    out = part * DV + tl.arange(0, DV)
    square = (lane * H + head) * (D * D) + dim[:, None] * D + out[None, :]
    at = lane * 64 + row
    k = tl.load(keys + (at[:, None] * (H // GROUP) + head // GROUP) * D + dim[None, :])
    w = tl.load(writes + (at[:, None] * H + head) * D + out[None, :])
    decay = tl.load(decays + at * H + head)
    factor = tl.load(factors + at * (H // GROUP) + head // GROUP)
    last = tl.load(decays + (lane * 64 + 63) * H + head)
    s = moved(tl.load(state + square), tl.dot(tl.trans(k), scaled(w, factor, decay, last)), last)
    tl.store(state + square, s)
    tl.store(rounded + square, s.to(rounded.dtype.element_ty))


@jit("rows", "x")
def gate_kernel(results, x, weight, out, rows, eps, H: tl.constexpr, OUT: tl.constexpr, D: tl.constexpr):
    """Write out (rows, H, D): the norm of results, times silu of the gates that x (rows, OUT) has before its last 2 H
    numbers."""
    row = (tl.program_id(0) * 16 + tl.arange(0, 16)).to(tl.int64)
    head, dim = tl.program_id(1), tl.arange(0, D)
    exists = (row < rows)[:, None]
    at = row[:, None] * (H * D) + head * D + dim[None, :]
    y = tl.load(results + at, mask=exists, other=0.0)
    z = tl.load(x + row[:, None] * OUT + (OUT - 2 * H - H * D) + head * D + dim[None, :], mask=exists, other=0.0)
    value = y.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    value = value * tl.load(weight + dim).to(tl.float32)[None, :]
    tl.store(out + at, (value * silu(z.to(tl.float32))).to(y.dtype), mask=exists)
