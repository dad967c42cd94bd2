"""Prompt scores: which logprobs of given tokens a step computes, and where they go. No torch here.

`PromptScorer` computes them on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    state_rows: int64 [n], the rows of the chunk whose hidden states are wanted. layers: see PromptStates.
    """

    lane: int
    row: int
    targets: np.ndarray
    top: int = 0
    temperature: float = 1.0
    state_rows: np.ndarray | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The payload of a Batch: the scores of its prefill chunks."""

    chunks: tuple[ChunkTargets, ...]


@dataclass(slots=True)
class Scored:
    """The logprobs of the prompt tokens at positions start, start + 1, ... of one lane, and with alternatives also the
    tokens' ranks."""

    lane: int
    start: int
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None = None
    ranks: list[int] | None = None


@dataclass(slots=True)
class ChunkStates:
    """The hidden states of a chunk of one lane. first: the first of their positions. values: [layers, n, hidden], as in
    PromptStates."""

    lane: int
    first: int
    values: np.ndarray


class PromptScores(PlanFeature):
    """Plans the scores of prefill chunks, and writes the results into the `PromptScore` of their sequences."""

    def reset(self, lanes: LaneTable) -> None:
        self._lanes = lanes
        self._chunks: list[ChunkTargets] = []

    def chunk(self, chunk: Prefill, num_sequences: int) -> None:
        """Request the hidden states of a chunk, and the prompt logprobs that its rows predict, one position later."""
        sequence = self._lanes[chunk.lane]
        if (score := sequence.score) is None:
            return
        first, end = max(chunk.start, score.start - 1), min(chunk.start + len(chunk.tokens), sequence.prompt_len - 1)
        targets = np.array(sequence.token_ids[first + 1 : end + 1], dtype=np.int32)
        scored = ChunkTargets(
            chunk.lane, first - chunk.start, targets, sequence.params.prompt_logprobs or 0, score.temperature
        )
        if (states := score.states) is not None:
            begin, stop = np.searchsorted(states.positions, (chunk.start, chunk.start + len(chunk.tokens)))
            if stop > begin:
                rows = states.positions[begin:stop] - chunk.start
                scored = replace(scored, state_rows=rows, layers=states.layers)
        if len(targets) or scored.layers:
            self._chunks.append(scored)

    def payload(self, batch: Batch) -> ScorePlan | None:
        chunks, self._chunks = tuple(self._chunks), []
        return ScorePlan(chunks) if chunks else None

    def update(self, batch: Batch, result: StepResult) -> None:
        for scored in result.features:
            if type(scored) is Scored and (score := self._lanes[scored.lane].score) is not None:
                end = scored.start + len(scored.logprobs)
                score.logprobs[scored.start : end] = scored.logprobs
                if scored.top_logprobs is not None and scored.ranks is not None:
                    score.top_logprobs[scored.start : end] = scored.top_logprobs
                    score.ranks[scored.start : end] = scored.ranks
            elif type(scored) is ChunkStates and (score := self._lanes[scored.lane].score) is not None:
                assert score.states is not None
                at = int(np.searchsorted(score.states.positions, scored.first))
                score.states.values[:, at : at + scored.values.shape[1]] = scored.values
