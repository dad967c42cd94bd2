"""Measures, as `bench.py gpu --sleep`, new weights from a state dict on the GPU, and sleep and wake; as `bench.py gpu
--adapter`, new adapters."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import bench_engine
import torch
from bench_engine import write_report
from reports import median_and_spread

from fastgen import Generator
from fastgen.model.config import ModelConfig
from fastgen.model.parameters import checkpoint_shards

REPEATS = 5
RANK = 32
ROOM = 0.7  # share of the free memory, so that a second set of weights fits

SLEEPS: dict[str, dict[str, Any]] = {
    "both": {},
    "kv_cache": {"tags": "kv_cache"},
    "weights": {"tags": "weights"},
    "dropped": {"keep_weights": False},
}


def bench_sleep(arguments: argparse.Namespace) -> None:
    """Measure medians of seconds, and the GB that sleep gave back. first: the first sleep, which pins memory of the
    host."""
    smoke = arguments.smoke
    room = arguments.memory_fraction or ROOM
    with bench_engine.ready_generator(arguments, memory_fraction=room) as (generator, _):
        weights = state_dict(generator.model_config, "cpu" if smoke else "cuda")
        updates = [seconds(lambda: generator.update_weights(weights))[0] for _ in range(REPEATS)]
        report: dict[str, Any] = {
            "weights_gb": sum(tensor.nbytes for tensor in weights.values()) / 1e9,
            "update_weights": median_and_spread(updates),
            "sleep": {name: turns(generator, options, weights) for name, options in SLEEPS.items()},
        }
    write_report(arguments, "sleep", report)


def bench_adapter(arguments: argparse.Namespace) -> None:
    """Measure seconds of updates to an adapter of all linear layers, from tensors on the GPU, and back to the base.
    first: the first update, which copies the base."""
    device = "cpu" if arguments.smoke else "cuda"
    report: dict[str, Any] = {"rank": RANK}
    for place in ("host", "device"):
        room = arguments.memory_fraction or ROOM
        with bench_engine.ready_generator(arguments, memory_fraction=room, adapter_base=place) as (generator, _):
            shards = checkpoint_shards(generator.model_config)
            sizes = {name: shard.shape for name, shard in shards.items() if name.endswith("_proj.weight")}
            state = {}
            for name, (outputs, inputs) in sizes.items():
                layer = f"base_model.model.{name.removesuffix('.weight')}"
                state[f"{layer}.lora_A.default.weight"] = torch.randn(RANK, inputs, device=device) * 0.02
                state[f"{layer}.lora_B.default.weight"] = torch.randn(outputs, RANK, device=device) * 0.02

            def update(state: Any = state, generator: Generator = generator) -> float:
                return seconds(lambda: generator.update_adapter(state, {"r": RANK, "lora_alpha": 2 * RANK}))[0]

            first, *updates = (update() for _ in range(REPEATS + 1))
            bases = [update(None) for _ in range(REPEATS)]
            report[place] = {"first": first, "update": median_and_spread(updates), "base": median_and_spread(bases)}
            report["base_gb"] = sum(a * b for a, b in sizes.values()) * (4 if arguments.smoke else 2) / 1e9
    write_report(arguments, "adapter", report)


def state_dict(config: ModelConfig, device: str) -> dict[str, torch.Tensor]:
    """Return random weights, by name."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    parts = checkpoint_shards(config)
    return {name: torch.empty(part.shape, dtype=dtype, device=device).normal_(0, 0.02) for name, part in parts.items()}


def turns(generator: Generator, options: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    slept, woke, freed = [], [], []
    for _ in range(REPEATS):
        taken, found = seconds(lambda: generator.sleep(**options))
        slept.append(taken)
        freed.append(found / 1e9)
        woke.append(seconds(generator.wake)[0])
        if not options.get("keep_weights", True):
            generator.update_weights(weights)
        bench_engine.warm_up(generator, smoke=True)  # takes again what torch has given back
    return {
        "freed_gb": statistics.median(freed),
        "first": slept[0],
        "sleep": median_and_spread(slept[1:]),
        "wake": median_and_spread(woke),
    }


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, with all that it launches, and its result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, found
