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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import bench_engine
import torch
from bench_engine import write_report
from bench_limits import WORKLOADS, Costs, Workload, settings
from huggingface_hub import save_torch_state_dict

from fastgen import Generator
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


class Recorder:
    """A recorder of `steps` steps of a Generator in steady decode: the same lanes all draw a token in each step.

    It replaces the step of the loop, `Loop.advance`, and leaves through an exception when it has enough.
    """

    def __init__(self, generator: Generator, steps: int, on_gpu: bool) -> None:
        activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
        self.profiler = torch.profiler.profile(activities=[activity])
        self.lanes = 0
        self._steps = steps
        self._generator = generator
        self._advance: Callable[[], None] = generator._loop.advance
        self.ends: list[float] = []  # of the steps recorded
        self._recording = False
        self._seen: deque[tuple[int, int]] = deque(maxlen=9)  # (lanes, tokens) after each of the last steps

    def __call__(self) -> None:
        self._advance()
        if not self._recording:
            stats = self._generator.stats
            self._seen.append((stats.running, stats.generated_tokens))
            if self._steady():
                self.lanes = stats.running
                self.profiler.start()
                self._recording = True
            return
        self.ends.append(time.perf_counter())
        if len(self.ends) == self._steps:
            self.profiler.stop()
            raise RecordedEnough

    def _steady(self) -> bool:
        lanes = {running for running, _ in self._seen}
        drawn = {after - before for (_, before), (_, after) in itertools.pairwise(self._seen)}
        return len(self._seen) == self._seen.maxlen and len(lanes) == 1 and drawn == lanes


def bench_busy(arguments: argparse.Namespace) -> None:
    """Measure the share of its time that the GPU computes or copies over steady decode steps, and the time of each
    kernel."""
    smoke = arguments.smoke
    report: dict[str, Any] = {}
    with bench_engine.ready_generator(arguments) as (generator, _):
        for name in arguments.only or ["decode"]:
            workload = Workload(4, 24, 80) if smoke else WORKLOADS[name]
            recorder = Recorder(generator, steps=8 if smoke else 64, on_gpu=not smoke)
            record(generator, workload, recorder)
            report[name] = read_trace(recorder, "cpu_op" if smoke else "kernel")
    write_report(arguments, "busy", report)


def record(generator: Generator, workload: Workload, recorder: Recorder) -> None:
    """Run a workload until its recorder has enough. Raises RuntimeError where it never has."""
    generator._loop.advance = recorder  # type: ignore[method-assign]
    try:
        bench_engine.run(generator, workload, seed=1)
    except RecordedEnough:
        return
    finally:
        del generator._loop.advance
    raise RuntimeError(f"{workload} never decoded steadily for long enough")


def read_trace(recorder: Recorder, kernels: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
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
    step = statistics.median(after - before for before, after in itertools.pairwise(recorder.ends)) * 1e6
    steps = window / step
    return {
        "busy": covered((start, end) for start, end, _ in work) / window,
        "lanes": recorder.lanes,
        "steps": len(recorder.ends),
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


if __name__ == "__main__":
    raise SystemExit(__doc__)  # says how bench.py runs it
