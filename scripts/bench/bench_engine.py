"""The common parts of the benchmarks of `bench.py gpu`: a Generator of a model's true shapes, the time of a workload,
the ceilings of the GPU, and the reports."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from bench_limits import (
    CARDS,
    SHARED,
    WORKLOADS,
    Costs,
    Rates,
    Workload,
    card_of,
    limit,
    product_shapes,
    settings,
)
from reports import RESULTS, write_json

from fastgen import Generator, SamplingParams
from fastgen.model.config import ModelConfig, parse_config

LONG_RUN = 30.0  # seconds, from where on one run is enough
PRODUCT_ROWS = 8192
COPY_BYTES = 8 * 10**9
PLACES = {"model", "revision", "tokenizer", "adapter", "tp_group"}  # options that a report leaves out


# What the chip can do


def measure_rates(model: ModelConfig, device: str, smoke: bool) -> dict[str, float]:
    """Measure the ceilings of this machine: a device copy, and the matrix products of the model's layers on random
    data."""
    seconds, rows, size = (0.01, 16, 10**5) if smoke else (2.0, PRODUCT_ROWS, COPY_BYTES)
    dtype = torch.float32 if smoke else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    def copy_seconds() -> float:
        source = random(size // dtype.itemsize)
        target = torch.empty_like(source)
        return sustained(lambda: target.copy_(source), seconds / 2, device)

    def product_seconds(out: int, size_in: int) -> float:
        x, weight = random(rows, size_in), random(out, size_in) * 0.02
        y = torch.empty(rows, out, dtype=dtype, device=device)
        return sustained(lambda: torch.mm(x, weight.T, out=y), seconds, device)

    shapes = product_shapes(model)
    copied = 2 * size / copy_seconds()  # read and written
    if device != "cpu":  # before cuBLAS takes a workspace, for good, out of that memory, which then could not go back
        torch.cuda.empty_cache()
    total = sum(product_seconds(*shape) for shape in shapes)
    if device != "cpu":
        torch.cuda.empty_cache()  # the engine takes what is free
        torch.cuda.reset_peak_memory_stats()
    return {
        "copy_tb_per_second": copied / 1e12,
        "products_tflop_per_second": 2 * rows * sum(out * size_in for out, size_in in shapes) / total / 1e12,
        "layers_us_per_token": total / rows * model.num_layers * 1e6,
    }


def sustained(once: Callable[[], object], seconds: float, device: str) -> float:
    """Return the seconds of one call, measured over as many calls as fill the given time."""
    calls, taken = 0, 0.0
    for _ in range(3):
        once()
    wait(device)
    start = time.perf_counter()
    while taken < seconds:
        for _ in range(10):
            once()
        calls += 10
        wait(device)
        taken = time.perf_counter() - start
    return taken / calls


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


# The engine


@dataclass
class Run:
    """One generate() of a workload. lanes: maximum number of sequences running at a time."""

    seconds: float
    steps: int
    preemptions: int
    lanes: int


class Watch:
    """A thread that reads a few times a second how many sequences of a Generator are running. lanes: the maximum."""

    def __init__(self, generator: Generator) -> None:
        self.lanes = 0
        self._generator = generator
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            self.lanes = max(self.lanes, self._generator.stats.running)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()


def random_prompts(workload: Workload, vocab_size: int, seed: int) -> list[list[int]]:
    """Return random prompts, which differ for each workload and seed, so that no prefix cache has them from another
    run."""
    draw = np.random.default_rng([seed, *astuple(workload)])
    common: list[int] = draw.integers(0, vocab_size, workload.common).tolist()
    own: list[list[int]] = draw.integers(0, vocab_size, (workload.prompts, workload.prompt - workload.common)).tolist()
    return [common + rest for rest in own]


def run(generator: Generator, workload: Workload, seed: int) -> Run:
    """Time one generate() of the prompts of this seed."""
    prompts = random_prompts(workload, generator.model_config.vocab_size, seed)
    params = SamplingParams(n=workload.samples, temperature=1, max_tokens=workload.generated, ignore_eos=True)
    before = generator.stats
    with Watch(generator) as watch:
        start = time.perf_counter()
        outputs = generator.generate(prompts, params)
        seconds = time.perf_counter() - start
    after = generator.stats
    lengths = [len(completion.token_ids) for output in outputs for completion in output.completions]
    if lengths != [workload.generated] * workload.sequences:
        found = f"{len(lengths)} sequences of {sorted(set(lengths))} tokens"
        raise RuntimeError(f"{found} instead of {workload.sequences} of {workload.generated}: {outputs[0].error}")
    lanes = watch.lanes or min(workload.sequences, generator.config.max_seqs)  # a run may end before the first look
    return Run(seconds, after.steps - before.steps, after.preemptions - before.preemptions, lanes)


def measure(generator: Generator, workload: Workload, repeats: int = 3) -> dict[str, Any]:
    """Return a workload's figures, without its limit."""
    runs: list[Run] = []
    while len(runs) < repeats and not (runs and runs[0].seconds > LONG_RUN):
        runs.append(run(generator, workload, seed=len(runs) + 1))
    return figures(workload, runs)


def measure_shared(generator: Generator, workload: Workload, repeats: int = 3) -> dict[str, Any]:
    """Return the figures of a workload with common prefixes, and as `unshared` the figures of one run in between, where
    each lane reads its prefix by itself."""
    together, apart = [run(generator, workload, seed=1)], []
    with unshared(generator):
        apart.append(run(generator, workload, seed=2))
    together += [run(generator, workload, seed=3 + repeat) for repeat in range(repeats - 1)]
    found, other = figures(workload, together), figures(workload, apart)
    times = found["tokens_per_second"] / other["tokens_per_second"]
    del other["workload"]
    return found | {"unshared": other, "times_unshared": times}


@contextmanager
def unshared(generator: Generator) -> Iterator[None]:
    """Let attention read a shared prefix once per lane, instead of once per step."""
    prefixes = generator._runner.attention.prefixes
    if prefixes is None:  # on the CPU
        yield
        return
    before, prefixes.wanted = prefixes.wanted, False
    try:
        yield
    finally:
        prefixes.wanted = before


def figures(workload: Workload, runs: list[Run]) -> dict[str, Any]:
    return {"workload": asdict(workload), **figures_of_runs(workload.tokens, runs)}


def figures_of_runs(tokens: int, runs: list[Run]) -> dict[str, Any]:
    """Return the figures of runs that each generate so many tokens."""
    rates = [tokens / each.seconds for each in runs]
    return {
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "seconds": [each.seconds for each in runs],
        "lanes": max(each.lanes for each in runs),
        "steps": runs[-1].steps,
        "preemptions": sum(each.preemptions for each in runs),
    }


def compare(
    found: dict[str, Any], costs: Costs, rates: dict[str, float] | None, workload: Workload, gpus: int
) -> dict[str, Any]:
    """Return a workload's figures with its limits on so many GPUs. rates: ceilings of one GPU."""
    card = card_of(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    limits = {card: limit(costs, workload, CARDS[card].times(gpus), found["lanes"])}
    if rates is not None:
        here = Rates(rates["copy_tb_per_second"] * 1e12, rates["products_tflop_per_second"] * 1e12)
        limits["measured"] = limit(costs, workload, here.times(gpus), found["lanes"])
    speed = found["tokens_per_second"]
    return found | {"limit": limits, "of_limit": {name: speed / each for name, each in limits.items()}}


@contextmanager
def dummy_folder(model: str, smoke: bool, int4: bool = False) -> Iterator[Path]:
    """Make a folder that holds the model's config.json and nothing else. int4: see `settings`."""
    with tempfile.TemporaryDirectory(prefix="fastgen-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings(model, smoke, int4)))
        yield Path(folder)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of Generator, from the command line and by default."""
    names = (
        "max_seqs", "max_step_tokens", "attention", "page_size", "memory_fraction", "max_model_len", "quantization",
        "kv_cache_dtype",
    )  # fmt: skip
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    device, dtype = ("cpu", "float32") if arguments.smoke else ("cuda", "bfloat16")
    if given.get("quantization") == "int4":  # of the folder
        del given["quantization"]
        dtype = dtype if arguments.smoke else "float16"
    if arguments.tensor_parallel > 1:
        given["tensor_parallel"] = arguments.tensor_parallel
    return {"load": "dummy", "device": device, "dtype": dtype, "seed": 0, **given}


def machine(device: str, gpus: int = 1) -> dict[str, Any]:
    """Return the machine's GPUs, the memory and the processors of one of them, and the versions of packages."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "flash-attn-4"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    versions["python"] = sys.version.split()[0]
    if device == "cpu":
        return {"gpu": "cpu", "versions": versions}
    found = torch.cuda.get_device_properties(device)
    name = f"{gpus} x {found.name}" if gpus > 1 else found.name
    gpu = {"gpu": name, "memory_gb": found.total_memory / 1e9, "processors": found.multi_processor_count}
    return {**gpu, "cuda": torch.version.cuda, "versions": versions}


def slug(gpu: str) -> str:
    """Return a GPU's name for file names: NVIDIA H100 80GB HBM3, or several of them, 4 x NVIDIA H100 ... -> h100."""
    name = re.sub(r"^\d+ x |\s\d+gb.*", "", gpu.lower()).removeprefix("nvidia")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def report_path(arguments: argparse.Namespace, gpu: str, part: str = "") -> Path:
    """Return MODEL-GPU-tpN-fp8-kv-fp8-PART.json; each part is there only where it applies."""
    several = f"tp{arguments.tensor_parallel}" if arguments.tensor_parallel > 1 else ""
    numbers = arguments.quantization or "", "kv-fp8" if arguments.kv_cache_dtype == "fp8" else ""
    parts = (arguments.model, slug(gpu), several, *numbers, part)
    folder: Path = arguments.out or RESULTS
    return folder / f"{'-'.join(filter(None, parts))}.json"


def warm_up(generator: Generator, smoke: bool) -> None:
    """Run a few short requests, so that everything is set up."""
    run(generator, Workload(4, 24, 4) if smoke else Workload(8, 128, 16), seed=0)


def merge(path: Path, report: dict[str, Any]) -> None:
    """Write a report; the workloads that it does not have stay as they were in the file."""
    before = json.loads(path.read_text()) if path.exists() else {}
    known = {name: value for name, value in report.items() if value is not None}  # rates may not have been measured
    report = report | before | known | {"workloads": before.get("workloads", {}) | report["workloads"]}
    write_json(path, report)


def ceilings(arguments: argparse.Namespace) -> dict[str, float] | None:
    """Measure the ceilings of one GPU, where they are wanted. While an engine runs there is neither memory nor time for
    it."""
    if arguments.skip_ceilings:
        return None
    config = parse_config(settings(arguments.model, arguments.smoke))
    rates = measure_rates(config, "cpu" if arguments.smoke else "cuda", arguments.smoke)
    if not arguments.smoke:
        print(", ".join(f"{name} {value:.2f}" for name, value in rates.items()), flush=True)
    return rates


@contextmanager
def ready_generator(arguments: argparse.Namespace, **options: Any) -> Iterator[tuple[Generator, float]]:
    """Make a Generator that has run something; yield it and the seconds of its start. options: override the options of
    the command line."""
    with dummy_folder(arguments.model, arguments.smoke, arguments.quantization == "int4") as folder:
        start = time.perf_counter()
        generator = Generator(folder, **engine_options(arguments) | options)
        seconds = time.perf_counter() - start
    print(f"ready in {seconds:.1f} s: {generator.config}", flush=True)
    with generator:
        warm_up(generator, arguments.smoke)
        yield generator, seconds


def measure_workload(
    arguments: argparse.Namespace, generator: Generator, name: str, rates: dict[str, float] | None, gpus: int
) -> dict[str, Any]:
    """Measure all that is reported of a workload."""
    workload = WORKLOADS[name].small() if arguments.smoke else WORKLOADS[name]
    figures_of = measure_shared if name in SHARED and gpus == 1 else measure
    costs = Costs.of(generator.model_config, generator.config.kv_cache_dtype)
    found = compare(figures_of(generator, workload), costs, rates, workload, gpus)
    pool_gb = generator.config.num_pages * generator.config.page_bytes(generator.model_config) / 1e9
    engine = {name: value for name, value in asdict(generator.config).items() if name not in PLACES}
    found |= {"engine": engine, "pool_gb": pool_gb}
    if not arguments.smoke and gpus == 1:  # with several, other processes have the memory
        found["peak_memory_gb"] = torch.cuda.max_memory_reserved() / 1e9
    print(line(name, found, arguments.smoke), flush=True)
    return found


def line(name: str, found: dict[str, Any], smoke: bool = False) -> str:
    """Return a workload's figures for the terminal; for a smoke run, a tiny model on the CPU, without ratios to what
    GPUs can do."""
    low, high = found["spread"]
    more = ""
    if "limit" in found and not smoke:
        limits = (f"{found['of_limit'][kind]:.3f} of {each:.0f} ({kind})" for kind, each in found["limit"].items())
        more = "; " + ", ".join(limits)
    if "unshared" in found:
        unshared_rate = found["unshared"]["tokens_per_second"]
        more += f"; {found['times_unshared']:.3f} times the {unshared_rate:.1f} with prefixes read once per lane"
    return (
        f"{name:9} {found['tokens_per_second']:8.1f} tok/s ({low:.1f} to {high:.1f}, {len(found['seconds'])} runs)"
        f"{more}; {found['lanes']} lanes, {found['steps']} steps, {found['preemptions']} preemptions"
    )


def write_report(
    arguments: argparse.Namespace, name: str, report: dict[str, Any], show: bool = True, keep: bool = False
) -> None:
    """Write MODEL-GPU-name.json, next to the workloads' file. show: print the report too. keep: what the file has and
    the report has not stays."""
    about = machine("cpu" if arguments.smoke else "cuda", arguments.tensor_parallel)
    if show:
        print(json.dumps(report, indent=2))
    if arguments.out or not arguments.smoke:
        path = report_path(arguments, about["gpu"], name)
        before = json.loads(path.read_text()) if keep and path.exists() else {}
        write_json(path, {**before, "model": arguments.model, **about, **report})
