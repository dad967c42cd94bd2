"""The logprobs and hidden states of a prompt, which a sequence may ask for. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # fgserve's HTTP process does not load NumPy
    import numpy as np

Positions: TypeAlias = str | Sequence[int]
"""Positions of a sequence: "all", "last", or their numbers; negative ones count from the end."""


@dataclass(slots=True)
class PromptStates:
    """The hidden states of a prompt; see `Generator.features`.

    layers: their indices, from 0 to the number of layers. positions: int64 [N], ascending. values: [layers, N, hidden],
    those computed so far, in float32, or the bits of a 16-bit dtype (which NumPy may not have) as int16.
    """

    layers: tuple[int, ...]
    positions: np.ndarray
    values: np.ndarray


@dataclass(slots=True)
class PromptScore:
    """The prompt logprobs of a sequence: the requested ones, as far as they are computed.

    start: the first position to score. temperature: divides the logits. logprobs: one for each token of the prompt, NaN
    if there is none. top_logprobs: their raw alternatives; empty if `SamplingParams.prompt_logprobs` asks for none.
    ranks: the ranks of the prompt's tokens, 0 for a token without a logprob; empty without alternatives.
    states: the hidden states of the same prompt; None if they are not wanted.
    """

    start: int
    temperature: float
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    states: PromptStates | None = None

    @property
    def first_row(self) -> int:
        """The first position whose row must be computed."""
        first = self.start - 1
        if self.states is not None and len(self.states.positions):
            first = min(first, int(self.states.positions[0]))
        return first
