"""Prefill attention on Hopper, in Gluon, with the same bits as a decode of each row.

A program has two groups of four warps, each with half of a tile's rows, and one warp that loads queries, keys and
values (by TMA) for both groups, as far ahead as shared memory allows and across the ends of tasks. A step of a group
has two parts: the products (the scores of a block, and the weights of the previous block times its values), and the
softmax of the block. The groups take turns, so the products of one overlap with the softmax of the other. A group's own
softmax overlaps with the second of its products, too.

The rows of a tile are loaded in units of some tokens times some heads, both powers of two. If the number of query heads
per KV head is a power of two, a group has one unit with all of these heads; otherwise it has units of eight or more
rows, first all heads of the first tokens, then all heads of the next tokens. A stage of shared memory holds what a step
needs: the keys of a block and the values of the previous block. A tile of n blocks has n + 1 steps, the first without
values and the last without keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.hopper.gluon import barrier, clear_rows, gl, gluon_jit, load_tile, next_stage, nvidia, reinterpret
from fastgen.kernels.hopper.products import described
from fastgen.kernels.launch import gluon_runs_on
from fastgen.kernels.triton.jit import constant, tl
from fastgen.kernels.triton.work_tiles import next_task, read_tile
from fastgen.kernels.work_tiles import FIELDS, HEADER

SIDE = 64  # rows of a group
UNIT = 8  # minimum number of rows of a unit, the period of the bank swizzle
KEYS = 64  # keys of a block, as in all attention kernels; one instruction loads them
PIECE = 64  # dimensions that one instruction loads
WARPS = 4  # warps of a group
REGISTERS = 168  # registers per thread of 12 warps; the loading warps give some of theirs to the others
GROUP_REGISTERS, LOADING_REGISTERS = constant(240), constant(24)


def unit_of(group: int) -> tuple[int, int]:
    """Return the tokens and the heads of a unit, for `group` query heads per KV head."""
    heads = group & -group  # the largest power of two that divides `group`
    return (SIDE if heads == group else max(UNIT, heads)) // heads, heads


def tokens_of(group: int) -> int:
    """Return the maximum number of tokens of a tile, for `group` query heads per KV head; 0 if they do not fit."""
    tokens, heads = unit_of(group)
    return 2 * SIDE // max(tokens * heads, 1) // (group // heads) * tokens


def stages_of(dims: int, item_size: int, chip: Chip) -> int:
    """Return for how many steps keys and values can be loading or in use at the same time."""
    room = chip.shared_memory - 3072 - 2 * SIDE * dims * item_size
    return min(room // (2 * KEYS * dims * item_size), 8)


def runs(chip: Chip, dtype: torch.dtype, group: int, head_size: int, page_size: int) -> bool:
    """Return whether this kernel computes prefills of this shape."""
    loads = page_size % KEYS == 0 and head_size * dtype.itemsize % 16 == 0  # a requirement of TMA
    return loads and gluon_runs_on(chip, dtype) and 64 <= power_of_two(head_size) <= 128 and tokens_of(group) > 0


@gluon_jit("layer", "num_pages", "table_width")
def _prefill_kernel(
    q_desc, keys_desc, values_desc, out_ptr, table_ptr, list_ptr,
    layer, num_pages, table_width,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, P: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr,
    DIMS: gl.constexpr, STAGES: gl.constexpr, SIDE: gl.constexpr, PIECE: gl.constexpr,
    HEADER: gl.constexpr, FIELDS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Compute all tasks. H, K, D, P, DIMS: see fastgen.kernels.attention."""
    dtype: gl.constexpr = keys_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIMS], dtype)
    side: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, DIMS], dtype)
    ks = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIMS], tile)
    vs = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIMS], tile)
    qs = gl.allocate_shared_memory(dtype, [2, SIDE, DIMS], side)
    ones = gl.allocate_shared_memory(dtype, [8, KEYS], gl.NVMMASharedLayout.get_default_for([8, KEYS], dtype))
    fields = gl.allocate_shared_memory(gl.int32, [FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    layout: gl.constexpr = nvidia.mbarrier.MBarrierLayout()
    asked = gl.allocate_shared_memory(gl.int64, [1], layout)
    answered = gl.allocate_shared_memory(gl.int64, [1], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    nvidia.mbarrier.init(asked, count=1)
    nvidia.mbarrier.init(answered, count=2)
    for stage in gl.static_range(STAGES):
        nvidia.mbarrier.init(ready.index(stage), count=1)
        nvidia.mbarrier.init(free.index(stage), count=2)
    whole: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ones.store(gl.full([8, KEYS], 1.0, dtype, whole))
    nvidia.fence_async_shared()
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    TOKENS: gl.constexpr = q_desc.block_type.shape[0]
    HEADS: gl.constexpr = q_desc.block_type.shape[1]
    queue = (qs, fields, asked, answered)
    blocks = (ks, vs, ones, ready, free)
    gl.warp_specialize(
        [
            (_attend, (
                queue, blocks, out_ptr, list_ptr, 0, H, K, D, WINDOW, SCALE, TOKENS, HEADS, HEADER, FIELDS,
            )),
            (_attend, (
                queue, blocks, out_ptr, list_ptr, 1, H, K, D, WINDOW, SCALE, TOKENS, HEADS, HEADER, FIELDS,
            )),
            (_load, (
                q_desc, keys_desc, values_desc, queue, blocks, table_ptr, list_ptr, layer, num_pages, table_width,
                H, K, P, PIECE, HEADER, FIELDS,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon_jit()
def _load(
    q_desc, keys_desc, values_desc, queue, blocks, table_ptr, list_ptr, layer, num_pages, table_width,
    H: gl.constexpr, K: gl.constexpr, P: gl.constexpr, PIECE: gl.constexpr, HEADER: gl.constexpr,
    FIELDS: gl.constexpr,
):  # fmt: skip
    """Take tasks until there are none, and load what each needs as soon as there is room. The last page of a sequence
    stands in for pages after it."""
    ks, vs, _ones, ready, free = blocks
    qs, fields, asked, answered = queue
    STAGES: gl.constexpr = ks.shape[0]
    KEYS: gl.constexpr = ks.shape[1]
    BYTES: gl.constexpr = 2 * KEYS * ks.shape[2]
    number = gl.arange(0, FIELDS, gl.BlockedLayout([FIELDS], [32], [gl.num_warps()], [0]))
    tasks = tl.load(list_ptr) * K
    task = gl.program_id(0)
    stage = 0
    phase = 1
    q_phase = 1
    while task < tasks:
        first, tokens, lane, position, begin, end, _part, _split = read_tile(list_ptr + HEADER + task // K * FIELDS)
        head = task % K
        pages_ptr = table_ptr + lane * table_width
        first_row = layer * num_pages * K + head
        page_before = 0
        for start in range(begin, end + KEYS, KEYS):
            page = tl.load(pages_ptr + gl.minimum(start, end - 1) // P)
            both = (start > begin) & (start < end)
            nvidia.mbarrier.wait(free.index(stage), phase)
            nvidia.mbarrier.expect(ready.index(stage), 2 * BYTES, pred=both)
            nvidia.mbarrier.expect(ready.index(stage), BYTES, pred=both == 0)
            _load_block(keys_desc, ks, ready, stage, start, page, first_row, start < end, K, P, PIECE)
            _load_block(values_desc, vs, ready, stage, start - KEYS, page_before, first_row, start > begin, K, P, PIECE)
            page_before = page
            stage, phase = next_stage(stage, phase, STAGES)
            if start == begin:  # after the first keys, for which there is room earlier
                nvidia.mbarrier.wait(answered, q_phase)
                field = gl.where(number == 0, task, gl.where(number == 1, position, tokens))
                fields.store(gl.where(number < 3, field, gl.where(number == 3, begin, end)))
                _load_queries(q_desc, qs, asked, first, head, H // K, PIECE)
        q_phase = q_phase ^ 1
        task = next_task(list_ptr, layer, tasks)
    nvidia.mbarrier.wait(answered, q_phase)
    fields.store(number * 0 - 1)
    nvidia.mbarrier.arrive(asked)


@gluon_jit()
def _load_queries(q_desc, qs, asked, first, head, G: gl.constexpr, PIECE: gl.constexpr):
    """Load the units of a task. What follows the last token of the tile are tokens of another sequence, or zeros."""
    TOKENS: gl.constexpr = q_desc.block_type.shape[0]
    HEADS: gl.constexpr = q_desc.block_type.shape[1]
    UNITS: gl.constexpr = qs.shape[1] // (TOKENS * HEADS)  # units of a group
    SETS: gl.constexpr = G // HEADS
    USED: gl.constexpr = 2 * UNITS // SETS * SETS
    PIECES: gl.constexpr = qs.shape[2] // PIECE
    to = reinterpret(qs, qs.dtype, [2 * PIECES * UNITS, TOKENS, HEADS, PIECE], q_desc.layout)
    nvidia.mbarrier.expect(asked, 2 * USED * TOKENS * HEADS * qs.shape[2])
    for unit in gl.static_range(USED):
        for piece in gl.static_range(PIECES):
            at = [first + unit // SETS * TOKENS, head * G + unit % SETS * HEADS, piece * PIECE]
            place = (unit // UNITS * PIECES + piece) * UNITS + unit % UNITS
            load_tile(q_desc, at, asked, to.index(place))


@gluon_jit()
def _load_block(
    desc, to, ready, stage, start, page, first_row, wanted, K: gl.constexpr, P: gl.constexpr, PIECE: gl.constexpr
):
    """Load a block of keys or values, all from one page, to a stage, if `wanted`."""
    KEYS: gl.constexpr = to.shape[1]
    PIECES: gl.constexpr = to.shape[2] // PIECE
    view = reinterpret(to, to.dtype, [to.shape[0] * PIECES, 1, KEYS, PIECE], desc.layout)
    for piece in gl.static_range(PIECES):
        at = [first_row + page * K, start % P, piece * PIECE]
        load_tile(desc, at, ready.index(stage), view.index(stage * PIECES + piece), pred=wanted)


@gluon_jit()
def _place(row, GROUP: gl.constexpr, SIDE: gl.constexpr, G: gl.constexpr, TOKENS: gl.constexpr, HEADS: gl.constexpr):
    """Return the token and the query head, within the tile, of each row [SIDE] of a group, and whether it is used."""
    UNIT: gl.constexpr = TOKENS * HEADS
    SETS: gl.constexpr = G // HEADS
    unit = GROUP * (SIDE // UNIT) + row // UNIT
    token = unit // SETS * TOKENS + row % UNIT // HEADS
    return token, unit % SETS * HEADS + row % HEADS, unit < 2 * SIDE // UNIT // SETS * SETS


@gluon_jit()
def _attend(
    queue, blocks, out_ptr, list_ptr, GROUP: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr,
    TOKENS: gl.constexpr, HEADS: gl.constexpr, HEADER: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Compute a group's rows of all tasks."""
    qs, fields, asked, answered = queue
    ks, _vs, _ones, _ready, _free = blocks
    KEYS: gl.constexpr = ks.shape[1]
    DIMS: gl.constexpr = ks.shape[2]
    SIDE: gl.constexpr = qs.shape[1]
    G: gl.constexpr = H // K
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, KEYS, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, DIMS, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 8, 16])
    token, _head, _used = _place(gl.arange(0, SIDE, gl.SliceLayout(1, scored)), GROUP, SIDE, G, TOKENS, HEADS)
    if GROUP == 1:
        _pass_turn(GROUP)
    stage = 0
    phase = 0
    q_phase = 0
    nvidia.mbarrier.wait(asked, q_phase)
    task, position, tokens, begin, end = _read_fields(fields)
    while task >= 0:
        query = position + token
        acc = gl.zeros([SIDE, DIMS], gl.float32, summed)
        peak = gl.full([SIDE], -1e30, gl.float32, gl.SliceLayout(1, scored))
        total = gl.zeros([SIDE, 8], gl.float32, narrow)
        q = qs.index(GROUP)
        running = (acc, peak, total, stage, phase)
        state = _first_step(running, q, blocks, query, begin, end, WINDOW, SCALE)
        full_begin, full_end = _full_blocks(position, tokens, begin, end, KEYS, WINDOW)
        if WINDOW > 0:
            for start in range(begin + KEYS, full_begin, KEYS):
                state = _step(state, q, blocks, query, start, end, GROUP, WINDOW, SCALE, True)
        for start in range(full_begin, full_end, KEYS):
            state = _step(state, q, blocks, query, start, end, GROUP, WINDOW, SCALE, False)
        for start in range(full_end, end, KEYS):
            state = _step(state, q, blocks, query, start, end, GROUP, WINDOW, SCALE, True)
        nvidia.mbarrier.arrive(answered)
        q_phase = q_phase ^ 1
        # The tile is read again, so that its fields do not occupy registers meanwhile.
        first, tokens, _lane, _position, begin, end, _part, _split = read_tile(list_ptr + HEADER + task // K * FIELDS)
        acc, total, stage, phase = _last_step(state, blocks, (end - begin) % KEYS)
        _store(acc, total, out_ptr, first, tokens, task % K, GROUP, H, K, D, TOKENS, HEADS)
        nvidia.mbarrier.wait(asked, q_phase)
        task, position, tokens, begin, end = _read_fields(fields)


@gluon_jit()
def _read_fields(fields):
    """Return the fields of the task that the loading warp has stored."""
    FIELDS: gl.constexpr = fields.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [gl.num_warps()], [0])
    number = gl.arange(0, FIELDS, layout)
    field = fields.load(layout)
    task = gl.sum(gl.where(number == 0, field, 0), 0)
    position = gl.sum(gl.where(number == 1, field, 0), 0)
    tokens = gl.sum(gl.where(number == 2, field, 0), 0)
    begin = gl.sum(gl.where(number == 3, field, 0), 0)
    end = gl.sum(gl.where(number == 4, field, 0), 0)
    return task, position, tokens, begin, end


@gluon_jit()
def _full_blocks(position, tokens, begin, end, KEYS: gl.constexpr, WINDOW: gl.constexpr):
    """Return the range [begin, end) of keys of the blocks after the first that all rows see in full."""
    full_begin = begin + KEYS
    if WINDOW > 0:  # the first block that the last query sees in full
        hidden = gl.maximum(position + tokens - WINDOW - begin, 0)
        full_begin = begin + gl.maximum((hidden + KEYS - 1) // KEYS, 1) * KEYS
        full_begin = gl.minimum(full_begin, begin + (end - begin + KEYS - 1) // KEYS * KEYS)
    return full_begin, full_begin + gl.maximum(gl.minimum(end, position + 1) - full_begin, 0) // KEYS * KEYS


@gluon_jit()
def _first_step(running, q, blocks, query, begin, end, WINDOW: gl.constexpr, SCALE: gl.constexpr):
    """Compute the weights of a tile's first block. Return the state; see `_step`."""
    acc, peak, total, stage, phase = running
    ks, _vs, _ones, ready, free = blocks
    STAGES: gl.constexpr = ks.shape[0]
    KEYS: gl.constexpr = ks.shape[1]
    SIDE: gl.constexpr = acc.shape[0]
    scored: gl.constexpr = query.type.layout.parent
    summed: gl.constexpr = acc.type.layout
    nvidia.mbarrier.wait(ready.index(stage), phase)
    scores = gl.zeros([SIDE, KEYS], gl.float32, scored)
    scores = nvidia.warpgroup_mma(q, ks.index(stage).permute((1, 0)), scores)
    nvidia.mbarrier.arrive(free.index(stage))
    weights, p_peak = _weigh(scores, query, begin, end, WINDOW, SCALE, True)
    p = gl.convert_layout(weights.to(ks.dtype), gl.DotOperandLayout(0, summed, 2))
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, peak, total, p, p_peak, stage, phase


@gluon_jit()
def _last_step(state, blocks, rest):
    """Sum the values of a tile's last block, of which only the first `rest` keys exist (0: all).

    Return acc, the sum of all weights, the next stage and its phase.
    """
    acc, peak, total, p, p_peak, stage, phase = state
    _ks, vs, ones, ready, free = blocks
    STAGES: gl.constexpr = vs.shape[0]
    nvidia.mbarrier.wait(ready.index(stage), phase)
    v = vs.index(stage)
    if rest != 0:
        clear_rows(v, rest)
        nvidia.fence_async_shared()
        barrier()
    next_acc, next_total = _begin_sum(acc, total, p, ones, v)
    next_acc, next_total, p = nvidia.warpgroup_mma_wait(0, deps=[next_acc, next_total, p])
    nvidia.mbarrier.arrive(free.index(stage))
    acc, _peak, total = _join(acc, peak, total, next_acc, p_peak, next_total)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, gl.max(total, 1), stage, phase  # the maximum of equal numbers


@gluon_jit()
def _weigh(scores, query, start, end, WINDOW: gl.constexpr, SCALE: gl.constexpr, MASKED: gl.constexpr):
    """Return the weights of a block of keys, and the peak that they are relative to."""
    if MASKED:
        key = gl.expand_dims(start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout)), 0)
        seen = (key <= gl.expand_dims(query, 1)) & (key < end)
        if WINDOW > 0:
            seen = seen & (key > gl.expand_dims(query, 1) - WINDOW)
        scores = gl.where(seen, scores, -1e30)
    peak = gl.maximum(gl.max(scores, 1) * SCALE, -1e20)
    return gl.exp2(gl.fma(scores, SCALE, -gl.expand_dims(peak, 1))), peak


@gluon_jit()
def _step(
    state, q, blocks, query, start, end, GROUP: gl.constexpr,
    WINDOW: gl.constexpr, SCALE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute the weights of the block at `start`, and sum the values of the previous block. Return the new state.

    state: acc, peak and total of all blocks before the previous one; p, the weights of the previous block, and the peak
    that they are relative to; the stage of shared memory and its phase.
    """
    acc, peak, total, p, p_peak, stage, phase = state
    ks, vs, ones, ready, free = blocks
    dtype: gl.constexpr = ks.dtype
    STAGES: gl.constexpr = ks.shape[0]
    KEYS: gl.constexpr = ks.shape[1]
    SIDE: gl.constexpr = acc.shape[0]
    scored: gl.constexpr = query.type.layout.parent
    summed: gl.constexpr = acc.type.layout
    nvidia.mbarrier.wait(ready.index(stage), phase)
    _wait_for_turn(GROUP)
    scores = gl.zeros([SIDE, KEYS], gl.float32, scored)
    scores = nvidia.warpgroup_mma(q, ks.index(stage).permute((1, 0)), scores, is_async=True)
    next_acc, next_total = _begin_sum(acc, total, p, ones, vs.index(stage))
    _pass_turn(GROUP)
    scores = nvidia.warpgroup_mma_wait(2, deps=[scores])
    weights, next_peak = _weigh(scores, query, start, end, WINDOW, SCALE, MASKED)
    rounded = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, summed, 2))
    _hold(rounded)
    next_acc, next_total, p = nvidia.warpgroup_mma_wait(0, deps=[next_acc, next_total, p])
    nvidia.mbarrier.arrive(free.index(stage))
    acc, peak, total = _join(acc, peak, total, next_acc, p_peak, next_total)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, peak, total, rounded, next_peak, stage, phase


@gluon_jit()
def _begin_sum(acc, total, p, ones, v):
    """Begin to sum the weights p of a block, and its values, in the layouts of total and acc."""
    narrow: gl.constexpr = total.type.layout
    summed: gl.constexpr = acc.type.layout
    SIDE: gl.constexpr = acc.shape[0]
    next_acc = gl.zeros([SIDE, acc.shape[1]], gl.float32, summed)
    next_total = gl.zeros([SIDE, 8], gl.float32, narrow)
    weights = gl.convert_layout(p, gl.DotOperandLayout(0, narrow, 2))
    next_total = nvidia.warpgroup_mma(weights, ones.permute((1, 0)), next_total, is_async=True)
    return nvidia.warpgroup_mma(p, v, next_acc, is_async=True), next_total


@gluon_jit()
def _join(acc, peak, total, next_acc, next_peak, next_total):
    """Combine the sums of a block with the sums before it, as softmax.combine does."""
    summed: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    narrow: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    higher = gl.maximum(peak, next_peak)
    weight = gl.exp2(peak - higher)
    next_weight = gl.exp2(next_peak - higher)
    a = gl.expand_dims(gl.convert_layout(weight, summed), 1)
    b = gl.expand_dims(gl.convert_layout(next_weight, summed), 1)
    acc = gl.fma(next_acc, b, acc * a)
    a = gl.expand_dims(gl.convert_layout(weight, narrow), 1)
    b = gl.expand_dims(gl.convert_layout(next_weight, narrow), 1)
    total = gl.fma(next_total, b, total * a)
    return acc, higher, total


@gluon_jit()
def _hold(p):
    """Make the compiler compute p before the next wait, which it would otherwise put first.

    This is done by a store that depends on all weights and never happens, since it would need all weights to be 0 and
    one of them to be negative.
    """
    gl.inline_asm_elementwise(
        "{.reg .b32 a; .reg .pred n; lop3.b32 a, $4, $5, $6, 0xFE; lop3.b32 a, a, $7, $8, 0xFE; "
        "lop3.b32 a, a, $9, $10, 0xFE; or.b32 a, a, $11; setp.eq.b32 n, a, 0x80000000; @n st.shared.b32 [a], a; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;}",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [p], gl.int8, False, 16,
    )  # fmt: skip


@gluon_jit()
def _wait_for_turn(GROUP: gl.constexpr):
    if GROUP == 0:
        gl.inline_asm_elementwise("bar.sync 12, 256; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.sync 13, 256; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon_jit()
def _pass_turn(GROUP: gl.constexpr):
    if GROUP == 0:
        gl.inline_asm_elementwise("bar.arrive 13, 256; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.arrive 12, 256; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon_jit()
def _store(
    acc, total, out_ptr, first, tokens, head, GROUP: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, TOKENS: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Write a group's rows of a tile."""
    G: gl.constexpr = H // K
    SIDE: gl.constexpr = acc.shape[0]
    summed: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    dim = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)), 0)
    token, number, used = _place(gl.arange(0, SIDE, summed), GROUP, SIDE, G, TOKENS, HEADS)
    at = gl.expand_dims(((first + token) * H + head * G + number) * D, 1) + dim
    out = (acc / gl.expand_dims(gl.convert_layout(total, summed), 1)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=gl.expand_dims((token < tokens) & used, 1) & (dim < D))


def launch(
    q: Tensor, out: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, tiles: Tensor, most: int, layer: int,
    window: int, scale: float,
) -> None:  # fmt: skip
    """Launch the kernel. fastgen.kernels.triton.attention has checked the arguments, and the twin of
    fastgen.kernels.attention says what it computes.

    tiles: the list of work tiles of up to `tokens_of` tokens each, whose key ranges begin at multiples of KEYS. Keys
    are not split. most: maximum number of work tiles.
    """
    (_, num_heads, head_size), (_, num_pages, num_kv, page_size, _) = q.shape, keys.shape
    chip, dims = Chip.of(q.device), power_of_two(head_size)
    assert keys.numel() // (page_size * head_size) < 2**31
    pools = (described(x.view(-1, page_size, head_size), [1, KEYS, PIECE]) for x in (keys, values))
    _prefill_kernel[(min(most * num_kv, chip.processors),)](
        described(q, [*unit_of(num_heads // num_kv), PIECE]), *pools, out, page_table, tiles,
        layer, num_pages, page_table.stride(0), num_heads, num_kv, head_size, page_size, window, scale,
        dims, stages_of(dims, q.element_size(), chip), SIDE, PIECE, HEADER, FIELDS, KEYS,
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
