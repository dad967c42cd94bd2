"""Attention over the paged KV pool: what an implementation takes and gives.

Shape letters: T tokens in the step, S sequences, H query heads, K KV heads, D head size, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class StepLayout:
    """Where a step's tokens sit. Sequence s has query_lens[s] tokens, in order, at its last positions.

    query_lens, kv_lens: int64 [S] on the host; kv_lens include the query tokens. The first `decodes` sequences have
    one query token each.
    lanes: int64 [S] on the host: the row of page_table that each sequence has.
    page_table: int32 [all lanes, slots] on the device: the pages of positions 0 .. P - 1, P .. 2 P - 1, ...; entries
    behind a sequence's last page are any valid page.
    shared: the decodes are the rows that `Attention.share` was last told of, and it said that sharing pays.
    """

    query_lens: Tensor
    kv_lens: Tensor
    decodes: int
    lanes: Tensor
    page_table: Tensor
    shared: bool = False


class Attention(Protocol):
    """An implementation. A plan is made once a step, `attend` runs once a layer.

    capturable: `plan_decode` and `attend` may be captured in a CUDA graph. needs_clean_pages: values that no token of
    a page's sequence has written yet must be finite, so that they have to be wiped when a page changes hands. shares:
    `share` may say that it pays.
    """

    @property
    def capturable(self) -> bool: ...

    @property
    def needs_clean_pages(self) -> bool: ...

    @property
    def shares(self) -> bool: ...

    def plan(self, layout: StepLayout) -> Any:
        """What the layers of one step share."""

    def share(self, lanes: NDArray[np.int64], full: NDArray[np.int64], tables: NDArray[np.int32]) -> bool:
        """Find the keys that the rows of the next steps' decodes share, to read them once; whether that pays.

        lanes: [S]; full: [S], how many full pages each has now; tables: [all lanes, slots], as the device has them.
        Holds for all steps of the same rows. May be called between any two steps, and does not wait for them.
        """

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, alone: bool = False
    ) -> Any:
        """The plan of a step of one token a sequence that is known on the device alone, so that a CUDA graph can hold
        it: lanes int64 [S], kv_lens int32 [S], page_table int32 [all lanes, slots]; values may change before a replay,
        and so may what the rows share. shared: read that once; else it makes no difference. alone: the step is of
        these decodes alone, so that their other keys are of earlier steps, and between this and the first `attend` a
        kernel is launched in the ordinary way: what the step's layers do not write may then be read before the kernel
        ahead has ended.
        """

    def attend(self, plan: Any, layer: int, q: Tensor, window: int) -> Tensor:
        """Causal attention of q [T, H, D] over the pages of each sequence, which hold its query tokens already.

        A query at position p sees the keys of positions (p - window, p], all up to p where window is 0.
        """
