"""Measures what the host does in a step of steady decode, and writes JSON to scripts/results/host.json.

    python scripts/bench/bench_host.py            # 1, 64, 256 and 1024 lanes, short and long contexts
    python scripts/bench/bench_host.py --smoke    # the same in seconds, to see that it runs; writes nothing

A Generator has the bundled model's settings, and instead of the runner a stub that answers at once with made-up tokens.
What is left is the loop: to schedule, to hand over, and to take the tokens in. The figures are microseconds per step,
the median over windows of whole pages, so that each lane takes its pages in each window.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from reports import RESULTS, processor, write_json

from fastgen import Generator, SamplingParams
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.outputs import OutputQueue
from fastgen.model.config import ModelConfig
from fastgen.request import Batch, Request, StepResult

LANES = (1, 64, 256, 1024)
PAGE_SIZE = 64
SHORT, LONG = 100, 30_000  # tokens of prompt


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


def stub_generator(lanes: int, context: int, model: Path | None = None) -> Generator:
    """Make a Generator with the bundled model's settings (or another's) over a StubRunner, with pages for all its
    lanes."""

    def build(model_config: ModelConfig, options: GeneratorOptions, *where: object) -> StubRunner:
        pages = lanes * -(-context // PAGE_SIZE) + 1
        return StubRunner(replace(EngineConfig.make(model_config, options), max_model_len=context, num_pages=pages))

    size = {"max_seqs": lanes, "max_step_tokens": 1 << 20, "page_size": PAGE_SIZE}
    with patch("fastgen.start.build_rank", build):
        return Generator(model, device="cpu", **size)


def decoding(lanes: int, prompt: int, answer: int, read: bool = False, model: Path | None = None) -> Generator:
    """Make a Generator whose lanes all decode. read: the events, and so the text, of each step are read."""
    gen = stub_generator(lanes, prompt + answer + 1, model)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
    ids, queue = [5] * prompt, None if read else OutputQueue()
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
    read = any(active.queue is None for active in gen._loop.active.values())
    turn: Callable[[], object] = gen.step if read else gen._loop.advance
    found = []
    for _ in range(windows):
        start = time.perf_counter()
        for _ in range(steps):
            turn()
        found.append((time.perf_counter() - start) / steps)
    return statistics.median(found)


def measure(lanes: int, prompt: int, steps: int, windows: int, read: bool = False, model: Path | None = None) -> float:
    """Return the microseconds per step."""
    with decoding(lanes, prompt, windows * steps + PAGE_SIZE, read, model) as gen:  # nobody ends before
        return round(seconds(gen, steps, windows) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps, nothing written")
    smoke = parser.parse_args().smoke
    logging.getLogger("fastgen").setLevel(logging.ERROR)  # the contexts are not the model's
    steps, windows = (8, 2) if smoke else (2 * PAGE_SIZE, 7)
    rows = [{"lanes": lanes, "context": SHORT, "us": measure(lanes, SHORT, steps, windows)} for lanes in LANES]
    rows.append({"lanes": 256, "context": LONG, "us": measure(256, LONG, steps, windows)})
    read = {"lanes": 256, "context": SHORT, "us": measure(256, SHORT, *(8, 2) if smoke else (PAGE_SIZE, 3), read=True)}
    for row in rows:
        print(f"{row['lanes']:5} lanes, context {row['context']:6}: {row['us']:8.1f} us per step")
    print(f"{read['lanes']:5} lanes whose text is read at each step: {read['us']:8.1f} us per step")
    if not smoke:
        report = {"machine": processor(), "python": sys.version.split()[0], "steady_decode": rows, "text_read": read}
        write_json(RESULTS / "host.json", report)


if __name__ == "__main__":
    main()
