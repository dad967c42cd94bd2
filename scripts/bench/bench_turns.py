"""Measures, as `bench.py gpu --turns`, conversations whose KV is more than the pool holds, in rounds of one turn each.

Three engines, one after the other: with a host tier that holds all conversations, with only the prefix cache, and with
neither, which computes each conversation anew at each turn. The time to the first token counts from add() on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import bench_engine
import numpy as np
from bench_engine import write_report
from bench_limits import settings

from fastgen import Generator, SamplingParams
from fastgen.engine.options import token_bytes
from fastgen.model.config import ModelConfig, parse_config

Prompts = list[list[int]]


@dataclass(frozen=True)
class Turns:
    """Conversations of so many turns; in each, the user says `new` tokens, and the model answers `generated`.

    active: number of conversations in the engine at a time. repeats: number of measurements of a single conversation.
    """

    conversations: int = 256
    turns: int = 6
    new: int = 122
    generated: int = 128
    active: int = 32
    repeats: int = 9
    page_size: int = 64

    @property
    def context(self) -> int:
        """The number of tokens of a conversation at its end."""
        return self.turns * (self.new + self.generated)

    @property
    def known(self) -> int:
        """The number of tokens of a conversation before its last turn."""
        return self.context - self.new - self.generated

    @property
    def pages(self) -> int:
        """The number of pages of all conversations at their ends."""
        return self.conversations * -(-self.context // self.page_size)

    @property
    def pool_pages(self) -> int:
        return self.pages // 3

    def cached(self, tokens: int) -> int:
        """Return the tokens that a cache can hold of a conversation of so many: full pages, without the last token's
        KV."""
        return (tokens - 1) // self.page_size * self.page_size

    def host_gb(self, model: ModelConfig, dtype: str) -> float:
        """Return the size of a host tier for all conversations. It has half a page more, or rounding might lose one."""
        return (self.pages + 0.5) * self.page_size * token_bytes(model, dtype) / 1e9


SMALL = Turns(conversations=8, turns=3, new=20, generated=12, active=2, repeats=2, page_size=16)


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt. ttft: seconds from add() to the step() that returned its first token."""

    ttft: float
    cached_tokens: int
    token_ids: list[int]


def ask(engine: Generator, prompts: Prompts, generated: int, active: int) -> list[Answer]:
    """Return answers of `generated` tokens each, in order, `active` at a time: the next is added as one finishes."""
    params = SamplingParams(temperature=1, max_tokens=generated, ignore_eos=True)
    waiting, running = deque(enumerate(prompts)), dict[str | int, tuple[int, float]]()
    answers: dict[int, Answer] = {}
    while waiting or running:
        while waiting and len(running) < active:
            number, prompt = waiting.popleft()
            added = time.perf_counter()
            running[engine.add(prompt, params)] = number, added
        events, now = engine.step(), time.perf_counter()
        for event in events:
            number, added = running[event.id]
            if event.token_ids and number not in answers:
                answers[number] = Answer(now - added, event.cached_tokens, [])
            if event.token_ids:
                answers[number].token_ids.extend(event.token_ids)
            if event.finish_reason is not None:
                found = len(answers[number].token_ids) if number in answers else 0
                if found != generated:
                    raise RuntimeError(f"an answer of {found} tokens instead of {generated}: {event.error}")
                del running[event.id]
    return [answers[number] for number in range(len(prompts))]


def random_prompts(count: int, tokens: int, vocab_size: int, draw: np.random.Generator) -> Prompts:
    ids: Prompts = draw.integers(0, vocab_size, (count, tokens)).tolist()
    return ids


def play(engine: Generator, turns: Turns, vocab_size: int) -> list[list[Answer]]:
    """Play turn t of all conversations in round t; return the answers of each round, in the order of the requests."""
    draw = np.random.default_rng(1)
    conversations: Prompts = [[] for _ in range(turns.conversations)]
    rounds = []
    for _ in range(turns.turns):
        for conversation, new in zip(
            conversations, random_prompts(turns.conversations, turns.new, vocab_size, draw), strict=True
        ):
            conversation += new
        order = [conversations[index] for index in draw.permutation(turns.conversations)]
        rounds.append(ask(engine, order, turns.generated, turns.active))
        for conversation, answer in zip(order, rounds[-1], strict=True):
            conversation += answer.token_ids
    return rounds


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """Return the median, mean and 90th percentile, in milliseconds."""
    ms = 1e3 * np.array(list(seconds))
    return {"median": float(np.median(ms)), "mean": float(ms.mean()), "p90": float(np.percentile(ms, 90))}


def measure_rounds(generator: Generator, turns: Turns) -> dict[str, Any]:
    """Return an engine's figures. cached_share: found tokens, as a share of those that a cache of unlimited size would
    hold."""
    before, start = generator.stats, time.perf_counter()
    rounds = play(generator, turns, generator.model_config.vocab_size)
    seconds, after = time.perf_counter() - start, generator.stats
    later = [answer for answers in rounds[1:] for answer in answers]
    step = turns.new + turns.generated
    cacheable = turns.conversations * sum(turns.cached(turn * step) for turn in range(1, turns.turns))
    return {
        "ttft_ms": {f"turn {turn}": spread(a.ttft for a in answers) for turn, answers in enumerate(rounds, 1)},
        "later_ttft_ms": spread(answer.ttft for answer in later),
        "tokens_per_second": turns.conversations * turns.turns * turns.generated / seconds,
        "seconds": seconds,
        "cached_share": sum(answer.cached_tokens for answer in later) / cacheable,
        "pages_saved": after.pages_saved - before.pages_saved,
        "pages_loaded": after.pages_loaded - before.pages_loaded,
        "preemptions": after.preemptions - before.preemptions,
    }


def confirm(name: str, found: dict[str, Any]) -> None:
    """Raise RuntimeError where an engine did not do what it is measured for."""
    saved, loaded, held = found["pages_saved"], found["pages_loaded"], found["cached_share"]
    right = {
        "host": saved > 0 and loaded > 0 and held > 0.9,
        "cache": saved == loaded == 0,
        "recompute": saved == loaded == held == 0,
    }
    if not right[name]:
        raise RuntimeError(
            f"{name}: {saved} pages were saved and {loaded} loaded, and {held:.2f} of what can be cached was found"
        )


# A single conversation


def alone_from_host(generator: Generator, turns: Turns) -> list[float]:
    """Return the seconds to the first token of a conversation's last turn on an idle engine, its KV on the host,
    `repeats` times.

    The conversations come first, and then so many other tokens that the pool holds nothing of them.
    """
    vocab_size, draw = generator.model_config.vocab_size, np.random.default_rng(2)
    conversations = random_prompts(turns.repeats, turns.known - turns.generated, vocab_size, draw)
    answers = ask(generator, conversations, turns.generated, turns.active)
    others = -(-3 * turns.pool_pages * turns.page_size // (2 * turns.context))
    ask(generator, random_prompts(others, turns.context, vocab_size, draw), 1, turns.active)
    found = []
    for start, answer, new in zip(
        conversations, answers, random_prompts(turns.repeats, turns.new, vocab_size, draw), strict=True
    ):
        before = generator.stats.pages_loaded
        [last] = ask(generator, [start + answer.token_ids + new], turns.generated, 1)
        loaded, cached = generator.stats.pages_loaded - before, turns.cached(turns.known)
        if last.cached_tokens != cached or loaded * turns.page_size != cached:
            raise RuntimeError(
                f"of a conversation of {turns.known} tokens, {last.cached_tokens} were found and {loaded} pages loaded "
                f"from the host, not {cached} in {cached // turns.page_size}"
            )
        found.append(last.ttft)
    return found


def alone_computed(generator: Generator, turns: Turns) -> list[float]:
    """Return the same times, where nothing is cached."""
    draw, length = np.random.default_rng(3), turns.known + turns.new
    prompts = random_prompts(turns.repeats, length, generator.model_config.vocab_size, draw)
    answers = ask(generator, prompts, turns.generated, 1)
    if any(answer.cached_tokens for answer in answers):
        raise RuntimeError("a prompt of random tokens was found in the cache")
    return [answer.ttft for answer in answers]


# The three engines


def bench_turns(arguments: argparse.Namespace) -> None:
    """Measure the times to the first token, and tokens/s, of each of the engines, and of a single conversation."""
    turns = SMALL if arguments.smoke else Turns(page_size=arguments.page_size or Turns.page_size)
    options = bench_engine.engine_options(arguments)
    dtype = "fp8" if options["kv_cache_dtype"] == "fp8" else options["dtype"]
    host_gb = turns.host_gb(parse_config(settings(arguments.model, arguments.smoke)), dtype)
    engines: dict[str, dict[str, Any]] = {
        "host": {"host_cache_gb": host_gb},
        "cache": {},
        "recompute": {"prefix_cache": False},
    }
    found: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {}
    for name, differing in engines.items():
        differing |= {"page_size": turns.page_size, "num_pages": turns.pool_pages}
        with bench_engine.ready_generator(arguments, **differing) as (generator, _):
            found[name] = measure_rounds(generator, turns) | {"engine": asdict(generator.config)}
            print(line(name, found[name]), flush=True)
            confirm(name, found[name])
            if name == "host":
                seconds[name] = alone_from_host(generator, turns)
            elif name == "recompute":
                seconds[name] = alone_computed(generator, turns)
    report = {
        "turns": asdict(turns) | {"context": turns.context},
        "host_cache_gb": host_gb,
        "engines": found,
        "alone": {
            "from_host_ms": spread(seconds["host"]),
            "computed_ms": spread(seconds["recompute"]),
            "times_faster": statistics.median(seconds["recompute"]) / statistics.median(seconds["host"]),
        },
    }
    write_report(arguments, "turns", report)


def line(name: str, found: dict[str, Any]) -> str:
    first = ", ".join(f"{kind} {ms:.1f}" for kind, ms in found["later_ttft_ms"].items())
    return (
        f"{name:9} {found['tokens_per_second']:8.1f} tok/s; first token of turns after the first: {first} ms; "
        f"{found['cached_share']:.3f} of what can be cached found, {found['pages_saved']} pages saved, "
        f"{found['pages_loaded']} loaded, {found['preemptions']} preemptions"
    )
