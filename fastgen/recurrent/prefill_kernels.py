"""The kernels of prefill chunks; see arithmetic.py."""

from __future__ import annotations

from fastgen.kernels.triton.jit import jit, tl
from fastgen.recurrent.arithmetic import convolved, decayed, diagonal, gates_of, moved, scaled, silu, unit_factor


@jit()
def _block(lists, number):
    """Return whether a block exists, its first position, and its chunk's lane, start, end, and first row in the
    step."""
    exists = number < tl.load(lists + 1)
    block = lists + 2 + tl.load(lists) * 8 + number * 2
    chunk = lists + 2 + tl.load(block, mask=exists, other=0) * 8
    first = tl.load(block + 1, mask=exists, other=0)
    lane = tl.load(chunk).to(tl.int64)
    return exists, first, lane, tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)


@jit()
def _input(x, inputs, position, start, end, row, c, lane, C: tl.constexpr, OUT: tl.constexpr):
    """Return the inputs of the convolution at positions, (64, BLOCK): from the step or from the lane, or zero."""
    fresh = (position >= start) & (position < end)
    old = (position < start) & (position >= 0) & (position >= start - 3)
    exists = c < C
    source = x + (row + position - start).to(tl.int64)[:, None] * OUT + c[None, :]
    from_lane = inputs + lane * (3 * C) + (position - start + 3)[:, None] * C + c[None, :]
    value = tl.load(source, mask=fresh[:, None] & exists[None, :], other=0.0)
    return tl.where(old[:, None], tl.load(from_lane, mask=old[:, None] & exists[None, :], other=0.0), value)


@jit("x", "lists")
def block_inputs_kernel(
    x, lists, taps, steps, decays, inputs, keys, strengths, mixed, gates,
    H: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write mixed (blocks, 64, C) and gates (blocks, 64, 2, H) of the positions of a block: computed from x (rows,
    OUT), kept by the lane if they are before the chunk (keys are C's second KEYS), or zero."""
    number, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, first, lane, start, end, row = _block(lists, number)
    if not exists:
        return
    tile = tl.arange(0, 64)
    position = first + tile
    x0 = _input(x, inputs, position - 3, start, end, row, c, lane, C, OUT)
    x1 = _input(x, inputs, position - 2, start, end, row, c, lane, C, OUT)
    x2 = _input(x, inputs, position - 1, start, end, row, c, lane, C, OUT)
    x3 = _input(x, inputs, position, start, end, row, c, lane, C, OUT)
    channel = tl.minimum(c, C - 1)[None, :]
    fresh = ((position >= start) & (position < end))[:, None]
    value = tl.where(fresh, silu(convolved(x0, x1, x2, x3, taps, channel)), 0.0).to(x3.dtype)
    kept = (position < start)[:, None] & ((c >= KEYS) & (c < 2 * KEYS))[None, :]
    own = tl.load(keys + (lane * 64 + tile)[:, None] * KEYS + (c - KEYS)[None, :], mask=kept, other=0.0)
    value = tl.where(kept, own, value)
    tl.store(mixed + (number * 64 + tile)[:, None] * C + c[None, :], value, mask=(c < C)[None, :])
    if tl.program_id(1) == 0:
        h = tl.arange(0, HEADS)
        of_step = x + (row + position - start).to(tl.int64)[:, None] * OUT + h[None, :]
        inside = fresh & (h < H)[None, :]
        b = tl.load(of_step + (OUT - 2 * H), mask=inside, other=0.0).to(tl.float32)
        a = tl.load(of_step + (OUT - H), mask=inside, other=0.0).to(tl.float32)
        decay = tl.load(decays + h, mask=h < H, other=0.0).to(tl.float32)
        step = tl.load(steps + h, mask=h < H, other=0.0).to(tl.float32)
        beta, g = gates_of(b, a, decay[None, :], step[None, :])
        old = (position < start)[:, None] & (h < H)[None, :]
        kept_beta = tl.load(strengths + (lane * 64 + tile)[:, None] * H + h[None, :], mask=old, other=0.0)
        target = gates + (number * 64 + tile)[:, None] * (2 * H) + h[None, :]
        tl.store(target, tl.where(fresh, beta, kept_beta), mask=(h < H)[None, :])
        tl.store(target + H, tl.where(fresh, g, 0.0), mask=(h < H)[None, :])


@jit("lists")
def sum_decays_kernel(lists, kept, gates, decays, H: tl.constexpr, HEADS: tl.constexpr):
    """Write the sums of log decays from each block's first token on, decays (blocks, 64, H); kept: the lanes' (L, 64,
    H)."""
    number = tl.program_id(0).to(tl.int64)
    exists, first, lane, start, _, _ = _block(lists, number)
    if not exists:
        return
    head = tl.arange(0, HEADS)
    inside = head < H
    total = tl.zeros([HEADS], tl.float32)
    for row in range(64):
        if first + row < start:
            total = tl.load(kept + (lane * 64 + row) * H + head, mask=inside, other=0.0)
        else:
            total = total + tl.load(gates + (number * 64 + row) * (2 * H) + H + head, mask=inside, other=0.0)
        tl.store(decays + (number * 64 + row) * H + head, total, mask=inside)


@jit("lists")
def matrices_kernel(
    lists, mixed, gates, decays, factors, matrices, inverse, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr
):
    """Write 16 rows of a block's matrix (blocks, H, 64, 64): -A, and on its diagonal of 16 x 16 squares T without its
    own diagonal. Also factors (blocks, 64, K), and `inverse` (L, H, 16, 16) of the chunk's last part."""
    part, number, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    exists, first, lane, _, end, _ = _block(lists, number)
    if not exists:
        return
    dim, step = tl.arange(0, D), tl.arange(0, 16)
    width: tl.constexpr = H // GROUP * D
    channels: tl.constexpr = 2 * width + H * D
    row = number * 64 + part * 16 + step
    source = mixed + width + (head // GROUP) * D + dim[None, :]
    mine = tl.load(source + row[:, None] * channels)
    decay = tl.load(decays + row * H + head)
    strength = tl.load(gates + row * (2 * H) + head)
    own = tl.dot(mine, tl.trans(mine))
    factor = unit_factor(diagonal(own, 1))
    if head % GROUP == 0:
        tl.store(factors + row * (H // GROUP) + head // GROUP, factor)
    target = matrices + (number * H + head) * 4096 + (part * 16 + step)[:, None] * 64
    for other in range(part):
        column = number * 64 + other * 16 + step
        theirs = tl.load(source + column[:, None] * channels)
        their_factor = unit_factor(diagonal(tl.dot(theirs, tl.trans(theirs)), 0))
        their_decay = tl.load(decays + column * H + head)
        lower = decayed(
            tl.dot(mine, tl.trans(theirs)), factor, their_factor, decay, their_decay, row[:, None] > column[None, :]
        )
        tl.store(target + (other * 16 + step)[None, :], (lower * -strength[:, None]).to(mine.dtype))
    below = step[:, None] > step[None, :]
    lower = decayed(own, factor, unit_factor(diagonal(own, 0)), decay, decay, below) * -strength[:, None]
    t = tl.where(step[:, None] == step[None, :], 1.0, 0.0)
    for each in range(1, 16):
        solved = tl.dot(lower, t, input_precision="tf32")
        t = tl.where((step[:, None] == each) & below, solved, t)
    tl.store(target + (part * 16 + step)[None, :], tl.where(below, t, 0.0).to(mine.dtype))
    if first + part * 16 == (end - 1) // 16 * 16:
        tl.store(inverse + (lane * H + head) * 256 + step[:, None] * 16 + step[None, :], t)


@jit()
def _apart(rows):
    """Return the four parts of a block's rows (64, DV)."""
    parts = tl.permute(tl.reshape(rows, [2, 2, 16, rows.shape[1]]), (2, 3, 0, 1))
    even, odd = tl.split(parts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit()
def _together(first, second, third, fourth):
    """Return a block's rows (64, DV), from its parts."""
    parts = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.permute(parts, (2, 3, 0, 1)), [64, first.shape[1]])


@jit()
def _write(
    part: tl.constexpr, r, matrix, first, start, end, target, residuals, writes,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Return what a part's tokens write, from their residuals, and store it in `target` and, for the chunk's last
    block, in the lane, whose rows before the chunk it keeps. The pointers are a head's."""
    step, out = tl.arange(0, 16), tl.arange(0, DV)[None, :]
    position = first + part * 16 + step
    of_part = residuals + step[:, None] * (H * D) + out
    of_block = (part * 16 + step)[:, None] * (H * D) + out
    r16 = r.to(matrix.dtype)
    if (first + part * 16 < start) & (first + part * 16 + 16 > start):
        r16 = tl.where((position < start)[:, None], tl.load(of_part), r16)
    w = tl.dot(matrix, r16, r).to(matrix.dtype)
    if first + part * 16 < start:
        w = tl.where((position < start)[:, None], tl.load(writes + of_block), w)
    tl.store(target + of_block, w)
    if first + 64 > end:
        tl.store(writes + of_block, w, mask=(position < end)[:, None])
        if first + part * 16 == (end - 1) // 16 * 16:
            tl.store(of_part, r16)
    return w


@jit("lists")
def scan_kernel(
    lists, mixed, gates, decays, factors, matrices, states, targets, state, rounded, residuals, writes,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through a chunk's blocks: states (blocks, H, D, D) at their starts, in 2 bytes, and what tokens write, targets
    (blocks, 64, H, D). Update the lane's state and the rows of its last block."""
    column, head, number = tl.program_id(0) * DV, tl.program_id(1), tl.program_id(2)
    if number >= tl.load(lists):
        return
    chunk = lists + 2 + number * 8
    lane, start, end = tl.load(chunk).to(tl.int64), tl.load(chunk + 1), tl.load(chunk + 2)
    block = tl.load(chunk + 4).to(tl.int64)
    step, row, dim, out = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, D), tl.arange(0, DV)
    width: tl.constexpr = H // GROUP * D
    channels: tl.constexpr = 2 * width + H * D
    square = head * (D * D) + column + dim[:, None] * D + out[None, :]
    state += lane * (H * D * D)
    rounded += lane * (H * D * D)
    residuals += lane * (16 * H * D) + head * D + column
    writes += lane * (64 * H * D) + head * D + column
    keys = mixed + width + head // GROUP * D
    values = mixed + 2 * width + head * D + column
    border = start // 64 * 64
    s = tl.load(state + square)
    if border == 0:
        s = tl.zeros([D, DV], tl.float32)
    for first in tl.range(border, end, 64, num_stages=STAGES):
        number64 = block + (first - border) // 64
        at = number64 * 64 + row
        k = tl.load(keys + at[:, None] * channels + dim[None, :])
        v = tl.load(values + at[:, None] * channels + out[None, :]).to(tl.float32)
        decay = tl.load(decays + at * H + head)
        strength = tl.load(gates + at * (2 * H) + head)
        factor = tl.load(factors + at * (H // GROUP) + head // GROUP)
        matrix = matrices + (number64 * H + head) * 4096 + step[:, None] * 64 + step[None, :]
        m00 = tl.load(matrix)
        m10, m11 = tl.load(matrix + 1024), tl.load(matrix + 1040)
        m20, m21, m22 = tl.load(matrix + 2048), tl.load(matrix + 2064), tl.load(matrix + 2080)
        m30, m31 = tl.load(matrix + 3072), tl.load(matrix + 3088)
        m32, m33 = tl.load(matrix + 3104), tl.load(matrix + 3120)
        last = tl.load(decays + (number64 * 64 + 63) * H + head)
        s16 = s.to(k.dtype)
        tl.store(states + number64 * (H * D * D) + square, s16)

        read = tl.dot(k, s16) * factor[:, None]
        r = strength[:, None] * tl.fma(-tl.exp(decay)[:, None] + tl.zeros_like(v), read, v)
        r0, r1, r2, r3 = _apart(r)
        target = targets + number64 * (64 * H * D) + head * D + column
        w0 = _write(0, r0, m00, first, start, end, target, residuals, writes, H, D, DV)
        r1 = tl.dot(m10, w0, r1)
        w1 = _write(1, r1, m11, first, start, end, target, residuals, writes, H, D, DV)
        r2 = tl.dot(m21, w1, tl.dot(m20, w0, r2))
        w2 = _write(2, r2, m22, first, start, end, target, residuals, writes, H, D, DV)
        r3 = tl.dot(m32, w2, tl.dot(m31, w1, tl.dot(m30, w0, r3)))
        w3 = _write(3, r3, m33, first, start, end, target, residuals, writes, H, D, DV)
        product = tl.dot(tl.trans(k), scaled(_together(w0, w1, w2, w3), factor, decay, last))
        if first + 64 <= end:
            s = moved(s, product, last)
    tl.store(state + square, s)
    tl.store(rounded + square, s.to(rounded.dtype.element_ty))


@jit("lists")
def outputs_kernel(
    lists, mixed, decays, factors, states, targets, results,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write the outputs, results (rows of the step, H, D), of a block's tokens that are in the chunk."""
    part, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    exists, first, _, start, end, row = _block(lists, number)
    if not exists:
        return
    dim, tile = tl.arange(0, D), tl.arange(0, 64)
    out = part * DV + tl.arange(0, DV)
    width: tl.constexpr = H // GROUP * D
    channels: tl.constexpr = 2 * width + H * D
    at = number * 64 + tile
    source = mixed + at[:, None] * channels + (head // GROUP) * D + dim[None, :]
    q, k = tl.load(source), tl.load(source + width)
    decay = tl.load(decays + at * H + head)
    factor = tl.load(factors + at * (H // GROUP) + head // GROUP)
    s16 = tl.load(states + (number * H + head) * (D * D) + dim[:, None] * D + out[None, :])
    w = tl.load(targets + at[:, None] * (H * D) + head * D + out[None, :])
    query_factor = unit_factor(diagonal(tl.dot(q, tl.trans(q)), 1)) * D**-0.5
    seen = tile[:, None] >= tile[None, :]
    weights = decayed(tl.dot(q, tl.trans(k)), query_factor, factor, decay, decay, seen).to(q.dtype)
    acc = tl.dot(q, s16) * query_factor[:, None] * tl.exp(decay)[:, None]
    position = first + tile
    inside = (position >= start) & (position < end)
    target = results + (row + position - start).to(tl.int64)[:, None] * (H * D) + head * D + out[None, :]
    tl.store(target, tl.dot(weights, w, acc).to(q.dtype), mask=inside[:, None])


@jit("x", "lists")
def keep_kernel(
    x, lists, mixed, gates, decay_sums, block_factors, inputs, border_inputs, keys, factors, strengths, decays,
    H: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, KEYS: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Leave to a chunk's lane its last inputs, those before its last block, and the block's keys and gates."""
    number, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if number >= tl.load(lists):
        return
    chunk = lists + 2 + number * 8
    lane, start, end = tl.load(chunk).to(tl.int64), tl.load(chunk + 1), tl.load(chunk + 2)
    row = tl.load(chunk + 3)
    three = tl.arange(0, 4)
    border = end // 64 * 64
    last = _input(x, inputs, end - 3 + three, start, end, row, c, lane, C, OUT)
    before = _input(x, inputs, border - 3 + three, start, end, row, c, lane, C, OUT)
    target = (lane * 3 + three)[:, None] * C + c[None, :]
    inside = (three < 3)[:, None] & (c < C)[None, :]
    tl.debug_barrier()  # all old inputs are read
    tl.store(inputs + target, last, mask=inside)
    if border > start:
        tl.store(border_inputs + target, before, mask=inside)
    if end > border:
        tile = tl.arange(0, 64)
        block = tl.load(chunk + 4).to(tl.int64) + (border - start // 64 * 64) // 64
        at = block * 64 + tile
        fresh = (border + tile >= start) & (border + tile < end)
        is_key = fresh[:, None] & ((c >= KEYS) & (c < 2 * KEYS))[None, :]
        k = tl.load(mixed + at[:, None] * C + c[None, :], mask=is_key, other=0.0)
        tl.store(keys + (lane * 64 + tile)[:, None] * KEYS + (c - KEYS)[None, :], k, mask=is_key)
        if tl.program_id(1) == 0:
            h = tl.arange(0, HEADS)
            of_heads = fresh[:, None] & (h < H)[None, :]
            place = (lane * 64 + tile)[:, None] * H + h[None, :]
            beta = tl.load(gates + at[:, None] * (2 * H) + h[None, :], mask=of_heads, other=0.0)
            tl.store(strengths + place, beta, mask=of_heads)
            total = tl.load(decay_sums + at[:, None] * H + h[None, :], mask=of_heads, other=0.0)
            tl.store(decays + place, total, mask=of_heads)
            of_kinds = fresh[:, None] & (h < KINDS)[None, :]
            factor = tl.load(block_factors + at[:, None] * KINDS + h[None, :], mask=of_kinds, other=0.0)
            tl.store(factors + (lane * 64 + tile)[:, None] * KINDS + h[None, :], factor, mask=of_kinds)
