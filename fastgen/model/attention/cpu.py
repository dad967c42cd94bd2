"""Fast attention for the CPU, in torch and MKL.

The bits of a query's result do not depend on the rest of the step (docs/determinism.md):

- Keys are processed in blocks of KEY_BLOCK positions, starting at position 0. Queries and keys of each block are
  multiplied by one matrix product, weights and values by another; the latter are added in the order of the blocks.
- The softmax runs over whole blocks, in which hidden keys have weight 0.
- BLAS sums the rows of small matrices in another order. So matrices are padded to a number of rows for which the order
  is the same (`padded_rows`), and the columns of values are split where the last ones differ (`_columns`).

Query tokens are grouped into tiles of one sequence each: a decode is one tile, a prefill chunk several. The batched
product of MKL takes the address of each matrix, so it reads blocks in place in the pool. If torch has no MKL, or a
block is not one contiguous piece of float32 memory, keys and values are copied for the batched product of torch.

Shape letters, in addition to the letters in interface.py: n tiles; N head tiles, one per tile and KV head, with number
tile * K + head; R query rows of a head tile, including padding; B blocks of the longest tile; M pairs of a block and a
head tile that sees it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device import mkl
from fastgen.device.mkl import Indices
from fastgen.device.processor import is_intel
from fastgen.device.threads import at_most
from fastgen.kernels import fp8_pages
from fastgen.model.attention.interface import StepLayout
from fastgen.model.kv_pool import KVPool

if TYPE_CHECKING:
    from fastgen.model.attention.shared import SharedPrefixes

INTEL_AVX2 = is_intel() and torch.backends.cpu.get_cpu_capability() == "AVX2"
"""True on an Intel processor with AVX2 only. There, MKL divides the rows of a matrix among threads if a batch has fewer
matrices than threads, or matrices of several sizes, and sums rows at the end of a thread's part in another order. It
also sums products of more than 64 columns in an order that depends on the number of rows. So all matrices of a batch
have one size there (KEY_STEP), threads are limited (`_threads`), and products have at most 64 columns (`_columns`)."""

KEY_BLOCK = 64
KEY_STEP = KEY_BLOCK if INTEL_AVX2 else 16  # products read a multiple of this many keys of a block
TILE_ROWS = 96  # maximum number of query rows of a prefill tile
MIN_SIZE = 16  # smaller heads are padded: MKL sums fewer columns in an order that depends on the number of rows
SCORES = 2**20  # approximate maximum number of scores in memory: many small operations take longer than slower memory


def padded_rows(rows: int, head_size: int) -> int:
    """Return the smallest number of rows >= `rows` whose matrix product has the same bits as a product of TILE_ROWS.

    MKL sums few rows in another order: with AVX-512 up to 4 rows if the head size is above 64, with AVX2 the rows after
    the last multiple of 6.
    """
    return 4 if rows <= 4 and head_size <= 64 else -(-rows // 12) * 12


def _columns(head_size: int) -> list[tuple[int, int]]:
    """Return (first column, number of columns) of the values in each product; the last two ranges may overlap.

    On AMD processors, MKL sums the columns after the last multiple of 16 in an order that depends on the threads. For
    more than 64 columns on some processors of Intel, see INTEL_AVX2.
    """
    if INTEL_AVX2 and head_size > 64:
        return [(first, 64) for first in (*range(0, head_size - 64, 64), head_size - 64)]
    whole = head_size // 16 * 16
    return [(0, whole), (head_size - 16, 16)] if whole < head_size else [(0, head_size)]


@dataclass
class _Tiles:
    """Tiles of one size, sorted by decreasing length, so that the head tiles that see a block are the first ones.

    targets: int64 [tokens], index in the step of the token of each result. queries: int64 [N * R], row of
    q.view(T * H, D) for each query row; padding repeats a row. results: int64 [tokens * H], row of sums in memory, as
    [R * M, D], for each result. rows: number of query rows of a head tile, without padding for decodes. sequences:
    int64 [n], index of each tile's sequence. position: int64 [R or 1, n, 1, 1], position of each query row.

    Three arrays describe the pairs in the order of their blocks, each int64 [M]. owner: the head tile. block: number of
    the block. seen: number of keys of the block up to the last one that the tile sees, in prefills KEY_BLOCK. runs:
    int64 [M, runs], indices of the runs of keys in the pool that make up the block.

    The following tensors are memory that all tiles of a step share. q: [N, R, D]. scores: [R, N, B * KEY_BLOCK], which
    the softmax replaces by the weights. sums: [R, M, D], products of weights and values. Of these two, the rows of a
    head tile lie next to each other in prefills, which makes products faster, and in decodes the head tiles of a row,
    so that the padding is apart. others: for each block after the first, a pair of tensors [rows, head tiles that see
    the block, D]: the part of the first block's sums to which this block's sums are added, and this block's sums.
    real_scores: the scores without padding, [rows, N, B * KEY_BLOCK]. real_scores_in_memory: the same, with the first
    two dimensions in the order of memory.
    """

    targets: Tensor
    queries: Tensor
    results: Tensor
    rows: int
    sequences: Indices
    position: Tensor
    owner: Indices
    block: Indices
    seen: Indices
    runs: Indices
    q: Tensor
    scores: Tensor
    sums: Tensor
    others: list[tuple[Tensor, Tensor]]
    real_scores: Tensor = field(init=False)
    real_scores_in_memory: Tensor = field(init=False)
    _hidden: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.real_scores = self.scores[: self.rows]
        self.real_scores_in_memory = _in_memory(self.real_scores)

    def move(self, ends: Indices) -> None:
        """Set the positions of decodes. ends: int64 [S], the new KV lengths. The number of KEY_STEPs that each tile
        sees must not change."""
        self.position = torch.from_numpy(ends[self.sequences] - 1).view(1, -1, 1, 1)
        self._hidden.clear()

    def hidden(self, window: int) -> tuple[Tensor, Tensor]:
        """Return the scores of all keys but the first ones, which all query rows see, [rows, n, K, later keys], and
        which of these keys are hidden from each query row: bool [rows or 1, n, 1, later keys]."""
        if window not in self._hidden:
            seen = 0 if window else int(self.position.min()) + 1
            # In memory the tiles come first, as in the scores of prefills: torch.where then takes half the time.
            ahead = self.position.transpose(0, 1) - torch.arange(seen, self.scores.shape[2], device="cpu")
            hidden = ahead < 0
            hidden = hidden.logical_or_(ahead >= window) if window else hidden
            later = self.real_scores.view(self.rows, len(self.sequences), -1, self.scores.shape[2])[..., seen:]
            self._hidden[window] = later, hidden.transpose(0, 1)
        return self._hidden[window]


class _InPlace:
    """The matrix products of tiles in MKL, which reads blocks in place in a layer's pool [pages, K, P, D].

    Of each block of a decode only the keys that the tile sees are read, rounded up to a multiple of KEY_STEP. Prefills
    read whole blocks, since MKL divides products of one size better among its threads.
    """

    def __init__(self, tiles: _Tiles) -> None:
        rows, _, size = tiles.sums.shape
        steps = -(-tiles.seen // KEY_STEP)
        order, counts = np.argsort(steps, kind="stable"), np.bincount(steps)  # MKL takes products in groups of one size
        groups, keys = counts[counts > 0], np.flatnonzero(counts) * KEY_STEP
        self._blocks = tiles.runs[order, 0] * (KEY_BLOCK * size * 4)  # bytes from the start of the pool
        self._at = np.empty_like(self._blocks)
        owner, same = tiles.owner[order], np.ones_like(keys)
        q = _addresses(tiles.q, owner * (rows * size)), size
        row, head_tile, _ = tiles.scores.stride()
        scores = _addresses(tiles.scores, owner * head_tile + tiles.block[order] * KEY_BLOCK), row
        self._score = mkl.batch(groups, rows * same, keys, size * same, q, (self._at, size), scores, transposed=True)
        row, pair, _ = tiles.sums.stride()
        sums = _addresses(tiles.sums, order * pair)
        self._sums = {
            first: mkl.batch(groups, rows * same, width * same, keys, scores, (self._at, size), (sums + 4 * first, row))
            for first, width in _columns(size)
        }

    def score(self, keys: Tensor) -> None:
        np.add(self._blocks, keys.data_ptr(), out=self._at)
        self._score()

    def sum(self, values: Tensor) -> None:
        for first, multiply in self._sums.items():
            np.add(self._blocks, values.data_ptr() + 4 * first, out=self._at)
            multiply()


def _threads(tiles: _Tiles) -> AbstractContextManager[None]:
    """Return a context that limits the threads of the matrix products of tiles, if the bits depend on them."""
    return at_most(len(tiles.owner)) if INTEL_AVX2 else nullcontext()


def _addresses(x: Tensor, numbers: Indices) -> Indices:
    """Return the addresses of the elements with these numbers in a float32 tensor."""
    return numbers * 4 + x.data_ptr()


class _Copied:
    """The matrix products of tiles in torch, on copies of the blocks, for a pool of any dtype, page size and head
    size."""

    def __init__(self, tiles: _Tiles) -> None:
        self._tiles = tiles
        self._padding = 0, max(MIN_SIZE - tiles.q.shape[2], 0)
        self._owner, self._block, self._runs = map(_flat, (tiles.owner, tiles.block, tiles.runs))

    def score(self, keys: Tensor) -> None:
        rows = F.pad(self._tiles.q.index_select(0, self._owner), self._padding)
        scores = torch.bmm(rows, self._blocks(keys).transpose(1, 2))
        _by_block(self._tiles.scores)[:, self._owner, self._block] = scores.transpose(0, 1)

    def sum(self, values: Tensor) -> None:
        weights = _by_block(self._tiles.scores)[:, self._owner, self._block].transpose(0, 1)
        blocks = self._blocks(values)
        for first, width in _columns(blocks.shape[2]):
            product = torch.bmm(weights, blocks.narrow(2, first, width)).transpose(0, 1)
            sums = self._tiles.sums[..., first : first + width]
            sums.copy_(product[..., : sums.shape[2]])

    def _blocks(self, pool: Tensor) -> Tensor:
        """Return the block of each pair, float32 [M, KEY_BLOCK, D], padded."""
        copy = fp8_pages.read(pool, self._runs, KEY_BLOCK // self._tiles.runs.shape[1])
        return F.pad(copy.view(-1, KEY_BLOCK, pool.shape[-1]), self._padding)


def _by_block(scores: Tensor) -> Tensor:
    """Return scores [R, N, B * KEY_BLOCK] as [R, N, B, KEY_BLOCK]."""
    return scores.view(*scores.shape[:2], -1, KEY_BLOCK)


def _in_memory(x: Tensor) -> Tensor:
    """Return scores or sums with the first two dimensions in the order of memory."""
    return x if x.is_contiguous() else x.transpose(0, 1)


def _flat(array: Indices) -> Tensor:
    """Return the array as a flat tensor."""
    return torch.from_numpy(array.reshape(-1))


_Plan = list[tuple[_Tiles, _InPlace | _Copied]]


class CpuAttention:
    """Attention on the CPU (see Attention). num_heads: H. scale: factor of the scores; None: D ** -0.5."""

    capturable = False
    needs_clean_pages = True
    prefixes: SharedPrefixes | None = None

    def __init__(self, pool: KVPool, num_heads: int, scale: float | None = None) -> None:
        self.pool = pool
        self._scale = pool.keys.shape[-1] ** -0.5 if scale is None else scale
        _, _, self._kv_heads, self._page_size, self._head_size = pool.keys.shape
        self._heads, self._group = num_heads, num_heads // self._kv_heads
        self._each = np.arange(self._kv_heads)
        self._run = math.gcd(self._page_size, KEY_BLOCK)  # number of keys that are always contiguous
        self._layers = list(zip(pool.keys, pool.values, strict=True))
        in_place = mkl.BATCHES and pool.keys.dtype == torch.float32 and self._run == KEY_BLOCK
        in_place = in_place and self._head_size >= MIN_SIZE
        self._products: type[_InPlace | _Copied] = _InPlace if in_place else _Copied
        self._memory = torch.zeros(0, dtype=torch.float32, device="cpu")
        self._key: tuple[object, ...] | None = None  # of `_plan`, the last plan of a step that has only decodes
        self._plan: _Plan = []
        self._hide = torch.tensor(-math.inf, dtype=torch.float32, device="cpu")

    def plan(self, layout: StepLayout) -> _Plan:
        """Lay out decodes in tiles of one token, and prefill chunks in tiles of up to TILE_ROWS query rows.

        The result is valid until the next call. Steps that decode the same sequences reuse a plan until a sequence
        needs another page or another KEY_STEP.
        """
        query_lens, kv_lens = layout.query_lens, layout.kv_lens
        columns = -(-int(kv_lens.max()) // self._page_size)
        table = layout.page_table.numpy()[layout.lanes, :columns].astype(np.int64)
        decode = query_lens == 1
        key = (table.shape, table.tobytes(), (-(-kv_lens // KEY_STEP)).tobytes()) if decode.all() else None
        if key is not None and key == self._key:
            for tiles, _ in self._plan:
                tiles.move(kv_lens)
            return self._plan
        groups = []
        for size, members in ((1, decode), (max(TILE_ROWS // self._group, 1), ~decode)):
            if members.any():
                groups += self._tiles(size, np.flatnonzero(members), layout, table)
        if key is not None:
            self._key, self._plan = key, groups
        return groups

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, reads_early: bool = False
    ) -> _Plan:
        ones = np.ones(len(lanes), dtype=np.int64)
        return self.plan(StepLayout(ones, kv_lens.long().numpy(), len(lanes), lanes.numpy(), page_table))

    def _tiles(self, size: int, sequences: Indices, layout: StepLayout, table: Indices) -> _Plan:
        """Lay out the query tokens of these sequences in tiles of `size` tokens, in groups of about SCORES scores.

        table: [S, columns], the pages of each sequence of the step.
        """
        lens = layout.query_lens
        query_lens, first = lens[sequences], (lens.cumsum() - lens)[sequences]
        before = layout.kv_lens[sequences] - query_lens
        per_sequence = -(-query_lens // size)
        owner = np.repeat(np.arange(len(sequences)), per_sequence)  # tile -> sequence
        number = np.arange(len(owner)) - (per_sequence.cumsum() - per_sequence)[owner]
        offset = number[:, None] * size + np.arange(size)  # [n, size]: the query token's number in its sequence
        last = query_lens[owner, None] - 1
        ends = before[owner] + np.minimum(offset[:, -1], last[:, 0])  # the position of each tile's last token
        order = np.argsort(-ends, kind="stable")
        groups = []
        while len(order):
            blocks = int(ends[order[0]]) // KEY_BLOCK + 1
            rows = padded_rows(size * self._group, self._head_size)
            fitting = max(SCORES // (rows * self._kv_heads * blocks * KEY_BLOCK), 1)
            # The softmax of a prefill runs over as many keys for a short tile as for the longest one.
            similar = len(order) if size == 1 else int((ends[order] * 2 >= ends[order[0]]).sum())
            here, order = np.split(order, [min(fitting, similar)])
            real = offset[here] <= last[here]
            inside = np.minimum(offset[here], last[here])  # the padding of a tile repeats its last token
            of = owner[here]
            tokens, position = first[of, None] + inside, before[of, None] + inside
            tiles = self._lay_out(sequences[of], tokens, position, real, table[sequences[of]])
            groups.append((tiles, self._products(tiles)))
        return groups

    def _lay_out(
        self, sequences: Indices, tokens: Indices, position: Indices, real: NDArray[np.bool_], table: Indices
    ) -> _Tiles:
        """Lay out tiles. sequences: [n], index of each tile's sequence. tokens: [n, size], indices of its tokens in the
        step. position: [n, size], their positions. real: bool [n, size], False for padding. table: [n, columns], the
        pages of the tile's sequence."""
        (count, size), heads, group = tokens.shape, self._kv_heads, self._group
        rows = np.arange(padded_rows(size * group, self._head_size))
        token, head = np.minimum(rows // group, size - 1), rows % group
        queries = self._by_head(tokens[:, token]).swapaxes(1, 2) * group + head  # [n, K, R]
        seen = position[:, -1:] >= np.arange(0, position[0, -1] + 1, KEY_BLOCK)  # [n, B]
        block, tile = np.nonzero(seen.T)
        blocks = seen.shape[1]
        # The runs of keys of each pair.
        key = block[:, None] * KEY_BLOCK + np.arange(0, KEY_BLOCK, self._run)  # the first key of each run
        page = table[tile[:, None], np.minimum(key // self._page_size, table.shape[1] - 1)]
        runs = (self._by_head(page) * self._page_size + (key % self._page_size)[..., None]).swapaxes(1, 2) // self._run
        owner = self._by_head(tile).reshape(-1)
        seen_keys = position[tile, -1] + 1 if size == 1 else np.full_like(tile, blocks * KEY_BLOCK)
        # Results, in the order of the step's tokens.
        real_tile, real_token = np.nonzero(real)
        number = np.argsort(tokens[real_tile, real_token])
        real_tile, real_token = real_tile[number, None], real_token[number, None]
        kv_head, of_group = np.divmod(np.arange(self._heads), group)
        row, pair = real_token * group + of_group, real_tile * heads + kv_head  # [tokens, H]
        q, scores, sums = self._take(count * heads, len(rows), blocks * KEY_BLOCK, len(owner), size == 1)
        results = (row * sums.stride(0) + pair * sums.stride(1)) // self._head_size
        real_rows = group if size == 1 else len(rows)
        first, *others = (part[:real_rows] for part in torch.split(sums, (seen.sum(0) * heads).tolist(), 1))
        return _Tiles(
            targets=_flat(tokens[real_tile, real_token]),
            queries=_flat(queries),
            results=_flat(results),
            rows=real_rows,
            sequences=sequences,
            position=_flat(position if size == 1 else position[:, token]).view(count, -1).t()[..., None, None],
            owner=owner,
            block=np.repeat(block, heads),
            seen=np.repeat(np.minimum(seen_keys - block * KEY_BLOCK, KEY_BLOCK), heads),
            runs=runs.reshape(len(owner), -1),
            q=q, scores=scores, sums=sums,
            others=[(first[:, : part.shape[1]], part) for part in others],
        )  # fmt: skip

    def _by_head(self, numbers: Indices) -> Indices:
        """Return numbers * K + head for each head, [..., K]: the head tiles of tiles, or the heads of pages."""
        return numbers[..., None] * self._kv_heads + self._each

    def _take(
        self, head_tiles: int, rows: int, width: int, pairs: int, is_decode: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, scores and sums (see _Tiles) in the memory that all tiles share. width: number of scores of a query
        row."""
        shapes = [(head_tiles, rows, self._head_size), (head_tiles, rows, width), (pairs, rows, self._head_size)]
        sizes = [math.prod(shape) for shape in shapes]
        if len(self._memory) < sum(sizes):
            self._memory = torch.zeros(sum(sizes), dtype=torch.float32, device="cpu")
        q, scores, sums = torch.split(self._memory[: sum(sizes)], sizes)
        if is_decode:
            return q.view(shapes[0]), scores.view(rows, head_tiles, width), sums.view(rows, pairs, self._head_size)
        return q.view(shapes[0]), scores.view(shapes[1]).transpose(0, 1), sums.view(shapes[2]).transpose(0, 1)

    def attend(self, plan: _Plan, layer: int, q: Tensor, window: int) -> Tensor:
        rows = (q.float() * self._scale).view(-1, self._head_size)
        outputs = [self._attend(*each, layer, rows, window).view(-1, *q.shape[1:]).to(q.dtype) for each in plan]
        if len(outputs) == 1:
            return outputs[0]
        out = torch.empty_like(q)
        for (tiles, _), part in zip(plan, outputs, strict=True):
            out.index_copy_(0, tiles.targets, part)  # takes half the time of an assignment
        return out

    def _attend(self, tiles: _Tiles, products: _InPlace | _Copied, layer: int, q: Tensor, window: int) -> Tensor:
        """Return the results of tiles, float32 [tokens * H, D]. q: the step's scaled queries [T * H, D]."""
        keys, values = self._layers[layer]
        torch.index_select(q, 0, tiles.queries, out=tiles.q.view(-1, self._head_size))
        with _threads(tiles):
            products.score(keys)
        later, hidden = tiles.hidden(window)
        torch.where(hidden, self._hide, later, out=later)
        # In place: torch reads all of a row before it writes the row (tests/model/test_attention_cpu.py would show it).
        torch.softmax(tiles.real_scores_in_memory, -1, out=tiles.real_scores_in_memory)
        with _threads(tiles):
            products.sum(values)
        for first, other in tiles.others:
            first += other
        return _in_memory(tiles.sums).view(-1, self._head_size).index_select(0, tiles.results)
