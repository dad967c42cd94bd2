"""Prefill chunks with which a step takes no longer than `max_step_ms`. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fastgen.request import Batch

LEAST_TOKENS = 256
"""Prefill tokens that any step may have. A step of fewer takes about as long, since it reads all weights."""

MULTIPLE = 1024
"""Larger steps have a multiple of so many tokens, with the decodes: the tiles of most products then fill a GPU evenly.
For Mistral 7B on an H200, 2176 tokens take 21 % longer than 2048."""

EMPTY_STEP = 50
"""Work of a step without its tokens: 1 ms for Mistral 7B on an H200."""

FAR = 20_000
"""Position at which attention doubles the work of a token: that of Mistral 7B."""

RATE = 0.25  # weight of a measured step in the moving average
MOST_RATIO = 2.0  # of a measured pace and the average, or its reciprocal: the delay of one step tells nothing


@dataclass
class StepWork:
    """The work of a step, counted in tokens at position 0. decodes, prefilled: tokens."""

    decodes: int
    prefilled: int = 0
    prefill_work: float = 0.0

    def add(self, start: int, count: int) -> None:
        """Add a chunk of `count` tokens from position `start` on."""
        self.prefilled += count
        self.prefill_work += count * (1 + (start + count / 2) / FAR)

    @property
    def total(self) -> float:
        return EMPTY_STEP + self.decodes + self.prefill_work


class StepTimes:
    """The time of a step with prefills is predicted as its work times `pace`, a moving average of measured steps.

    Other influences, such as the contexts of decodes, change slowly from step to step, and `pace` follows them.
    """

    def __init__(self, limit: float) -> None:
        """limit: seconds that a step with decodes and prefills should take; 0: no limit."""
        self.limit = limit or inf
        self.pace = 0.0  # seconds of a unit of work; 0: no step was measured
        self.least, self.multiple = LEAST_TOKENS, MULTIPLE

    def room(self, step: StepWork, start: int, budget: int) -> int:
        """Return the tokens of a chunk at position `start` that a step has room for, at most `budget`.

        A step without decodes has room for all, and any step for `least` prefill tokens.
        """
        if not step.decodes or self.limit == inf:
            return budget
        work = max(self.limit / self.pace - step.total, 0.0) if self.pace else 0.0
        tokens = int(work / (1 + (start + work / 2) / FAR))  # slightly too few, since `work` is more than `tokens`
        total = step.decodes + step.prefilled + tokens
        if total >= self.multiple:
            tokens -= total % self.multiple
        return min(budget, max(tokens, self.least - step.prefilled, 0))

    def learn(self, batch: Batch, seconds: float) -> None:
        """Take the measured time of a step into account, unless its chunks are too few to tell of large ones."""
        step = StepWork(len(batch.decodes))
        for chunk in batch.prefills:
            step.add(chunk.start, len(chunk.tokens))
        if step.prefilled >= self.least:
            pace = seconds / step.total
            ratio = pace / self.pace if self.pace else 1.0
            self.pace = (self.pace or pace) * min(max(ratio, 1 / MOST_RATIO), MOST_RATIO) ** RATE
