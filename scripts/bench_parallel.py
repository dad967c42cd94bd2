"""What `bench.py gpu` measures of several GPUs as one: how speed grows with them, and what it costs to tell the ranks
of a step."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import bench_gpu
import numpy as np
import torch
from bench_limits import Workload
from bench_parts import write_report

from fastgen.request import Batch

COUNTS = (1, 2, 4)
SCALED = ("headline", "chat1")

Launch = tuple[Batch, float]  # and the seconds that the call took


# One engine after the other


def bench_scaling(arguments: argparse.Namespace) -> None:
    """The workloads on 1, 2 and 4 GPUs, as far as there are so many. efficiency: tokens/s of N GPUs / (N x one's). All
    without deterministic mode, which several have not."""
    smoke = arguments.smoke
    rates = bench_gpu.ceilings(arguments)
    about = bench_gpu.machine("cpu" if smoke else "cuda")
    path = bench_gpu.report_path(arguments, about["gpu"], "scaling")
    report: dict[str, Any] = {"model": arguments.model, **about, "rates": rates, "ready_seconds": {}, "workloads": {}}
    for gpus in gpu_counts(2 if smoke else torch.cuda.device_count()):
        options: dict[str, Any] = {"deterministic": False}
        if gpus > 1:
            options["tensor_parallel"] = gpus
        with bench_gpu.ready_generator(arguments, **options) as (generator, ready):
            report["ready_seconds"][str(gpus)] = ready
            for name in arguments.only or SCALED:
                by_gpus = report["workloads"].setdefault(name, {})
                by_gpus[str(gpus)] = bench_gpu.measure_workload(arguments, generator, name, rates, gpus)
                print(f"{name} on {gpus}: efficiency {add_efficiency(by_gpus, gpus):.3f}", flush=True)
        if not smoke:  # the next engine's ranks can not take back what this process keeps
            gc.collect()
            torch.cuda.empty_cache()
        if arguments.out or not smoke:  # after each engine, or an error would lose those before it
            bench_gpu.merge(path, report)


def gpu_counts(there: int) -> list[int]:
    return [count for count in COUNTS if count <= there]


def add_efficiency(by_gpus: dict[str, dict[str, Any]], gpus: int) -> float:
    """Of the figures of so many GPUs against those of one; it is written beside them."""
    rate, alone = by_gpus[str(gpus)]["tokens_per_second"], by_gpus["1"]["tokens_per_second"]
    efficiency: float = rate / (gpus * alone)
    by_gpus[str(gpus)]["efficiency"] = efficiency
    return efficiency


# What it costs to tell the ranks of a step


class Sender(Protocol):
    """What a Generator launches steps with."""

    launch: Callable[[Batch], Any]


@contextmanager
def timed_launches(sender: Sender) -> Iterator[list[Launch]]:
    """Each Batch that is launched meanwhile, and the seconds that this took the caller."""
    launch, found = sender.launch, []

    def timed(batch: Batch) -> Any:
        start = time.perf_counter()
        launched = launch(batch)
        found.append((batch, time.perf_counter() - start))
        return launched

    sender.launch = timed
    try:
        yield found
    finally:
        del sender.launch  # the method is behind it


def bench_broadcast(arguments: argparse.Namespace) -> None:
    """Microseconds that `launch` takes the caller, and from its beginning until the last rank has taken the Batch up,
    while steps run: of decodes of 512 lanes, and of prefills of as many tokens as a step has. The thread of a rank that
    takes it up is the one that launches, which in prefills is still at the step before: there the former counts."""
    decodes, prefills = Workload(512, 16, 200), Workload(64, 2048, 1)
    if arguments.smoke:
        decodes, prefills = Workload(4, 16, 40), Workload(6, 100, 1)
        arguments.max_step_tokens = arguments.max_step_tokens or 64
    with bench_gpu.ready_generator(arguments) as (generator, _):
        lanes, budget = min(decodes.sequences, generator.config.max_seqs), generator.config.max_step_tokens
        kinds: dict[str, tuple[Workload, Callable[[Batch], bool]]] = {
            "decode": (decodes, lambda batch: len(batch.decodes) == lanes and not batch.prefills),
            "prefill": (prefills, lambda batch: batch.num_tokens == budget and not batch.decodes),
        }
        report: dict[str, Any] = {"lanes": lanes, "prefill_tokens": budget}
        for name, (workload, wanted) in kinds.items():
            sender: Any = generator._runner
            with timed_launches(sender) as launched:
                bench_gpu.run(generator, workload, seed=1)
            report[name] = broadcast_figures(launched, sender.delays(), wanted)
    write_report(arguments, "broadcast", report)


def broadcast_figures(
    launched: list[Launch], delays: list[float], wanted: Callable[[Batch], bool]
) -> dict[str, int | dict[str, float]]:
    """Of the launches whose Batch is wanted. delays: of the latest launches, in order, which may be fewer or more."""
    known = min(len(launched), len(delays))
    pairs = zip(launched[len(launched) - known :], delays[len(delays) - known :], strict=True)
    kept = [(taken, delay) for (batch, taken), delay in pairs if wanted(batch)]
    if not kept:
        raise RuntimeError(f"of {known} steps none was of the kind that is measured")
    return {
        "steps": len(kept),
        "launch_us": microseconds(taken for taken, _ in kept),
        "last_rank_us": microseconds(delay for _, delay in kept),
    }


def microseconds(seconds: Iterable[float]) -> dict[str, float]:
    values = np.array(list(seconds)) * 1e6
    return {
        "median": float(np.median(values)),
        "p90": float(np.percentile(values, 90)),
        "most": float(values.max()),
    }
