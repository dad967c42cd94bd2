"""Measures, as `bench.py gpu --speculate`, generated tokens per second with and without speculation.

Random weights accept nothing, so the answers are recorded: a hook on the draw replaces each drawn token by the recorded
token of its request and position, in all runs alike. The drafts come from the real matcher. One Generator without a
prefix cache runs each stream with SamplingParams(speculate=False) and without it, in turns. Streams:

- edit: the prompt is a text of random tokens in Zipf's distribution, and the answer copies it in runs of about 12
  tokens, between which 1 to 9 tokens are new; about 70 % of it are copied.
- other: prompt and answer are such texts that have nothing in common, so that few drafts are right.
- random: all tokens are equally likely, so that there are no drafts.
- tail: the history holds an answer to each prompt, which agrees with the answer in so many percent of the tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_engine import ready_generator, write_report

from fastgen import Generator, SamplingParams
from fastgen.engine import runner

RUN = 12  # mean length of a copied run
NEW = 9  # maximum number of new tokens between two
REPEATS = 2


@dataclass(frozen=True)
class Stream:
    """Requests that run at once: `lanes` prompts of `prompt` tokens, answers of `generated` tokens.

    agreement: share of an answer that is copied from the text that drafts come from, which is the prompt, or with
    `history` an earlier answer. uniform: all tokens are equally likely.
    """

    lanes: int
    agreement: float
    history: bool = False
    uniform: bool = False
    prompt: int = 512
    generated: int = 384


STREAMS = {
    "chat1 edit": Stream(1, 0.7),
    "chat8 edit": Stream(8, 0.7),
    "chat1 random": Stream(1, 0.0, uniform=True, prompt=128, generated=256),
    **{f"tail16 {percent} %": Stream(16, percent / 100, history=True, prompt=64) for percent in (70, 50, 90)},
    "chat1 other": Stream(1, 0.0, prompt=128, generated=256),
    "chat8 other": Stream(8, 0.0, prompt=128, generated=256),
}


def text(draw: np.random.Generator, length: int, vocab: int) -> list[int]:
    """Return random tokens, the likeliest ones often."""
    order = np.random.default_rng(0).permutation(vocab)
    found: list[int] = order[np.minimum(draw.zipf(1.3, length), vocab) - 1].tolist()
    return found


def edited(draw: np.random.Generator, source: list[int], length: int, agreement: float, vocab: int) -> list[int]:
    """Return `length` tokens, of which the share `agreement` is copied from a source in runs, in order."""
    found: list[int] = []
    at = 0
    while len(found) < length:
        run = int(draw.geometric(1 / RUN)) if agreement else 0
        new = round(run * (1 / agreement - 1)) if run else length
        found += source[at : at + run] + text(draw, min(new, NEW) if run < RUN else new, vocab)
        at = (at + run + int(draw.integers(0, 4))) % max(len(source) - RUN, 1)
    return found[:length]


def requests(stream: Stream, vocab: int, seed: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return prompts, answers, and the earlier answers that a history holds."""
    draw = np.random.default_rng(seed)
    if stream.uniform:
        prompts = draw.integers(0, vocab, (stream.lanes, stream.prompt)).tolist()
        return prompts, draw.integers(0, vocab, (stream.lanes, stream.generated)).tolist(), prompts
    prompts = [text(draw, stream.prompt, vocab) for _ in range(stream.lanes)]
    earlier = [text(draw, stream.generated, vocab) for _ in prompts] if stream.history else prompts
    answers = [edited(draw, source, stream.generated, stream.agreement, vocab) for source in earlier]
    return prompts, answers, earlier


@contextmanager
def recorded(generator: Generator, prompts: list[list[int]], answers: list[list[int]]) -> Iterator[None]:
    """Draw the recorded tokens. The seed of a request is its number."""
    device = generator._runner.device
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    script = torch.tensor(rows, dtype=torch.int32, device=device)
    right = runner.draw

    def draw(logits: Any, state: Any, lanes: Any, positions: Any, *rest: Any, to_host: bool) -> Any:
        output = right(logits, state, lanes, positions, *rest)  # not to the host, where other tokens belong
        numbers = state.table[lanes, 0].clamp(0, len(rows) - 1)
        tokens = script[numbers, positions.long().clamp(max=script.shape[1] - 1)]
        output.packed[0].copy_(tokens)
        state.last_token[lanes] = tokens.long()
        return output

    with mock.patch.object(runner, "draw", draw):
        yield


def measure(generator: Generator, stream: Stream, seed: int, speculate: bool) -> dict[str, float]:
    vocab = generator.model_config.vocab_size
    prompts, answers, earlier = requests(stream, vocab, seed)
    shared = SamplingParams(max_tokens=stream.generated, ignore_eos=True, speculate=speculate)
    params = [replace(shared, seed=number) for number in range(stream.lanes)]
    generator.history.clear()
    if stream.history:
        for prompt, answer in zip(prompts, earlier, strict=True):
            generator.history.add(prompt, answer)
    before = generator.stats
    with recorded(generator, prompts, answers):
        start = time.perf_counter()
        outputs = generator.generate(prompts, params)
        seconds = time.perf_counter() - start
    after = generator.stats
    if [output.completions[0].token_ids for output in outputs] != answers:
        raise RuntimeError("the answers are not the recorded ones")
    return {
        "tokens_per_second": stream.lanes * stream.generated / seconds,
        "steps": after.steps - before.steps,
        "drafted": after.drafted - before.drafted,
        "accepted": after.accepted - before.accepted,
    }


def compare(generator: Generator, name: str, smoke: bool = False) -> dict[str, Any]:
    """Return the medians of runs that take turns."""
    stream, found = STREAMS[name], []
    if smoke:
        stream = replace(stream, prompt=60, generated=40)
    for seed in range(1 if smoke else REPEATS):
        found.append([measure(generator, stream, seed, speculate) for speculate in (False, True)])
    (off, on), times = found[-1], [on["tokens_per_second"] / off["tokens_per_second"] for off, on in found]
    result = {
        "plain": statistics.median(off["tokens_per_second"] for off, _ in found),
        "speculative": statistics.median(on["tokens_per_second"] for _, on in found),
        "times": statistics.median(times), "spread": [min(times), max(times)],
        "steps": [off["steps"], on["steps"]], "drafted": on["drafted"], "accepted": on["accepted"],
    }  # fmt: skip
    print(
        f"{name:14} {result['plain']:8.1f} -> {result['speculative']:8.1f} tok/s: {result['times']:.2f} times "
        f"({min(times):.2f} to {max(times):.2f}); {off['steps']} -> {on['steps']} steps, "
        f"{on['accepted']} of {on['drafted']} drafts right",
        flush=True,
    )
    return result


def bench_speculate(arguments: argparse.Namespace) -> None:
    with ready_generator(arguments, prefix_cache=False, speculate="auto") as (generator, _):
        compare(generator, "chat8 other", smoke=True)  # a warm-up
        found = {name: compare(generator, name, arguments.smoke) for name in STREAMS}
        write_report(arguments, "speculate", {"streams": found})
