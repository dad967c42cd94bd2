"""Attention over the paged KV pool, for decodes and prefills, driven by a list of work tiles: the lists and the twin.
The kernels are in fastgen.kernels.triton.attention.

Keys that several rows of a decode step share have their own launch (SHARED), whose tiles hold these rows and which
stores partial results. The launch for the private keys follows (PRIVATE) and combines these results with its own.

Shape letters: T tokens in the step, H query heads, K KV heads, D head size, P page size, G = H / K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.kernels import fp8_pages
from fastgen.kernels.launch import Kernel
from fastgen.kernels.work_tiles import (
    BEGIN,
    END,
    FIELDS,
    FIRST,
    HEADER,
    LANE,
    PART,
    POSITION,
    SPLITS,
    TOKENS,
    SharedRows,
)

DECODE, PREFILL = "decode", "prefill"
GROUP = "group"  # the phase of rows that share keys


@dataclass(frozen=True)
class AttentionConfig:
    """The shape of a program's work.

    rows: number of rows of a query tile, at least tokens * G. keys: number of keys of a block. programs: maximum number
    of programs per processor. peel: whether blocks of keys that all rows see in full have a separate loop without a
    mask. combine_rows, combine_splits: numbers of rows and splits whose partial results are loaded together. unsplit:
    number of keys up to which decodes are not split, if none has more. specialized, streamed: whether
    fastgen.kernels.hopper.prefill, or hopper.decode, computes the work tiles.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    peel: bool
    combine_rows: int
    combine_splits: int
    unsplit: int = 0
    specialized: bool = False
    streamed: bool = False


PLAIN, SHARED, PRIVATE = 0, 1, 2  # kinds of lists; see the module's docstring


@dataclass(frozen=True)
class TileList:
    """A list of work tiles on the device, and how to run it.

    list: int32, see fastgen.kernels.work_tiles. most: maximum number of work tiles in the list. kind: PLAIN, SHARED or
    PRIVATE. rows, bases, kv_lens: for SHARED lists only, the ranges that the list belongs to, their bases for the
    window (int32 [S]), and the number of keys of each row (int32 [S]). split: whether decodes may be split.
    reads_early: see fastgen.model.attention.interface.Attention.plan_decode.
    """

    list: Tensor
    most: int
    config: AttentionConfig
    kind: int = PLAIN
    rows: SharedRows | None = None
    bases: Tensor | None = None
    kv_lens: Tensor | None = None
    split: bool = False
    reads_early: bool = False


@dataclass(frozen=True)
class PartialResults:
    """Memory for the partial results of work tiles (fastgen.kernels.triton.softmax).

    parts: float32 [partials, H, D], weighted sums of values. peaks, totals: float32 [partials, H]. arrivals: int32
    [partials, K], counters of finished splits, which are 0 between launches.
    """

    parts: Tensor
    peaks: Tensor
    totals: Tensor
    arrivals: Tensor

    @staticmethod
    def empty(partials: int, num_heads: int, num_kv: int, head_size: int, device: torch.device) -> PartialResults:
        return PartialResults(
            torch.empty(partials, num_heads, head_size, dtype=torch.float32, device=device),
            torch.empty(partials, num_heads, dtype=torch.float32, device=device),
            torch.empty(partials, num_heads, dtype=torch.float32, device=device),
            torch.zeros(partials, num_kv, dtype=torch.int32, device=device),
        )


def _twin(
    q: Tensor, out: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, tiles: TileList,
    partial_results: PartialResults, layer: int, window: int, scale: float | None = None,
) -> None:  # fmt: skip
    """Write the causal attention of the work tiles' query tokens, rows of q [T, H, D], to the same rows of out.

    keys, values: [layers, pages, K, P, D], in the dtype of q or in fp8, of which `layer` is read. page_table: int32
    [lanes, columns]. A query at position p sees the positions (p - window, p], or all positions up to p if window is 0.
    scale: factor of the scores; None: D ** -0.5. Sums are computed in float32. A list can be used once per layer.
    SHARED lists only store partial results.
    """
    listed = tiles.list.cpu()
    work_tiles = listed[HEADER : HEADER + int(listed[0]) * FIELDS].view(-1, FIELDS).tolist()
    if tiles.rows is not None:
        assert tiles.bases is not None
        assert tiles.kv_lens is not None
        for tile in work_tiles:
            members = tiles.rows.members[tile[FIRST] : tile[FIRST] + tile[TOKENS]].long()
            key = torch.arange(tile[BEGIN], tile[END], device=q.device)
            query = tiles.kv_lens[members] - 1
            answer, lse = _exact(q[members], query, key, keys, values, page_table, tile, layer, window, scale)
            slots = tiles.bases[members].long()
            partial_results.parts[slots], partial_results.peaks[slots] = answer, lse
            partial_results.totals[slots] = 1
        return
    query_tiles: dict[int, list[list[int]]] = {}
    for tile in work_tiles:
        query_tiles.setdefault(tile[FIRST], []).append(tile)
    for first, splits in query_tiles.items():
        partials, tokens = divmod(splits[0][TOKENS], SPLITS)
        key = torch.cat([torch.arange(tile[BEGIN], tile[END], device=q.device) for tile in splits])
        query = splits[0][POSITION] + torch.arange(tokens, device=q.device)
        rows = slice(first, first + tokens)
        answer, lse = _exact(q[rows], query, key, keys, values, page_table, splits[0], layer, window, scale)
        if partials:
            before = slice(splits[0][PART], splits[0][PART] + partials)
            peaks = torch.cat([partial_results.peaks[before], lse])  # [partials + 1, H]
            weights = torch.exp2(peaks - peaks.amax(0))
            total = (weights * torch.cat([partial_results.totals[before], torch.ones_like(lse)])).sum(0)
            whole = (weights[:, :, None] * torch.cat([partial_results.parts[before], answer])).sum(0, keepdim=True)
            answer = whole / total[:, None]
        out[rows] = answer.to(out.dtype)


def _exact(
    q: Tensor, query: Tensor, key: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, tile: list[int],
    layer: int, window: int, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with q [t, H, D] at positions `query` [t] to the positions `key` of the work tile's lane, in float32.

    Return the result [t, H, D], and the log2 of the softmax's sum [t, H], which is -1e30 for a row that sees no key.
    """
    num_kv, page_size = keys.shape[2:4]
    group = q.shape[1] // num_kv
    page = page_table[tile[LANE], key // page_size].long()
    head = page[:, None] * num_kv + torch.arange(num_kv, device=q.device)
    rows = (head * page_size + (key % page_size)[:, None]).flatten()
    k, v = (fp8_pages.read(pool[layer], rows, 1).view(len(key), num_kv, -1) for pool in (keys, values))
    scores = torch.einsum("tkgd,nkd->kgtn", q.float().unflatten(1, (-1, group)), k)
    scores *= q.shape[2] ** -0.5 if scale is None else scale
    ahead = query[:, None] - key
    scores = scores.masked_fill((ahead < 0) | (ahead >= window) if window else ahead < 0, -1e30)
    answer = torch.einsum("kgtn,nkd->tkgd", scores.softmax(-1), v).flatten(1, 2)
    lse = (scores.logsumexp(-1) / math.log(2)).clamp(min=-1e30)
    return answer, lse.permute(2, 0, 1).flatten(1)


attention = Kernel(_twin, "fastgen.kernels.triton.attention:attention")
sharing = Kernel(_twin, "fastgen.kernels.triton.attention:attention")
"""For SHARED and PRIVATE lists. If these do not compile for a chip, others still run."""
