"""The interface of attention over the paged KV pool.

Shape letters: T tokens in the step, S sequences, H query heads, K KV heads, D head size, P page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from fastgen.model.attention.shared import SharedPrefixes


@dataclass(frozen=True)
class StepLayout:
    """The sequences of a step. Sequence s has query_lens[s] tokens in the step, in order, at its last positions.

    query_lens, kv_lens: int64 [S]; kv_lens count the query tokens too. decodes: the first sequences of the step, which
    have one query token each. lanes: int64 [S], the row of page_table of each sequence. page_table: int32 [all lanes,
    columns] on the device, the pages of positions 0 .. P - 1, P .. 2 P - 1, ...; entries after a sequence's last page
    are any valid page. shared: `SharedPrefixes.update` was last called for the first sequences of this layout and
    returned True; the others share nothing.
    """

    query_lens: NDArray[np.int64]
    kv_lens: NDArray[np.int64]
    decodes: int
    lanes: NDArray[np.int64]
    page_table: Tensor
    shared: bool = False


class Attention(Protocol):
    """An implementation of attention. `plan` runs once per step, `attend` once per layer.

    A plan is opaque to all but the Attention that made it, which has its own type.

    capturable: a CUDA graph can hold `plan_decode` and `attend`. needs_clean_pages: all values of a page must be
    finite, also those that its sequence has not written yet, so fresh pages are wiped. prefixes: None: each sequence
    reads its own keys.
    """

    @property
    def capturable(self) -> bool: ...

    @property
    def needs_clean_pages(self) -> bool: ...

    @property
    def prefixes(self) -> SharedPrefixes | None: ...

    def plan(self, layout: StepLayout) -> object:
        """Prepare a step: compute what its layers have in common."""

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, reads_early: bool = False
    ) -> object:
        """Prepare a step of one token per sequence only from tensors on the device, so that a CUDA graph can hold it.

        lanes: int64 [S]; kv_lens: int32 [S]; page_table: int32 [all lanes, columns]. Their values, and the keys that
        rows share, may change before a replay. shared: read shared keys once; it does not change the results.
        reads_early: the step has no prefill chunks, so all other keys are of earlier steps, and an ordinary kernel
        launch stands between this call and the first `attend`; data that the step's layers do not write may then be
        read before the kernel ahead has ended (programmatic dependent launch).
        """

    def attend(self, plan: Any, layer: int, q: Tensor, window: int) -> Tensor:
        """Return causal attention [T, H, D] of q [T, H, D] over the pages of each sequence.

        The pages hold the keys and values of the query tokens already. A query at position p sees the keys of positions
        (p - window, p]; all up to p if window is 0.
        """


class CapturableAttention(Attention, Protocol):
    """An Attention that is `capturable`."""

    def lists(self, layout: StepLayout) -> list[NDArray[np.int32]]:
        """Return what `plan_lists` needs to know about the prefill chunks of a step, in a few arrays; none without
        chunks."""

    def list_sizes(self, tokens: int) -> list[int]:
        """Return the maximum lengths of `lists` for a step of `tokens` tokens."""

    def plan_lists(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, lists: Sequence[Tensor], shared: bool = False
    ) -> object:
        """Prepare a step of decodes and prefills only from tensors on the device, so that a CUDA graph can hold it.

        lanes: int64 [S], of which the first ones decode; kv_lens: int32 [S], 0 for lanes that do not decode. lists: the
        arrays of `lists`, at the beginning of tensors of `list_sizes`. The others: see `plan_decode`. Values may change
        before a replay, and so may the numbers of decodes and of chunks.
        """
