"""Measures generated tokens per second, and writes JSON to scripts/results/.

    python scripts/bench/bench.py cpu            # against transformers' generate, on the bundled model
    python scripts/bench/bench.py cpu --smoke    # the same in seconds, to see that it runs; writes nothing
    python scripts/bench/bench.py gpu            # true shapes on a GPU, beside the limit of the chip; see bench_gpu.py

On the CPU each engine runs in a process of its own, so that its peak memory is its own. Prompts are random ids, the
same for both engines; every sequence runs to its length (no eos).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent.parent / "results"


@dataclass(frozen=True)
class Workload:
    """Ragged prompts and answers of `sequences` sequences; the lengths of both are drawn evenly from `shortest` to
    `longest`."""

    sequences: int = 64
    shortest: int = 16
    longest: int = 256
    seed: int = 0

    def lengths(self) -> list[tuple[int, int]]:
        """Return (prompt length, tokens to generate) of each sequence."""
        draw = random.Random(self.seed)
        span = (self.shortest, self.longest)
        return [(draw.randint(*span), draw.randint(*span)) for _ in range(self.sequences)]

    def prompts(self, vocab_size: int) -> list[list[int]]:
        draw = random.Random(self.seed + 1)
        return [[draw.randrange(vocab_size) for _ in range(length)] for length, _ in self.lengths()]


def run_fastgen(model: str | None, workload: Workload, dtype: str, repeats: int) -> list[float]:
    """Return the seconds of each repeat."""
    from fastgen import Generator, SamplingParams

    generator = Generator(model, dtype=dtype, device="cpu", seed=0)
    prompts = workload.prompts(generator.model_config.vocab_size)
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for _, tokens in workload.lengths()]

    def once() -> None:
        outputs = generator.generate(prompts, params)
        assert [len(out.completions[0].token_ids) for out in outputs] == [tokens for _, tokens in workload.lengths()]

    return _timed(once, repeats)


def run_transformers(model: str | None, workload: Workload, dtype: str, repeats: int) -> list[float]:
    """Return the seconds of each repeat: one batch, padded on the left, until the longest answer is done."""
    from transformers import AutoModelForCausalLM

    from fastgen.model.loader import resolve

    causal: Any = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=getattr(torch, dtype))
    prompts = workload.prompts(causal.config.vocab_size)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    most = max(tokens for _, tokens in workload.lengths())

    def once() -> None:
        out = causal.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            temperature=None,
            min_new_tokens=most,
            max_new_tokens=most,
            pad_token_id=0,
        )
        assert out.shape[1] == width + most

    return _timed(once, repeats)


def _timed(once: Callable[[], None], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


ENGINES = {"fastgen": run_fastgen, "transformers": run_transformers}


def measure(engine: str, model: str | None, workload: Workload, dtype: str, repeats: int) -> dict[str, Any]:
    """Measure one engine in this process. tokens/s counts the tokens that were requested."""
    seconds = ENGINES[engine](model, workload, dtype, repeats)
    tokens = sum(generated for _, generated in workload.lengths())
    rates = [tokens / each for each in seconds]
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "generated_tokens": tokens,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6,
    }


def processor() -> str:
    """Return the processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def bench_cpu(arguments: argparse.Namespace) -> None:
    workload = Workload(sequences=4, longest=24) if arguments.smoke else Workload()
    repeats = 1 if arguments.smoke else arguments.repeats
    results = {}
    for engine in ENGINES:
        what = [engine, json.dumps([arguments.model, asdict(workload), arguments.dtype, repeats])]
        command = [sys.executable, __file__, "engine", *what]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[engine] = json.loads(answer.splitlines()[-1])
    ratio = results["fastgen"]["tokens_per_second"] / results["transformers"]["tokens_per_second"]
    for engine, found in results.items():
        low, high = found["spread"]
        print(
            f"{engine:13} {found['tokens_per_second']:8.1f} tok/s ({low:.1f} to {high:.1f}), "
            f"peak memory {found['peak_memory_mb']:.0f} MB"
        )
    print(f"fastgen is {ratio:.2f} times transformers, {arguments.dtype}, {torch.get_num_threads()} threads")
    if not arguments.smoke:
        report = {
            "model": arguments.model or "bundled",
            "workload": asdict(workload),
            "dtype": arguments.dtype,
            "threads": torch.get_num_threads(),
            "machine": processor(),
            "torch": torch.__version__,
            "repeats": repeats,
            **results,
            "ratio": ratio,
        }
        path = RESULTS / f"{arguments.name or f'cpu-{arguments.dtype}'}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    cpu = kinds.add_parser("cpu", help="fastgen and transformers on the bundled model, on the CPU")
    cpu.add_argument("--model", help="a folder or hub id (default: the bundled model)")
    cpu.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    cpu.add_argument("--name", help="of the JSON file in scripts/results (default: cpu-DTYPE)")
    cpu.add_argument("--repeats", type=int, default=3, help="timed runs after a warm-up (default 3)")
    cpu.add_argument("--smoke", action="store_true", help="a few tokens, nothing written")
    kinds.add_parser("gpu", add_help=False, help="Mistral 7B, Qwen2.5 14B or Llama 70B with random weights, on GPUs")
    engine = kinds.add_parser("engine", help="(what `cpu` starts, once an engine)")
    engine.add_argument("engine", choices=list(ENGINES))
    engine.add_argument("what", type=json.loads)
    arguments, rest = parser.parse_known_args()
    if arguments.kind == "gpu":
        import bench_gpu  # not above: it brings fastgen, and the process that measures transformers is to have none

        bench_gpu.main(rest)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    elif arguments.kind == "cpu":
        bench_cpu(arguments)
    else:
        model, workload, dtype, repeats = arguments.what
        print(json.dumps(measure(arguments.engine, model, Workload(**workload), dtype, repeats)))


if __name__ == "__main__":
    main()
