"""Attention in torch: the implementation for the CPU, and the expected answer in the other implementations' tests.

The answer for a query is the same to the bit whatever else is in the step (docs/determinism.md). The keys are taken in
fixed blocks of KEY_BLOCK positions from position 0 on. Each block is a matrix product of its own, and the blocks are
added in order, scaled by powers of two, which rounds nothing. BLAS sums the rows of small matrices in another order;
`padded_rows` gives the numbers of rows that it sums alike.

Query tokens are taken in tiles of one sequence: a decode is a tile, a prefill chunk several. A span is a range of
blocks that one batched product serves. If pages are blocks, and the pages of the tiles lie close together in the pool,
there is one span, and its product reads the pool in place, which is up to 1.6 times as fast as copying the keys.

Shape letters beside those of the interface: n tiles, R query rows of a tile and a KV head (with padding), M products
(a KV head of a tile against a block each) of a span, B blocks of a span. A head tile is a KV head of a tile; its
number is tile * K + head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.model.attention.interface import StepLayout
from fastgen.model.kv_pool import KVPool

KEY_BLOCK = 64
TILE_ROWS = 48  # most query rows of a prefill tile
LN_2 = math.log(2)
MASKED = -1e30  # score of a hidden key: finite, so that a row whose keys in a block are all hidden gives no NaN
FLOOR = -100  # least score behind the peak, to base 2: exp is 20 times slower where it gives no normal number
DENSE = 0.5  # least share of a range of pages that tiles must hold for the range to be read in place
COPIED = 2**20  # numbers of a span's keys, about, where they are copied

Indices = NDArray[np.int64]


def padded_rows(rows: int, head_size: int) -> int:
    """Return the least number of rows, at least `rows`, whose matrix product has the same bits as one of TILE_ROWS.

    MKL sums few rows in another order: with AVX-512 and a head size above 64 up to 4 rows, with AVX2 the last rows
    behind a multiple of 6.
    """
    return 4 if rows <= 4 and head_size <= 64 else -(-rows // 12) * 12


class _Hidden(NamedTuple):
    """keys: bool [M, R or 1, KEY_BLOCK], keys that a query row must not see; visible: 0.0 for these, else 1.0."""

    keys: Tensor
    visible: Tensor


@dataclass
class _Span:
    """Products of head tiles with the keys and values of B consecutive blocks.

    selected: the runs of keys of a layer's pool that the products read, in order: a slice, or int64 [M * runs].
    ahead: int64 [M, R or 1, KEY_BLOCK], query position - key position; negative for a hidden key.
    owner: int64 [M], the head tile of each product; any where no tile holds the page.
    order: int64, the products of the first block by head tile, then those of the second, ...; None if this is their
    order. counts: the number of head tiles of each block; the first head tiles have most blocks.
    blocks: int64 [counts[0] * B], the products of each head tile; its first product again for a block it does not have.
    """

    selected: slice | Tensor
    ahead: Tensor
    owner: Tensor
    order: Tensor | None
    counts: list[int]
    blocks: Tensor
    _hidden: dict[int, _Hidden | None] = field(default_factory=dict)

    def hidden(self, window: int) -> _Hidden | None:
        """Return the keys that a query row must not see, or None if it sees all."""
        if window not in self._hidden:
            keys = self.ahead < 0
            if window:
                keys |= self.ahead >= window
            self._hidden[window] = _Hidden(keys, keys.logical_not().float()) if bool(keys.any()) else None
        return self._hidden[window]


@dataclass(frozen=True)
class _Tiles:
    """Tiles of one size, in order of falling length, so that the head tiles of each block are the first ones.

    queries: int64 [n * K * R], the rows of q.view(T * H, D) of the head tiles; padding repeats a row.
    answers: int64 [tokens * H], the rows of the result [n * K * R, D] that are wanted; targets: int64 [tokens], the
    step's tokens that they belong to.
    """

    queries: Tensor
    answers: Tensor
    targets: Tensor
    spans: list[_Span]


class ReferenceAttention:
    capturable = False
    needs_clean_pages = True
    shares = False

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        self.pool = pool
        _, _, self._kv_heads, self._page_size, self._head_size = pool.keys.shape
        self._heads, self._group = num_heads, num_heads // self._kv_heads
        self._each = np.arange(self._kv_heads)
        self._run = math.gcd(self._page_size, KEY_BLOCK)  # keys that lie together, whatever the pages
        run = self._run * self._head_size
        self._pools = [list(each.view(len(each), -1, run)) for each in (pool.keys, pool.values)]

    def plan(self, layout: StepLayout) -> list[_Tiles]:
        """Lay out decodes in tiles of one token, and prefill chunks in tiles of up to TILE_ROWS query rows."""
        query_lens = layout.query_lens.numpy()
        slots = -(-int(layout.kv_lens.max()) // self._page_size)
        table = layout.page_table.cpu().numpy()[layout.lanes.numpy(), :slots].astype(np.int64)
        decode = query_lens == 1
        groups = []
        for size, members in ((1, decode), (max(TILE_ROWS // self._group, 1), ~decode)):
            if members.any():
                groups.append(self._tiles(size, np.flatnonzero(members), layout, table))
        return groups

    def share(self, lanes: NDArray[np.int64], full: NDArray[np.int64], tables: NDArray[np.int32]) -> bool:
        """Return False: each sequence reads its own keys."""
        return False

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, alone: bool = False
    ) -> list[_Tiles]:
        """Read the lengths from the device, so that no CUDA graph can hold the step."""
        ones = torch.ones(len(lanes), dtype=torch.int64)
        return self.plan(StepLayout(ones, kv_lens.cpu().long(), len(lanes), lanes.cpu(), page_table))

    def _tiles(self, size: int, sequences: Indices, layout: StepLayout, table: Indices) -> _Tiles:
        """Lay out tiles of `size` tokens of these sequences; table: [S, slots]."""
        lens = layout.query_lens.numpy()
        query_lens, first = lens[sequences], (lens.cumsum() - lens)[sequences]
        before = layout.kv_lens.numpy()[sequences] - query_lens
        per_sequence = -(-query_lens // size)
        owner = np.repeat(np.arange(len(sequences)), per_sequence)  # tile -> sequence
        number = np.arange(len(owner)) - (per_sequence.cumsum() - per_sequence)[owner]
        offset = number[:, None] * size + np.arange(size)  # [n, size]: the query token's number in its sequence
        last = query_lens[owner, None] - 1
        order = np.argsort(-(before[owner] + np.minimum(offset[:, -1:], last)[:, 0]), kind="stable")
        owner, offset, last = owner[order], offset[order], last[order]
        real = np.flatnonzero(offset <= last)
        offset = np.minimum(offset, last)  # the padding of a tile repeats its last token
        tokens, position = first[owner, None] + offset, before[owner, None] + offset
        real = real[np.argsort(tokens.flat[real])]
        rows = np.arange(padded_rows(size * self._group, self._head_size))
        token, head = np.minimum(rows // self._group, size - 1), rows % self._group
        queries = self._by_head(tokens[:, token]).swapaxes(1, 2) * self._group + head  # [n, K, R]
        kv_head, head = np.divmod(np.arange(self._heads), self._group)
        tile, token_of_tile = np.divmod(real[:, None], size)
        answers = (tile * self._kv_heads + kv_head) * len(rows) + token_of_tile * self._group + head  # [tokens, H]
        return _Tiles(
            queries=self._put(queries),
            answers=self._put(answers),
            targets=self._put(tokens.flat[real]),
            spans=self._spans(position if size == 1 else position[:, token], table[sequences[owner]]),
        )

    def _by_head(self, numbers: Indices) -> Indices:
        """Return numbers * K + head, [..., K]: the head tiles of tiles, or the runs of pages that are a run each."""
        return numbers[..., None] * self._kv_heads + self._each

    def _put(self, array: Indices) -> Tensor:
        """Return the array as a flat tensor on the pool's device."""
        return torch.from_numpy(array.reshape(-1)).to(self.pool.keys.device)

    def _spans(self, position: Indices, table: Indices) -> list[_Span]:
        """Cut the blocks that the tiles see into spans; position: [n, R or 1], of the query rows; table: [n, slots]."""
        seen = position[:, -1:] >= np.arange(0, position[0, -1] + 1, KEY_BLOCK)  # [n, blocks]
        block, tile = np.nonzero(seen.T)
        if self._page_size == KEY_BLOCK:
            page = table[tile, block]
            first, size = int(page.min()), int(page.max() - page.min()) + 1
            if len(page) >= DENSE * size and np.bincount(page - first).max() == 1:
                selected = slice(first * self._kv_heads, (first + size) * self._kv_heads)
                return [self._span(position, tile, block, selected, size, page - first)]
        counts = seen.sum(0)
        numbers = (counts.cumsum() - counts) * self._kv_heads * KEY_BLOCK * self._head_size
        spans = []
        for blocks in np.split(np.arange(len(counts)), np.flatnonzero(np.diff(numbers // COPIED)) + 1):
            chosen = (blocks[0] <= block) & (block <= blocks[-1])
            runs = self._runs(table, tile[chosen], block[chosen])
            spans.append(self._span(position, tile[chosen], block[chosen], runs, int(chosen.sum())))
        return spans

    def _runs(self, table: Indices, tile: Indices, block: Indices) -> Tensor:
        """Return the runs of a layer's pool that these blocks are made of, for each KV head: int64 [M * runs]."""
        key = block[:, None] * KEY_BLOCK + np.arange(0, KEY_BLOCK, self._run)  # the first key of each run
        page = table[tile[:, None], np.minimum(key // self._page_size, table.shape[1] - 1)]
        first = self._by_head(page) * self._page_size + (key % self._page_size)[..., None]  # [tiles, runs, K]
        return self._put(first.swapaxes(1, 2) // self._run)

    def _span(
        self,
        position: Indices,
        tile: Indices,
        block: Indices,
        selected: slice | Tensor,
        size: int,
        index: Indices | None = None,
    ) -> _Span:
        """Make the span of these tiles and blocks, block by block; index: which of `size` places in `selected` each
        pair has; by default their own order."""
        at = np.arange(size) if index is None else index
        owner, start = np.zeros((2, size), np.int64)
        owner[at], start[at] = tile, block * KEY_BLOCK
        counts = np.bincount(block - block[0])
        blocks = at[: counts[0], None].repeat(len(counts), 1)
        blocks[tile, block - block[0]] = at
        ahead = position[owner, :, None] - start[:, None, None] - np.arange(KEY_BLOCK)
        return _Span(
            selected=selected,
            ahead=self._put(ahead.repeat(self._kv_heads, 0)).view(-1, *ahead.shape[1:]),
            owner=self._put(self._by_head(owner)),
            order=None if index is None else self._put(self._by_head(at)),
            counts=(counts * self._kv_heads).tolist(),
            blocks=self._put(self._by_head(blocks).swapaxes(1, 2)),
        )

    def attend(self, plan: list[_Tiles], layer: int, q: Tensor, window: int) -> Tensor:
        rows = (q.float() * (self._head_size**-0.5 / LN_2)).view(-1, self._head_size)
        found = [self._attend(tiles, layer, rows, window).view(-1, *q.shape[1:]).to(q.dtype) for tiles in plan]
        if len(found) == 1:
            return found[0]
        out = torch.empty_like(q)
        for tiles, part in zip(plan, found, strict=True):
            out[tiles.targets] = part
        return out

    def _attend(self, tiles: _Tiles, layer: int, q: Tensor, window: int) -> Tensor:
        """Return the answers, float32 [tokens * H, D], to scaled queries q [T * H, D]."""
        first, *others = tiles.spans
        q = q.index_select(0, tiles.queries).view(len(first.blocks) // len(first.counts), -1, self._head_size)
        peak, (sums, *parts) = self._products(first, layer, q, window)
        _add(sums, parts)
        for span in others:
            new_peak, parts = self._products(span, layer, q, window, peak)
            sums[: len(new_peak)] *= (peak[: len(new_peak)] - new_peak).exp2_()
            peak[: len(new_peak)] = new_peak
            _add(sums, parts)
        return (sums[..., :-1] / sums[..., -1:]).view(-1, self._head_size).index_select(0, tiles.answers)

    def _products(
        self, span: _Span, layer: int, q: Tensor, window: int, peak: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the softmax peaks of the head tiles of a span, and for each of its blocks the sums to be divided.

        The peaks, [head tiles, R, 1], are logarithms to base 2, and at least `peak`, those of the blocks before. They
        are whole numbers, so that a division by 2**peak rounds nothing (but for what is 2**-126 of the rest). The sums,
        [head tiles of the block, R, D + 1], are those of exp2(scores - peak) times the values, and of it alone.
        """
        k, v = (_select(pool[layer], span.selected).view(-1, KEY_BLOCK, self._head_size) for pool in self._pools)
        scores = torch.bmm(q.index_select(0, span.owner), k.transpose(1, 2))
        hidden = span.hidden(window)
        if hidden is not None:
            scores.masked_fill_(hidden.keys, MASKED)
        own = scores.amax(-1, keepdim=True).ceil_()
        # Not exp2, which rounds otherwise at the end of a thread's share.
        weights = scores.sub_(own).clamp_(min=FLOOR).mul_(LN_2).exp_()
        if hidden is not None:
            weights.mul_(hidden.visible)
        sums = torch.cat((torch.bmm(weights, v), weights.sum(-1, keepdim=True)), -1)
        new_peak = own.index_select(0, span.blocks).view(-1, len(span.counts), *own.shape[1:]).amax(1)
        if peak is not None:
            torch.maximum(new_peak, peak[: len(new_peak)], out=new_peak)
        sums.mul_(own.sub_(new_peak.index_select(0, span.owner)).exp2_())
        if span.order is not None:
            sums = sums.index_select(0, span.order)
        return new_peak, list(torch.split(sums, span.counts))


def _select(pool: Tensor, selected: slice | Tensor) -> Tensor:
    """Return runs of a layer's pool [runs, numbers] in float32."""
    return (pool[selected] if isinstance(selected, slice) else pool.index_select(0, selected)).float()


def _add(sums: Tensor, parts: list[Tensor]) -> None:
    """Add each part to as many of the first `sums`, in order."""
    for part in parts:
        sums.narrow(0, 0, len(part)).add_(part)
