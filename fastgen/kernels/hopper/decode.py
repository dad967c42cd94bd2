"""Decode attention on Hopper, in Gluon, with the same bits as fastgen.kernels.triton.attention.

The blocks of keys of all tasks of a program form one stream: one warp loads the next blocks to shared memory (by TMA),
including the first blocks of the next task, while four other warps compute. In Triton's loop each task would have to
wait for its first block.

If keys are split, each split is one block. When all programs have stored their partial results, many programs combine
them, SPAN dimensions of a query head each: 16,000 keys have 250 splits, and one program would take longer to load
their results than all programs take to load the keys.

If a step has only decodes, its only new keys are at the positions of its own tokens, and its lists and page tables were
written before its embedding. Therefore the first blocks load before the previous kernel has ended (see
fastgen.kernels.hopper.products).

Keys and values in fp8 (fastgen.kernels.fp8_pages) are converted to 2-byte numbers in the registers of the warps that
multiply. Each thread reads contiguous bytes, so the 16 columns of keys (or 16 rows of values) of an instruction have a
different order than in memory. All numbers and scales are exact, so the bits are the same as with these keys and values
in bfloat16, unless the elements of a query span more than a factor of 2**31.
- Keys are converted to float16, with one instruction for two numbers. Queries are converted to float16 times a power of
  two.
- Values are converted to bfloat16 by shifts and masks: E4M3 bits read as a bfloat16 are 2**120 times smaller.
- The scales of keys multiply the scores, and the scales of values multiply the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.fp8_pages import E4M3, scales_of
from fastgen.kernels.hopper.gluon import barrier, clear_rows, gl, gluon_jit, load_tile, next_stage, nvidia, reinterpret
from fastgen.kernels.hopper.products import LOADING_REGISTERS, REGISTERS, SIDE, WARPS, described
from fastgen.kernels.launch import gluon_runs_on
from fastgen.kernels.triton.fp8_pages import power_of
from fastgen.kernels.triton.jit import constant, tl
from fastgen.kernels.triton.softmax import combine, load_partial
from fastgen.kernels.triton.work_tiles import read_tile, schedule
from fastgen.kernels.work_tiles import FIELDS, HEADER, SPLITS

KEYS = 64  # keys of a block, as in all attention kernels
SOME = constant(16)  # keys that an instruction sums; a sequence's last block is padded to a multiple of these
MAX_GROUP = 32  # maximum query heads per KV head; with more, a thread's numbers do not fit in its registers
PROGRAMS = 2  # programs per processor that REGISTERS and `stages_of` leave room for; more could wait for ever
SPLIT_BELOW = 0.4  # tasks per processor up to which decodes are split, measured on an H200
MAX_STAGES = 8
SPAN = constant(64)  # dimensions whose partial results a program combines
UNSPLIT = 448  # keys up to which decodes are not split if none has more: combining takes longer (measured on an H100)


def rows_of(group: int) -> int:
    """Return the number of rows of a tile: the query heads of a KV head, and unused rows."""
    return max(power_of_two(group), 8)


def stages_of(group: int, dims: int, item_size: int, chip: Chip, programs: int = PROGRAMS) -> int:
    """Return how many blocks can be loading or in use at the same time. item_size: bytes per element of the pool.
    programs: number of programs per processor."""
    rows = (KEYS + 2 * dims) * rows_of(group)
    if item_size == 1:  # in addition, queries in float16 and weights times scales
        rows += (KEYS + dims) * rows_of(group)
    room = (chip.shared_memory + 1024) // programs - 2048 - rows * 2
    return min(room // (2 * KEYS * (dims + 2 * (item_size == 1)) * item_size), MAX_STAGES)


def streams(
    chip: Chip, dtype: torch.dtype, group: int, head_size: int, page_size: int, item_size: int | None = None
) -> bool:
    """Return whether this kernel computes decodes of this shape.

    dtype: dtype of the queries. item_size: bytes per element of the pool; by default the same as for queries.
    """
    dims, item_size = power_of_two(head_size), item_size or dtype.itemsize
    if item_size == 1 and dtype != torch.bfloat16:  # values are converted to bfloat16
        return False
    loads = page_size % KEYS == 0 and head_size * item_size % 16 == 0  # a requirement of TMA
    fits = loads and 64 <= dims <= 128 and group <= MAX_GROUP
    return fits and gluon_runs_on(chip, dtype) and stages_of(group, dims, item_size, chip) > 1


@gluon_jit("layer", "num_pages", "table_width", "split", "reads_early")
def _decode_kernel(
    q_desc, keys_desc, values_desc, key_bits_desc, value_bits_desc, out_ptr, table_ptr, list_ptr, parts_ptr, peaks_ptr,
    totals_ptr, layer, num_pages, table_width, split, reads_early,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, P: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIMS: gl.constexpr, STAGES: gl.constexpr, SIDE: gl.constexpr,
    HEADER: gl.constexpr, FIELDS: gl.constexpr, SPLITS: gl.constexpr, PRIVATE: gl.constexpr,
):  # fmt: skip
    """Compute all tasks, scheduled statically. H, K, D, P, ROWS, DIMS: see fastgen.kernels.attention.

    key_bits_desc, value_bits_desc: descriptors of the scales of keys and values in fp8, else None.
    """
    dtype: gl.constexpr = keys_desc.dtype
    ks = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, DIMS], keys_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, DIMS], values_desc.layout)
    bits = (None, None)
    if key_bits_desc is not None:  # with gaps, since TMA needs multiples of 128 bytes
        bits = (
            gl.allocate_shared_memory(dtype, [2 * STAGES, 1, KEYS], key_bits_desc.layout),
            gl.allocate_shared_memory(dtype, [2 * STAGES, 1, KEYS], value_bits_desc.layout),
        )
    qs = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, DIMS], q_desc.layout)
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
    if reads_early == 0:
        tl.extra.cuda.gdc_wait()
    tasks = tl.load(list_ptr) * K
    task, programs = schedule(gl.program_id(0), gl.num_programs(0), tasks)
    # Programs without a task make room for the next kernel's. Program 0 stays, since it has to wait in `_attend`.
    if (task >= tasks) & (gl.program_id(0) > 0):
        return
    tiles_ptr = list_ptr + HEADER
    split = split * (read_tile(tiles_ptr)[7] // SPLITS - 1)  # splits come first: 0 if no sequence is split
    blocks = (ks, vs, bits, ready, free)
    pools = (keys_desc, values_desc, key_bits_desc, value_bits_desc)
    arrivals_ptr = list_ptr + 1 + layer  # the layer's counter, which the static schedule does not need
    results = (out_ptr, parts_ptr, peaks_ptr, totals_ptr, arrivals_ptr)
    gl.warp_specialize(
        [
            (_attend, (
                q_desc, qs, asked, blocks, results, tiles_ptr, task, tasks, programs, split, H, K, D, WINDOW, SCALE,
                SIDE, FIELDS, SPLITS, PRIVATE,
            )),
            (_load_blocks, (
                pools, blocks, tiles_ptr, table_ptr, table_width, layer * num_pages, task, tasks,
                programs, K, P, FIELDS,
            )),
        ],
        [1],
        [LOADING_REGISTERS],
    )  # fmt: skip


@gluon_jit()
def _load_blocks(
    pools, blocks, tiles_ptr, table_ptr, table_width, first_page, task, tasks, programs,
    K: gl.constexpr, P: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Load the blocks of all tasks, each as soon as a stage is free.

    The keys of a sequence's last block are placed at the end of the stage. The rest of the stage holds the keys before
    them in the page, or zeros before the beginning of the page.
    """
    ks, vs, bits, ready, free = blocks
    keys_desc, values_desc, key_bits_desc, value_bits_desc = pools
    STAGES: gl.constexpr = ks.shape[0]
    KEYS: gl.constexpr = ks.shape[2]
    FP8: gl.constexpr = key_bits_desc is not None
    BYTES: gl.constexpr = 2 * KEYS * (ks.shape[3] + 1) if FP8 else 4 * KEYS * ks.shape[3]
    stage = 0
    phase = 1
    while task < tasks:
        _first, _tokens, lane, position, begin, end, _part, _split = read_tile(tiles_ptr + task // K * FIELDS)
        pages_ptr = table_ptr + lane * table_width
        page = tl.load(pages_ptr + begin // P)
        for start in range(begin, end, KEYS):
            at = [(first_page + page) * K + task % K, start % P - _keys_before(start, end, KEYS), 0]
            page = tl.load(pages_ptr + gl.minimum(start + KEYS, end - 1) // P)
            nvidia.mbarrier.wait(free.index(stage), phase)
            if start + KEYS > position:  # the block contains the key that the previous kernel writes
                tl.extra.cuda.gdc_wait()
            nvidia.mbarrier.expect(ready.index(stage), BYTES)
            load_tile(keys_desc, at, ready.index(stage), ks.index(stage))
            load_tile(values_desc, at, ready.index(stage), vs.index(stage))
            if FP8:
                load_tile(key_bits_desc, at[:2], ready.index(stage), bits[0].index(2 * stage))
                load_tile(value_bits_desc, at[:2], ready.index(stage), bits[1].index(2 * stage))
            stage, phase = next_stage(stage, phase, STAGES)
        task += programs


@gluon_jit()
def _keys_before(start, end, KEYS: gl.constexpr):
    """Return the number of keys of a stage before the keys [start, end), a multiple of SOME.

    Thereby the keys [start, end) are summed by the same instructions as in a full block.
    """
    return gl.maximum(KEYS - (end - start + SOME - 1) // SOME * SOME, 0)


@gluon_jit()
def _first_of(tiles_ptr, task, tasks, K: gl.constexpr, FIELDS: gl.constexpr):
    """Return the index in the step of a task's query token, or 0 if there is no such task."""
    return tl.load(tiles_ptr + task // K * FIELDS, mask=task < tasks, other=0)


@gluon_jit()
def _load_query(q_desc, qs, asked, slot, first, task, tasks, H: gl.constexpr, K: gl.constexpr):
    """Begin to load the queries of a task, if there is one. first: see `_first_of`."""
    wanted = task < tasks
    nvidia.mbarrier.expect(asked.index(slot), 2 * qs.shape[1] * qs.shape[2], pred=wanted)
    row = first * H + task % K * (H // K)
    load_tile(q_desc, [row, 0], asked.index(slot), qs.index(slot), pred=wanted)


@gluon_jit()
def _attend(
    q_desc, qs, asked, blocks, results, tiles_ptr, task, tasks, programs, splitting,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr,
    SIDE: gl.constexpr, FIELDS: gl.constexpr, SPLITS: gl.constexpr, PRIVATE: gl.constexpr,
):  # fmt: skip
    """Compute the blocks as they arrive, and then combine splits. Keys are rows of products: acc is [DIMS, ROWS]."""
    ks, vs, bits, ready, free = blocks
    dtype: gl.constexpr = qs.dtype
    FP8: gl.constexpr = ks.dtype != dtype
    STAGES: gl.constexpr = ks.shape[0]
    KEYS: gl.constexpr = ks.shape[2]
    DIMS: gl.constexpr = ks.shape[3]
    ROWS: gl.constexpr = qs.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    ws = gl.allocate_shared_memory(dtype, [ROWS, KEYS], gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], dtype))
    number = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, mma)), 1)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    ones = gl.full([SIDE, KEYS], 1.0, dtype, left)
    if FP8:
        halves = gl.allocate_shared_memory(gl.float16, [ROWS, DIMS], qs.index(0).type.layout)
        scaled = gl.allocate_shared_memory(dtype, [ROWS, KEYS], ws.type.layout)
    first = _first_of(tiles_ptr, task, tasks, K, FIELDS)  # which the previous kernel has not written, see `reads_early`
    tl.extra.cuda.gdc_wait()  # also in a program 0 without tasks: this kernel cannot end before the previous one
    _load_query(q_desc, qs, asked, 0, first, task, tasks, H, K)
    stage, phase, slot, q_phase = 0, 0, 0, 0
    combine_from, combine_until = tasks, 0
    while task < tasks:
        first, tokens, _lane, position, begin, end, part, split = read_tile(tiles_ptr + task // K * FIELDS)
        following = _first_of(tiles_ptr, task + programs, tasks, K, FIELDS)
        _load_query(q_desc, qs, asked, slot ^ 1, following, task + programs, tasks, H, K)
        acc, peak, total = _begin(
            results, tokens, part, split, task % K, H, K, D, DIMS, ROWS, SIDE, SPLITS, PRIVATE, FP8, mma
        )
        nvidia.mbarrier.wait(asked.index(slot), q_phase)
        q = qs.index(slot)
        if FP8:
            shrink = gl.expand_dims(gl.convert_layout(_halve(q, halves), gl.SliceLayout(0, mma)), 0)
            q = halves
        for start in range(begin, end, KEYS):
            k = ks.index(stage).reshape([KEYS, DIMS])
            v = vs.index(stage).reshape([KEYS, DIMS])
            nvidia.mbarrier.wait(ready.index(stage), phase)
            k = _convert_keys(k, left) if FP8 else k
            scores = nvidia.warpgroup_mma(k, q.permute((1, 0)), gl.zeros([KEYS, ROWS], gl.float32, mma), is_async=True)
            v = _convert_values(v, left) if FP8 else v.permute((1, 0))
            scores = nvidia.warpgroup_mma_wait(0, deps=[scores])
            before = _keys_before(start, end, KEYS)
            key = start - before + number
            if FP8:
                scores = scores * shrink * power_of(bits[0].index(2 * stage).permute((1, 0)).load(mma))
            weights, next_peak = _weigh(scores, key, start, end, position, WINDOW, SCALE)
            weights = weights.to(dtype)
            ws.store(gl.permute(weights, (1, 0)))
            if FP8:  # no step has written the keys from `end` on; their numbers are finite, but maybe not their scales
                scales = gl.where(key < end, power_of(bits[1].index(2 * stage).permute((1, 0)).load(mma)), 0.0)
                scaled.store(gl.permute(weights * scales.to(dtype), (1, 0)))
            elif end - start + before < KEYS:
                clear_rows(vs.index(stage).reshape([KEYS, DIMS]), end - start + before)
            next_total, next_acc = _sum_values(ones, ws, v, scaled if FP8 else ws, mma)
            nvidia.mbarrier.arrive(free.index(stage))
            acc, peak, total = combine(acc, peak, total, next_acc, next_peak, next_total, True)
            stage, phase = next_stage(stage, phase, STAGES)
        part += tokens // SPLITS
        _store(acc, peak, gl.max(total, 0), results, first, part, split, task % K, H, K, D, SPLITS, FP8)
        if (split // SPLITS > 1) & (split % SPLITS < H // K * (DIMS // SPAN)):
            combine_from, combine_until = gl.minimum(combine_from, task), task + 1
        q_phase, slot, task = q_phase ^ slot, slot ^ 1, task + programs
    if (splitting > 0) & (gl.program_id(0) < programs):
        _combine(results, ks, tiles_ptr, combine_from, combine_until, tasks, programs, H, K, D, FIELDS, SPLITS, FP8)


@gluon_jit()
def _begin(
    results, tokens, part, split, head, H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, DIMS: gl.constexpr,
    ROWS: gl.constexpr, SIDE: gl.constexpr, SPLITS: gl.constexpr, PRIVATE: gl.constexpr, FP8: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Return the partial result to begin with: acc [DIMS, ROWS], peak [ROWS] and total [SIDE, ROWS].

    It covers the keys that a row shares, if there are any and `_combine` does not add them, otherwise no keys.
    """
    if PRIVATE:
        _out_ptr, parts_ptr, peaks_ptr, totals_ptr, _arrivals_ptr = results
        row = gl.arange(0, ROWS, gl.SliceLayout(0, mma))
        dim = _dims_of(gl.arange(0, DIMS, gl.SliceLayout(1, mma)), FP8)
        here = (row < H // K) & (tokens // SPLITS > 0) & (split // SPLITS == 1)
        slot = part * H + head * (H // K) + row
        return load_partial(parts_ptr, peaks_ptr, totals_ptr, slot, here, dim, D, True)
    else:
        peak = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(0, mma))
        return gl.zeros([DIMS, ROWS], gl.float32, mma), peak, gl.zeros([SIDE, ROWS], gl.float32, mma)


@gluon_jit()
def _dims_of(row, FP8: gl.constexpr):
    """Return the dimensions of the head that these rows of acc hold."""
    if FP8:  # in the order of `_convert_values`
        row = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    return row


@gluon_jit()
def _halve(q, halves):
    """Write queries [ROWS, DIMS] to `halves` in float16, with their columns in the order of `_convert_keys`.

    Each row is multiplied by a power of two, with which its largest magnitude is at least 2**14. Return the factors by
    which scores have to be multiplied, [ROWS].
    """
    ROWS: gl.constexpr = q.shape[0]
    DIMS: gl.constexpr = q.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIMS, DIMS // 8], [gl.num_warps(), 1], [1, 0])
    found = q.load(layout).to(gl.float32)
    largest = gl.max(found.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = gl.maximum(largest >> 23, 15)
    found *= gl.expand_dims(((268 - exponent) << 23).to(gl.float32, bitcast=True), 1)
    found = gl.permute(gl.reshape(found.to(gl.float16), [ROWS, DIMS // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    halves.store(gl.reshape(found, [ROWS, DIMS]))
    nvidia.fence_async_shared()
    barrier()  # without it the compiler would put one into the loop over blocks
    return ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon_jit()
def _convert_keys(numbers, left: gl.constexpr):
    """Convert numbers in E4M3 [KEYS, DIMS] to float16, and return them as the left side of a product.

    Of each 16 columns, a thread holds 4 that are contiguous in memory, as 2 pairs.
    """
    KEYS: gl.constexpr = numbers.shape[0]
    DIMS: gl.constexpr = numbers.shape[1]
    registers: gl.constexpr = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]] + [[0, 64]] * (DIMS // 128)
    lanes: gl.constexpr = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    found = numbers.load(gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [KEYS, DIMS]))
    found = gl.permute(gl.reshape(found.to(gl.float16), [KEYS, DIMS // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(found, [KEYS, DIMS]), left, assert_trivial=True)


@gluon_jit()
def _convert_values(numbers, left: gl.constexpr):
    """Convert numbers in E4M3 [KEYS, DIMS] to bfloat16, and return them as the left side of a product, [DIMS, KEYS].

    Row 16 * n + 8 * i + j is column 16 * n + 2 * j + i, so a load that transposes units of 2 bytes gives a thread two
    rows.
    """
    KEYS: gl.constexpr = numbers.shape[0]
    DIMS: gl.constexpr = numbers.shape[1]
    HALF: gl.constexpr = DIMS // 2
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], gl.int16)
    pairs = reinterpret(numbers, gl.int16, [KEYS, HALF], shared).permute((1, 0))
    registers: gl.constexpr = [[0, 1], [0, 8], [0, 16], [0, 32]] + [[32, 0]] * (DIMS // 128)
    lanes: gl.constexpr = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    found = pairs.load(gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [HALF, KEYS]))
    even, odd = gl.inline_asm_elementwise(
        "{.reg .b32 x, s; "
        "shl.b32 x, $2, 4; and.b32 x, x, 0x07F007F0; shl.b32 s, $2, 8; lop3.b32 s, s, 0x80008000, 0x7B807B80, 0xEA; "
        "mul.bf16x2 $0, x, s; "
        "shr.b32 x, $2, 4; and.b32 x, x, 0x07F007F0; lop3.b32 s, $2, 0x80008000, 0x7B807B80, 0xEA; "
        "mul.bf16x2 $1, x, s;}",
        "=r,=r,r", [found], (gl.bfloat16, gl.bfloat16), True, 2,
    )  # fmt: skip
    found = gl.permute(gl.reshape(gl.join(even, odd), [DIMS // 16, 8, KEYS, 2]), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(found, [DIMS, KEYS]), left, assert_trivial=True)


@gluon_jit()
def _weigh(scores, key, start, end, position, WINDOW: gl.constexpr, SCALE: gl.constexpr):
    """Return the weights of keys [KEYS, 1], of which [start, end) are seen, and the peak that they are relative to."""
    seen = (key >= start) & (key < end)
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
    scores = gl.where(seen, scores, -1e30)
    peak = gl.maximum(gl.max(scores, 0) * SCALE, -1e20)
    return gl.exp2(gl.fma(scores, SCALE, -gl.expand_dims(peak, 0))), peak


@gluon_jit()
def _sum_values(ones, weights, v, scaled, mma: gl.constexpr):
    """Return the sums of weights [ROWS, KEYS], as [SIDE, ROWS], and of values v [DIMS, KEYS] times scaled weights."""
    ROWS: gl.constexpr = weights.shape[0]
    DIMS: gl.constexpr = v.shape[0]
    nvidia.fence_async_shared()
    total = gl.zeros([ones.shape[0], ROWS], gl.float32, mma)
    total = nvidia.warpgroup_mma(ones, weights.permute((1, 0)), total, is_async=True)
    acc = gl.zeros([DIMS, ROWS], gl.float32, mma)
    acc = nvidia.warpgroup_mma(v, scaled.permute((1, 0)), acc, is_async=True)
    return nvidia.warpgroup_mma_wait(0, deps=[total, acc])


@gluon_jit()
def _store(
    acc, peak, total, results, first, part, split, head,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Write the result of a task from acc [DIMS, ROWS]; if the task is a split, write a partial result."""
    out_ptr, parts_ptr, peaks_ptr, totals_ptr, _arrivals_ptr = results
    G: gl.constexpr = H // K
    DIMS: gl.constexpr = acc.shape[0]
    mma: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[1], gl.SliceLayout(0, mma))
    dim = _dims_of(gl.arange(0, DIMS, gl.SliceLayout(1, mma)), FP8)
    here = gl.expand_dims(row < G, 0) & gl.expand_dims(dim < D, 1)
    q_head = head * G + row
    if split // SPLITS == 1:
        at = gl.expand_dims((first * H + q_head) * D, 0) + gl.expand_dims(dim, 1)
        tl.store(out_ptr + at, (acc / gl.expand_dims(total, 0)).to(out_ptr.dtype.element_ty), mask=here)
    else:
        slot = (part + split % SPLITS) * H + q_head
        tl.store(parts_ptr + gl.expand_dims(slot * D, 0) + gl.expand_dims(dim, 1), acc, mask=here)
        tl.store(peaks_ptr + slot, peak, mask=row < G)
        tl.store(totals_ptr + slot, total, mask=row < G)


@gluon_jit()
def _combine(
    results, ks, tiles_ptr, task, until, tasks, programs, H: gl.constexpr, K: gl.constexpr, D: gl.constexpr,
    FIELDS: gl.constexpr, SPLITS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Combine the partial results of some query heads, when all programs have stored theirs.

    The dimensions of a query tile's heads are distributed over the programs of its first splits, so that many programs
    load partial results. task, until: the range of tasks of this program that are such splits. All programs are on the
    chip at the same time (PROGRAMS), so none waits for a program that has not begun.
    """
    SPANS: gl.constexpr = ks.shape[3] // SPAN
    arrivals_ptr = results[4]
    barrier()  # all threads have stored before the program counts as arrived
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="release", scope="gpu")
    tile = read_tile(tiles_ptr + gl.minimum(task, tasks - 1) // K * FIELDS)  # while others arrive
    if task < until:
        while arrived < programs:
            arrived = tl.atomic_add(arrivals_ptr, 0, sem="acquire", scope="gpu")
    while task < until:
        first, tokens, _lane, _position, _begin, _end, part, split = tile
        splits = split // SPLITS
        if splits > 1:
            for number in range(split % SPLITS, H // K * SPANS, splits):
                head = task % K * (H // K) + number // SPANS
                dim = number % SPANS * SPAN
                _combine_span(results, ks, first, part, tokens // SPLITS + splits, head, dim, H, D, SPAN, FP8)
        task += programs
        tile = read_tile(tiles_ptr + gl.minimum(task, tasks - 1) // K * FIELDS)


@gluon_jit()
def _combine_span(
    results, ks, first, part, splits, head, dim, H: gl.constexpr, D: gl.constexpr, SPAN: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Combine SPAN dimensions, from `dim` on, of the partial results of one query head, and write its result.

    The results of up to AT_ONCE splits are loaded at once. Their sums pass through the first stage of keys, which is
    free: this program has used all blocks that were loaded.
    """
    STAGES: gl.constexpr = ks.shape[0]
    AT_ONCE: gl.constexpr = ks.shape[2] * ks.shape[3] // (4 if FP8 else 2) // SPAN
    out_ptr, parts_ptr, peaks_ptr, totals_ptr, _arrivals_ptr = results
    tall: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums = reinterpret(ks, gl.float32, [STAGES, AT_ONCE, SPAN], matrix).index(0)
    sum_of = reinterpret(ks, gl.float32, [STAGES * AT_ONCE, SPAN], vector)
    peaks = gl.allocate_shared_memory(gl.float32, [AT_ONCE], vector)
    totals = gl.allocate_shared_memory(gl.float32, [AT_ONCE], vector)
    peak_of = reinterpret(peaks, gl.float32, [AT_ONCE, 1], vector)
    total_of = reinterpret(totals, gl.float32, [AT_ONCE, 1], vector)
    number = gl.arange(0, AT_ONCE, gl.SliceLayout(1, tall))
    dims = dim + gl.arange(0, SPAN, gl.SliceLayout(0, tall))
    acc = gl.zeros([1, SPAN], gl.float32, wide)
    peak = gl.full([1], -1e30, gl.float32, gl.SliceLayout(1, wide))
    total = gl.zeros([1], gl.float32, gl.SliceLayout(1, wide))
    slot = (part + number) * H + head
    found = load_partial(parts_ptr, peaks_ptr, totals_ptr, slot, number < splits, dims, D, False)
    for first_split in range(0, splits, AT_ONCE):
        barrier()  # all threads have read the splits before
        sums.store(found[0])
        peaks.store(found[1])
        totals.store(found[2])
        slot += AT_ONCE * H
        found = load_partial(
            parts_ptr, peaks_ptr, totals_ptr, slot, first_split + AT_ONCE + number < splits, dims, D, False
        )
        barrier()
        for at in range(0, gl.minimum(splits - first_split, AT_ONCE), 8):
            for offset in gl.static_range(8):  # unrolled, so that the loads overlap
                next_acc = gl.expand_dims(sum_of.index(at + offset).load(gl.SliceLayout(0, wide)), 0)
                next_peak = peak_of.index(at + offset).load(gl.SliceLayout(1, wide))
                next_total = total_of.index(at + offset).load(gl.SliceLayout(1, wide))
                acc, peak, total = combine(acc, peak, total, next_acc, next_peak, next_total, False)
    out = (acc / gl.expand_dims(total, 1)).to(out_ptr.dtype.element_ty)
    dims = gl.expand_dims(dim + gl.arange(0, SPAN, gl.SliceLayout(0, wide)), 0)
    tl.store(out_ptr + (first * H + head) * D + dims, out, mask=dims < D)


def described_pools(keys: Tensor, values: Tensor, block: list[int]) -> list[Any]:
    """Return TMA descriptors of keys and values [layers, pages, K, P, D], in tiles `block`, and of their scales, which
    are None unless keys and values are in fp8."""
    pools = [described(x.flatten(0, 2), block) for x in (keys, values)]
    if keys.dtype != E4M3:
        return [*pools, None, None]
    return pools + [described(scales_of(x).view(E4M3).flatten(0, 2), block[:2]) for x in (keys, values)]


def launch(
    q: Tensor, out: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, tiles: Tensor, most: int, split: bool,
    reads_early: bool, private: bool, memory: tuple[Tensor, ...], layer: int, window: int, scale: float,
) -> None:  # fmt: skip
    """Launch the kernel. fastgen.kernels.triton.attention has checked the arguments, and the twin of
    fastgen.kernels.attention says what it computes.

    tiles: the list of work tiles. most: maximum number of work tiles. split: whether some may be splits.
    reads_early: see fastgen.model.attention.interface.Attention.plan_decode. private: whether the list is PRIVATE.
    memory: the tensors of PartialResults.
    """
    (_, num_heads, head_size), (_, num_pages, num_kv, page_size, _) = q.shape, keys.shape
    chip, group, dims = Chip.of(q.device), num_heads // num_kv, power_of_two(head_size)
    # With a processor for each task, a program has the shared memory of two: more keys load before the queries arrive.
    programs = 1 if most * num_kv <= chip.processors else PROGRAMS
    rows, stages = rows_of(group), stages_of(group, dims, keys.element_size(), chip, programs)
    assert keys.numel() // (page_size * head_size) < 2**31
    pools = described_pools(keys, values, [1, KEYS, dims])
    _decode_kernel[(min(most * num_kv, chip.processors * programs),)](
        described(q.view(-1, head_size), [rows, dims]), *pools, out, page_table, tiles, *memory[:3],
        layer, num_pages, page_table.stride(0), int(split), int(reads_early), num_heads, num_kv, head_size, page_size,
        window, scale, rows, KEYS, dims, stages, SIDE, HEADER, FIELDS, SPLITS, private,
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
