"""Work tiles, the units of attention: their lists, the kernel that lists a decode step's, and the tile scheduler.

A work tile is a tile of query tokens of one sequence against a range of its keys. A query tile whose keys are split
into several ranges has a work tile for each split, and the attention kernel combines their partial results. Work tiles
of whole splits come first and those with the fewest keys last, so that all programs end at about the same time.

A list is int32 [HEADER + work tiles * FIELDS]. Its header holds the number of work tiles, and then a counter for each
layer, from which the tile scheduler gives out tasks. The fields of a work tile:
  FIRST      its first query token in the step
  TOKENS     the number of its query tokens (in decodes: + SPLITS * the number of partial results for shared keys)
  LANE       the row of the page table
  POSITION   the position of its first query token in the sequence
  BEGIN, END the range of key positions
  PART       where the partial results of its query tile begin, in tokens; unused if the query tile has one split
  SPLIT      the number of this split + SPLITS * the number of splits of the query tile

If rows of a decode step share the pages of their first keys, a list of its own (`SharedRows`) holds the shared ranges,
in tiles of the rows that share them. The step's list then covers only the private keys of each row, and the row's
result combines these with the partial results that the shared ranges leave for it.

A task is a work tile and a KV head. Task t has work tile t // K and KV head t % K.

Shape letters: S sequences, W distinct windows of the model's layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.launch import Kernel, jit, tl

HEADER, FIELDS = 256, 8
FIRST, TOKENS, LANE, POSITION, BEGIN, END, PART, SPLIT = range(FIELDS)
SPLITS = 1 << 16
ALIGN = 64  # keys; a window's first range begins at a multiple, and a decode's block of keys divides it
SHORTEST, LONGEST = 64, 2048  # keys of a decode's split, unless the sequence would have too many splits
MOST_SPLITS = 64  # of a decode; one program combines them all
PARTIALS = 4096  # partial results of a decode step, about: with more sequences each may have fewer splits
WHOLE = 1 << 26  # the split of sequences that are not split, a multiple of all other splits
SHORTEST_PREFILL = 512  # keys of a prefill tile's split, at least
CLASSES = 8  # of lengths, by which the work tiles of a decode step are ordered
BLOCKS = (64, 1024, 2048, 4096, 8192)  # sequences that variants of the kernel take; most processes use two of them
DOUBLINGS = 15  # of a split, until it is long enough: from 64 keys to 2 million

Ints = NDArray[np.int64]


def split_of(sequences: int, num_kv: int, chip: Chip) -> int:
    """Return the keys of a decode's split: fewer if the sequences alone do not fill the chip."""
    tasks = sequences * num_kv * 128 // max(chip.processors, 1)
    return min(max(1 << max(tasks - 1, 0).bit_length(), SHORTEST), LONGEST)


def splits_of(sequences: int) -> int:
    """Return the most splits of a sequence in a decode step (one more if a window cuts the first)."""
    return min(max(PARTIALS // sequences, 1), MOST_SPLITS)


def partials_for(max_seqs: int, context: int) -> int:
    """Return the most partial results of any decode step: sequences * (splits_of(sequences) + 1)."""
    return min(max(PARTIALS, max_seqs), max_seqs * min(-(-context // SHORTEST), MOST_SPLITS)) + max_seqs


@dataclass(frozen=True)
class SharedRows:
    """Key ranges that the S rows of a decode step share. All tensors are int32 on the device.

    list: a list of work tiles, in which FIRST and TOKENS select from `members` [any], rows of the step; SPLIT is the
    number of the partial result that the work tile leaves for each of these rows; PART is unused. ends: [S], where each
    row's private keys begin. partials: [S], the number of partial results for each row. bases: [W, S], where each row's
    partial results begin; written together with the step's lists.
    """

    list: Tensor
    members: Tensor
    ends: Tensor
    partials: Tensor
    bases: Tensor


@jit("sequences", "base", "most", "list_size", "bases_size")
def _plan_kernel(
    lanes_ptr, lens_ptr, windows_ptr, lists_ptr, shared_ptr, ends_ptr, partials_ptr, bases_ptr,
    sequences, base, most, list_size, bases_size,
    BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr, HEADER: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr,
    ALIGN: tl.constexpr, CLASSES: tl.constexpr, DOUBLINGS: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the work tiles of a decode step, one program a window. Each sequence has count - 1 work tiles of `split`
    keys, and one of the rest."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    list_ptr = lists_ptr + tl.program_id(0) * list_size
    window = tl.load(windows_ptr + tl.program_id(0))
    s = tl.arange(0, BLOCK_S)
    lane = tl.load(lanes_ptr + s, mask=s < sequences, other=0).to(tl.int32)
    length = tl.load(lens_ptr + s, mask=s < sequences, other=0)
    begin = tl.where(window > 0, tl.maximum(length - window, 0) // ALIGN * ALIGN, 0)
    partials = tl.zeros([BLOCK_S], tl.int32)
    if SHARED:
        begin = tl.maximum(begin, tl.load(ends_ptr + s, mask=s < sequences, other=0))
        partials = tl.load(partials_ptr + s, mask=s < sequences, other=0)
    split = tl.zeros([BLOCK_S], tl.int32) + base
    for _ in tl.static_range(DOUBLINGS):
        split = tl.where(split * most < length - begin, split * 2, split)
    start = begin // split
    count = tl.where(length > 0, (length + split - 1) // split - start, 0)
    rest = length - tl.maximum(begin, (start + count - 1) * split)

    longest = tl.maximum(tl.max(tl.where(count > 1, split, rest), 0), 1)
    whole_class = (longest - split) * CLASSES // longest
    rest_class = (longest - rest) * CLASSES // longest
    whole_at = tl.zeros([BLOCK_S], tl.int32)
    rest_at = tl.zeros([BLOCK_S], tl.int32)
    total = tl.sum(whole_at, 0)
    for number in tl.static_range(CLASSES):
        whole = tl.where((whole_class == number) & (count > 1), count - 1, 0)
        both = whole + tl.where((rest_class == number) & (count > 0), 1, 0)
        place = total + tl.cumsum(both, 0) - both
        whole_at = tl.where(whole_class == number, place, whole_at)
        rest_at = tl.where(rest_class == number, place + whole, rest_at)
        total += tl.sum(both, 0)
    parts = tl.where(count > 1, count, 0) + partials
    part = tl.cumsum(parts, 0) - parts

    header = tl.arange(0, HEADER)
    tl.store(list_ptr + header, tl.where(header == 0, total, 0))
    if SHARED:
        tl.store(bases_ptr + tl.program_id(0) * bases_size + s, part, mask=s < sequences)
        if tl.program_id(0) == 0:
            tl.store(shared_ptr + header, tl.zeros([HEADER], tl.int32), mask=header > 0)
    for first_j in range(0, tl.max(count, 0), BLOCK_J):
        j = (first_j + tl.arange(0, BLOCK_J))[None, :]
        here = j < count[:, None]
        at = tl.where(j == count[:, None] - 1, rest_at[:, None], whole_at[:, None] + j)
        tile_ptr = list_ptr + HEADER + at * FIELDS
        from_key = (start[:, None] + j) * split[:, None]
        tl.store(tile_ptr, s[:, None], mask=here)
        tl.store(tile_ptr + 1, 1 + partials[:, None] * SPLITS, mask=here)
        tl.store(tile_ptr + 2, lane[:, None], mask=here)
        tl.store(tile_ptr + 3, length[:, None] - 1, mask=here)
        tl.store(tile_ptr + 4, tl.maximum(from_key, begin[:, None]), mask=here)
        tl.store(tile_ptr + 5, tl.minimum(from_key + split[:, None], length[:, None]), mask=here)
        tl.store(tile_ptr + 6, part[:, None], mask=here)
        tl.store(tile_ptr + 7, j + count[:, None] * SPLITS, mask=here)


def _launch(
    lanes: Tensor, kv_lens: Tensor, windows: Tensor, lists: Tensor, base: int, most: int, shared: SharedRows | None
) -> None:
    count, capacity = len(lanes), (lists.shape[1] - HEADER) // FIELDS
    assert lanes.dtype == torch.int64
    assert kv_lens.dtype == windows.dtype == lists.dtype == torch.int32
    assert lanes.shape == kv_lens.shape
    assert lanes.is_contiguous()
    assert kv_lens.is_contiguous()
    assert lists.stride() == (lists.shape[1], 1)
    assert len(windows) == len(lists)
    assert base % ALIGN == 0 or ALIGN % base == 0
    assert 0 < count <= min(capacity, BLOCKS[-1])
    block = next(size for size in BLOCKS if size >= count)
    pdl = Chip.of(lanes.device).dependent_launch
    tables: tuple[Tensor, ...] | tuple[None, ...] = (None, None, None, None)
    bases_size = 0
    if shared is not None:
        tables, bases_size = (shared.list, shared.ends, shared.partials, shared.bases), shared.bases.stride(0)
        assert shared.list.dtype == shared.ends.dtype == shared.partials.dtype == shared.bases.dtype == torch.int32
        assert min(len(shared.ends), len(shared.partials), shared.bases.shape[1]) >= count
    _plan_kernel[(len(windows),)](
        lanes, kv_lens, windows, lists, *tables, count, base, most, lists.shape[1], bases_size,
        block, max(1024 // block, 1), HEADER, FIELDS, SPLITS, ALIGN, CLASSES, DOUBLINGS, shared is not None, pdl,
        num_warps=4 if block == BLOCKS[0] else 16 if block < 4096 else 32, launch_pdl=pdl,
    )  # fmt: skip


def _twin(
    lanes: Tensor, kv_lens: Tensor, windows: Tensor, lists: Tensor, base: int, most: int, shared: SharedRows | None
) -> None:
    """Write the lists of a step with one token a sequence to `lists`, int32 [W, HEADER + capacity * FIELDS].

    lanes: int64 [S]. kv_lens: int32 [S], with the token itself. windows: int32 [W], 0 for none. A sequence's keys are
    split at multiples of `base` keys (a multiple or a divisor of ALIGN), doubled until the range that it sees has at
    most `most` splits. shared: the ranges that the sequences share; writes its `bases`, and resets its list's counters.
    """
    lanes_of, lens = (_host(x) for x in (lanes, kv_lens))
    ends, partials = (_host(x)[: len(lens)] for x in (shared.ends, shared.partials)) if shared else (None, None)
    if shared:
        shared.list[1:HEADER] = 0
    for number, (window, whole) in enumerate(zip(windows.tolist(), lists, strict=True)):
        begin = np.maximum(lens - window, 0) // ALIGN * ALIGN if window else np.zeros_like(lens)
        if ends is not None:
            begin = np.maximum(begin, ends)
        split = np.full_like(lens, base)
        while (short := split * most < lens - begin).any():
            split[short] *= 2
        first = np.arange(len(lens))
        origin = np.zeros_like(lens)
        found, nominal = cut(first, np.ones_like(lens), lanes_of, lens - 1, begin, lens, origin, split, partials)
        if shared:
            shared.bases[number, found[:, FIRST]] = torch.from_numpy(found[:, PART].copy()).to(whole.device)
        longest = nominal.max(initial=1)
        order = np.argsort((longest - nominal) * CLASSES // longest, kind="stable")
        whole[:HEADER] = 0
        whole[0] = len(found)
        whole[HEADER : HEADER + found.size] = torch.from_numpy(found[order].ravel()).to(whole.device)


def _host(tensor: Tensor) -> Ints:
    return tensor.cpu().numpy().astype(np.int64)


def cut(
    first: Ints, tokens: Ints, lanes: Ints, position: Ints, begin: Ints, end: Ints, origin: Ints, split: Ints,
    partials: Ints | None = None,
) -> tuple[NDArray[np.int32], Ints]:  # fmt: skip
    """Split query tiles' keys [begin, end) every `split` keys from `origin` on. All arguments are [query tiles].

    Returns the work tiles [n, FIELDS] and their nominal lengths [n]: the split, but for a query tile's last the rest.
    """
    start = (begin - origin) // split
    count = np.where(end > begin, -(-(end - origin) // split) - start, 0)
    parts = np.where(count > 1, count * tokens, 0)
    if partials is not None:
        parts, tokens = parts + partials, tokens + SPLITS * partials
    owner = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    cuts = origin[owner] + (start[owner] + number) * split[owner]
    found = np.empty((len(owner), FIELDS), np.int32)
    for field, values in ((FIRST, first), (TOKENS, tokens), (LANE, lanes), (POSITION, position)):
        found[:, field] = values[owner]
    found[:, BEGIN] = np.maximum(cuts, begin[owner])
    found[:, END] = np.minimum(cuts + split[owner], end[owner])
    found[:, PART] = (np.cumsum(parts) - parts)[owner]
    found[:, SPLIT] = number + count[owner] * SPLITS
    nominal = np.where(number == count[owner] - 1, found[:, END] - found[:, BEGIN], split[owner])
    return found, nominal


plan_decode = Kernel(_launch, _twin)


@dataclass(frozen=True)
class Chunks:
    """Prefill chunks of n sequences, all int64 [n]: the first query token in the step, the number of query tokens, the
    row of the page table, and the number of keys, query tokens included."""

    first: Ints
    query_lens: Ints
    lanes: Ints
    kv_lens: Ints


def prefill_tiles(chunks: Chunks, window: int, tile_rows: int, block: int, tasks: int, most: int) -> NDArray[np.int32]:
    """Return the work tiles [n, FIELDS] of prefill chunks, with up to `tile_rows` tokens, those with most keys first.

    The keys of a query tile are split evenly, if they are many more than its share would be of `tasks` equal shares,
    and only so far that there are at most `most` partial results (0: never). Ranges begin at multiples of `block`.
    """
    first, tokens, lanes, position, begin, end = _query_tiles(chunks, window, tile_rows, block)
    length = end - begin
    share = max(int(length.sum()) // tasks, SHORTEST_PREFILL)
    while True:
        count = np.maximum((length + share // 2) // share, 1)
        split = -(-length // (count * block)) * block
        count = -(-length // split)
        if int((tokens * count)[count > 1].sum()) <= most:
            break
        share *= 2
    found, nominal = cut(first, tokens, lanes, position, begin, end, begin, split)
    return found[np.argsort(-nominal, kind="stable")]


def _query_tiles(chunks: Chunks, window: int, tile_rows: int, block: int) -> tuple[Ints, ...]:
    """Cut prefill chunks into query tiles. Returns, all int64 [query tiles]: the first token in the step, the number of
    tokens, lane, position, and begin and end of the range of keys that the tile sees."""
    count = -(-chunks.query_lens // tile_rows)
    owner = np.repeat(np.arange(len(count)), count)
    offset = (np.arange(len(owner)) - (np.cumsum(count) - count)[owner]) * tile_rows
    tokens = np.minimum(chunks.query_lens[owner] - offset, tile_rows)
    position = (chunks.kv_lens - chunks.query_lens)[owner] + offset
    end = position + tokens
    begin = np.maximum(position - window + 1, 0) // block * block if window else np.zeros_like(end)
    return chunks.first[owner] + offset, tokens, chunks.lanes[owner], position, begin, end


def list_of(work_tiles: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the list of work tiles [n, FIELDS], to be copied to the device."""
    whole = np.zeros(HEADER + work_tiles.size, np.int32)
    whole[0] = len(work_tiles)
    whole[HEADER:] = work_tiles.ravel()
    return whole


@jit()
def schedule(task, programs, tasks):
    """Return a program's first task and the number of programs that take any, if a program takes each `programs`-th
    task. The programs are as few as finish in the same number of rounds: with more, few of them would work in the last
    round, and not fill the memory."""
    programs = tl.cdiv(tasks, tl.maximum(tl.cdiv(tasks, programs), 1))
    return tl.where(task < programs, task, tasks), programs


@jit()
def next_task(list_ptr, layer, tasks):
    """Take the next task; `tasks` if there are no more."""
    task = tasks
    if tasks > tl.num_programs(0):
        task = tl.num_programs(0) + tl.atomic_add(list_ptr + 1 + layer, 1, sem="relaxed")
    return task


@jit()
def read_tile(tile_ptr):
    """Return the fields of a work tile."""
    first = tl.load(tile_ptr)
    tokens = tl.load(tile_ptr + 1)
    lane = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
    begin = tl.load(tile_ptr + 4)
    end = tl.load(tile_ptr + 5)
    part = tl.load(tile_ptr + 6)
    split = tl.load(tile_ptr + 7)
    return first, tokens, lane, position, begin, end, part, split
