"""The work of an attention step as a list of items in device memory, and the kernel that lists a decode step's.

An item is a tile of query tokens of one sequence against a range of its keys. A tile whose keys are cut into several
ranges has an item for each (a split); the attention kernel merges them. Items of equal splits come first, those with
fewest keys last, so that the programs which take them one by one end together.

A list is int32 [HEADER + items * FIELDS]. The header is the number of items, and then a counter a layer, of what
programs have asked for. An item's fields:
  FIRST      its first query token in the step
  TOKENS     its query tokens (of a decode + SPLITS * its priors, see below)
  LANE       the row of the page table
  POSITION   of the first query token in its sequence
  BEGIN, END the range of key positions
  PART       where the partial results of its tile begin, in tokens; not used where the tile has one split
  SPLIT      the number of this split + SPLITS * the number of the tile's splits

Where rows of a decode step share the pages of their first keys, these are a list of their own: of ranges of keys, and
tiles of the rows that share them (see SharedRows). Each row then has items of its own, private keys alone; merged with
them are its priors, the partial results that shared ranges have left for it.

Shape letters: S sequences, W distinct windows of the model's layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.kernels.launch import Chip, Kernel, jit, tl

HEADER, FIELDS = 256, 8
FIRST, TOKENS, LANE, POSITION, BEGIN, END, PART, SPLIT = range(FIELDS)
SPLITS = 1 << 16
ALIGN = 64  # key positions: where a window's first range begins is a multiple, and a decode's block of keys a divisor
SHORTEST, LONGEST = 64, 2048  # keys of a decode's split, unless it would have more splits than it may
MOST_SPLITS = 64  # of a decode; the last program to end merges them, alone
SLOTS = 4096  # partial results of a decode step, about: with more sequences a sequence may have fewer splits
WHOLE = 1 << 26  # the split of sequences that have only one, a multiple of all others
SHORTEST_PREFILL = 512  # keys of a prefill tile's split, at least
DEPENDENT_LAUNCH = True  # of this kernel and the attention's, where the chip can
CLASSES = 8  # of lengths, by which a decode step's items are ordered
BLOCKS = (64, 1024, 2048, 4096, 8192)  # sequences of the kernels that make the list; two of them in most processes
DOUBLINGS = 15  # of a split, until it is long enough: from 64 keys to 2 million

Ints = NDArray[np.int64]


def dependent(chip: Chip) -> bool:
    """Whether these kernels are launched before the one ahead of them has ended, and wait for it themselves."""
    return DEPENDENT_LAUNCH and chip.dependent_launch


def split_of(sequences: int, num_kv: int, chip: Chip) -> int:
    """Keys of a decode's split: fewer where the sequences alone do not fill the chip."""
    units = sequences * num_kv * 128 // max(chip.processors, 1)
    return min(max(1 << max(units - 1, 0).bit_length(), SHORTEST), LONGEST)


def splits_of(sequences: int) -> int:
    """The most splits that a sequence of a decode step may have (one more, where a window cuts the first)."""
    return min(max(SLOTS // sequences, 1), MOST_SPLITS)


def slots_for(max_seqs: int, context: int) -> int:
    """Partial results that any decode step has at most: sequences * (splits_of(sequences) + 1) of them."""
    return min(max(SLOTS, max_seqs), max_seqs * min(-(-context // SHORTEST), MOST_SPLITS)) + max_seqs


@dataclass(frozen=True)
class SharedRows:
    """What the S rows of a decode step share, all int32 on the device.

    list: its items, as above, but FIRST and TOKENS say which of `members` [any], rows of the step, and SPLIT alone is
    the number of the prior that the item leaves for each of them; PART is not used. ends: [S], where each row's private
    keys begin; priors: [S], how many it has. Written with a step's lists: bases [W, S], where the partial results of
    each row begin.
    """

    list: Tensor
    members: Tensor
    ends: Tensor
    priors: Tensor
    bases: Tensor


@jit("sequences", "base", "most", "list_size", "bases_size")
def _plan_kernel(
    lanes_ptr, lens_ptr, windows_ptr, lists_ptr, shared_ptr, ends_ptr, priors_ptr, bases_ptr,
    sequences, base, most, list_size, bases_size,
    BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr, HEADER: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr,
    ALIGN: tl.constexpr, CLASSES: tl.constexpr, DOUBLINGS: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a window. Each sequence has count - 1 items of `split` keys, and one of what is left."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    list_ptr = lists_ptr + tl.program_id(0) * list_size
    window = tl.load(windows_ptr + tl.program_id(0))
    s = tl.arange(0, BLOCK_S)
    lane = tl.load(lanes_ptr + s, mask=s < sequences, other=0).to(tl.int32)
    length = tl.load(lens_ptr + s, mask=s < sequences, other=0)
    begin = tl.where(window > 0, tl.maximum(length - window, 0) // ALIGN * ALIGN, 0)
    priors = tl.zeros([BLOCK_S], tl.int32)
    if SHARED:
        begin = tl.maximum(begin, tl.load(ends_ptr + s, mask=s < sequences, other=0))
        priors = tl.load(priors_ptr + s, mask=s < sequences, other=0)
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
    parts = tl.where(count > 1, count, 0) + priors
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
        item_ptr = list_ptr + HEADER + at * FIELDS
        from_key = (start[:, None] + j) * split[:, None]
        tl.store(item_ptr, s[:, None], mask=here)
        tl.store(item_ptr + 1, 1 + priors[:, None] * SPLITS, mask=here)
        tl.store(item_ptr + 2, lane[:, None], mask=here)
        tl.store(item_ptr + 3, length[:, None] - 1, mask=here)
        tl.store(item_ptr + 4, tl.maximum(from_key, begin[:, None]), mask=here)
        tl.store(item_ptr + 5, tl.minimum(from_key + split[:, None], length[:, None]), mask=here)
        tl.store(item_ptr + 6, part[:, None], mask=here)
        tl.store(item_ptr + 7, j + count[:, None] * SPLITS, mask=here)


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
    pdl = dependent(Chip.of(lanes.device))
    options = {"launch_pdl": True} if pdl else {}
    tables: tuple[Tensor, ...] | tuple[None, ...] = (None, None, None, None)
    bases_size = 0
    if shared is not None:
        tables, bases_size = (shared.list, shared.ends, shared.priors, shared.bases), shared.bases.stride(0)
        assert shared.list.dtype == shared.ends.dtype == shared.priors.dtype == shared.bases.dtype == torch.int32
        assert min(len(shared.ends), len(shared.priors), shared.bases.shape[1]) >= count
    _plan_kernel[(len(windows),)](
        lanes, kv_lens, windows, lists, *tables, count, base, most, lists.shape[1], bases_size,
        block, max(1024 // block, 1), HEADER, FIELDS, SPLITS, ALIGN, CLASSES, DOUBLINGS, shared is not None, pdl,
        num_warps=4 if block == BLOCKS[0] else 16 if block < 4096 else 32, **options,
    )  # fmt: skip


def _twin(
    lanes: Tensor, kv_lens: Tensor, windows: Tensor, lists: Tensor, base: int, most: int, shared: SharedRows | None
) -> None:
    """Write the lists of a step of one token a sequence: lists int32 [W, HEADER + capacity * FIELDS].

    lanes: int64 [S]; kv_lens: int32 [S], with the token itself; windows: int32 [W], 0 for none. A sequence's keys are
    cut at multiples of its split: `base` keys (a multiple of ALIGN, or a divisor), doubled until the range that it sees
    has `most` splits. shared: what the sequences share, whose `bases` are written too and whose list may be taken from
    anew.
    """
    lanes_of, lens = (_host(x) for x in (lanes, kv_lens))
    ends, priors = (_host(x)[: len(lens)] for x in (shared.ends, shared.priors)) if shared else (None, None)
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
        items, nominal = cut(first, np.ones_like(lens), lanes_of, lens - 1, begin, lens, origin, split, priors)
        if shared:
            shared.bases[number, items[:, FIRST]] = torch.from_numpy(items[:, PART].copy()).to(whole.device)
        longest = nominal.max(initial=1)
        order = np.argsort((longest - nominal) * CLASSES // longest, kind="stable")
        whole[:HEADER] = 0
        whole[0] = len(items)
        whole[HEADER : HEADER + items.size] = torch.from_numpy(items[order].ravel()).to(whole.device)


def _host(tensor: Tensor) -> Ints:
    return tensor.cpu().numpy().astype(np.int64)


def cut(
    first: Ints, tokens: Ints, lanes: Ints, position: Ints, begin: Ints, end: Ints, origin: Ints, split: Ints,
    priors: Ints | None = None,
) -> tuple[NDArray[np.int32], Ints]:  # fmt: skip
    """The items [n, FIELDS] of tiles whose keys [begin, end) are cut every `split` keys from `origin` on, and their
    lengths (that of a tile's last; for the others the split). All arguments are [tiles]."""
    start = (begin - origin) // split
    count = np.where(end > begin, -(-(end - origin) // split) - start, 0)
    parts = np.where(count > 1, count * tokens, 0)
    if priors is not None:
        parts, tokens = parts + priors, tokens + SPLITS * priors
    owner = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    cuts = origin[owner] + (start[owner] + number) * split[owner]
    items = np.empty((len(owner), FIELDS), np.int32)
    for field, values in ((FIRST, first), (TOKENS, tokens), (LANE, lanes), (POSITION, position)):
        items[:, field] = values[owner]
    items[:, BEGIN] = np.maximum(cuts, begin[owner])
    items[:, END] = np.minimum(cuts + split[owner], end[owner])
    items[:, PART] = (np.cumsum(parts) - parts)[owner]
    items[:, SPLIT] = number + count[owner] * SPLITS
    nominal = np.where(number == count[owner] - 1, items[:, END] - items[:, BEGIN], split[owner])
    return items, nominal


plan_decode = Kernel(_launch, _twin)


@dataclass(frozen=True)
class Chunks:
    """Prefill chunks of n sequences, all int64 [n]: the first query token in the step, how many there are, the row of
    the page table, and the keys with the query tokens."""

    first: Ints
    query_lens: Ints
    lanes: Ints
    kv_lens: Ints


def prefill_items(chunks: Chunks, window: int, tile: int, block: int, units: int, slots: int) -> NDArray[np.int32]:
    """The items [n, FIELDS] of prefill chunks, in tiles of up to `tile` tokens, those with most keys first.

    A tile's keys are split, evenly, only where it has many more of them than each of `units` items would if all had
    equal shares, and never so that all partial results need more than `slots` (0: not at all). Ranges begin at
    multiples of `block`.
    """
    first, tokens, lanes, position, begin, end = _prefill_tiles(chunks, window, tile, block)
    length = end - begin
    share = max(int(length.sum()) // units, SHORTEST_PREFILL)
    while True:
        count = np.maximum((length + share // 2) // share, 1)
        split = -(-length // (count * block)) * block
        count = -(-length // split)
        if int((tokens * count)[count > 1].sum()) <= slots:
            break
        share *= 2
    items, nominal = cut(first, tokens, lanes, position, begin, end, begin, split)
    return items[np.argsort(-nominal, kind="stable")]


def _prefill_tiles(chunks: Chunks, window: int, tile: int, block: int) -> tuple[Ints, ...]:
    """Of each tile of prefill chunks, all int64 [tiles]: its first token in the step, tokens, lane, position, and the
    range of keys that it sees."""
    tiles = -(-chunks.query_lens // tile)
    owner = np.repeat(np.arange(len(tiles)), tiles)
    offset = (np.arange(len(owner)) - (np.cumsum(tiles) - tiles)[owner]) * tile
    tokens = np.minimum(chunks.query_lens[owner] - offset, tile)
    position = (chunks.kv_lens - chunks.query_lens)[owner] + offset
    end = position + tokens
    begin = np.maximum(position - window + 1, 0) // block * block if window else np.zeros_like(end)
    return chunks.first[owner] + offset, tokens, chunks.lanes[owner], position, begin, end


def prefill_list(items: NDArray[np.int32]) -> NDArray[np.int32]:
    """The list of these items, to be copied to the device."""
    whole = np.zeros(HEADER + items.size, np.int32)
    whole[0] = len(items)
    whole[HEADER:] = items.ravel()
    return whole
