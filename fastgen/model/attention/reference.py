"""Attention in torch: for the CPU, and what the other implementations are held to.

The answer for a query does not depend on what else is in the step, to the bit (DESIGN, promise 1): the keys are taken
in fixed blocks of KEY_BLOCK positions from 0 on, each block is a product of its own, and the blocks are merged in
order by their softmax peaks and sums. Query rows are padded to a multiple of BMM_ROWS, since BLAS sums otherwise for
fewer rows.

Where a page is a block, which is the default, one product serves all blocks of all decodes. If their pages lie close
together in the pool it goes over the pool itself, page by page, and a page that no decode holds is computed in vain;
that moves half the memory of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastgen.model.attention.interface import StepLayout
from fastgen.model.kv_pool import KVPool

KEY_BLOCK = 64
QUERY_TILE = 32  # query tokens of a prefill tile
BMM_ROWS = 4
LN_2 = math.log(2)
LEAST = -1e30  # the peak of a row whose block is masked as a whole: finite, so that it gives zeros and no NaN
DENSE = 0.5  # the share of a range of pages that decodes must hold for it to be read in place
COPY_MOST = 2**24  # numbers in a copy of the decodes' keys, beyond which it is made block by block


@dataclass(frozen=True)
class _Part:
    """A block's softmax for some query rows, before it is merged: [n, K, R, 1], [n, K, R, 1] and [n, K, R, D].

    The sums are in units of 2**peak. Peaks are whole numbers, so that bringing parts to one unit rounds nothing (but
    for what is 2**-126 of the rest), and may be done at any time.
    """

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
class _AtOnce(_Keys):
    """All blocks of all tiles, a page each. selected: the pages that the product goes over, of a layer's pool.

    owner: int64 [selected pages], the tile that each belongs to (any, if to none). pages: which of the selected is
    block 0 of each tile that has one, then block 1 of each that has one, ...; counts: how many tiles have each block.
    """

    selected: slice | Tensor = field(kw_only=True)
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
    at_once: _AtOnce | None


class ReferenceAttention:
    capturable = False
    needs_clean_pages = True
    shares = False

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def plan(self, layout: StepLayout) -> list[_Tiles]:
        """Decodes in tiles of one token, prefill chunks in tiles of QUERY_TILE."""
        first = layout.query_lens.cumsum(0) - layout.query_lens
        slots = -(-int(layout.kv_lens.max()) // self.pool.page_size)
        table = layout.page_table[layout.lanes.to(layout.page_table.device), :slots].long()
        decode = layout.query_lens == 1
        groups = []
        for size, members in ((1, decode), (QUERY_TILE, ~decode)):
            chosen = members.nonzero().flatten()
            if len(chosen):
                groups.append(self._tiles(size, chosen, first[chosen], layout, table))
        return groups

    def share(self, lanes: NDArray[np.int64], full: NDArray[np.int64], tables: NDArray[np.int32]) -> bool:
        """Each sequence reads its keys for itself."""
        return False

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, alone: bool = False
    ) -> list[_Tiles]:
        """Reads the lengths from the device, so that no CUDA graph can hold it."""
        ones = torch.ones(len(lanes), dtype=torch.int64)
        return self.plan(StepLayout(ones, kv_lens.cpu().long(), len(lanes), lanes.cpu(), page_table))

    def _tiles(self, size: int, sequences: Tensor, first: Tensor, layout: StepLayout, table: Tensor) -> _Tiles:
        """table: int64 [S, slots] on the device."""
        device = table.device
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
        table = table[sequences[owner].to(device)]
        at_once = self._at_once(position, table) if size == 1 and self.pool.page_size == KEY_BLOCK else None
        return _Tiles(
            tokens=tokens.to(device),
            real=None if len(real) == tokens.numel() else real.to(device),
            targets=tokens.flatten()[real].to(device),
            gathered=[] if at_once else self._gathered(position, table),
            at_once=at_once,
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

    def _at_once(self, position: Tensor, table: Tensor) -> _AtOnce | None:
        """None where the pages lie too far apart to be read in place, and are too many to be copied at once."""
        device = table.device
        counts = [count for _, count in _counts(position)]
        pages = torch.cat([table[:count, block] for block, count in enumerate(counts)])
        first, last = int(pages.min()), int(pages.max()) + 1
        dense = len(pages) >= DENSE * (last - first) and len(set(pages.tolist())) == len(pages)
        if not dense and pages.numel() * self.pool.keys[0, 0].numel() > COPY_MOST:
            return None
        selected, size = (slice(first, last), last - first) if dense else (pages, len(pages))
        pages = pages - first if dense else torch.arange(size, device=device)
        owner, start = torch.zeros(2, size, dtype=torch.int64, device=device)
        owner[pages] = torch.cat([torch.arange(count) for count in counts]).to(device)
        start[pages] = (torch.arange(len(counts)) * KEY_BLOCK).repeat_interleave(torch.tensor(counts)).to(device)
        keys = start[:, None, None] + torch.arange(KEY_BLOCK, device=device)
        ahead = position.to(device)[owner][:, :, None] - keys
        return _AtOnce(ahead=ahead, selected=selected, owner=owner, pages=pages, counts=counts)

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
        rows = q[tiles.tokens].float().mul_(head_size**-0.5 / LN_2).view(n, tile, kv_heads, group, head_size)
        rows = rows.transpose(1, 2).reshape(n, kv_heads, tile * group, head_size)
        if padding := -rows.shape[2] % BMM_ROWS:
            rows = F.pad(rows, (0, 0, 0, padding))
        if tiles.at_once:
            out = _attend_at_once(tiles.at_once, rows, keys, values, window, group)
        else:
            flat = keys.view(-1, head_size), values.view(-1, head_size)
            out = _merge(_part(block, rows, *flat, window, group) for block in tiles.gathered)
        out = out.reshape(n, kv_heads, tile, group, head_size)
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
        weights.masked_fill_(hidden, -math.inf)
    peak = weights.amax(-1, keepdim=True).ceil_().clamp_(min=LEAST)
    weights.sub_(peak).mul_(LN_2).exp_()  # not exp2, which rounds otherwise at the end of a thread's share
    out = torch.bmm(scores.flatten(0, 1), v.flatten(0, 1)).view(q.shape)[:, :, :real]
    return _Part(peak, weights.sum(-1, keepdim=True), out)


def _part(block: _Gathered, q: Tensor, keys: Tensor, values: Tensor, window: int, group: int) -> _Part:
    """The first tiles' part of a block; q [n, K, R, D], keys and values [pool rows, D]."""
    k, v = F.embedding(block.rows, keys).float(), F.embedding(block.rows, values).float()
    return _softmax_part(q[: len(k)], k, v, block.hidden(window, group), block.ahead.shape[1] * group)


def _select(pool: Tensor, pages: slice | Tensor) -> Tensor:
    return pool[pages] if isinstance(pages, slice) else pool.index_select(0, pages)  # several times faster than []


def _attend_at_once(span: _AtOnce, q: Tensor, keys: Tensor, values: Tensor, window: int, group: int) -> Tensor:
    """The softmax over all blocks [n, K, R, D] of q [n, K, R', D], out of one product over the pool; keys and values
    [pages, K, KEY_BLOCK, D]. The sums go over the blocks in order, so that they are those of `_merge`, to the bit."""
    k, v = (_select(pool, span.selected).float() for pool in (keys, values))
    whole = _softmax_part(q.index_select(0, span.owner), k, v, span.hidden(window, group), group)
    peaks = torch.split(whole.peak.index_select(0, span.pages), span.counts)
    peak = peaks[0].clone()
    for each in peaks[1:]:
        torch.maximum(peak[: len(each)], each, out=peak[: len(each)])
    scale = whole.peak.sub_(peak.index_select(0, span.owner)).exp2_()
    scaled = torch.cat([whole.out, whole.total], -1).mul_(scale)
    parts = torch.split(scaled.index_select(0, span.pages), span.counts)
    merged = parts[0]
    for part in parts[1:]:
        merged[: len(part)] += part
    return merged[..., :-1] / merged[..., -1:]


def _merge(parts: Iterator[_Part]) -> Tensor:
    """The softmax over all blocks [n, K, R, D], from the parts of each, in order; later blocks have fewer tiles."""
    first = next(parts)
    peak, total, out = first.peak, first.total, first.out
    for part in parts:
        n = len(part.peak)
        higher = torch.maximum(peak[:n], part.peak)
        old, new = (peak[:n] - higher).exp2_(), (part.peak - higher).exp2_()
        peak[:n] = higher
        total[:n].mul_(old).addcmul_(part.total, new)
        out[:n].mul_(old).addcmul_(part.out, new)
    return out.div_(total)
