"""Prompt scores: which logprobs of given tokens a step computes, and where they go. No torch here.

`PromptScorer` computes them on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastgen.engine.admission import LaneTable
from fastgen.engine.interface import PlanFeature
from fastgen.request import Batch, Prefill, StepResult

SCORE_ROWS = 512
"""Prompts are scored in pieces of so many rows, whose logits over the whole vocabulary are in memory at a time."""


@dataclass(frozen=True, slots=True)
class ChunkTargets:
    """The tokens to score after a prefill chunk: its row `row + i` predicts the token `targets[i]` (int32 [n]).

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

    chunks: tuple[ChunkTargets, ...]


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

    def reset(self, lanes: LaneTable) -> None:
        self._lanes = lanes
        self._chunks: list[ChunkTargets] = []

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
            row = first - chunk.start
            self._chunks.append(ChunkTargets(chunk.lane, row, targets, top, score.temperature, embed))

    def payload(self, batch: Batch) -> ScorePlan | None:
        chunks, self._chunks = tuple(self._chunks), []
        return ScorePlan(chunks) if chunks else None

    def update(self, batch: Batch, result: StepResult) -> None:
        for scored in result.features:
            if type(scored) is Scored and (score := self._lanes[scored.lane].score) is not None:
                end = scored.start + len(scored.logprobs)
                score.logprobs[scored.start : end] = scored.logprobs
                if scored.top_logprobs is not None:
                    score.top_logprobs[scored.start : end] = scored.top_logprobs
                if scored.embedding is not None:
                    score.embedding = scored.embedding
