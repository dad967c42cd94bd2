"""Measures generated tokens per second on the CPU, of fastgen and of transformers' generate.

    python scripts/bench/bench.py cpu                                      # the bundled model; 5 minutes
    python scripts/bench/bench.py cpu --model llama-135m --dtype bfloat16  # true shapes, random weights; 5 minutes
    python scripts/bench/bench.py cpu --model qwen2.5-0.5b --only "batch 1,ragged 32" --pairs 2
    python scripts/bench/bench.py cpu --out x.json                         # writes the report too
    python scripts/bench/bench.py cpu --peers --help                       # vLLM's CPU build and llama.cpp as well
    python scripts/bench/bench.py cpu --smoke                              # in seconds, to see that it runs

Each engine runs in its own process, and the two take turns: a ratio is of one pair of runs, one right after the other.
Prompts are random ids, the same for both engines and new in each pair; every sequence runs to its length (no eos).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from reports import MODELS, median_and_spread, processor, write_json


@dataclass(frozen=True)
class Workload:
    """`sequences` prompts and `samples` answers to each: one is greedy, several are drawn at temperature 1. The lengths
    of prompts and the numbers of tokens to generate are drawn evenly between the two numbers of `prompt` and of
    `answer`."""

    sequences: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    seed: int = 0
    samples: int = 1

    def lengths(self) -> list[tuple[int, int]]:
        """Return (prompt length, tokens to generate) of each sequence, whatever the seed."""
        draw = random.Random(0)
        return [(draw.randint(*self.prompt), draw.randint(*self.answer)) for _ in range(self.sequences)]

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return random prompts of these lengths."""
        draw = random.Random(self.seed + 1)
        return [[draw.randrange(vocab_size) for _ in range(length)] for length, _ in self.lengths()]

    @property
    def generated(self) -> int:
        """The number of tokens that are asked for."""
        return self.samples * sum(tokens for _, tokens in self.lengths())

    @property
    def temperature(self) -> float:
        return 0.0 if self.samples == 1 else 1.0

    def shortened(self, most: int) -> Workload:
        """Return the workload with lengths of at most `most` tokens."""
        prompt, answer = (tuple(min(length, most) for length in span) for span in (self.prompt, self.answer))
        return replace(self, prompt=prompt, answer=answer)


def batch(sequences: int, prompt: int = 64, answer: int = 64) -> Workload:
    """Return a workload whose sequences all have the same lengths."""
    return Workload(sequences, (prompt, prompt), (answer, answer))


SHAPE_WORKLOADS = {
    "batch 1": batch(1),
    "batch 8": batch(8),
    "ragged 32": Workload(32, (8, 300), (48, 48)),
    "long prompt": batch(1, 1500, 32),
    "first token": batch(1, 1500, 1),
}
"""The workloads of a model with random weights, and of a folder or hub id."""

BUNDLED_WORKLOADS = {
    **SHAPE_WORKLOADS,
    "ragged 64": Workload(64, (16, 256), (16, 256)),
    "batch 32": batch(32),
    "batch 64": batch(64),
}
SMOKE_TOKENS = 24

Run = Callable[[Workload], None]


def fastgen_runs(model: str | None, dtype: str, random_weights: bool) -> Run:
    """Return the function that runs a workload in fastgen."""
    from fastgen import Generator, SamplingParams

    load = "dummy" if random_weights else "auto"
    generator = Generator(model, dtype=dtype, device="cpu", load=load, seed=0)

    def run(workload: Workload) -> None:
        chosen = SamplingParams(temperature=workload.temperature, n=workload.samples, ignore_eos=True)
        params = [replace(chosen, max_tokens=tokens) for _, tokens in workload.lengths()]
        outputs = generator.generate(workload.prompts(generator.model_config.vocab_size), params)
        assert sum(len(each.token_ids) for output in outputs for each in output.completions) == workload.generated

    return run


def transformers_runs(model: str | None, dtype: str, random_weights: bool) -> Run:
    """Return the function that runs a workload in transformers, as one batch that is padded on the left."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fastgen.model.loader import resolve

    folder, numbers = resolve(model), getattr(torch, dtype)
    causal: Any
    if random_weights:
        causal = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=numbers).eval()
    else:
        causal = AutoModelForCausalLM.from_pretrained(folder, dtype=numbers)

    def run(workload: Workload) -> None:
        prompts = workload.prompts(causal.config.vocab_size)
        width, most = max(map(len, prompts)), max(tokens for _, tokens in workload.lengths())
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options: dict[str, Any] = {"min_new_tokens": most, "max_new_tokens": most, "pad_token_id": 0}
        if workload.samples > 1:
            options |= {"do_sample": True, "top_k": 0, "num_return_sequences": workload.samples}
        out = causal.generate(ids, attention_mask=mask, **({"do_sample": False, "temperature": None} | options))
        assert out.shape[1] == width + most

    return run


ENGINES = {"fastgen": fastgen_runs, "transformers": transformers_runs}


def serve_engine(run: Run) -> None:
    """Run each workload that comes as a line of JSON on stdin; answer with its seconds in square brackets."""
    for line in sys.stdin:
        workload = Workload(**json.loads(line))
        start = time.perf_counter()
        run(workload)
        print(json.dumps([time.perf_counter() - start]), flush=True)


class Engine:
    """An engine in its own process: `python script`, which calls `serve_engine` of an engine that `arguments` name.

    environment: variables to add to this process's.
    """

    def __init__(
        self, arguments: Sequence[Any], script: str = __file__, python: str = sys.executable, **environment: str
    ) -> None:
        command = [python, script, json.dumps(arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=os.environ | environment, **pipes)

    def rate(self, workload: Workload) -> float:
        """Run a workload; return tokens per second, of those that were asked for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(workload)) + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("["):
            if not line:
                raise RuntimeError(f"the engine has ended with {self._process.wait()}")
        (seconds,) = json.loads(line)
        return workload.generated / seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run_pairs(engines: dict[str, Engine], name: str, workload: Workload, pairs: int) -> dict[str, Any]:
    """Run pairs of both engines, each first in every second one; return rates, and the ratio of the rates of a pair."""
    rates: dict[str, list[float]] = {engine: [] for engine in engines}
    for pair in range(pairs):
        for engine in list(engines)[:: 1 if pair % 2 else -1]:
            seed = zlib.crc32(f"{name} {pair}".encode())  # prompts of another workload would be in the prefix cache
            rates[engine].append(engines[engine].rate(replace(workload, seed=seed)))
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    found = {engine: median_and_spread(each) for engine, each in rates.items()} | {"ratio": median_and_spread(ratios)}
    columns = [
        f"{column} {each['median']:.2f} ({each['spread'][0]:.2f} to {each['spread'][1]:.2f})"
        for column, each in found.items()
    ]
    print(f"{name:14} {', '.join(columns)}", flush=True)
    return found


@contextmanager
def model_of(name: str | None) -> Iterator[tuple[str | None, bool]]:
    """Return the folder or hub id of the model with this name (None: the bundled one), and whether its weights are
    random."""
    if name not in MODELS:
        yield name, False
        return
    with tempfile.TemporaryDirectory(prefix="fastgen-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        yield folder, True


def workloads_of(arguments: argparse.Namespace) -> dict[str, Workload]:
    """Return the workloads to run."""
    workloads = BUNDLED_WORKLOADS if arguments.model is None else SHAPE_WORKLOADS
    if arguments.only:
        workloads = {name: BUNDLED_WORKLOADS[name] for name in arguments.only}
    if arguments.smoke:
        workloads = {name: workloads[name].shortened(SMOKE_TOKENS) for name in list(workloads)[:2]}
    return workloads


def run_engines(arguments: argparse.Namespace, model: str | None, random_weights: bool) -> dict[str, Any]:
    """Run all workloads in both engines, and return the report."""
    workloads = workloads_of(arguments)
    pairs = 1 if arguments.smoke else arguments.pairs
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    engines = {name: Engine([name, model, arguments.dtype, random_weights]) for name in ENGINES}
    try:
        for engine in engines.values():
            for workload in workloads.values():
                engine.rate(replace(workload.shortened(64), answer=(4, 4)))  # warms up
        found = {name: run_pairs(engines, name, workload, pairs) for name, workload in workloads.items()}
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "model": arguments.model or "bundled",
        "random_weights": random_weights,
        "dtype": arguments.dtype,
        "machine": processor(),
        "cores": cores,
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "pairs": pairs,
        "workloads": {name: asdict(workload) for name, workload in workloads.items()},
        "quiet": found,
    }


def names_of(text: str) -> list[str]:
    """Return the names of workloads in an argument."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(BUNDLED_WORKLOADS)):
        raise argparse.ArgumentTypeError(f"no workload {', '.join(unknown)}; there are {', '.join(BUNDLED_WORKLOADS)}")
    return names


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.py cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help=f"{', '.join(MODELS)}, or a folder or hub id (default: the bundled model)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", type=names_of, metavar="NAMES", help=f"of {','.join(BUNDLED_WORKLOADS)}")
    parser.add_argument("--out", type=Path, help="the JSON file to write; without it none is written")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs of each workload (default 5)")
    parser.add_argument("--smoke", action="store_true", help="a few tokens")
    arguments = parser.parse_args(argv)
    if arguments.out is not None and arguments.out.is_dir():
        parser.error(f"--out {arguments.out} is a folder; name the JSON file")
    with model_of(arguments.model) as (model, random_weights):
        report = run_engines(arguments, model, random_weights)
    if arguments.out:
        write_json(arguments.out, report)


if __name__ == "__main__":  # started by Engine
    engine, *engine_arguments = json.loads(sys.argv[1])
    serve_engine(ENGINES[engine](*engine_arguments))
