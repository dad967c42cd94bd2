"""Measures generated tokens per second on a GPU, and the limit that its memory and its matrix products set.

    python scripts/bench/bench.py gpu                                  # the workloads of Mistral 7B that share nothing
    python scripts/bench/bench.py gpu --only group,tree                # with prefixes in common; takes 5 minutes
    python scripts/bench/bench.py gpu --model qwen14 --only headline
    python scripts/bench/bench.py gpu --deterministic                  # headline, short and chat1, with it and without
    python scripts/bench/bench.py gpu --turns                          # conversations, with and without the host tier
    python scripts/bench/bench.py gpu --model llama70 --tensor-parallel 4 --only headline,chat1
    python scripts/bench/bench.py gpu --model qwen14 --scaling         # on 1, 2 and 4 GPUs: bench_parallel.py
    python scripts/bench/bench.py gpu --tensor-parallel 2 --telling    # messages from rank 0 to the other ranks
    python scripts/bench/bench.py gpu --smoke                          # tiny, on the CPU; writes nothing

Shapes are the true ones, weights and prompts random, temperature 1; every sequence runs to its length. Random weights
say nothing sensible, and cost what sensible ones cost. A figure is the median of three runs of one generate() each,
after a warm-up; where a run takes over 30 s, one run, and the spread is over thirds of its time (prefills come early,
so that the thirds differ more than runs do). Where prefixes are in common, one run more, in which each lane reads its
prefix by itself (on one GPU only). The limit of several GPUs is that of one which is so many times as fast; ceilings
are measured on one, before the engine starts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import bench_logprobs
import bench_parallel
import bench_parts
import bench_sleep
import bench_start
import bench_turns
from bench_engine import ceilings, machine, measure_workload, merge, ready_generator, report_path
from bench_limits import (
    MODELS,
    PLAIN,
    WORKLOADS,
)


def bench_workloads(arguments: argparse.Namespace) -> None:
    smoke, gpus = arguments.smoke, arguments.tensor_parallel
    rates = ceilings(arguments)
    about = machine("cpu" if smoke else "cuda", gpus)
    path = report_path(arguments, about["gpu"])
    with ready_generator(arguments) as (generator, ready):
        report: dict[str, Any] = {
            "model": arguments.model,
            **about,
            "rates": rates,
            "ready_seconds": ready,
            "workloads": {},
        }
        for name in arguments.only or PLAIN:
            report["workloads"][name] = measure_workload(arguments, generator, name, rates, gpus)
            if arguments.out or not smoke:  # each as it comes, or an error would lose those before it
                merge(path, report)


def workload_names(text: str) -> list[str]:
    wanted = text.split(",")
    unknown = sorted(set(wanted) - set(WORKLOADS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return wanted


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.py gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mistral7", choices=list(MODELS))
    names = f"of {','.join(WORKLOADS)} (default: {','.join(PLAIN)})"
    parser.add_argument("--only", type=workload_names, metavar="NAMES", help=names)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: scripts/results)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU; writes only with --out")
    parser.add_argument("--skip-ceilings", action="store_true", help="do not measure what the chip can do")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--start", action="store_true", help="instead: from process start to the first token")
    kinds.add_argument("--chat", action="store_true", help="instead: from process start to fgchat's first word")
    kinds.add_argument("--load", action="store_true", help="instead: loading a checkpoint from the page cache")
    kinds.add_argument("--busy", action="store_true", help="instead: the share of a decode that the GPU is busy")
    kinds.add_argument("--perf", action="store_true", help="instead: tokens/s over the tokens generated")
    kinds.add_argument("--turns", action="store_true", help="instead: conversations, with and without the host tier")
    kinds.add_argument("--deterministic", action="store_true", help="instead: what deterministic mode costs")
    parser.add_argument("--alone", action="store_true", help="of --turns: only one conversation alone, into its file")
    kinds.add_argument("--sleep", action="store_true", help="instead: update_weights, sleep and wake")
    kinds.add_argument("--logprobs", action="store_true", help="instead: the part of a decode step that they take")
    kinds.add_argument("--scaling", action="store_true", help="instead: headline and chat1 on 1, 2 and 4 GPUs")
    kinds.add_argument("--telling", action="store_true", help="instead: messages to the ranks, of --tensor-parallel")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="of --perf (default: 16 to 2048)")
    options = parser.add_argument_group("options of Generator")
    for name in ("--max-seqs", "--max-step-tokens", "--page-size", "--max-model-len"):
        options.add_argument(name, type=int)
    options.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS", help="the file's name has -tpGPUS")
    options.add_argument("--attention")
    options.add_argument("--memory-fraction", type=float)
    options.add_argument("--no-prefix-cache", action="store_true", help="the file's name ends in -nocache")
    options.add_argument("--no-deterministic", action="store_true", help="... in -nondeterministic")
    arguments = parser.parse_args(argv)
    if arguments.turns and arguments.no_prefix_cache:
        parser.error("--turns measures with and without the prefix cache; leave --no-prefix-cache out")
    if arguments.alone and not arguments.turns:
        parser.error("--alone is a part of --turns; add that")
    if arguments.tensor_parallel > 1 and (arguments.busy or arguments.load):
        parser.error("--busy and --load look into one process; leave --tensor-parallel out")
    if arguments.telling and arguments.tensor_parallel == 1:
        parser.error("--telling measures messages between ranks; add --tensor-parallel 2")
    if arguments.tensor_parallel > 1 and arguments.deterministic:
        parser.error("--deterministic is of one GPU; leave --tensor-parallel out")
    if arguments.deterministic and arguments.no_deterministic:
        parser.error("--deterministic measures with and without deterministic mode; leave --no-deterministic out")
    if arguments.tensor_parallel > 1 and arguments.scaling:
        parser.error("--scaling takes 1, 2 and 4 GPUs itself; leave --tensor-parallel out")
    return arguments


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    instead = {
        "start": bench_start.bench_start,
        "chat": bench_start.bench_chat,
        "load": bench_parts.bench_load,
        "busy": bench_parts.bench_busy,
        "perf": bench_parts.bench_perf,
        "deterministic": bench_parts.bench_deterministic,
        "alone": bench_turns.bench_alone,  # before what it is a part of
        "turns": bench_turns.bench_turns,
        "sleep": bench_sleep.bench_sleep,
        "logprobs": bench_logprobs.bench_logprobs,
        "scaling": bench_parallel.bench_scaling,
        "telling": bench_parallel.bench_telling,
    }
    wanted = [bench for name, bench in instead.items() if getattr(arguments, name)]
    (wanted or [bench_workloads])[0](arguments)
