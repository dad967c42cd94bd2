"""Work that arrives one by one, for `bench.py gpu --arriving`: steps that decode and prefill, lanes that are refilled,
and requests at random times through fgserve.

- steps: lanes decode, and one prompt is added before each step. Milliseconds per step, and how long the GPU is busy in
  it; their ratio is what the host costs. Prompts of an engine without lanes tell how long a first token takes at least.
- refilled: as many requests as lanes, and a new one whenever one ends, as in asynchronous rollouts. Tokens per second,
  and the share of the limit, while requests are waiting.
- served: requests at the times of a Poisson process, whose prompts and answers have log-normal lengths (means 580 and
  145 tokens); also with prompts of 8,000 tokens among them, and one request at a time.

Weights and prompts are random, and every answer runs to its length.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench_engine import ready_generator, wait, write_report
from bench_limits import CARDS, Costs, card_of
from serve_load import Clients, Load, figures
from serve_process import Server, model_folder
from torch.profiler import ProfilerActivity, profile

from fastgen import Generator, SamplingParams

LANES = (0, 16, 64, 128)
PROMPTS = (0, 64, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
CONTEXT = 16384
LANE_PROMPT = 512  # tokens of the prompts of lanes that decode
SERVED_SECONDS = 15
PROMPT, ANSWER, SIGMA = 512, 128, 0.5  # medians of the log-normal lengths; their means are 13 % larger
LONG, EVERY = 8000, 4
SERVED = ((0.0, 0, 0), (4.0, 0, 0), (16.0, 0, 0), (40.0, 0, 0), (8.0, LONG, EVERY))
"""Requests per second (0: one at a time), and prompts of how many tokens one request of how many has."""

REFILLED = {"lanes": 64, "prompt": 512, "longest": 1024, "requests": 320}
PARTS = ("steps", "masked", "refilled", "served")


def bench_arriving(arguments: argparse.Namespace) -> None:
    smoke, wanted = arguments.smoke, arguments.only or PARTS
    report: dict[str, Any] = {}
    if not {"steps", "masked", "refilled"}.isdisjoint(wanted):
        with ready_generator(arguments, prefix_cache=False, max_model_len=512 if smoke else CONTEXT) as (gen, ready):
            report["ready_seconds"] = ready
            if "steps" in wanted:
                report["steps"] = measure_steps(gen, *(((0, 2), (0, 16)) if smoke else (LANES, PROMPTS)))
            if "masked" in wanted:
                report["masked"] = measure_steps(gen, *(((2,), (16,)) if smoke else ((64,), (512,))), Even())
            if "refilled" in wanted:
                report["refilled"] = measure_refilled(gen, smoke)
    if "served" in wanted and arguments.tensor_parallel == 1 and not arguments.quantization:
        report["served"] = measure_served(arguments)
    write_report(arguments, "arriving", report, show=smoke, keep=True)


class Even:
    """A mask that allows even tokens."""

    def fill(self, row: np.ndarray) -> None:
        row[:] = 0x55555555

    def accept(self, token: int) -> None:
        assert token % 2 == 0


# Steps


def measure_steps(
    gen: Generator, lanes: tuple[int, ...], prompts: tuple[int, ...], mask: Even | None = None
) -> list[dict[str, Any]]:
    """Return milliseconds per step, and those in which the GPU is busy, for each number of lanes and prompt tokens.
    mask: of the lanes that decode."""
    on_gpu = gen.config.device != "cpu"
    draw, found = random.Random(1), list[dict[str, Any]]()
    for count in lanes:
        params = SamplingParams(max_tokens=3000 if on_gpu else 40, ignore_eos=True, mask=mask)
        requests = [gen.add(random_ids(draw, LANE_PROMPT if on_gpu else 8), params) for _ in range(count)]
        for _ in range(30 if on_gpu else 2):
            gen.step()
        for prompt in prompts:
            if not count and not prompt:
                continue
            run = step_runner(gen, draw, prompt)
            run(4 if on_gpu else 1)
            times = []
            for _ in range(3):
                start = time.perf_counter()
                run(10 if on_gpu else 2)
                times.append((time.perf_counter() - start) / (10 if on_gpu else 2))
            row = {"lanes": count, "prompt": prompt, "step_ms": min(times) * 1e3}
            if on_gpu:
                row["busy_ms"] = busy_ms(run, 6)
            print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            found.append(row)
        gen.abort(requests)
    return found


def random_ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(10, 300) for _ in range(length)]


def step_runner(gen: Generator, draw: random.Random, prompt: int) -> Callable[[int], None]:
    """Return a function that runs a number of steps, each with a new prompt of this length, and waits for the GPU."""

    def run(steps: int) -> None:
        for _ in range(steps):
            if prompt:
                gen.add(random_ids(draw, prompt), SamplingParams(max_tokens=1))
            gen.step()
        wait(gen.config.device)

    return run


def busy_ms(run: Callable[[int], None], steps: int) -> float:
    """Return the milliseconds per step in which at least one kernel runs, as the profiler sees it."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run(steps)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total, end = 0.0, -math.inf
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / steps / 1e3


# Lanes that are refilled


def measure_refilled(gen: Generator, smoke: bool) -> dict[str, Any]:
    """Return tokens per second from the first refill to the last, with a constant number of requests in the engine, and
    the limit: the prefills and decodes of this time at the rates of the card, with the weights read once per step."""
    lanes, prompt, longest, requests = (2, 8, 16, 8) if smoke else REFILLED.values()
    draw = np.random.default_rng(1)
    lengths = np.clip(np.rint(450 * draw.lognormal(0, 0.7, requests)), 16, longest).astype(int).tolist()
    waiting = list(zip(draw.integers(10, 300, (requests, prompt)).tolist(), lengths, strict=True))
    drawn: Counter[str | int] = Counter()

    def add() -> None:
        ids, length = waiting.pop()
        gen.add(ids, SamplingParams(max_tokens=length, temperature=1, ignore_eos=True))

    def step() -> tuple[int, int, int]:
        """Run a step. Return how many requests have ended, how many tokens are drawn, and how many keys they have."""
        ended = tokens = keys = 0
        for event in gen.step():
            ended += event.finish_reason is not None
            tokens += len(event.token_ids)
            drawn[event.id] += len(event.token_ids)
            keys += (prompt + drawn[event.id]) * len(event.token_ids)
        return ended, tokens, keys

    for _ in range(lanes):
        add()
    while not (ended := step()[0]):
        pass
    start, before, refills, tokens, keys = time.perf_counter(), gen.stats.steps, 0, 0, 0
    while waiting:
        for _ in range(min(ended, len(waiting))):
            add()
            refills += 1
        ended, more, read = step()
        tokens, keys = tokens + more, keys + read
    seconds, steps = time.perf_counter() - start, gen.stats.steps - before
    while gen.unfinished:
        gen.step()
    costs = Costs.of(gen.model_config, gen.config.kv_cache_dtype)
    rates = CARDS[card_of("" if smoke else torch.cuda.get_device_name())].times(gen.config.tensor_parallel)
    prefill = refills * (costs.layer_flops * prompt + 2 * costs.head) / rates.products
    decode = (tokens / lanes * costs.weight_bytes + costs.kv * keys) / rates.memory
    found = {
        "lanes": lanes, "prompt": prompt, "requests": refills, "generated": tokens, "steps": steps, "seconds": seconds,
        "tokens_per_second": tokens / seconds, "limit": tokens / (prefill + decode),
        "of_limit": (prefill + decode) / seconds,
    }  # fmt: skip
    print(", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
    return found


# Requests through fgserve


def measure_served(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the latencies of requests at random times, for each point of SERVED."""
    with (
        model_folder(arguments.model, arguments.smoke) as (model, flags),
        Server(model, flags) as server,
        Clients(1 if arguments.smoke else 4) as clients,
    ):
        found, url = [], f"{server.url}/v1"
        clients.run(Load(url, "default", 8, 16, 4, 8, 10, 300), False)  # a client's first requests take 0.1 s
        for load in served_loads(url, arguments.smoke):
            found.append({"rate": load.rate, "long": load.long, **figures(clients.run(load, False))})
            print(served_line(found[-1]), flush=True)
    return found


def served_loads(url: str, smoke: bool) -> list[Load]:
    name = "default"
    if smoke:
        return [Load(url, name, 6, 16, 8, 64, 10, 300, rate=20.0, sigma=SIGMA)]
    alone = Load(url, name, 16, PROMPT, 16, 1, 10, 30000)  # without a spread, so that the GPU's time is known
    return [
        Load(
            url, name, round(rate * SERVED_SECONDS), PROMPT, ANSWER, 4096, 10, 30000, seed, rate, long, every, SIGMA,
        )
        if rate
        else alone
        for seed, (rate, long, every) in enumerate(SERVED)
    ]  # fmt: skip


def served_line(row: dict[str, Any]) -> str:
    def times(name: str, *quantiles: str) -> str:
        return "/".join(f"{1000 * row[name][of]:.1f}" for of in quantiles)

    beside = f" and a fourth of {row['long']} tokens" if row["long"] else ""
    load = f"{row['rate']:g} requests/s{beside}" if row["rate"] else "one at a time"
    return (
        f"{load}: first token p50/p99 {times('ttft', 'p50', 'p99')} ms, per token p50 "
        f"{times('per_token', 'p50')}, gap p99.9 {times('inter_token', 'p99.9')}, end p50 {times('end_to_end', 'p50')}"
    )
