"""Measures generated tokens per second on the CPU, of fastgen and of transformers' generate.

    python scripts/bench/bench.py cpu                # the bundled model; 5 minutes
    python scripts/bench/bench.py cpu --out x.json   # writes the report too
    python scripts/bench/bench.py cpu --smoke        # the same in seconds, to see that it runs

Each engine runs in a process of its own, so that its peak memory is its own, and the two take turns: a ratio is of one
pair of runs, one right after the other. Prompts are random ids, the same for both engines and new in each
pair; every sequence runs to its length (no eos). Some workloads also run while other processes are busy, one per
core, which the benchmark starts and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from reports import median_and_spread, processor, write_json


@dataclass(frozen=True)
class Workload:
    """`sequences` prompts and answers; the lengths of both are drawn evenly from `shortest` to `longest`."""

    sequences: int = 64
    shortest: int = 16
    longest: int = 256
    seed: int = 0

    def lengths(self) -> list[tuple[int, int]]:
        """Return (prompt length, tokens to generate) of each sequence, whatever the seed."""
        draw, span = random.Random(0), (self.shortest, self.longest)
        return [(draw.randint(*span), draw.randint(*span)) for _ in range(self.sequences)]

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return random prompts of these lengths."""
        draw = random.Random(self.seed + 1)
        return [[draw.randrange(vocab_size) for _ in range(length)] for length, _ in self.lengths()]

    @property
    def generated(self) -> int:
        """The number of tokens that are asked for."""
        return sum(tokens for _, tokens in self.lengths())


WORKLOADS = {
    "ragged": Workload(),
    "batch 1": Workload(1, 64, 64),
    "batch 8": Workload(8, 64, 64),
    "batch 32": Workload(32, 64, 64),
    "batch 64": Workload(64, 64, 64),
}
BUSY = {"batch 1": Workload(1, 64, 64), "batch 32": Workload(32, 16, 16)}
"""Workloads that run while other processes are busy, where transformers may generate 2 tokens per second."""

BUSY_PAIRS = 3

SMOKE = {"ragged": Workload(4, 16, 24), "batch 1": Workload(1, 16, 16)}
SMOKE_BUSY = {"batch 1": SMOKE["batch 1"]}

Run = Callable[[Workload], None]


def fastgen_runs(model: str | None, dtype: str) -> Run:
    """Return the function that runs a workload in fastgen."""
    from fastgen import Generator, SamplingParams

    generator = Generator(model, dtype=dtype, device="cpu", seed=0)

    def run(workload: Workload) -> None:
        params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for _, tokens in workload.lengths()]
        outputs = generator.generate(workload.prompts(generator.model_config.vocab_size), params)
        assert sum(len(output.completions[0].token_ids) for output in outputs) == workload.generated

    return run


def transformers_runs(model: str | None, dtype: str) -> Run:
    """Return the function that runs a workload in transformers, as one batch that is padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    from fastgen.model.loader import resolve

    causal: Any = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=getattr(torch, dtype))

    def run(workload: Workload) -> None:
        prompts = workload.prompts(causal.config.vocab_size)
        width, most = max(map(len, prompts)), max(tokens for _, tokens in workload.lengths())
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        length = {"min_new_tokens": most, "max_new_tokens": most, "pad_token_id": 0}
        out = causal.generate(ids, attention_mask=mask, do_sample=False, temperature=None, **length)
        assert out.shape[1] == width + most

    return run


ENGINES = {"fastgen": fastgen_runs, "transformers": transformers_runs}


def serve_engine(name: str, model: str | None, dtype: str) -> None:
    """Run each workload that comes as a line of JSON on stdin; answer with seconds and the peak memory in bytes."""
    run = ENGINES[name](model, dtype)
    unit = 1 if sys.platform == "darwin" else 1024
    for line in sys.stdin:
        workload = Workload(**json.loads(line))
        start = time.perf_counter()
        run(workload)
        seconds = time.perf_counter() - start
        print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]), flush=True)


class Engine:
    """An engine in a process of its own. peak_memory: its largest memory so far, in bytes."""

    def __init__(self, name: str, model: str | None, dtype: str) -> None:
        command = [sys.executable, __file__, json.dumps([name, model, dtype])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.peak_memory = 0

    def rate(self, workload: Workload) -> float:
        """Run a workload; return tokens per second, of those that were asked for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(workload)) + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("["):
            if not line:
                raise RuntimeError(f"the engine has ended with {self._process.wait()}")
        seconds, self.peak_memory = json.loads(line)
        return workload.generated / seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run so many processes that compute without end, until the end of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_pairs(engines: dict[str, Engine], name: str, workload: Workload, pairs: int) -> dict[str, Any]:
    """Run pairs of both engines, each first in every second one; return rates, and the ratio of the rates of a pair."""
    rates: dict[str, list[float]] = {engine: [] for engine in engines}
    for pair in range(pairs):
        for engine in list(engines)[:: 1 if pair % 2 else -1]:
            rates[engine].append(engines[engine].rate(replace(workload, seed=pair + 1)))
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    found = {engine: median_and_spread(each) for engine, each in rates.items()} | {"ratio": median_and_spread(ratios)}
    columns = [
        f"{column} {each['median']:.2f} ({each['spread'][0]:.2f} to {each['spread'][1]:.2f})"
        for column, each in found.items()
    ]
    print(f"{name:14} {', '.join(columns)}", flush=True)
    return found


def bench_cpu(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run and report all workloads, tokens per second and ratios; write the report where `--out` says."""
    workloads, busy_workloads = (SMOKE, SMOKE_BUSY) if arguments.smoke else (WORKLOADS, BUSY)
    pairs = 1 if arguments.smoke else arguments.pairs
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    engines = {name: Engine(name, arguments.model, arguments.dtype) for name in ENGINES}
    try:
        for engine in engines.values():
            for workload in workloads.values():
                engine.rate(replace(workload, shortest=min(workload.shortest, 16), longest=16))  # warms up
        found = {name: run_pairs(engines, name, workload, pairs) for name, workload in workloads.items()}
        with busy_processes(cores):
            busy = {
                name: run_pairs(engines, f"{name}, busy", workload, min(pairs, BUSY_PAIRS))
                for name, workload in busy_workloads.items()
            }
    finally:
        for engine in engines.values():
            engine.close()
    report = {
        "model": arguments.model or "bundled",
        "dtype": arguments.dtype,
        "machine": processor(),
        "cores": cores,
        "torch": metadata.version("torch"),
        "pairs": pairs,
        "workloads": {name: asdict(workload) for name, workload in workloads.items()},
        "busy_workloads": {name: asdict(workload) for name, workload in busy_workloads.items()},
        "peak_memory_mb": {name: engine.peak_memory / 1e6 for name, engine in engines.items()},
        "quiet": found,
        "beside_busy_processes": busy,
    }
    if arguments.out:
        write_json(arguments.out, report)
    return report


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.py cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or hub id (default: the bundled model)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="the JSON file to write; without it none is written")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs of each workload (default 5)")
    parser.add_argument("--smoke", action="store_true", help="a few tokens")
    arguments = parser.parse_args(argv)
    if arguments.out is not None and arguments.out.is_dir():
        parser.error(f"--out {arguments.out} is a folder; name the JSON file")
    bench_cpu(arguments)


if __name__ == "__main__":  # started by Engine
    serve_engine(*json.loads(sys.argv[1]))
