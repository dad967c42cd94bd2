"""Measures the cost of files: fggen's work on a prompt file, compared with Generator.generate on the same prompts in
memory.

    OMP_NUM_THREADS=1 python scripts/bench/bench_gen.py            # writes scripts/results/gen-cost.json
    python scripts/bench/bench_gen.py --smoke                      # a few prompts, to see that it runs; writes nothing

One process and one Generator (the bundled model) do both in turns, with the same seeds, so that both make the same
tokens; the time of fggen is the time of `write_all`, from the first row read to the last line written. As other
programs on the machine lengthen the elapsed time, the report also has processor time, and the share of time outside of
steps, which is where files cost.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reports import RESULTS, processor, write_json
from tqdm import tqdm

from fastgen import Generator, SamplingParams
from fastgen.cli.gen.main import write_all
from fastgen.cli.gen.outputs import Lines
from fastgen.cli.gen.progress import Progress
from fastgen.cli.gen.rows import read_rows
from fastgen.cli.gen.work import RowJob, seed_of, state_by, work

SEED = 0


def prompts(count: int) -> list[str]:
    draw = random.Random(SEED)
    return [f"what is {draw.randrange(100)} * {draw.randrange(100)} step by step?" for _ in range(count)]


def in_memory(gen: Generator, asked: list[str], params: SamplingParams) -> int:
    """Return the number of tokens that `generate` makes."""
    chats = [[{"role": "user", "content": prompt}] for prompt in asked]
    seeded = [SamplingParams(n=params.n, max_tokens=params.max_tokens, ignore_eos=True, seed=seed_of(SEED, row))
              for row in range(len(asked))]  # fmt: skip
    return sum(len(c.token_ids) for output in gen.generate(chats, seeded) for c in output.completions)


def from_file(gen: Generator, file: Path, params: SamplingParams) -> int:
    """Return the number of tokens that fggen makes of a file; it writes all of them."""
    output = Lines(file.with_name("out.jsonl"), state_by(("row", "error")))
    with output.opened(), Progress(total=0) as progress:
        write_all(work(RowJob(params, SEED, chat=True).ask, read_rows([file]), gen.stream), output, progress)
    output.path.unlink()
    return progress.tally.tokens


@dataclass(frozen=True)
class Run:
    """Figures of one run. tokens: generated; seconds: elapsed; cpu: seconds of the processor; outside: elapsed seconds
    in which no step ran."""

    tokens: int
    seconds: float
    cpu: float
    outside: float


def timed(gen: Generator, once: Callable[[], int]) -> Run:
    before, start, start_cpu = gen.stats.step_seconds, time.perf_counter(), time.process_time()
    tokens = once()
    seconds = time.perf_counter() - start
    outside = seconds - (gen.stats.step_seconds - before)
    return Run(tokens, seconds, time.process_time() - start_cpu, outside)


def measure(count: int, params: SamplingParams, rounds: int) -> dict[str, Any]:
    """Return the rates of both, and fggen's speed as a share of generate's: medians over the rounds."""
    asked = prompts(count)
    runs: dict[str, list[Run]] = {"generate": [], "fggen": []}
    with Generator(seed=SEED) as gen, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "in.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
        ways = {"generate": lambda: in_memory(gen, asked, params), "fggen": lambda: from_file(gen, file, params)}
        for turn in tqdm(range(rounds + 1)):
            for kind in ("generate", "fggen") if turn % 2 else ("fggen", "generate"):
                run = timed(gen, ways[kind])
                if run.tokens != count * params.n * (params.max_tokens or 0):
                    raise RuntimeError(f"{kind} made {run.tokens} tokens")
                if turn:  # the first warms up
                    runs[kind].append(run)
    found: dict[str, Any] = {"prompts": count, "n": params.n, "max_tokens": params.max_tokens, "rounds": rounds}
    for kind, done in runs.items():
        rates = [run.tokens / run.seconds for run in done]
        found[kind] = {
            "tokens_per_second": statistics.median(rates),
            "spread": [min(rates), max(rates)],
            "tokens_per_cpu_second": statistics.median(run.tokens / run.cpu for run in done),
            "outside_steps": statistics.median(run.outside / run.seconds for run in done),
        }
    pairs = list(zip(runs["fggen"], runs["generate"], strict=True))
    found["speed_of_generate"] = statistics.median(other.seconds / mine.seconds for mine, other in pairs)
    found["cpu_speed_of_generate"] = statistics.median(other.cpu / mine.cpu for mine, other in pairs)
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(argv)
    count, rounds = (4, 1) if arguments.smoke else (arguments.prompts, arguments.rounds)
    params = SamplingParams(n=arguments.n, max_tokens=arguments.max_tokens, ignore_eos=True)
    report = {"machine": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    report |= measure(count, params, rounds)
    print(json.dumps(report, indent=1))
    if not arguments.smoke:
        write_json(RESULTS / "gen-cost.json", report)
    return report


if __name__ == "__main__":
    main()
