"""Attention in torch: for the CPU, and what the other implementations are held to.

The answer for a query does not depend on what else is in the step, to the bit (DESIGN, promise 1): the keys are taken
in fixed blocks of KEY_BLOCK positions from 0 on, and merged by online softmax in that order. Query rows are padded to
a multiple of ROW_TILE, since BLAS sums otherwise for fewer rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.attention import StepLayout
from fastgen.cache.pool import KVPool

KEY_BLOCK = 64
QUERY_TILE = 32  # query tokens of a prefill tile
ROW_TILE = 4
MASKED = -1e30  # finite, so that a row whose first block is masked as a whole stays free of NaN; the next wipes it


@dataclass(frozen=True)
class _Block:
    """The keys of one block for the first `count` tiles: rows into the pool, and what each query must not see."""

    count: int
    rows: Tensor  # int32 [count, K, KEY_BLOCK]
    ahead: Tensor  # int64 [count, tile, KEY_BLOCK]: query position - key position; negative: not to be seen
    masked: bool  # some key lies ahead of some query


@dataclass(frozen=True)
class _Tiles:
    """Query tokens in tiles of one size, those with most key blocks first, so that each block serves a prefix."""

    tokens: Tensor  # int64 [n, tile]: which token of the step; a tile's padding repeats its last token
    blocks: list[_Block]
    order: Tensor  # where the real tokens are in tokens.flatten()
    targets: Tensor  # and which tokens of the step these are


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
        real = offset < query_lens[owner][:, None]
        offset = torch.minimum(offset, query_lens[owner][:, None] - 1)
        position = (kv_lens - query_lens)[owner][:, None] + offset
        blocks_needed = position[:, -1] // KEY_BLOCK + 1
        order = torch.argsort(blocks_needed, descending=True, stable=True)
        owner, offset, position, real = owner[order], offset[order], position[order], real[order]
        tokens = first[owner][:, None] + offset
        kept = real.flatten().nonzero().flatten()
        return _Tiles(
            tokens=tokens.to(device),
            blocks=self._blocks(sequences[owner], position, blocks_needed[order], layout.page_table),
            order=kept.to(device),
            targets=tokens.flatten()[kept].to(device),
        )

    def _blocks(self, sequence: Tensor, position: Tensor, needed: Tensor, page_table: Tensor) -> list[_Block]:
        """sequence [n], position [n, tile] and needed [n] are on the host."""
        device = page_table.device
        table = page_table[sequence.to(device)]
        query = position.to(device)
        blocks = []
        for start in range(0, int(needed[0]) * KEY_BLOCK, KEY_BLOCK):
            count = int((needed * KEY_BLOCK > start).sum())
            keys = torch.arange(start, start + KEY_BLOCK, device=device)
            slots = (keys // self.pool.page_size).clamp(max=table.shape[1] - 1)
            rows = self.pool.rows(table[:count, slots], keys % self.pool.page_size)  # [count, KEY_BLOCK, K]
            blocks.append(
                _Block(
                    count=count,
                    rows=rows.transpose(1, 2).contiguous().int(),
                    ahead=query[:count, :, None] - keys,
                    masked=bool((position[:count, 0] < start + KEY_BLOCK - 1).any()),
                )
            )
        return blocks

    def attend(self, plan: list[_Tiles], layer: int, q: Tensor, window: int) -> Tensor:
        out = torch.empty_like(q)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        for tiles in plan:
            out[tiles.targets] = _attend(tiles, q, keys, values, window).to(q.dtype)
        return out


def _attend(tiles: _Tiles, q: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """float32 [real tokens, H, D], in the order of tiles.order."""
    (n, tile), (_, heads, head_size), kv_heads = tiles.tokens.shape, q.shape, keys.shape[1]
    group = heads // kv_heads
    rows = q[tiles.tokens].float().mul_(head_size**-0.5)  # [n, tile, H, D]
    rows = rows.view(n, tile, kv_heads, group, head_size).transpose(1, 2).reshape(n, kv_heads, tile * group, head_size)
    if padding := -rows.shape[2] % ROW_TILE:
        rows = F.pad(rows, (0, 0, 0, padding))
    merged = _merge_blocks(tiles.blocks, rows, keys.view(-1, head_size), values.view(-1, head_size), tile, window)
    out = merged[:, :, : tile * group].reshape(n, kv_heads, tile, group, head_size).transpose(1, 2)
    return out.reshape(n * tile, heads, head_size)[tiles.order]


def _merge_blocks(blocks: list[_Block], q: Tensor, keys: Tensor, values: Tensor, tile: int, window: int) -> Tensor:
    """Online softmax of q [n, K, R, D] over the blocks, in order; keys and values [rows, D]."""
    n, kv_heads, num_rows, head_size = q.shape
    best = q.new_full((n, kv_heads, num_rows, 1), MASKED)
    total = torch.zeros_like(best)
    out = torch.zeros_like(q)
    for block in blocks:
        count = block.count
        k = F.embedding(block.rows, keys).float().flatten(0, 1)  # [count * K, KEY_BLOCK, D]
        v = F.embedding(block.rows, values).float().flatten(0, 1)
        scores = torch.bmm(q[:count].flatten(0, 1), k.transpose(1, 2)).view(count, kv_heads, num_rows, KEY_BLOCK)
        _mask(scores, block, tile, window)
        peak = torch.maximum(best[:count], scores.amax(-1, keepdim=True))
        decay = (best[:count] - peak).exp_()
        weights = scores.sub_(peak).exp_()
        best[:count] = peak
        total[:count] = total[:count] * decay + weights.sum(-1, keepdim=True)
        part = torch.bmm(weights.flatten(0, 1), v).view(count, kv_heads, num_rows, head_size)
        out[:count] = out[:count] * decay + part
    return out.div_(total)


def _mask(scores: Tensor, block: _Block, tile: int, window: int) -> None:
    """Set the scores [count, K, R, KEY_BLOCK] of keys ahead of the query, or behind its window, to MASKED."""
    if not block.masked and not window:
        return
    hidden = block.ahead < 0
    if window:
        hidden = hidden | (block.ahead >= window)
    if tile > 1:  # a query token has `group` rows, and there is no padding
        hidden = hidden.repeat_interleave(scores.shape[2] // tile, dim=1)
    scores.masked_fill_(hidden[:, None], MASKED)
