"""Workloads of `bench.py gpu` whose requests share prefixes and differ in length, in rounds of one generate() each.

- rl: 64 prompts of 512 tokens, each sent as 16 separate requests; answers are log-normal around 450 tokens.
- tools: 1,500 requests with one of 12 prefixes of 1,500 tokens, about 80 tokens more, and answers of about 60.
- turns: 64 conversations over 8 prefixes of 1,000 tokens, in 6 turns of 150 new tokens and answers of 100.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from bench_engine import LONG_RUN, Run, Watch, figures_of_runs

from fastgen import Generator, SamplingParams


class Asked(NamedTuple):
    """One request: a conversation with `ids` added to it, to be answered with `generated` tokens."""

    conversation: int
    ids: list[int]
    generated: int


Round = list[Asked]


class Draw:
    """Random ids, which differ between seeds, and random lengths, which do not."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._ids, self.lengths, self._vocab_size = np.random.default_rng([seed]), np.random.default_rng(0), vocab_size

    def ids(self, count: int) -> list[int]:
        found: list[int] = self._ids.integers(0, self._vocab_size, count).tolist()
        return found

    def around(self, median: int, sigma: float, least: int = 1, most: int = 1024) -> int:
        """Return a log-normal length."""
        return int(np.clip(round(median * self.lengths.lognormal(0, sigma)), least, most))


def rl(draw: Draw, small: bool) -> list[Round]:
    """Return the rounds of `rl`, of a trainer that sends a request for each sample."""
    prompts, size, samples, answer, least = (2, 24, 2, 8, 1) if small else (64, 512, 16, 450, 16)
    ids = [draw.ids(size) for _ in range(prompts)]
    numbers = range(prompts * samples)
    return [[Asked(number, ids[number // samples], draw.around(answer, 0.7, least)) for number in numbers]]


def tools(draw: Draw, small: bool) -> list[Round]:
    """Return the rounds of `tools`: short questions after long descriptions."""
    roots, size, requests, question, answer = (2, 24, 4, 8, 6) if small else (12, 1500, 1500, 80, 60)
    ids = [draw.ids(size) for _ in range(roots)]

    def one(number: int) -> Asked:
        root = ids[draw.lengths.integers(roots)]
        return Asked(number, root + draw.ids(draw.around(question, 0.7)), draw.around(answer, 0.6))

    return [[one(number) for number in range(requests)]]


def turns(draw: Draw, small: bool) -> list[Round]:
    """Return the rounds of `turns`."""
    roots, size, chats, count, new, answer = (2, 24, 4, 2, 8, 4) if small else (8, 1000, 64, 6, 150, 100)
    ids = [draw.ids(size) for _ in range(roots)]
    first = [Asked(chat, ids[chat % roots] + draw.ids(new), answer) for chat in range(chats)]
    return [first, *([Asked(chat, draw.ids(new), answer) for chat in range(chats)] for _ in range(count - 1))]


REQUESTS: dict[str, Callable[[Draw, bool], list[Round]]] = {"rl": rl, "tools": tools, "turns": turns}


def measure_requests(generator: Generator, name: str, small: bool, repeats: int = 3) -> dict[str, Any]:
    """Return the figures of one of REQUESTS, over several runs, or one run if that takes long."""
    runs: list[Run] = []
    while len(runs) < repeats and not (runs and runs[0].seconds > LONG_RUN):
        rounds = REQUESTS[name](Draw(len(runs) + 1, generator.model_config.vocab_size), small)
        runs.append(run_rounds(generator, rounds))
    tokens = sum(asked.generated for each in rounds for asked in each)
    shape = {"rounds": len(rounds), "requests": sum(map(len, rounds)), "generated": tokens}
    return {"workload": shape, **figures_of_runs(tokens, runs)}


def run_rounds(generator: Generator, rounds: list[Round]) -> Run:
    """Time one generate() for each round."""
    conversations: defaultdict[int, list[int]] = defaultdict(list)
    before = generator.stats
    with Watch(generator) as watch:
        start = time.perf_counter()
        for each in rounds:
            for asked in each:
                conversations[asked.conversation] += asked.ids
            params = [SamplingParams(temperature=1, max_tokens=asked.generated, ignore_eos=True) for asked in each]
            outputs = generator.generate([conversations[asked.conversation] for asked in each], params)
            for asked, output in zip(each, outputs, strict=True):
                if len(output.completions[0].token_ids) != asked.generated:
                    raise RuntimeError(f"an answer does not have {asked.generated} tokens: {output.error}")
                conversations[asked.conversation] += output.completions[0].token_ids
        seconds = time.perf_counter() - start
    after = generator.stats
    return Run(seconds, after.steps - before.steps, after.preemptions - before.preemptions, watch.lanes)
