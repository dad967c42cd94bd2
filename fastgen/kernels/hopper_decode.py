"""Decode attention of fastgen.kernels.attention in deterministic mode, to the bit, on Hopper; in Gluon.

The blocks of keys that a program goes through, of one unit after the other, are one stream: one warp has the next few
loaded to shared memory (by TMA), those of the next unit too while four others work on this one's. Where Triton makes
the loop, each unit begins with a wait for its first block.

In a step of decodes alone keys are new only where its own tokens are, and lists and page tables were written before its
embedding: the first blocks are then on their way before the kernel ahead has ended (see fastgen.kernels.hopper).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.kernels.blocks import join
from fastgen.kernels.gluon import barrier, gl, gluon_jit, load_tile, nvidia
from fastgen.kernels.hopper import LOADING_REGISTERS, REGISTERS, SIDE, WARPS, described, runs_on
from fastgen.kernels.items import FIELDS, HEADER, SPLITS, dependent
from fastgen.kernels.launch import Chip, tl
from fastgen.kernels.merging import merge_fixed
from fastgen.kernels.tiles import power_of_two
from fastgen.kernels.units import deal, item_at

KEYS = 64  # of a block, as in tiles.FIXED_HOPPER
SOME = 16  # keys that an instruction sums: of a sequence's last block so many, or a multiple, are loaded
MOST_GROUP = 32  # query heads of a KV head: with more, a thread's numbers do not fit its registers
PROGRAMS = 2  # that a processor is given: REGISTERS are for so many
SPLIT_BELOW = 0.4  # units a processor: with more, decodes are not split
MOST_STAGES = 8


def rows_of(group: int) -> int:
    """Of a tile: the query heads of a KV head, and rows that are not used."""
    return max(power_of_two(group), 8)


def stages_of(group: int, dims: int, item_size: int, chip: Chip) -> int:
    """Blocks that are on their way at once, or worked on."""
    room = (chip.shared_memory + 1024) // PROGRAMS - 2048 - (KEYS + 2 * dims) * rows_of(group) * item_size
    return min(room // (2 * KEYS * dims * item_size), MOST_STAGES)


def streams(chip: Chip, dtype: torch.dtype, group: int, head_size: int, page_size: int) -> bool:
    """Whether decodes of this shape are for this kernel."""
    dims = power_of_two(head_size)
    loads = page_size % KEYS == 0 and head_size * dtype.itemsize % 16 == 0  # as TMA has it
    fits = loads and 64 <= dims <= 128 and group <= MOST_GROUP
    return fits and runs_on(chip, dtype) and stages_of(group, dims, dtype.itemsize, chip) > 1


@gluon_jit("layer", "num_pages", "table_width", "alone")
def _decode_kernel(
    q_desc, keys_desc, values_desc, out_ptr, table_ptr, list_ptr, parts_ptr, peaks_ptr, totals_ptr, arrivals_ptr,
    layer, num_pages, table_width, alone,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, P: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, SOME: gl.constexpr, DIMS: gl.constexpr, STAGES: gl.constexpr,
    SIDE: gl.constexpr, MERGE_ROWS: gl.constexpr, MERGE_SPLITS: gl.constexpr, HEADER: gl.constexpr,
    FIELDS: gl.constexpr, SPLITS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """All units are dealt out. H, K, D, P, ROWS, DIMS and an item's fields: see fastgen.kernels.attention."""
    dtype: gl.constexpr = keys_desc.dtype
    ks = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, DIMS], keys_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, DIMS], values_desc.layout)
    qs = gl.allocate_shared_memory(dtype, [2, ROWS, DIMS], q_desc.layout)
    layout: gl.constexpr = nvidia.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    asked = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    for stage in gl.static_range(STAGES):
        nvidia.mbarrier.init(ready.index(stage), count=1)
        nvidia.mbarrier.init(free.index(stage), count=1)
    nvidia.mbarrier.init(asked.index(0), count=1)
    nvidia.mbarrier.init(asked.index(1), count=1)
    tl.extra.cuda.gdc_launch_dependents()
    if alone == 0:
        tl.extra.cuda.gdc_wait()
    units = tl.load(list_ptr) * K
    unit, programs, _ = deal(gl.program_id(0), gl.num_programs(0), units, 0)
    items_ptr = list_ptr + HEADER
    blocks = (ks, vs, ready, free)
    results = (out_ptr, parts_ptr, peaks_ptr, totals_ptr, arrivals_ptr)
    gl.warp_specialize(
        [
            (_attend, (
                q_desc, qs, asked, blocks, results, items_ptr, unit, units, programs, H, K, D, WINDOW, SCALE, SOME,
                SIDE, MERGE_ROWS, MERGE_SPLITS, FIELDS, SPLITS,
            )),
            (_load_blocks, (
                keys_desc, values_desc, blocks, items_ptr, table_ptr, table_width, layer * num_pages, unit, units,
                programs, K, P, SOME, FIELDS,
            )),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


@gluon_jit()
def _load_blocks(
    keys_desc, values_desc, blocks, items_ptr, table_ptr, table_width, first_page, unit, units, programs,
    K: gl.constexpr, P: gl.constexpr, SOME: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Have the blocks of all units loaded, each when a stage is free. A sequence's last block has its keys at the end
    of the stage, behind what is before them in the page, or zeros where the page begins."""
    ks, vs, ready, free = blocks
    STAGES: gl.constexpr = ks.shape[0]
    KEYS: gl.constexpr = ks.shape[2]
    BYTES: gl.constexpr = 4 * KEYS * ks.shape[3]
    stage = 0
    phase = 1
    while unit < units:
        _first, _tokens, lane, position, begin, end, _part, _split = item_at(items_ptr + unit // K * FIELDS)
        pages_ptr = table_ptr + lane * table_width
        page = tl.load(pages_ptr + begin // P)
        for start in range(begin, end, KEYS):
            at = [(first_page + page) * K + unit % K, start % P - _behind(start, end, KEYS, SOME), 0]
            page = tl.load(pages_ptr + gl.minimum(start + KEYS, end - 1) // P)
            nvidia.mbarrier.wait(free.index(stage), phase)
            if start + KEYS > position:  # with the key that the kernel ahead writes
                tl.extra.cuda.gdc_wait()
            nvidia.mbarrier.expect(ready.index(stage), BYTES)
            load_tile(keys_desc, at, ready.index(stage), ks.index(stage))
            load_tile(values_desc, at, ready.index(stage), vs.index(stage))
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)
        unit += programs


@gluon_jit()
def _behind(start, end, KEYS: gl.constexpr, SOME: gl.constexpr):
    """The keys of a stage that are not those of [start, end): a multiple of those that an instruction sums, so that the
    others are summed as in a full block."""
    return gl.maximum(KEYS - (end - start + SOME - 1) // SOME * SOME, 0)


@gluon_jit()
def _load_query(
    q_desc, qs, asked, slot, items_ptr, unit, units, H: gl.constexpr, K: gl.constexpr, FIELDS: gl.constexpr
):
    wanted = unit < units
    first = tl.load(items_ptr + unit // K * FIELDS, mask=wanted, other=0)
    nvidia.mbarrier.expect(asked.index(slot), 2 * qs.shape[1] * qs.shape[2], pred=wanted)
    row = first * H + unit % K * (H // K)
    load_tile(q_desc, [row, 0], asked.index(slot), qs.index(slot), pred=wanted)


@gluon_jit()
def _attend(
    q_desc, qs, asked, blocks, results, items_ptr, unit, units, programs,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr, SOME: gl.constexpr,
    SIDE: gl.constexpr, MERGE_ROWS: gl.constexpr, MERGE_SPLITS: gl.constexpr, FIELDS: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Go through the blocks as they come. A tile's keys are the rows of its products: acc is [DIMS, ROWS]."""
    ks, vs, ready, free = blocks
    dtype: gl.constexpr = ks.dtype
    STAGES: gl.constexpr = ks.shape[0]
    KEYS: gl.constexpr = ks.shape[2]
    DIMS: gl.constexpr = ks.shape[3]
    ROWS: gl.constexpr = qs.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    ws = gl.allocate_shared_memory(dtype, [ROWS, KEYS], gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], dtype))
    w = ws.permute((1, 0))
    number = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, mma)), 1)
    ones = gl.full([SIDE, KEYS], 1.0, dtype, gl.DotOperandLayout(0, mma, 2))
    if (unit < units) | (gl.program_id(0) == 0):  # program 0, so that this kernel never ends before the one ahead
        tl.extra.cuda.gdc_wait()
    _load_query(q_desc, qs, asked, 0, items_ptr, unit, units, H, K, FIELDS)
    stage = 0
    phase = 0
    slot = 0
    q_phase = 0
    while unit < units:
        first, _tokens, _lane, position, begin, end, part, split = item_at(items_ptr + unit // K * FIELDS)
        _load_query(q_desc, qs, asked, slot ^ 1, items_ptr, unit + programs, units, H, K, FIELDS)
        acc = gl.zeros([DIMS, ROWS], gl.float32, mma)
        peak = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(0, mma))
        total = gl.zeros([SIDE, ROWS], gl.float32, mma)
        nvidia.mbarrier.wait(asked.index(slot), q_phase)
        q = qs.index(slot).permute((1, 0))
        for start in range(begin, end, KEYS):
            k = ks.index(stage).reshape([KEYS, DIMS])
            v = vs.index(stage).reshape([KEYS, DIMS])
            nvidia.mbarrier.wait(ready.index(stage), phase)
            scores = nvidia.warpgroup_mma(k, q, gl.zeros([KEYS, ROWS], gl.float32, mma))
            behind = _behind(start, end, KEYS, SOME)
            key = start - behind + number
            seen = (key >= start) & (key < end)
            if WINDOW > 0:
                seen = seen & (key > position - WINDOW)
            scores = gl.where(seen, scores, -1e30)
            next_peak = gl.maximum(gl.max(scores, 0) * SCALE, -1e20)
            weights = gl.exp2(gl.fma(scores, SCALE, -gl.expand_dims(next_peak, 0)))
            ws.store(gl.permute(weights.to(dtype), (1, 0)))
            if end - start + behind < KEYS:
                _clear(v, end - start + behind)
            nvidia.fence_async_shared()
            next_total = nvidia.warpgroup_mma(ones, w, gl.zeros([SIDE, ROWS], gl.float32, mma), is_async=True)
            next_acc = gl.zeros([DIMS, ROWS], gl.float32, mma)
            next_acc = nvidia.warpgroup_mma(v.permute((1, 0)), w, next_acc, is_async=True)
            next_total, next_acc = nvidia.warpgroup_mma_wait(0, deps=[next_total, next_acc])
            nvidia.mbarrier.arrive(free.index(stage))
            acc, peak, total = join(acc, peak, total, next_acc, next_peak, next_total, True)
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)
        _finish(
            acc, peak, gl.max(total, 0), results, first, part, split, unit % K, H, K, D, MERGE_ROWS, MERGE_SPLITS,
            SPLITS,
        )  # fmt: skip
        q_phase = q_phase ^ slot
        slot = slot ^ 1
        unit += programs


@gluon_jit()
def _clear(v, keys):
    """Zeros in place of the values from the row `keys` on, which are not written yet: a weight of 0 does not do where
    there is no number."""
    KEYS: gl.constexpr = v.shape[0]
    DIMS: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIMS, DIMS // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, layout)), 1)
    v.store(gl.where(row < keys, v.load(layout), gl.zeros([KEYS, DIMS], v.dtype, layout)))


@gluon_jit()
def _finish(
    acc, peak, total, results, first, part, split, head,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, MERGE_ROWS: gl.constexpr, MERGE_SPLITS: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Write the answer of a unit, acc [DIMS, ROWS], or of one of its splits the partial results; who is last merges
    them."""
    out_ptr, parts_ptr, peaks_ptr, totals_ptr, arrivals_ptr = results
    G: gl.constexpr = H // K
    DIMS: gl.constexpr = acc.shape[0]
    mma: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[1], gl.SliceLayout(0, mma))
    dim = gl.arange(0, DIMS, gl.SliceLayout(1, mma))
    here = gl.expand_dims(row < G, 0) & gl.expand_dims(dim < D, 1)
    q_head = head * G + row
    splits = split // SPLITS
    if splits == 1:
        at = gl.expand_dims((first * H + q_head) * D, 0) + gl.expand_dims(dim, 1)
        tl.store(out_ptr + at, (acc / gl.expand_dims(total, 0)).to(out_ptr.dtype.element_ty), mask=here)
    else:
        slot = (part + split % SPLITS) * H + q_head
        tl.store(parts_ptr + gl.expand_dims(slot * D, 0) + gl.expand_dims(dim, 1), acc, mask=here)
        tl.store(peaks_ptr + slot, peak, mask=row < G)
        tl.store(totals_ptr + slot, total, mask=row < G)
        barrier()  # all of the program's results are written before it counts as arrived
        arrived = tl.atomic_add(arrivals_ptr + part * K + head, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            lanes: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
            merge_fixed(
                gl.zeros([MERGE_ROWS, DIMS], gl.float32, lanes), gl.arange(0, MERGE_ROWS, gl.SliceLayout(1, lanes)),
                gl.arange(0, DIMS, gl.SliceLayout(0, lanes)), out_ptr, parts_ptr, peaks_ptr, totals_ptr, first, 1,
                part, splits, head, H, G, D, MERGE_ROWS, MERGE_SPLITS,
            )  # fmt: skip
            tl.store(arrivals_ptr + part * K + head, 0)


def launch(
    q: Tensor, out: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, items: Tensor, most: int, alone: bool,
    workspace: tuple[Tensor, ...], layer: int, window: int, scale: float, merging: tuple[int, int],
) -> None:  # fmt: skip
    """As fastgen.kernels.attention, which checks. items: the list, of `most` items; alone: see
    fastgen.model.attention.interface.Attention.plan_decode; merging: rows and splits that are merged at once."""
    (_, num_heads, head_size), (_, num_pages, num_kv, page_size, _) = q.shape, keys.shape
    chip, group, dims = Chip.of(q.device), num_heads // num_kv, power_of_two(head_size)
    rows, stages = rows_of(group), stages_of(group, dims, q.element_size(), chip)
    assert keys.numel() // (page_size * head_size) < 2**31
    pools = (described(x.view(-1, page_size, head_size), [1, KEYS, dims]) for x in (keys, values))
    _decode_kernel[(min(most * num_kv, chip.processors * PROGRAMS),)](
        described(q.view(-1, head_size), [rows, dims]), *pools, out, page_table, items, *workspace,
        layer, num_pages, page_table.stride(0), int(alone), num_heads, num_kv, head_size, page_size, window, scale,
        rows, KEYS, SOME, dims, stages, SIDE, *merging, HEADER, FIELDS, SPLITS, LOADING_REGISTERS,
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False, **({"launch_pdl": True} if dependent(chip) else {}),
    )  # fmt: skip
