"""What one sequence wants of a step, and what it keeps of the step's result. No torch here."""

from __future__ import annotations

import numpy as np

from fastgen.request import LaneStart, Score, Scored, Sequence, Status, StepResult


def lane_start(sequence: Sequence) -> LaneStart:
    return LaneStart(
        lane=sequence.lane,
        params=sequence.params,
        seed=sequence.seed,
        index=sequence.index,
        prompt_len=sequence.prompt_len,
        stop_ids=sequence.stop_ids,
        token_ids=tuple(sequence.token_ids) if sequence.params.penalized else (),
    )


def cacheable(sequence: Sequence) -> int:
    """How many of a sequence's known tokens need not be computed, at most: the last one's row is drawn from, and a
    prompt logprob comes from the row before its position."""
    known = len(sequence.token_ids)
    return max(0, min(known, known if sequence.score_start is None else sequence.score_start) - 1)


def wanted_score(sequence: Sequence, start: int, end: int) -> Score | None:
    """The prompt logprobs that the chunk of positions start .. end - 1 gives: of the tokens one further."""
    if sequence.score_start is None:
        return None
    first = max(start, sequence.score_start - 1)
    targets = np.array(sequence.token_ids[first + 1 : min(end, sequence.prompt_len - 1) + 1], dtype=np.int32)
    if not len(targets):
        return None
    return Score(first - start, targets, sequence.params.prompt_logprobs or 0, sequence.score_temperature)


def keep_scores(sequence: Sequence, scored: Scored) -> None:
    end = scored.start + len(scored.logprobs)
    sequence.prompt_logprobs[scored.start : end] = scored.logprobs
    if scored.top_logprobs is not None:
        sequence.prompt_top_logprobs[scored.start : end] = scored.top_logprobs


def fill_mask(sequence: Sequence, row: np.ndarray) -> None:
    """Write the tokens that a sequence's mask allows into a row; none, where it raises."""
    if sequence.mask is not None and sequence.status is Status.RUNNING:
        try:
            sequence.mask.fill(row)
        except Exception as error:  # the user's code; ends this sequence alone, when no token comes back
            sequence.error = f"the mask raised {error!r}"
            row[:] = 0


def keep_token(sequence: Sequence, result: StepResult, row: int) -> bool:
    """Keep a token and all that was asked for with it; False, and `error` says why, where there can be none."""
    token = result.tokens[row]
    if token < 0:
        nothing = "the logits are not finite" if sequence.mask is None else "the mask allowed no token"
        sequence.error = sequence.error or nothing
        return False
    if sequence.mask is not None:
        try:
            sequence.mask.accept(token)
        except Exception as error:
            sequence.error = f"the mask raised {error!r}"
            return False
    sequence.drawn.append(result, row)
    sequence.token_ids.append(token)  # last: what an exception leaves without its token is cut by `requeue`
    return True


def requeue(sequence: Sequence) -> None:
    """Make a sequence what it was before it ran, but for the tokens that have been read, after an exception."""
    sequence.pages.clear()
    sequence.lane = -1
    sequence.computed = sequence.pending = 0
    sequence.preemptions += sequence.status is Status.RUNNING
    sequence.status = Status.WAITING
    sequence.finish_reason = sequence.stop_reason = sequence.error = None
    sequence.drawn.cut(sequence.output_len)
