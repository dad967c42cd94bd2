"""Attention in plain torch, the reference in tests of the other implementations.

It runs on any device, one sequence after another. It is not batch-invariant: the bits of a result may depend on the
number of query tokens of its sequence in the step.

Shape letters, in addition to the letters in interface.py: Q query tokens of a sequence, L its keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fastgen.kernels import fp8_pages
from fastgen.model.attention.interface import StepLayout
from fastgen.model.kv_pool import KVPool

if TYPE_CHECKING:
    from fastgen.model.attention.shared import SharedPrefixes


@dataclass(frozen=True)
class _Sequence:
    """A sequence of a step. queries: number of its query tokens. rows: int64 [L, K], row of pool.view(-1, D) for each
    key and KV head."""

    queries: int
    rows: Tensor


class ReferenceAttention:
    """Attention in plain torch (see Attention). num_heads: H. scale: factor of the scores; None: D ** -0.5."""

    capturable = False
    needs_clean_pages = False  # only keys and values of the sequence's own tokens are read
    prefixes: SharedPrefixes | None = None

    def __init__(self, pool: KVPool, num_heads: int, scale: float | None = None) -> None:
        self.pool = pool
        self._scale = pool.keys.shape[-1] ** -0.5 if scale is None else scale
        self._kv_heads, self._page_size, self._head_size = pool.keys.shape[2:]
        self._group = num_heads // self._kv_heads

    def plan(self, layout: StepLayout) -> list[_Sequence]:
        lens = zip(layout.lanes.tolist(), layout.query_lens.tolist(), layout.kv_lens.tolist(), strict=True)
        return [_Sequence(queries, self._rows(layout.page_table[lane], length)) for lane, queries, length in lens]

    def _rows(self, own_pages: Tensor, length: int) -> Tensor:
        """Return the rows in the pool of the keys at positions 0 .. length - 1: int64 [length, K]."""
        positions = torch.arange(length, device=own_pages.device)
        page = own_pages[positions // self._page_size].long()
        heads = torch.arange(self._kv_heads, device=own_pages.device)
        return (page[:, None] * self._kv_heads + heads) * self._page_size + (positions % self._page_size)[:, None]

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, reads_early: bool = False
    ) -> list[_Sequence]:
        """Prepare a step as `plan` does. It reads the lengths from the device, which a CUDA graph cannot capture."""
        ones = np.ones(len(lanes), dtype=np.int64)
        return self.plan(StepLayout(ones, kv_lens.cpu().long().numpy(), len(lanes), lanes.cpu().numpy(), page_table))

    def attend(self, plan: list[_Sequence], layer: int, q: Tensor, window: int) -> Tensor:
        parts = torch.split(q, [sequence.queries for sequence in plan])
        found = [self._attend(part, sequence.rows, layer, window) for part, sequence in zip(parts, plan, strict=True)]
        return torch.cat(found)

    def _attend(self, q: Tensor, rows: Tensor, layer: int, window: int) -> Tensor:
        """Return the attention [Q, H, D] of q [Q, H, D], the last tokens of a sequence with keys at `rows`."""
        keys, values = (self._gather(tensor[layer], rows) for tensor in (self.pool.keys, self.pool.values))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self._scale
        positions = torch.arange(len(keys), device=q.device)
        ahead = positions[-len(q) :, None] - positions  # [Q, L], distance from a key to the query
        hidden = (ahead < 0) | (ahead >= (window or math.inf))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)

    def _gather(self, pool: Tensor, rows: Tensor) -> Tensor:
        """Return the keys or values of a sequence for each query head: float32 [L, H, D]."""
        found = fp8_pages.read(pool, rows.flatten(), 1).view(*rows.shape, self._head_size)
        return found.repeat_interleave(self._group, dim=1)
