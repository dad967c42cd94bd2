"""The other measurements of `bench.py gpu`: loading, the busy share of the GPU, and rates over lengths."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import bench_engine
import torch
from bench_engine import write_report
from bench_limits import WORKLOADS, Costs, Workload, settings
from huggingface_hub import save_torch_state_dict

from fastgen import Generator, Request, SamplingParams
from fastgen.model import loader
from fastgen.model.config import parse_config
from fastgen.model.loader import fill_random
from fastgen.model.parameters import Parameters

PERF_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)


# Loading


def bench_load(arguments: argparse.Namespace) -> None:
    """Measure GB/s of loading a random checkpoint that has just been written, so that it is in the page cache."""
    smoke = arguments.smoke
    device, dtype = torch.device("cpu" if smoke else "cuda"), torch.bfloat16
    config = parse_config(settings(arguments.model, smoke))
    targets = Parameters(config, dtype, device).targets()
    views = {name: part.view for name, part in targets.items()}
    with tempfile.TemporaryDirectory(prefix="fastgen-bench-") as name:
        folder = Path(name)
        fill_random(targets)
        expected = checksums(views)
        written = sum(view.nbytes for view in views.values())
        whole = {name: view.cpu().clone() for name, view in views.items()}  # views of one memory would be written once
        save_torch_state_dict(whole, folder, max_shard_size=10**5 if smoke else 5 * 10**9)
        del whole
        print(f"wrote {written / 1e9:.1f} GB", flush=True)

        def load_seconds() -> float:
            for view in views.values():
                view.zero_()
            bench_engine.wait(device.type)
            start = time.perf_counter()
            loader.load(targets, folder)
            seconds = time.perf_counter() - start
            if checksums(views) != expected:
                raise RuntimeError("what was loaded is not what was written")
            return seconds

        runs = [load_seconds() for _ in range(3)]
        rates = [written / seconds / 1e9 for seconds in runs]
        report = {
            "gb": written / 1e9,
            "gb_per_second": statistics.median(rates),
            "spread": [min(rates), max(rates)],
            "first_gb_per_second": rates[0],
        }
    write_report(arguments, "load", report)


def checksums(tensors: dict[str, torch.Tensor]) -> list[int]:
    return torch.stack([tensor.view(torch.int16).sum() for tensor in tensors.values()]).tolist()


# How busy the GPU is


class RecordedEnough(Exception):  # noqa: N818
    """Raised when the wanted steps have been recorded."""


def bench_busy(arguments: argparse.Namespace) -> None:
    """Measure the share of its time that the GPU computes or copies over steady decode steps, and the time of each
    kernel."""
    smoke = arguments.smoke
    report: dict[str, Any] = {}
    with bench_engine.ready_generator(arguments) as (generator, _):
        for name in arguments.only or ["decode"]:
            workload = Workload(4, 24, 80) if smoke else WORKLOADS[name]
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                lanes, ends = record(generator, workload, 8 if smoke else 64, trace)
                report[name] = {"lanes": lanes, **read_trace(trace, ends, "cpu_op" if smoke else "kernel")}
    write_report(arguments, "busy", report)


def record(generator: Generator, workload: Workload, steps: int, trace: Path) -> tuple[int, list[float]]:
    """Run a workload, and write a trace of so many steps of its steady decode, in which the same lanes all draw a token
    in each step. Return the number of lanes and the time at which each step ended."""
    ends: list[float] = []
    seen: deque[tuple[int, int]] = deque(maxlen=9)  # (lanes, tokens) after each of the last steps
    params = SamplingParams(n=workload.samples, temperature=1, max_tokens=workload.generated, ignore_eos=True)

    def steady() -> bool:
        seen.append((generator.stats.running, generator.stats.generated_tokens))
        lanes = {running for running, _ in seen}
        drawn = {after - before for (_, before), (_, after) in itertools.pairwise(seen)}
        return len(seen) == seen.maxlen and len(lanes) == 1 and drawn == lanes

    def requests() -> Iterator[Request | None]:
        for prompt in bench_engine.random_prompts(workload, generator.model_config.vocab_size, seed=1):
            yield Request(prompt, params)
        while not steady():
            yield None  # which runs a step
        with generator.profile(trace, steps):
            for _ in range(steps):
                yield None
                ends.append(time.perf_counter())
        raise RecordedEnough

    try:
        for _ in generator.stream(requests()):
            raise RuntimeError(f"{workload} never decoded steadily for long enough")
    except RecordedEnough:
        return seen[-1][0], ends
    raise AssertionError("the iterable ends with an exception")


def read_trace(trace: Path, ends: list[float], kernels: str) -> dict[str, Any]:
    events = json.loads(trace.read_text())["traceEvents"]
    kinds = {kernels, "gpu_memcpy", "gpu_memset"}
    work = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in kinds)
    first, last = work[0][0], max(end for _, end, _ in work)
    first += (last - first) / 10  # starting the profiler leaves a gap
    work = [each for each in work if each[0] >= first]
    spent: dict[str, list[float]] = defaultdict(list)
    for start, end, name in work:
        spent[re.sub(r"<.*", "", name)[:80]].append(end - start)
    top = sorted(spent.items(), key=lambda item: -sum(item[1]))[:25]
    window = last - work[0][0]
    step = statistics.median(after - before for before, after in itertools.pairwise(ends)) * 1e6
    steps = window / step
    return {
        "busy": covered((start, end) for start, end, _ in work) / window,
        "steps": len(ends),
        "us_per_step": step,
        "kernels_per_step": len(work) / steps,
        "top": [
            {"name": name, "share": sum(times) / window, "per_step": len(times) / steps, "us": statistics.median(times)}
            for name, times in top
        ],
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, which are in the order of their starts."""
    total, until = 0.0, float("-inf")
    for start, end in intervals:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


# Rates over the tokens generated


def bench_perf(arguments: argparse.Namespace) -> None:
    """Measure tok/s over 16 to 2048 generated tokens for 512 prompts of 1024; scripts/bench/plot.py draws it."""
    smoke, points = arguments.smoke, []
    with bench_engine.ready_generator(arguments) as (generator, _):
        costs = Costs.of(generator.model_config, generator.config.kv_cache_dtype)
        for generated in PERF_LENGTHS[:3] if smoke else PERF_LENGTHS:
            workload = Workload(4, 24, generated) if smoke else Workload(512, 1024, generated)
            found = bench_engine.measure(generator, workload, repeats=1)
            points.append(bench_engine.compare(found, costs, None, workload, None, arguments.tensor_parallel))
            print(bench_engine.line(str(generated), points[-1], smoke), flush=True)
    write_report(arguments, "perf", {"points": points})
