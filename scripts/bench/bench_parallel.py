"""Measures how the speed of `bench.py gpu` grows with the number of GPUs."""

from __future__ import annotations

import argparse
import gc
from typing import Any

import bench_engine
import torch

COUNTS = (1, 2, 4)
SCALED = ("headline", "chat1")


def bench_scaling(arguments: argparse.Namespace) -> None:
    """The workloads on 1, 2 and 4 GPUs, as far as there are so many. efficiency: tokens/s of N GPUs / (N x one's). All
    without deterministic mode, which several have not."""
    smoke = arguments.smoke
    rates = bench_engine.ceilings(arguments)
    about = bench_engine.machine("cpu" if smoke else "cuda")
    path = bench_engine.report_path(arguments, about["gpu"], "scaling")
    report: dict[str, Any] = {"model": arguments.model, **about, "rates": rates, "ready_seconds": {}, "workloads": {}}
    for gpus in gpu_counts(2 if smoke else torch.cuda.device_count()):
        options: dict[str, Any] = {"deterministic": False}
        if gpus > 1:
            options["tensor_parallel"] = gpus
        with bench_engine.ready_generator(arguments, **options) as (generator, ready):
            report["ready_seconds"][str(gpus)] = ready
            for name in arguments.only or SCALED:
                by_gpus = report["workloads"].setdefault(name, {})
                by_gpus[str(gpus)] = bench_engine.measure_workload(arguments, generator, name, rates, gpus)
                print(f"{name} on {gpus}: efficiency {add_efficiency(by_gpus, gpus):.3f}", flush=True)
        if not smoke:  # the next engine's ranks can not take back what this process keeps
            gc.collect()
            torch.cuda.empty_cache()
        if arguments.out or not smoke:  # after each engine, or an error would lose those before it
            bench_engine.merge(path, report)


def gpu_counts(there: int) -> list[int]:
    return [count for count in COUNTS if count <= there]


def add_efficiency(by_gpus: dict[str, dict[str, Any]], gpus: int) -> float:
    """Of the figures of so many GPUs against those of one; it is written beside them."""
    rate, alone = by_gpus[str(gpus)]["tokens_per_second"], by_gpus["1"]["tokens_per_second"]
    efficiency: float = rate / (gpus * alone)
    by_gpus[str(gpus)]["efficiency"] = efficiency
    return efficiency
