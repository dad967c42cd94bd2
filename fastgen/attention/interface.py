"""Attention over the paged KV pool: what an implementation takes and gives.

Shape letters: T tokens in the step, S sequences, H query heads, K KV heads, D head size, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class StepLayout:
    """Where a step's tokens sit. Sequence s has query_lens[s] tokens, in order, at its last positions.

    query_lens, kv_lens: int64 [S] on the host; kv_lens include the query tokens.
    page_table: int64 [S, slots] on the device; entries behind a sequence's last page are any valid page.
    """

    query_lens: Tensor
    kv_lens: Tensor
    page_table: Tensor


class Attention(Protocol):
    """An implementation. `plan` runs once a step, `attend` once a layer."""

    def plan(self, layout: StepLayout) -> Any:
        """What the layers of one step share."""

    def attend(self, plan: Any, layer: int, q: Tensor, window: int) -> Tensor:
        """Causal attention of q [T, H, D] over the pages of each sequence, which hold its query tokens already.

        A query at position p sees the keys of positions (p - window, p], all up to p where window is 0.
        """
