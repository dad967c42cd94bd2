"""Prompt scores: which logprobs of given tokens a step computes, and where they go. No torch here.

`PromptScorer` computes them on the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from fastgen.engine.admission import LaneTable
from fastgen.engine.interface import PlanFeature
from fastgen.engine.prompts import prompt_list
from fastgen.request import Batch, Prefill, Prompt, StepResult


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """The prompt logprobs wanted of a prefill chunk: its row `row + i` predicts the token `targets[i]` (int32 [n]).

    lane: the lane of the chunk. top: the number of alternatives for each token. temperature: divides the logits.
    embed: the hidden state of the chunk's last row is wanted too.
    """

    lane: int
    row: int
    targets: np.ndarray
    top: int = 0
    temperature: float = 1.0
    embed: bool = False


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The payload of a Batch: the scores of its prefill chunks."""

    requests: tuple[ScoreRequest, ...]


@dataclass(slots=True)
class Scored:
    """The logprobs of the prompt tokens at positions start, start + 1, ... of one lane, or its embedding."""

    lane: int
    start: int
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None = None
    embedding: list[float] | None = None


class PromptScores(PlanFeature):
    """Plans the scores of prefill chunks, and writes the results into the `PromptScore` of their sequences."""

    def __init__(self, lanes: LaneTable) -> None:
        self._lanes = lanes
        self._requests: list[ScoreRequest] = []

    def chunk(self, chunk: Prefill, num_sequences: int) -> None:
        """Request the prompt logprobs that the rows of a chunk predict, one position later than the rows."""
        sequence = self._lanes[chunk.lane]
        if (score := sequence.score) is None:
            return
        first, end = max(chunk.start, score.start - 1), min(chunk.start + len(chunk.tokens), sequence.prompt_len - 1)
        targets = np.array(sequence.token_ids[first + 1 : end + 1], dtype=np.int32)
        embed = score.embedding is not None and chunk.start + len(chunk.tokens) == sequence.prompt_len
        if len(targets) or embed:
            top = sequence.params.prompt_logprobs or 0
            request = ScoreRequest(chunk.lane, first - chunk.start, targets, top, score.temperature, embed)
            self._requests.append(request)

    def payload(self, batch: Batch) -> ScorePlan | None:
        requests, self._requests = tuple(self._requests), []
        return ScorePlan(requests) if requests else None

    def update(self, batch: Batch, result: StepResult) -> None:
        for scored in result.features:
            if type(scored) is Scored and (score := self._lanes[scored.lane].score) is not None:
                end = scored.start + len(scored.logprobs)
                score.logprobs[scored.start : end] = scored.logprobs
                if scored.top_logprobs is not None:
                    score.top_logprobs[scored.start : end] = scored.top_logprobs
                if scored.embedding is not None:
                    score.embedding = scored.embedding


def pair_scores(
    sequences: Iterable[Prompt], start: int | SequenceOf[int], temperature: float
) -> tuple[list[Prompt], list[int]]:
    """Return the sequences to score, and the first position of each. Raises ValueError or TypeError for arguments that
    do not fit together."""
    if not (isinstance(temperature, Real) and 0 < float(temperature) < math.inf):
        raise ValueError(f"temperature is {temperature}; scores need one above 0")
    prompts = prompt_list(sequences)
    starts = [start] * len(prompts) if isinstance(start, Integral) else start
    if not isinstance(starts, Collection) or not all(isinstance(first, Integral) for first in starts):
        raise TypeError(f"start must be an integer, or one for each sequence, not {start!r}")
    if len(starts) != len(prompts):
        raise ValueError(f"there are {len(prompts)} sequences and {len(starts)} starts; give one start per sequence")
    return prompts, list(starts)
