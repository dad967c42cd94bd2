"""Attention over the paged KV pool, for decodes and prefills, driven by a list of work tiles.

A task is a work tile and a KV head (`fastgen.kernels.work_tiles`): its query rows are the tile's tokens times the query
heads of that KV head. As many programs run as fit on the chip, and each takes tasks until none are left. If the keys of
a decode are split, each split stores a partial result, and the program that finishes last combines them in the order of
the splits, so the result does not depend on which program was last.

Keys that several rows of a decode step share have their own launch (SHARED), whose tiles hold these rows and which
stores partial results. The launch for the private keys follows (PRIVATE) and combines these results with its own.

On Hopper, fastgen.kernels.hopper.prefill computes prefills, and fastgen.kernels.hopper.decode computes decodes except
for their shared keys. All kernels compute the softmax in the same blocks of keys (fastgen.kernels.triton.softmax), so
the bits of a row do not depend on the kernel.

Shape letters: T tokens in the step, H query heads, K KV heads, D head size, P page size, G = H / K.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastgen.device.chip import HOPPER, Chip, power_of_two
from fastgen.kernels import fp8_pages
from fastgen.kernels.attention import (
    DECODE,
    GROUP,
    PREFILL,
    PRIVATE,
    SHARED,
    AttentionConfig,
    PartialResults,
    TileList,
)
from fastgen.kernels.hopper import decode as hopper_decode
from fastgen.kernels.hopper import prefill as hopper_prefill
from fastgen.kernels.triton.fp8_pages import dequantized
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.triton.softmax import (
    combine,
    combine_splits,
    load_partial,
    no_keys,
    softmax_block,
    store_partial,
)
from fastgen.kernels.triton.work_tiles import next_task, read_tile
from fastgen.kernels.work_tiles import FIELDS, HEADER, SPLITS

REGISTERS = 256  # registers per thread, the maximum, which measured faster than more programs per processor

# Phase -> choices of (rows, warps, stages), of which the first that fits is taken. 0 rows: the rows of one token. While
# a program computes a block of keys, `stages` - 1 blocks load. The bits of a row must not depend on its phase, so all
# phases use the same tensor core instruction. Hopper's needs at least 64 rows on the left side.
HOPPER_SHAPES = {DECODE: ((64, 4, 2),), PREFILL: ((128, 8, 3), (64, 4, 2)), GROUP: ((64, 4, 2),)}
HALF_SHAPES = {DECODE: ((0, 2, 2),), PREFILL: ((32, 2, 2),), GROUP: ((32, 2, 2),)}
FLOAT_SHAPES = dict.fromkeys((DECODE, PREFILL, GROUP), ((32, 4, 2),))


def configure(
    phase: str, group: int, head_size: int, dtype: torch.dtype, chip: Chip, page_size: int = 16, fp8: bool = False
) -> AttentionConfig:
    """Return the configuration for `group` query heads per KV head (G), with keys and values of `dtype` or in fp8.

    A block has 64 keys, 32 in float32, and fewer where large heads would not fit on the chip. Raises ValueError if no
    size fits.
    """
    half = dtype.itemsize == 2
    if phase == PREFILL and not fp8 and hopper_prefill.runs(chip, dtype, group, head_size, page_size):
        rows = hopper_prefill.tokens_of(group) * group
        return AttentionConfig(rows, hopper_prefill.KEYS, hopper_prefill.WARPS, 0, 1, True, 1, 1, specialized=True)
    for keys in (64, 32, 16)[not half :]:
        # All phases use the largest block of keys that fits next to the largest query tiles, those of prefills.
        if _shape(PREFILL, keys, group, head_size, dtype, chip) is None:
            continue
        shape = _shape(phase, keys, group, head_size, dtype, chip)
        assert shape is not None
        rows, warps, stages = shape
        dims, tiles = power_of_two(head_size), phase in (PREFILL, GROUP)
        size = shared_bytes(rows, keys, stages, dims, dtype, chip)
        combine_rows = min(power_of_two(group), 32)
        combine_splits = min(4 * min(max(8 * warps * 32 // (combine_rows * dims), 1), 16), 8)
        programs = programs_of(size, warps, chip)
        streamed = not tiles and hopper_decode.streams(chip, dtype, group, head_size, page_size, 1 if fp8 else None)
        return AttentionConfig(
            rows, keys, warps, stages, programs, tiles, combine_rows, combine_splits,
            unsplit=hopper_decode.UNSPLIT if streamed else 0, streamed=streamed,
        )  # fmt: skip
    raise ValueError(
        f"attention='paged' cannot run {group} query heads per KV head of size {head_size} in {dtype} on this GPU, "
        f"whose blocks have {chip.shared_memory} bytes of shared memory; use dtype='bfloat16', another GPU or "
        "device='cpu'"
    )


def _shape(
    phase: str, keys: int, group: int, head_size: int, dtype: torch.dtype, chip: Chip
) -> tuple[int, int, int] | None:
    """Return the rows of a tile, the warps and the stages of a phase, or None if blocks of `keys` keys do not fit."""
    half, dims, least = dtype.itemsize == 2, power_of_two(head_size), max(power_of_two(group), 16)
    wide = dims > 128  # half as many rows then hold as many numbers
    hopper = half and chip.capability[0] == HOPPER[0] and 64 <= dims <= 128
    for rows, warps, stages in (HOPPER_SHAPES if hopper else HALF_SHAPES if half else FLOAT_SHAPES)[phase]:
        if not hopper:  # so that the warps divide the keys in all phases, which tests check
            rows = min(rows, dims // 2)
        rows = max(rows // 2 if wide else rows, least)
        warps = max(warps, min(rows // 16, 8) if rows == least else 0, 4 if wide else 0)
        if shared_bytes(rows, keys, stages, dims, dtype, chip) <= chip.shared_memory:
            return rows, warps, stages
    return None


def programs_of(shared_memory: int, warps: int, chip: Chip) -> int:
    """Return the number of programs that a processor holds at once. Any further ones would find no tasks left."""
    by_memory = (chip.shared_memory + 1024) // (shared_memory + 1024)  # the system takes a kilobyte per program
    by_registers = 65536 // (REGISTERS * 32 * warps)
    return max(min(by_memory, by_registers, 16), 1)


def shared_bytes(rows: int, keys: int, stages: int, dims: int, dtype: torch.dtype, chip: Chip) -> int:
    """Return an upper bound of the bytes of shared memory per program; the compiler decides the exact number."""
    ahead = stages if chip.capability >= HOPPER and rows >= 64 else max(stages - 1, 1)
    numbers = 2 * ahead * keys * dims + rows * dims + rows * keys
    return max(numbers * dtype.itemsize, rows * dims * 4) + 2048


@jit("layer", "num_pages", "table_width")
def _attention_kernel(
    q_ptr, out_ptr, keys_ptr, values_ptr, table_ptr, list_ptr, parts_ptr, peaks_ptr, totals_ptr, arrivals_ptr,
    members_ptr, bases_ptr, lens_ptr, layer, num_pages, table_width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, PEEL: tl.constexpr,
    COMBINE_ROWS: tl.constexpr, COMBINE_SPLITS: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr,
    PRIVATE: tl.constexpr, HEADER: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take tasks in order, the first by the program's number and the others from the layer's counter."""
    # A SHARED launch lets the PRIVATE one start only when all earlier kernels have ended.
    if PDL and KIND == SHARED:
        tl.extra.cuda.gdc_wait()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL and KIND != SHARED:
        tl.extra.cuda.gdc_wait()
    G: tl.constexpr = H // K
    task = tl.program_id(0)
    # The first work tile loads at the same time as their number. In a small step, loading it later would take longer.
    count = tl.load(list_ptr)
    tile = read_tile(list_ptr + HEADER + task // K * FIELDS)
    while task < count * K:
        first, tokens, lane, position, begin, end, part, split = tile
        head = task % K
        row = tl.arange(0, ROWS)
        token, q_head = row // G, head * G + row % G
        dim = tl.arange(0, DIMS)[None, :]
        here = (token < tokens % SPLITS)[:, None] & (dim < D)
        query_row, query = first + token, position + token
        low, high = position, position + tokens % SPLITS - 1
        if KIND == SHARED:
            query_row = tl.load(members_ptr + query_row, mask=token < tokens, other=0)
            query = tl.load(lens_ptr + query_row) - 1
            low, high = end, tl.max(query, 0)  # all queries come after the range
        q = tl.load(q_ptr + ((query_row * H + q_head)[:, None] * D + dim), mask=here, other=0.0)
        acc, peak, total = no_keys(ROWS, DIMS)
        if KIND == PRIVATE:  # begin with the result of the shared keys, unless `combine_splits` does
            partial = (token < tokens % SPLITS) & (tokens // SPLITS > 0) & (split // SPLITS == 1)
            slot = part * H + q_head
            acc, peak, total = load_partial(
                parts_ptr, peaks_ptr, totals_ptr, slot, partial, tl.arange(0, DIMS), D, False
            )
        acc, peak, total = _softmax(
            acc, peak, total, q, query, low, high, begin, end, keys_ptr, values_ptr, table_ptr + lane * table_width,
            layer * num_pages, head, K, D, P, WINDOW, SCALE, KEYS, DIMS, PEEL,
        )  # fmt: skip
        if KIND == SHARED:
            slot = tl.load(bases_ptr + query_row) * H + q_head
            store_partial(acc, peak, total, parts_ptr, peaks_ptr, totals_ptr, slot, token < tokens, D, DIMS)
        else:
            _finish(
                acc, peak, total, out_ptr, parts_ptr, peaks_ptr, totals_ptr, arrivals_ptr, first, tokens, part, split,
                head, H, K, D, ROWS, DIMS, COMBINE_ROWS, COMBINE_SPLITS, SPLITS,
            )  # fmt: skip
        task = next_task(list_ptr, layer, count * K)
        tile = read_tile(list_ptr + HEADER + tl.minimum(task // K, count - 1) * FIELDS)


@jit()
def _softmax(
    acc, peak, total, q, query, low, high, begin, end, keys_ptr, values_ptr, table_ptr, first_page, head,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, DIMS: tl.constexpr, PEEL: tl.constexpr,
):  # fmt: skip
    """Extend the softmax of q [ROWS, DIMS] by the keys [begin, end), and return a partial result (acc, peak, total).

    query: [ROWS], the positions of q, which are between low and high. A row that sees no key has a peak of -1e20 or
    less, which has no weight when it is combined with any other.
    """
    full_begin = begin
    full_end = end
    if PEEL:
        if WINDOW > 0:  # the first block that the last query sees in full
            full_begin = begin + tl.cdiv(tl.maximum(high + 1 - WINDOW - begin, 0), KEYS) * KEYS
            full_begin = tl.minimum(full_begin, end)
            acc, peak, total = _blocks(
                acc, peak, total, q, query, begin, full_begin, end, keys_ptr, values_ptr, table_ptr, first_page, head,
                K, D, P, WINDOW, SCALE, KEYS, DIMS, True,
            )  # fmt: skip
        full_end = full_begin + tl.maximum(tl.minimum(end, low + 1) - full_begin, 0) // KEYS * KEYS
        acc, peak, total = _blocks(
            acc, peak, total, q, query, full_begin, full_end, end, keys_ptr, values_ptr, table_ptr, first_page, head,
            K, D, P, WINDOW, SCALE, KEYS, DIMS, False,
        )  # fmt: skip
        full_begin = full_end
    acc, peak, total = _blocks(
        acc, peak, total, q, query, full_begin, end, end, keys_ptr, values_ptr, table_ptr, first_page, head,
        K, D, P, WINDOW, SCALE, KEYS, DIMS, True,
    )  # fmt: skip
    return acc, peak, total


@jit()
def _blocks(
    acc, peak, total, q, query, begin, end, limit, keys_ptr, values_ptr, table_ptr, first_page, head,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Extend the softmax by the keys [begin, end). Keys from `limit` on do not exist and are not loaded, because the
    pool may hold anything there."""
    FP8: tl.constexpr = keys_ptr.dtype.element_ty == tl.float8e4nv
    STEP: tl.constexpr = P * (D + 1) if FP8 else P * D  # from one head's page to the next one's
    number = tl.arange(0, KEYS)
    dim = tl.arange(0, DIMS)[None, :]
    next_page = tl.load(table_ptr + tl.minimum(begin, limit - 1) // P)
    for start in range(begin, end, KEYS):
        key = start + number
        if P % KEYS == 0:  # the block lies in one page, whose number was loaded an iteration ago
            base = ((first_page + next_page).to(tl.int64) * K + head) * STEP + start % P * D
            next_page = tl.load(table_ptr + tl.minimum(start + KEYS, limit - 1) // P)
            at = number[:, None] * D + dim
            scale_at = P * D - start % P * (D - 1) + number
        else:
            page = (first_page + tl.load(table_ptr + key // P, mask=key < limit, other=0)).to(tl.int64)
            base = tl.zeros([], tl.int64)
            at = ((page * K + head) * STEP + key % P * D)[:, None] + dim
            scale_at = (page * K + head) * STEP + P * D + key % P
        if MASKED:
            here = (key < limit)[:, None] & (dim < D)
            k = tl.load(keys_ptr + base + at, mask=here, other=0.0)
            v = tl.load(values_ptr + base + at, mask=here, other=0.0)
        elif DIMS == D:
            k = tl.load(keys_ptr + base + at)
            v = tl.load(values_ptr + base + at)
        else:
            k = tl.load(keys_ptr + base + at, mask=dim < D, other=0.0)
            v = tl.load(values_ptr + base + at, mask=dim < D, other=0.0)
        if FP8:
            k = dequantized(k, tl.load(keys_ptr + base + scale_at, mask=key < limit, other=0.0)[:, None], q.dtype)
            v = dequantized(v, tl.load(values_ptr + base + scale_at, mask=key < limit, other=0.0)[:, None], q.dtype)
        seen = None
        if MASKED:
            seen = _seen(key, query, limit, WINDOW)
        next_acc, next_peak, next_total = softmax_block(q, k, v, seen, SCALE)
        acc, peak, total = combine(acc, peak, total, next_acc, next_peak, next_total, False)
    return acc, peak, total


@jit()
def _seen(key, query, limit, WINDOW: tl.constexpr):
    """Return a mask [ROWS, KEYS] of the keys [KEYS] that each query [ROWS] sees."""
    key, query = key[None, :], query[:, None]
    seen = (key <= query) & (key < limit)
    if WINDOW > 0:
        seen = seen & (key > query - WINDOW)
    return seen


@jit()
def _finish(
    acc, peak, total, out_ptr, parts_ptr, peaks_ptr, totals_ptr, arrivals_ptr, first, tokens, part, split, head,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    COMBINE_ROWS: tl.constexpr, COMBINE_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write the result of a query tile. If it is split, write a partial result, and combine all of them if this program
    is the last to finish."""
    partials = tokens // SPLITS
    tokens = tokens % SPLITS
    splits = split // SPLITS
    split = split % SPLITS
    token = tl.arange(0, ROWS) // (H // K)
    q_head = head * (H // K) + tl.arange(0, ROWS) % (H // K)
    dim = tl.arange(0, DIMS)[None, :]
    here = (token < tokens)[:, None] & (dim < D)
    if splits == 1:
        at = ((first + token) * H + q_head)[:, None] * D + dim
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=here)
    else:
        slot = (part + partials + split * tokens + token) * H + q_head
        store_partial(acc, peak, total, parts_ptr, peaks_ptr, totals_ptr, slot, token < tokens, D, DIMS)
        tl.debug_barrier()  # all threads have stored before the program counts as arrived
        arrived = tl.atomic_add(arrivals_ptr + part * K + head, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            combine_splits(
                out_ptr, parts_ptr, peaks_ptr, totals_ptr, first, tokens, part, partials + splits, head,
                H, H // K, D, DIMS, COMBINE_ROWS, COMBINE_SPLITS,
            )  # fmt: skip
            tl.store(arrivals_ptr + part * K + head, 0)


def attention(
    q: Tensor, out: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, tiles: TileList,
    partial_results: PartialResults, layer: int, window: int, scale: float | None = None,
) -> None:  # fmt: skip
    (_, num_heads, head_size), (_, num_pages, num_kv, page_size, _), config = q.shape, keys.shape, tiles.config
    group, dims = num_heads // num_kv, power_of_two(head_size)
    assert q.shape == out.shape
    assert q.dtype == out.dtype
    assert keys.dtype == values.dtype
    assert keys.dtype in (q.dtype, fp8_pages.E4M3)
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert keys.shape == values.shape
    fp8_pages.check(keys)
    fp8_pages.check(values)
    assert keys.shape[4] == head_size
    assert num_heads == group * num_kv
    assert group <= config.rows
    assert page_table.dtype == tiles.list.dtype == torch.int32
    assert page_table.stride(1) == 1
    assert layer < HEADER - 1
    assert max(q.numel(), partial_results.parts.numel(), page_table.numel()) < 2**31
    assert (tiles.kind == SHARED) == (tiles.rows is not None)
    members = tiles.rows.members if tiles.rows is not None else None
    chip = Chip.of(q.device)
    pdl, scale = chip.dependent_launch, (head_size**-0.5 if scale is None else scale) * math.log2(math.e)
    memory = partial_results.parts, partial_results.peaks, partial_results.totals, partial_results.arrivals
    if config.streamed:
        assert config.keys == hopper_decode.KEYS
        hopper_decode.launch(
            q, out, keys, values, page_table, tiles.list, tiles.most, tiles.split, tiles.reads_early,
            tiles.kind == PRIVATE, memory, layer, window, scale,
        )  # fmt: skip
        return
    if config.specialized:
        hopper_prefill.launch(q, out, keys, values, page_table, tiles.list, tiles.most, layer, window, scale)
        return
    _attention_kernel[(min(tiles.most * num_kv, chip.processors * config.programs),)](
        q, out, keys, values, page_table, tiles.list, *memory, members, tiles.bases, tiles.kv_lens,
        layer, num_pages, page_table.stride(0), num_heads, num_kv, head_size, page_size, window, scale,
        config.rows, config.keys, dims, config.peel, config.combine_rows, config.combine_splits,
        tiles.kind, SHARED, PRIVATE, HEADER, FIELDS, SPLITS, pdl,
        # The compiler might otherwise fuse a multiplication with an addition in one phase and not in another.
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
