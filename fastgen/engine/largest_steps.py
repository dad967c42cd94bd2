"""The largest steps on made-up tokens, for the start of an engine, and how fast prefills are in them."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fastgen.engine.options import MIN_PREFILL_TOKENS, EngineConfig
from fastgen.engine.runner import Runner
from fastgen.engine.step import StepFeature
from fastgen.request import Batch, LaneStart, Prefill, SamplingParams

STEP_SECONDS = 0.06  # limit of a step of decodes and prefills at the measured rate; rounding makes it 50 ms on average
MULTIPLE = 1024  # tokens; for Mistral 7B on an H200, a step of 2176 takes 21 % longer than one of 2048
CPU_RATE_TOKENS = 64  # tokens of the step that measures the speed of prefills on the CPU


def largest_batches(
    config: EngineConfig, params: SamplingParams, features: Collection[StepFeature[Any]] = ()
) -> Iterator[Batch]:
    """Yield a step of prefills on all lanes that fill the token budget, a step of decodes on all lanes, and the largest
    steps of features.

    The steps also wipe and copy the spare page. Forks are left out: they take no more memory than prefills.
    """
    lanes, most = config.max_seqs, config.max_model_len - 1
    lengths, left = [1] * lanes, config.max_step_tokens - lanes
    for lane in range(lanes):  # the first lanes are the longest, so that features have many rows
        more = min(left, most - 1)
        lengths[lane], left = 1 + more, left - more
    starts = tuple(LaneStart(lane, params, 0, 0, lengths[lane], frozenset((0,)), (0,)) for lane in range(lanes))
    prefills = tuple(Prefill(lane, 0, np.zeros(lengths[lane], dtype=np.int32), True) for lane in range(lanes))
    rows, top = (lengths[0] - 1, params.logprobs) if params.logprobs else (0, 0)
    payloads = tuple(payload for feature in features for payload in feature.largest_payloads(config, rows, top))
    spare = config.num_pages
    yield Batch(prefills=prefills, starts=starts, fresh=(spare,), features=payloads)
    yield Batch(decodes=tuple(range(lanes)), copies=((0, spare),))
    for feature in features:
        yield from feature.largest_batches(config)


def measure_prefill_tokens(runner: Runner) -> int:
    """Return the number of prefill tokens in a step of about 50 ms: the minimum over the ranks, since all ranks have
    the same schedule.

    The rate is measured in the largest step on a GPU, and in a short step on the CPU, where the largest may take
    seconds.
    """
    config = runner.config
    if runner.device.type == "cpu":
        config = replace(config, max_seqs=1, max_step_tokens=min(config.max_step_tokens, CPU_RATE_TOKENS))
    largest = next(largest_batches(config, SamplingParams()))
    batch, seconds = Batch(prefills=largest.prefills, starts=largest.starts), math.inf
    for _ in range(2):
        start = time.perf_counter()
        runner.collect(runner.launch(batch))
        seconds = min(seconds, time.perf_counter() - start)
    runner.clear_lanes()
    rate = sum(len(chunk.tokens) for chunk in batch.prefills) / seconds
    return runner.group.minimum(min(even_tokens(rate * STEP_SECONDS), runner.config.max_step_tokens))


def even_tokens(most: float) -> int:
    """Return the largest number of tokens <= `most` whose tiles fill a GPU evenly, but at least MIN_PREFILL_TOKENS."""
    unit = MULTIPLE if most >= MULTIPLE else MIN_PREFILL_TOKENS
    return max(int(most) // unit * unit, MIN_PREFILL_TOKENS)
