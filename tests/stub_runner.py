"""The engine's loop over a runner that answers at once, without a model, for tests of what the host does."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fastgen import Generator, SamplingParams
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.outputs import OutputQueue
from fastgen.model.config import ModelConfig
from fastgen.request import Batch, Request, StepResult

PAGE_SIZE = 64


@dataclass
class Launched:
    batch: Batch


class StubRunner:
    """A runner that draws the token 7 for each sequence, at no cost."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._columns: dict[int, tuple[list[int], list[float]]] = {}

    def close(self) -> None:
        """Do nothing, as there is nothing to close."""

    def launch(self, batch: Batch) -> Launched:
        return Launched(batch)

    def sample(self, launched: Launched, masks: Any = None) -> None:
        pass

    def collect(self, launched: Launched) -> StepResult:
        rows = len(launched.batch.sampling)
        if rows not in self._columns:
            self._columns[rows] = [7] * rows, [-0.5] * rows
        tokens, logprobs = self._columns[rows]
        return StepResult(
            tokens=tokens,
            lanes=launched.batch.sampling,
            logprobs=logprobs,
            untruncated_logprobs=logprobs,
            raw_logprobs=logprobs,
        )


def stub_generator(lanes: int, context: int, model: Path) -> Generator:
    """Make a Generator with a model's settings over a StubRunner, with pages for all its lanes."""

    def build(model_config: ModelConfig, options: GeneratorOptions, *where: object) -> StubRunner:
        pages = lanes * -(-context // PAGE_SIZE) + 1
        return StubRunner(replace(EngineConfig.make(model_config, options), max_model_len=context, num_pages=pages))

    size = {"max_seqs": lanes, "max_step_tokens": 1 << 20, "page_size": PAGE_SIZE}
    with patch("fastgen.start.build_rank", build):
        return Generator(model, device="cpu", **size)


def decoding(lanes: int, prompt: int, answer: int, model: Path) -> Generator:
    """Make a Generator whose lanes all decode."""
    gen = stub_generator(lanes, prompt + answer + 1, model)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
    ids, queue = [5] * prompt, OutputQueue()
    for _ in range(lanes):
        gen._loop.begin(Request(ids, params), queue)
    for _ in range(2 + lanes * prompt // gen.config.max_step_tokens + 1):  # the prompts, and a step to read the last
        gen._loop.advance()
    assert len(gen._loop.scheduler.running) == lanes
    assert all(sequence.output_len for sequence in gen._loop.scheduler.running)
    gc.collect()  # what the set-up left, not in the middle of a measurement
    return gen


def seconds(gen: Generator, steps: int, windows: int) -> float:
    """Return the seconds per step: the median over windows of so many steps each."""
    found = []
    for _ in range(windows):
        start = time.perf_counter()
        for _ in range(steps):
            gen._loop.advance()
        found.append((time.perf_counter() - start) / steps)
    return statistics.median(found)
