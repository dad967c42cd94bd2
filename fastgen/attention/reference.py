"""Attention in torch: for the CPU, and what the other implementations are held to.

The answer for a query does not depend on what else is in the step, to the bit (DESIGN, promise 1): the keys are taken
in fixed blocks of KEY_BLOCK positions from 0 on, each block is a product of its own, and the blocks are merged in
order by their softmax peaks and sums. Query rows are padded to a multiple of ROW_TILE, since BLAS sums otherwise for
fewer rows.

Where a page is a block and the decodes' pages lie close together in the pool, which is the common case, their keys
are not gathered: one product goes over the pool itself, page by page, and a page that no decode holds is computed in
vain. It gives the same bits and moves half the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.attention.interface import StepLayout
from fastgen.cache.pool import KVPool

KEY_BLOCK = 64
QUERY_TILE = 32  # query tokens of a prefill tile
ROW_TILE = 4
MASKED = -1e30  # finite, so that a row whose first block is masked as a whole stays free of NaN; the next wipes it
DENSE = 0.5  # the share of a range of pages that decodes must hold for it to be read as a whole


@dataclass(frozen=True)
class _Part:
    """A block's softmax for some query rows, before it is merged: [n, K, R, 1], [n, K, R, 1] and [n, K, R, D]."""

    peak: Tensor
    total: Tensor
    out: Tensor


@dataclass
class _Keys:
    """The keys that a product goes over, against tiles of queries.

    ahead: int64 [n, tile, KEY_BLOCK], query position - key position; negative: not to be seen.
    """

    ahead: Tensor
    _hidden: dict[int, Tensor | None] = field(default_factory=dict)

    def hidden(self, window: int, group: int) -> Tensor | None:
        """bool [n, 1, R or 1, KEY_BLOCK]: keys that a query row must not see; None where all are seen."""
        if window not in self._hidden:
            hidden = self.ahead < 0
            if window:
                hidden |= self.ahead >= window
            if hidden.shape[1] > 1:  # a token of a prefill tile has `group` rows
                hidden = hidden.repeat_interleave(group, dim=1)
            self._hidden[window] = hidden[:, None] if bool(hidden.any()) else None
        return self._hidden[window]


@dataclass
class _Gathered(_Keys):
    """One block of the first tiles. rows: int32 [n, K, KEY_BLOCK] into a layer's pool."""

    rows: Tensor = field(kw_only=True)


@dataclass
class _InPlace(_Keys):
    """The pages first .. last - 1 of the pool; owner [pages]: the tile that each belongs to (any, if to none);
    pages: the page of each tile that has block 0, of each that has block 1, ..., counted from `first`; counts: how many
    tiles have each block."""

    first: int = field(kw_only=True)
    last: int = field(kw_only=True)
    owner: Tensor = field(kw_only=True)
    pages: Tensor = field(kw_only=True)
    counts: list[int] = field(kw_only=True)


@dataclass(frozen=True)
class _Tiles:
    """Query tokens in tiles of one size, those with most key blocks first, so that each block serves a prefix."""

    tokens: Tensor  # int64 [n, tile]: which token of the step; a tile's padding repeats its last token
    real: Tensor | None  # where the real tokens are in tokens.flatten(); None: everywhere
    targets: Tensor  # and which tokens of the step these are
    gathered: list[_Gathered]  # a block each, or empty:
    in_place: _InPlace | None


class ReferenceAttention:
    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def plan(self, layout: StepLayout) -> list[_Tiles]:
        """Decodes in tiles of one token, prefill chunks in tiles of QUERY_TILE."""
        first = layout.query_lens.cumsum(0) - layout.query_lens
        decode = layout.query_lens == 1
        groups = []
        for size, members in ((1, decode), (QUERY_TILE, ~decode)):
            chosen = members.nonzero().flatten()
            if len(chosen):
                groups.append(self._tiles(size, chosen, first[chosen], layout))
        return groups

    def _tiles(self, size: int, sequences: Tensor, first: Tensor, layout: StepLayout) -> _Tiles:
        device = layout.page_table.device
        query_lens, kv_lens = layout.query_lens[sequences], layout.kv_lens[sequences]
        per_sequence = -(-query_lens // size)
        owner = torch.repeat_interleave(torch.arange(len(sequences)), per_sequence)  # tile -> sequence
        number = torch.arange(len(owner)) - (per_sequence.cumsum(0) - per_sequence)[owner]
        offset = number[:, None] * size + torch.arange(size)  # [n, size]: the query token's number in its sequence
        last = query_lens[owner][:, None] - 1
        needed = (kv_lens - query_lens)[owner] + torch.minimum(offset[:, -1:], last)[:, 0]
        order = torch.argsort(needed, descending=True, stable=True)
        owner, offset, last = owner[order], offset[order], last[order]
        real = (offset <= last).flatten().nonzero().flatten()
        offset = torch.minimum(offset, last)
        tokens = first[owner][:, None] + offset
        position = (kv_lens - query_lens)[owner][:, None] + offset
        table = layout.page_table[sequences[owner].to(device)]
        in_place = self._in_place(position, table) if size == 1 and self.pool.page_size == KEY_BLOCK else None
        return _Tiles(
            tokens=tokens.to(device),
            real=None if len(real) == tokens.numel() else real.to(device),
            targets=tokens.flatten()[real].to(device),
            gathered=[] if in_place else self._gathered(position, table),
            in_place=in_place,
        )

    def _gathered(self, position: Tensor, table: Tensor) -> list[_Gathered]:
        """position [n, tile] is on the host, table [n, slots] on the device."""
        query, blocks = position.to(table.device), []
        for start, count in _counts(position):
            keys = torch.arange(start, start + KEY_BLOCK, device=table.device)
            slots = (keys // self.pool.page_size).clamp(max=table.shape[1] - 1)
            rows = self.pool.rows(table[:count, slots], keys % self.pool.page_size)  # [count, KEY_BLOCK, K]
            ahead = query[:count, :, None] - keys
            blocks.append(_Gathered(ahead=ahead, rows=rows.transpose(1, 2).contiguous().int()))
        return blocks

    def _in_place(self, position: Tensor, table: Tensor) -> _InPlace | None:
        """None where it does not pay: the decodes' pages lie too far apart."""
        counts = [count for _, count in _counts(position)]
        pages = torch.cat([table[:count, block] for block, count in enumerate(counts)])
        first, last = int(pages.min()), int(pages.max()) + 1
        if len(pages) < DENSE * (last - first) or len(set(pages.tolist())) < len(pages):
            return None
        pages = pages - first
        owner = torch.zeros(last - first, dtype=torch.int64, device=table.device)
        owner[pages] = torch.cat([torch.arange(count, device=table.device) for count in counts])
        start = torch.zeros_like(owner)
        start[pages] = (
            torch.arange(len(counts), device=table.device).repeat_interleave(torch.tensor(counts)) * KEY_BLOCK
        )
        keys = start[:, None, None] + torch.arange(KEY_BLOCK, device=table.device)
        ahead = position.to(table.device)[owner][:, :, None] - keys
        return _InPlace(ahead=ahead, first=first, last=last, owner=owner, pages=pages, counts=counts)

    def attend(self, plan: list[_Tiles], layer: int, q: Tensor, window: int) -> Tensor:
        out = torch.empty_like(q)
        for tiles in plan:
            out[tiles.targets] = self._attend(tiles, layer, q, window).to(q.dtype)
        return out

    def _attend(self, tiles: _Tiles, layer: int, q: Tensor, window: int) -> Tensor:
        """float32 [real tokens, H, D]."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        (n, tile), (_, heads, head_size), kv_heads = tiles.tokens.shape, q.shape, keys.shape[1]
        group = heads // kv_heads
        rows = q[tiles.tokens].float().mul_(head_size**-0.5).view(n, tile, kv_heads, group, head_size)
        rows = rows.transpose(1, 2).reshape(n, kv_heads, tile * group, head_size)
        if padding := -rows.shape[2] % ROW_TILE:
            rows = F.pad(rows, (0, 0, 0, padding))
        if tiles.in_place:
            parts = _parts_in_place(tiles.in_place, rows, keys, values, window, group)
        else:
            flat = keys.view(-1, head_size), values.view(-1, head_size)
            parts = (_part(block, rows, *flat, window, group) for block in tiles.gathered)
        out = _merge(parts).view(n, kv_heads, tile, group, head_size)
        out = out.transpose(1, 2).reshape(n * tile, heads, head_size)
        return out if tiles.real is None else out[tiles.real]


def _counts(position: Tensor) -> list[tuple[int, int]]:
    """(first position, how many tiles see it) of each key block, for tiles [n, tile] in order of falling length."""
    needed = position[:, -1].tolist()
    starts = range(0, needed[0] + 1, KEY_BLOCK)
    return [(start, sum(last >= start for last in needed)) for start in starts]


def _softmax_part(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, real: int) -> _Part:
    """q [n, K, R', D] against its own keys and values, each [n, K, KEY_BLOCK, D]; only `real` of the rows count."""
    n, kv_heads, num_rows, _ = q.shape
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(n, kv_heads, num_rows, KEY_BLOCK)
    weights = scores[:, :, :real]
    if hidden is not None:
        weights.masked_fill_(hidden, MASKED)
    peak = weights.amax(-1, keepdim=True)
    weights.sub_(peak).exp_()
    out = torch.bmm(scores.flatten(0, 1), v.flatten(0, 1)).view(q.shape)[:, :, :real]
    return _Part(peak, weights.sum(-1, keepdim=True), out)


def _part(block: _Gathered, q: Tensor, keys: Tensor, values: Tensor, window: int, group: int) -> _Part:
    """The first tiles' part of a block; q [n, K, R, D], keys and values [pool rows, D]."""
    k, v = F.embedding(block.rows, keys).float(), F.embedding(block.rows, values).float()
    return _softmax_part(q[: len(k)], k, v, block.hidden(window, group), block.ahead.shape[1] * group)


def _parts_in_place(
    span: _InPlace, q: Tensor, keys: Tensor, values: Tensor, window: int, group: int
) -> Iterator[_Part]:
    """The parts of each block, out of one product over the pool; keys and values [pages, K, KEY_BLOCK, D]."""
    k, v = keys[span.first : span.last].float(), values[span.first : span.last].float()
    whole = _softmax_part(q[span.owner], k, v, span.hidden(window, group), group)
    parts = (torch.split(each[span.pages], span.counts) for each in (whole.peak, whole.total, whole.out))
    return (_Part(*part) for part in zip(*parts, strict=True))


def _merge(parts: Iterator[_Part]) -> Tensor:
    """The softmax over all blocks [n, K, R, D], from the parts of each, in order; later blocks have fewer tiles."""
    first = next(parts)
    peak, total, out = first.peak, first.total, first.out
    for part in parts:
        n = len(part.peak)
        higher = torch.maximum(peak[:n], part.peak)
        old, new = (peak[:n] - higher).exp_(), (part.peak - higher).exp_()
        peak[:n] = higher
        total[:n].mul_(old).addcmul_(part.total, new)
        out[:n].mul_(old).addcmul_(part.out, new)
    return out.div_(total)
