"""Requests, and random schedules under which deterministic=True must answer them alike, to the bit."""

from __future__ import annotations

import itertools
import random
from typing import Any

from fastgen import Generator, SamplingParams
from fastgen.request import Completion

Requests = list[tuple[list[int], SamplingParams]]
Answer = tuple[list[Completion], list[float]]


def random_requests(vocab: int, count: int, longest: int, generated: int) -> Requests:
    """Prompts of up to `longest` tokens, of which many begin alike, drawn from in all ways."""
    draw = random.Random(0)

    def ids(most: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(draw.randint(1, most))]

    known, found = ids(longest // 2) + ids(longest // 4), []
    for seed in range(count):
        start = known[: draw.choice((0, len(known) // 2, len(known)))]
        params = SamplingParams(
            n=draw.choice((1, 1, 3)),
            temperature=draw.choice((0.0, 0.7, 1.0)),
            top_p=draw.choice((1.0, 0.9)),
            max_tokens=draw.choice((2, generated // 2, generated)),
            seed=seed,
            ignore_eos=True,
            logprobs=draw.choice((None, 2)),
            prompt_logprobs=draw.choice((None, None, 0)),
        )
        found.append((start + ids(longest - len(start) - 1), params))
    return found


def random_options(seed: int, context: int) -> dict[str, Any]:
    """Options of Generator that change its schedule; its pool holds a few sequences."""
    draw = random.Random(seed)
    page_size = draw.choice((16, 64))
    return {
        "max_seqs": draw.choice((5, 8, 24)),
        "max_step_tokens": draw.choice((24, 67, 67, 300)),
        "page_size": page_size,
        "max_model_len": context,
        "num_pages": -(-context // page_size) * draw.choice((1, 2)) + 2,
        "prefix_cache": draw.random() < 0.7,
    }


def preempting(gen: Generator, steps: int) -> Generator:
    """The same, but every so many steps all that runs gives up its lane and its pages. Fewer steps than the longest
    sequence has chunks never end without a prefix cache."""
    advance, count = gen._loop.advance, itertools.count(1)

    def advance_anew() -> None:
        if next(count) % steps == 0:
            gen._loop.drain()
            gen._loop.scheduler.preempt_all()
        advance()

    gen._loop.advance = advance_anew  # type: ignore[method-assign]
    return gen


def answers(gen: Generator, requests: Requests) -> list[Answer]:
    """All of them at once."""
    prompts, params = zip(*requests, strict=True)
    outputs = gen.generate(list(prompts), list(params))
    assert not any(output.error for output in outputs)
    return [(output.completions, (output.prompt_logprobs or [])[1:]) for output in outputs]


def alone(gen: Generator, requests: Requests) -> list[Answer]:
    """Each by itself."""
    return [answers(gen, [request])[0] for request in requests]
