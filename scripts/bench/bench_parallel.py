"""Measures how the speed of `bench.py gpu` grows with the number of GPUs, and the time to tell ranks of a step."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import bench_engine
import numpy as np
import torch

from fastgen.ranks.protocol import Invoke, Leader, Result
from fastgen.request import Batch, Prefill

COUNTS = (1, 2, 4)
SCALED = ("headline", "chat1")
STEP_SECONDS = 0.005  # between two messages, so that code and caches are as cold as between two steps
STEPS = {
    "decode of 512 lanes": Batch(decodes=tuple(range(512))),
    "prefill of 8192 tokens": Batch(prefills=(Prefill(0, 0, np.zeros(8192, dtype=np.int32), True),)),
}


def bench_scaling(arguments: argparse.Namespace) -> None:
    """Measure the workloads on 1, 2 and 4 GPUs, as far as there are so many. efficiency: tokens/s of N GPUs / (N x
    one's)."""
    smoke = arguments.smoke
    rates = bench_engine.ceilings(arguments)
    about = bench_engine.machine("cpu" if smoke else "cuda")
    path = bench_engine.report_path(arguments, about["gpu"], "scaling")
    report: dict[str, Any] = {"model": arguments.model, **about, "rates": rates, "ready_seconds": {}, "workloads": {}}
    there = 2 if smoke else torch.cuda.device_count()
    for gpus in [count for count in COUNTS if count <= there]:
        options = {"tensor_parallel": gpus} if gpus > 1 else {}
        with bench_engine.ready_generator(arguments, **options) as (generator, ready):
            report["ready_seconds"][str(gpus)] = ready
            for name in arguments.only or SCALED:
                by_gpus = report["workloads"].setdefault(name, {})
                found = bench_engine.measure_workload(arguments, generator, name, rates, gpus)
                by_gpus[str(gpus)] = found
                found["efficiency"] = found["tokens_per_second"] / (gpus * by_gpus["1"]["tokens_per_second"])
                print(f"{name} on {gpus}: efficiency {found['efficiency']:.3f}", flush=True)
        if not smoke:  # the next engine's ranks cannot take back what this process keeps
            gc.collect()
            torch.cuda.empty_cache()
        if arguments.out or not smoke:  # after each engine, or an error would lose those before it
            bench_engine.merge(path, report)


def bench_telling(arguments: argparse.Namespace) -> None:
    """Measure messages with the batches of two steps, to ranks that do nothing else: `send_us` until the leader goes
    on, `reply_us` until the replies of all followers have come back."""
    with bench_engine.ready_generator(arguments) as (generator, _):
        report = {
            name: telling(generator._runner, batch, 20 if arguments.smoke else 200) for name, batch in STEPS.items()
        }
    bench_engine.write_report(arguments, "telling", report)


def telling(leader: Leader, batch: Batch, messages: int) -> dict[str, dict[str, float]]:
    sent, replied = [], []
    for _ in range(messages):
        time.sleep(STEP_SECONDS)
        start = time.perf_counter()
        number = next(leader._numbers)
        leader._peers.send(Invoke(number, "__eq__", (batch,)))  # a method that does nothing
        sent.append(time.perf_counter() - start)
        leader._gather(Result, number)
        replied.append(time.perf_counter() - start)
    return {"send_us": spread_us(sent), "reply_us": spread_us(replied)}


def spread_us(seconds: list[float]) -> dict[str, float]:
    deciles = [1e6 * each for each in statistics.quantiles(seconds, n=10)]
    return {"median": 1e6 * statistics.median(seconds), "p90": deciles[-1], "most": 1e6 * max(seconds)}
