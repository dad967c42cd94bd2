"""A decode step in its parts (`bench.py gpu --step`): the time of each kernel, and the time of steps that lack a part
and compute nonsense, which bounds what this part can still gain."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_engine
import torch
from bench_engine import write_report
from bench_limits import WORKLOADS, Workload
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fastgen import Generator, SamplingParams
from fastgen.engine.runner import Runner
from fastgen.engine.step import Launched
from fastgen.kernels import fp8
from fastgen.kernels.fp8 import quantize
from fastgen.kernels.launch import Kernel
from fastgen.model import linear, quantized
from fastgen.model.sampler import draw
from fastgen.model.transformer import StepPart, Transformer
from fastgen.request import Batch, LaneStart

DEFAULT = ["chat1", "chat8", "batch128"]
PRODUCTS = ("qkv", "o", "gate_up", "down")
CHUNK = 16  # steps between two resets of the lanes' lengths
ROUNDS, CHUNKS = 3, 2  # each variant is measured in turn; its time is the median chunk

Patch = Callable[[ExitStack], None]


# Parts of a step that can be left out


@cache
def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random numbers instead of a result that is not computed, always the same."""
    return torch.randn(shape, device=device).to(dtype)


@cache
def random_fp8(*shape: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values, scales = quantize.twin(random(*shape, dtype=torch.bfloat16, device=device))
    return values, scales


def like(x: Tensor) -> Tensor:
    return random(*x.shape, dtype=x.dtype, device=x.device)


def like_fp8(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return random_fp8(*x.shape, device=x.device)


def without_norms(stack: ExitStack) -> None:
    stack.enter_context(patch.object(linear, "rms_norm", lambda x, *_: like(x)))
    stack.enter_context(patch.object(fp8, "rms_norm_fp8", like_fp8))


def without_quantizing(stack: ExitStack) -> None:
    """Leave out the kernels that only quantize: before o and down."""
    stack.enter_context(patch.object(fp8, "quantize", Kernel(like_fp8, f"{__name__}:like_fp8")))


def without_rope(kind: type[Transformer], stack: ExitStack) -> None:
    def project(self: Transformer, part: StepPart, number: int, pool: Any) -> Tensor:
        layer = self.layers[number]
        qkv = part.residual.project(layer.qkv, layer.input_norm)
        shape = len(qkv), self.query_rows, self.config.head_size
        return random(*shape, dtype=qkv.dtype, device=qkv.device)

    stack.enter_context(patch.object(kind, "project_qkv", project))


def without_attention(kind: type[Transformer], stack: ExitStack) -> None:
    def attend(self: Transformer, plan: object, number: int, q: Tensor, attention: Any) -> Tensor:
        return q[:, : self.config.num_heads].flatten(1).contiguous()

    stack.enter_context(patch.object(kind, "_attend", attend))


def parts_of(generator: Generator) -> dict[str, Patch]:
    """Return how to leave out each part that a step of this Generator has."""
    model, found = generator._runner.model, dict[str, Patch](norms=without_norms)
    o, kind = model.layers[0].o, type(model)
    if isinstance(o, quantized.Fp8Linear) and not isinstance(o, quantized.WeightOnlyFp8):
        found["quantizing"] = without_quantizing
    return found | {"rope": partial(without_rope, kind), "attention": partial(without_attention, kind)}


# Steps


class Steps:
    """Decode steps of a number of lanes, all with about the same number of keys."""

    def __init__(self, generator: Generator, lanes: int, keys: int) -> None:
        runner: Runner = generator._runner
        self.runner, self.count, self.keys = runner, lanes, keys
        self._before: Launched | None = None
        pages = -(-(keys + CHUNK + 1) // generator.config.page_size)
        assert lanes * pages <= generator.config.num_pages
        params = SamplingParams(temperature=1)
        starts = tuple(LaneStart(lane, params, seed=lane, prompt_len=keys) for lane in range(lanes))
        updates = tuple((lane, 0, tuple(range(lane * pages, (lane + 1) * pages))) for lane in range(lanes))
        self.batch = Batch(decodes=tuple(range(lanes)))
        batch = Batch(starts=starts, page_updates=updates)
        runner.lanes.update_tables(batch)
        runner.lanes.start(batch)
        runner.lanes.set_decodes(self.batch.decodes)
        self.reset()

    def reset(self) -> None:
        self.runner.lanes.kv_lens[: self.count] = self.keys
        self.runner.lanes.host_kv_lens[: self.count] = self.keys

    @torch.inference_mode()
    def step(self, drawing: bool = True) -> None:
        runner = self.runner
        runner.decode_body(self.count)
        if drawing:
            rows = runner.lanes.input.first(self.count)
            plan = runner.lanes.plan_of(self.batch.decodes)
            draw(runner.logits[: self.count], runner.lanes.state, rows.lanes, rows.kv_lens, plan, None)

    def captured(self, change: Patch | None, drawing: bool = True) -> Callable[[], None]:
        """Return a function that runs a step with a part changed: as a CUDA graph, on a GPU."""

        def changed() -> None:
            with ExitStack() as stack:
                if change is not None:
                    change(stack)
                self.step(drawing)

        changed()
        if self.runner.device.type == "cpu":
            return changed
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            changed()
        return graph.replay

    def engine(self) -> None:
        """Run a step as the engine does, without its scheduler: collect it when the next one is launched."""
        launched = self.runner.launch(self.batch)
        if self._before is not None:
            self.runner.collect(self._before)
        self._before = launched

    def microseconds(self, run: Callable[[], None]) -> float:
        """Return the time of one of CHUNK steps."""
        self.reset()
        bench_engine.wait(self.runner.device.type)
        start = time.perf_counter()
        for _ in range(CHUNK):
            run()
        bench_engine.wait(self.runner.device.type)
        return (time.perf_counter() - start) / CHUNK * 1e6


def compare(steps: Steps, runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the microseconds of each kind of steps, measured in turn."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, run in runs.items():
            steps.microseconds(run)
            found[name] += [steps.microseconds(run) for _ in range(CHUNKS)]
    return {name: statistics.median(times) for name, times in found.items()}


# Kernels


def kernels(steps: Steps, run: Callable[[], None]) -> list[dict[str, Any]]:
    """Return a step's kernels, the longest first: how many there are, and the microseconds from the end of the kernel
    ahead to its end, which add up to the step's time."""
    gpu = steps.runner.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    steps.reset()
    with profile(activities=activities) as profiler:
        for _ in range(CHUNK):
            run()
        bench_engine.wait(steps.runner.device.type)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    category = {"kernel", "gpu_memcpy", "gpu_memset"} if gpu else {"cpu_op"}
    work = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in category)
    return table([(end, name) for _, end, name in work], len(steps.runner.model.layers))


def table(work: list[tuple[float, str]], layers: int) -> list[dict[str, Any]]:
    """Return the rows of `kernels`. work: the end and the name of each kernel of several steps, in order.

    A step's products have one name; they are in the order of PRODUCTS in each layer, and the head is the last one.
    """
    spent: dict[str, list[float]] = defaultdict(list)
    products, steps = 0, 0
    for (before, _), (end, name) in itertools.pairwise(work):
        if "_advance_kernel" in name:  # a step's first kernel
            products, steps = 0, steps + 1
        if "_product_kernel" in name:
            name = f"product {PRODUCTS[products % 4] if products < 4 * layers else 'head'}"
            products += 1
        spent[re.sub(r"<.*", "", name)[:60]].append(end - before)
    steps = max(steps, 1)
    rows = [
        {
            "name": name,
            "per_step": len(times) / steps,
            "us": statistics.median(times),
            "us_per_step": sum(times) / steps,
        }
        for name, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -row["us_per_step"])


def bench_step(arguments: argparse.Namespace) -> None:
    """Measure decode steps of workloads in their parts."""
    smoke, report = arguments.smoke, {}
    several = {name: Workload(4, 24, 80) if smoke else WORKLOADS[name] for name in arguments.only or DEFAULT}
    most = max(each.sequences for each in several.values())
    with bench_engine.ready_generator(arguments, max_seqs=most, prefix_cache=False) as (generator, _):
        for name, workload in several.items():
            steps = Steps(generator, workload.sequences, workload.prompt + workload.generated // 2)
            runs = {"whole": steps.captured(None), "engine": steps.engine}
            runs["draw"] = steps.captured(None, drawing=False)
            for part, change in parts_of(generator).items():
                runs[part] = steps.captured(change)
            times = compare(steps, runs, 1 if smoke else ROUNDS)
            report[name] = {"us": times, "kernels": kernels(steps, steps.engine)}
            print(lines(name, workload, report[name]), flush=True)
    write_report(arguments, "step", report)


def lines(name: str, workload: Workload, found: dict[str, Any]) -> str:
    """Return a step's figures for the terminal."""
    whole = found["us"]["whole"]
    text = [f"{name}: {workload.sequences} lanes, a step {whole:.1f} us (engine {found['us']['engine']:.1f})"]
    for part, us in list(found["us"].items())[2:]:
        text.append(f"  without {part:22} {us:9.1f} us, {1 - us / whole:6.1%}")
    for row in found["kernels"][:18]:
        each = f"{row['per_step']:6.1f} x {row['us']:8.2f} us"
        text.append(f"  {row['name']:46} {each} = {row['us_per_step']:9.1f} us")
    return "\n".join(text)
