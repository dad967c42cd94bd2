"""The scheduler of a server over a device that is only a clock: the time between two tokens, and the speed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hash_model import make_config, make_sequence

from fastgen.engine.largest_steps import STEP_SECONDS, even_tokens
from fastgen.engine.scheduler import Scheduler
from fastgen.request import Batch, SamplingParams, Sequence, StepResult

Cost = Callable[[list[int], list[tuple[int, int]]], float]
"""A function that returns the seconds of a step, given the contexts of its decodes and its chunks (start, length)."""


def mistral(contexts: list[int], chunks: list[tuple[int, int]]) -> float:
    """Return the seconds of a step of Mistral 7B on an H200 (docs/performance.md): 14.2 GB of weights at 4.3 TB/s or
    14.2 GFLOP per token, in tiles of 128 tokens by 256 outputs on 132 processors; attention; 1 ms for all else."""
    tokens = len(contexts) + sum(count for _, count in chunks)
    products = 0.0
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)) if tokens > 64 else ():
        waves = -(-(-(-tokens // 128) * (outputs // 256)) // 132)
        products += 32 * 2 * waves * 132 * 128 * 256 * inputs / 690e12
    pairs = sum(count * (start + count / 2) for start, count in chunks)
    return max(products, 14.2e9 / 4.3e12) + pairs * 524288 / 450e12 + sum(contexts) * 131e3 / 4.2e12 + 1e-3


def linear(contexts: list[int], chunks: list[tuple[int, int]]) -> float:
    """Return the seconds of a step of a small model on a CPU."""
    each = sum(count * (60e-6 + 4e-9 * (start + count / 2)) for start, count in chunks)
    return 2e-3 + 60e-6 * len(contexts) + each + 1e-7 * sum(contexts)


# ------------------------------------------------------------------------------------- a server in virtual time

H200: dict[str, Any] = {
    "max_seqs": 1024, "max_step_tokens": 8192, "page_size": 64, "num_pages": 14000, "max_model_len": 32768,
    "prefix_cache": False,
}  # fmt: skip


@dataclass
class Served:
    """A server whose device takes the times of `cost`, with the loop of Generator, which runs one step ahead.

    arrivals: times and sequences, in order. times: of the tokens of each sequence.
    """

    scheduler: Scheduler
    cost: Cost
    arrivals: deque[tuple[float, Sequence]]
    now: float = 0.0
    times: dict[Sequence, list[float]] = field(default_factory=dict)

    def run(self) -> Served:
        flight: tuple[Batch, float] | None = None
        while self.arrivals or self.scheduler.busy:
            while self.arrivals and self.arrivals[0][0] <= self.now:
                self.scheduler.add(self.arrivals.popleft()[1])
            batch = self.scheduler.schedule()
            if flight is not None:
                self._end(*flight)
            flight = None if batch is None else (batch, self._seconds(batch))
            if not self.scheduler.busy and self.arrivals:
                self.now = self.arrivals[0][0]
        return self

    def _seconds(self, batch: Batch) -> float:
        decoding = [self.scheduler.lanes[lane] for lane in batch.decodes]
        chunks = [(chunk.start, len(chunk.tokens)) for chunk in batch.prefills]
        return self.cost([sequence.computed for sequence in decoding], chunks)

    def _end(self, batch: Batch, seconds: float) -> None:
        self.now += seconds
        for lane in batch.sampling:
            self.times.setdefault(self.scheduler.lanes[lane], []).append(self.now)
        values = [0.0] * len(batch.sampling)
        drawn = {"logprobs": values, "untruncated_logprobs": values, "raw_logprobs": values}
        tokens = [7] * len(batch.sampling)
        self.scheduler.update(batch, StepResult(tokens=tokens, lanes=batch.sampling, **drawn))

    @property
    def p999(self) -> float:
        """The 99.9th percentile of the time between two tokens, in ms."""
        gaps = [after - before for times in self.times.values() for before, after in pairwise(times)]
        return float(np.percentile(gaps, 99.9)) * 1000

    @property
    def rate(self) -> float:
        return self.scheduler.stats.generated_tokens / self.now


def served(limit: int, rate: float, prompts: list[int], answer: int, cost: Cost) -> Served:
    """Serve prompts that arrive as a Poisson process.

    limit: max_prefill_tokens. rate: arrivals per second. prompts: their lengths. answer: the length of each output.
    """
    config, rng, now = make_config(**H200, max_prefill_tokens=limit), random.Random(0), 0.0
    arrivals = deque[tuple[float, Sequence]]()
    for number, length in enumerate(prompts):
        now += rng.expovariate(rate)
        sequence = make_sequence([number] * length, SamplingParams(max_tokens=answer, ignore_eos=True), config)
        arrivals.append((now, sequence))
    return Served(Scheduler(config), cost, arrivals).run()


def measured(cost: Cost) -> int:
    """Return the limit that a server computes at its start from the time of its largest step."""
    most = H200["max_step_tokens"]
    return even_tokens(STEP_SECONDS * most / cost([], [(0, most)]))


def test_mistral_prefills_2048_tokens_in_a_step_with_decodes() -> None:
    assert measured(mistral) == 2048


@pytest.mark.parametrize(
    ("cost", "rate", "prompts", "answer"),
    [
        (mistral, 8, [512, 512, 512, 8000] * 30, 128),
        (mistral, 100, [512, 512, 512, 8000] * 60, 128),
        (mistral, 70, [512] * 1500, 128),
        (linear, 3, [100, 100, 100, 2000] * 25, 64),
    ],
    ids=["long prompts", "saturation", "many", "a slow device"],
)
def test_prompts_hardly_delay_decodes_at_little_cost(cost: Cost, rate: float, prompts: list[int], answer: int) -> None:
    free, limited = (served(limit, rate, prompts, answer, cost) for limit in (8192, measured(cost)))
    assert free.p999 > 100
    assert limited.p999 < 70
    assert limited.rate > 0.95 * free.rate
