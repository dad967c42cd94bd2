"""Prompt scores: which logprobs of given tokens a step computes, and where they go. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastgen.request import Sequence


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """The prompt logprobs wanted of a lane's prefill chunk: its row `row + i` predicts the token `targets[i]` (int32
    [n]).

    top: the number of alternatives. temperature: divides the logits.
    """

    lane: int
    row: int
    targets: np.ndarray
    top: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The payload of a Batch: the scores of its prefill chunks."""

    requests: tuple[ScoreRequest, ...]


@dataclass(slots=True)
class Scored:
    """The logprobs of the prompt tokens at positions start, start + 1, ... of one lane."""

    lane: int
    start: int
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None = None


def chunk_score(sequence: Sequence, start: int, end: int) -> ScoreRequest | None:
    """Return the prompt logprobs to take from the chunk of positions start .. end - 1, whose rows predict the tokens
    one position later."""
    if sequence.score_start is None:
        return None
    first = max(start, sequence.score_start - 1)
    targets = np.array(sequence.token_ids[first + 1 : min(end, sequence.prompt_len - 1) + 1], dtype=np.int32)
    if not len(targets):
        return None
    top = sequence.params.prompt_logprobs or 0
    return ScoreRequest(sequence.lane, first - start, targets, top, sequence.score_temperature)


def keep_scores(sequence: Sequence, scored: Scored) -> None:
    """Write scores into their sequence."""
    end = scored.start + len(scored.logprobs)
    sequence.prompt_logprobs[scored.start : end] = scored.logprobs
    if scored.top_logprobs is not None:
        sequence.prompt_top_logprobs[scored.start : end] = scored.top_logprobs
