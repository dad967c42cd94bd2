"""Work tiles, the units of attention: their lists, and the list of a decode step.

A work tile is a tile of query tokens of one sequence against a range of its keys. If the keys of a decode are split
into several ranges, each split is a work tile, and the attention kernel combines their partial results. In a step where
some sequence has more keys than are left whole (`unsplit`), all sequences are split. Work tiles of whole splits come
first and those with the fewest keys last, so that all programs end at about the same time.

A list is an int32 tensor [HEADER + work tiles * FIELDS]. Its header holds the number of work tiles, followed by one
counter per layer, from which the scheduler (fastgen.kernels.triton.work_tiles) hands out tasks. The fields of a work
tile are:
  FIRST      the index of its first query token in the step
  TOKENS     the number of its query tokens (in decodes: + SPLITS if there is a partial result for shared keys)
  LANE       the row of the page table
  POSITION   the position of its first query token in the sequence
  BEGIN, END the range of key positions
  PART       where the partial results of a decode begin; unused if there are none
  SPLIT      the index of this split + SPLITS * the number of splits of the query tile

If rows of a decode step share the pages of their first keys, a separate list (`SharedRows`) holds the shared ranges, in
tiles of the rows that share them. The step's own list then covers only the private keys of each row, and a row's result
begins with the partial result of its shared range.

A task is a pair of a work tile and a KV head. Task t is work tile t // K with KV head t % K.

Shape letters: S sequences, K KV heads, W distinct windows of the model's layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.kernels.launch import Kernel

HEADER, FIELDS = 256, 8
FIRST, TOKENS, LANE, POSITION, BEGIN, END, PART, SPLIT = range(FIELDS)
SPLITS = 1 << 16
ALIGN = 64  # keys; a window's first range begins at a multiple of it, and a decode's block of keys divides it
WHOLE = 1 << 26  # the split size, in keys, of sequences that are not split
CLASSES = 8  # classes of lengths by which the work tiles of a decode step are ordered
BLOCKS = (64, 1024, 2048, 4096, 8192)  # maximum sequences of each variant of the kernel; most processes use two of them

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SharedRows:
    """The key ranges that the S rows of a decode step share. All tensors are int32 on the device.

    list: list of work tiles whose FIRST and TOKENS select a slice of `members`; PART and SPLIT are unused. members:
    rows of the step; each work tile leaves a partial result for every member in its slice. ends: [S], the position at
    which each row's private keys begin, 0 if the row shares no keys. bases: [W, S], index of each row's partial result,
    written together with the step's lists.
    """

    list: Tensor
    members: Tensor
    ends: Tensor
    bases: Tensor


def _twin(
    lanes: Tensor, kv_lens: Tensor, windows: Tensor, lists: Tensor, split: int, shared: SharedRows | None,
    unsplit: int = 0, most_split: int = BLOCKS[-1],
) -> None:  # fmt: skip
    """Write the lists of a step with one token per sequence to `lists`, int32 [W, HEADER + capacity * FIELDS].

    lanes: int64 [S], the row of the page table of each sequence. kv_lens: int32 [S], number of keys of each sequence,
    including the new token, or 0 for a sequence that has no token in the step. windows: int32 [W], 0 for no window.
    split: number of keys, a multiple or a divisor of ALIGN; keys are split at its multiples. shared: the ranges that
    the sequences share; its `bases` are written, and the counters of its list are reset. unsplit: number of keys up to
    which sequences are not split, if none has more. most_split: number of sequences with keys above which none is
    split.
    """
    lanes_of, lens = (_host(x) for x in (lanes, kv_lens))
    split = split if np.count_nonzero(lens) <= most_split else WHOLE
    ends = _host(shared.ends)[: len(lens)] if shared else np.zeros_like(lens)
    if shared:
        shared.list[1:HEADER] = 0
    for number, (window, whole) in enumerate(zip(windows.tolist(), lists, strict=True)):
        begin = np.maximum(lens - window, 0) // ALIGN * ALIGN if window else np.zeros_like(lens)
        tiles = _cut(lanes_of, lens, np.maximum(begin, ends), split, unsplit, (ends > 0).astype(np.int64))
        if shared:
            shared.bases[number, tiles[:, FIRST]] = torch.from_numpy(tiles[:, PART].copy()).to(whole.device)
        length, rest = tiles[:, END] - tiles[:, BEGIN], tiles[:, SPLIT] % SPLITS + 1 == tiles[:, SPLIT] // SPLITS
        longest = np.where(rest, length, split).max(initial=1)
        order = np.argsort(np.where(rest, (longest - length) * CLASSES // longest, -1), kind="stable")
        whole[:HEADER] = 0
        whole[0] = len(tiles)
        whole[HEADER : HEADER + tiles.size] = torch.from_numpy(tiles[order].ravel()).to(whole.device)


def _host(tensor: Tensor) -> Ints:
    return tensor.cpu().numpy().astype(np.int64)


def _cut(lanes: Ints, lens: Ints, begin: Ints, split: int, unsplit: int, partials: Ints) -> NDArray[np.int32]:
    """Return the work tiles [n, FIELDS] of decodes with keys [begin, lens), split at multiples of `split` if any
    sequence has more than `unsplit`.

    If one is split, all are: a longer work tile at the end would delay the step, which combines splits in any case.

    partials: [S], 1 for each sequence that has a partial result for shared keys, else 0. lanes, lens, begin: [S].
    """
    if (lens - begin).max(initial=0) > unsplit:
        unsplit = 0
    start = begin // split
    count = np.where(lens - begin > unsplit, -(-lens // split) - start, lens > begin)
    parts = np.where(count > 1, count, 0) + partials
    owner = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    cuts = (start[owner] + number) * split
    low, high = np.maximum(cuts, begin[owner]), np.where(number == count[owner] - 1, lens[owner], cuts + split)
    return tiles_of(
        owner, 1 + SPLITS * partials[owner], lanes[owner], lens[owner] - 1, low, high,
        (np.cumsum(parts) - parts)[owner], number + count[owner] * SPLITS,
    )  # fmt: skip


def tiles_of(
    first: Ints, tokens: Ints, lanes: Ints, position: Ints, begin: Ints, end: Ints,
    part: Ints | int = 0, split: Ints | int = SPLITS,
) -> NDArray[np.int32]:  # fmt: skip
    """Return work tiles [n, FIELDS], given their fields, [n] each. By default the keys are not split."""
    tiles = np.empty((len(first), FIELDS), np.int32)
    for field, values in enumerate((first, tokens, lanes, position, begin, end, part, split)):
        tiles[:, field] = values
    return tiles


plan_decode = Kernel(_twin, "fastgen.kernels.triton.work_tiles:plan_decode")


@dataclass(frozen=True)
class Chunks:
    """The prefill chunks of n sequences. All arrays are int64 [n].

    first: index of the first query token in the step. query_lens: number of query tokens. lanes: row of the page table.
    kv_lens: number of keys, including those of the query tokens.
    """

    first: Ints
    query_lens: Ints
    lanes: Ints
    kv_lens: Ints


def prefill_tiles(chunks: Chunks, window: int, tile_rows: int, block: int) -> NDArray[np.int32]:
    """Return the work tiles [n, FIELDS] of prefill chunks, with up to `tile_rows` tokens each, in order of falling
    numbers of keys. Ranges of keys begin at multiples of `block`."""
    count = -(-chunks.query_lens // tile_rows)
    owner = np.repeat(np.arange(len(count)), count)
    offset = (np.arange(len(owner)) - (np.cumsum(count) - count)[owner]) * tile_rows
    tokens = np.minimum(chunks.query_lens[owner] - offset, tile_rows)
    position = (chunks.kv_lens - chunks.query_lens)[owner] + offset
    end = position + tokens
    begin = np.maximum(position - window + 1, 0) // block * block if window else np.zeros_like(end)
    tiles = tiles_of(chunks.first[owner] + offset, tokens, chunks.lanes[owner], position, begin, end)
    return tiles[np.argsort(begin - end, kind="stable")]


def list_of(work_tiles: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the list that holds these work tiles [n, FIELDS], to be copied to the device."""
    whole = np.zeros(HEADER + work_tiles.size, np.int32)
    whole[0] = len(work_tiles)
    whole[HEADER:] = work_tiles.ravel()
    return whole
