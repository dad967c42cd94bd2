"""Measures generated tokens per second on a GPU, and the limit that its memory and its matrix products set.

    python scripts/bench/bench.py gpu                                  # the workloads of Mistral 7B that share nothing
    python scripts/bench/bench.py gpu --only group,tree                # with prefixes in common; takes 5 minutes
    python scripts/bench/bench.py gpu --only rl,tools,turns            # requests that share prefixes: bench_requests.py
    python scripts/bench/bench.py gpu --only chat64,batch128,long,longchat
    python scripts/bench/bench.py gpu --model llama1 --only chat1,chat8,chat32,batch128
    python scripts/bench/bench.py gpu --model qwen14 --only headline
    python scripts/bench/bench.py gpu --quantization fp8               # linear layers in fp8
    python scripts/bench/bench.py gpu --quantization int4              # linear layers in int4, groups of 128
    python scripts/bench/bench.py gpu --kv-cache-dtype fp8             # keys and values in fp8
    python scripts/bench/bench.py gpu --arriving                       # work that arrives one by one
    python scripts/bench/bench.py gpu --arriving --only served         # a part of it; the file keeps the others
    python scripts/bench/bench.py gpu --data --model smollm2-1.7b      # rewrite documents: bench_data.py
    python scripts/bench/bench.py gpu --model llama70 --tensor-parallel 4 --only headline,chat1
    python scripts/bench/bench.py gpu --smoke                          # tiny, on the CPU; writes nothing

Shapes are the true ones, weights and prompts random, temperature 1; every sequence runs to its length. Random weights
say nothing sensible, and cost what sensible ones cost. A figure is the median of three runs of one generate() each,
after a warm-up, or one run if that takes over 30 s. If prefixes are in common, one more run lets each lane read its
prefix by itself (on one GPU only). The limit of several GPUs is the limit of one that is so many times as fast;
ceilings are measured on one, before the engine starts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_arriving
import bench_data
import bench_step
from bench_engine import ceilings, line, machine, measure_workload, merge, ready_generator, report_path
from bench_limits import PLAIN, WORKLOADS
from bench_requests import REQUESTS, measure_requests
from reports import MODELS


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
            if name in REQUESTS:
                report["workloads"][name] = measure_requests(generator, name, smoke)
                print(line(name, report["workloads"][name]), flush=True)
            else:
                report["workloads"][name] = measure_workload(arguments, generator, name, rates, gpus)
            if arguments.out or not smoke:  # each as it comes, or an error would lose those before it
                merge(path, report)


KINDS: dict[str, tuple[Callable[[argparse.Namespace], None], str]] = {
    "step": (bench_step.bench_step, "a decode step in its parts, and without each of them"),
    "arriving": (bench_arriving.bench_arriving, "work that arrives one by one: steps, refilled lanes, and served"),
    "data": (bench_data.bench_data, "a job that rewrites documents, as datatrove's benchmark, with and without drafts"),
}
"""What can be measured instead of the workloads, with one flag each."""


def only_known(names: list[str], kind: str | None) -> str:
    """Return what is wrong with the names of --only, or "". kind: one of KINDS, or None for the workloads."""
    workloads = (*WORKLOADS, *(REQUESTS if kind is None else ()))
    known = {"arriving": bench_arriving.PARTS, "data": tuple(bench_data.PARTS)}.get(kind or "", workloads)
    unknown = sorted(set(names) - set(known))
    return f"--only: no {', '.join(unknown)}; there are {', '.join(known)}" if unknown else ""


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options; kind: one of KINDS, or None for the workloads."""
    parser = argparse.ArgumentParser(
        prog="bench.py gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mistral7", choices=list(MODELS))
    parts, jobs = ",".join(bench_arriving.PARTS), ",".join(bench_data.PARTS)
    names = f"of {','.join([*WORKLOADS, *REQUESTS])} (default: {','.join(PLAIN)})"
    names += f"; with --arriving, of {parts}; with --data, of {jobs}"
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAMES", help=names)
    parser.add_argument("--data-parallel", type=int, default=1, metavar="GPUS", help="of --data")
    parser.add_argument("--documents", type=int, help=f"of --data (default: {bench_data.DOCUMENTS})")
    parser.add_argument("--seconds", type=float, help="of --data: end after so many seconds of the steady rate")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: scripts/results)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU; writes only with --out")
    parser.add_argument("--skip-ceilings", action="store_true", help="do not measure what the chip can do")
    kinds = parser.add_mutually_exclusive_group()
    for name, (_, what) in KINDS.items():
        kinds.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=f"instead: {what}")
    options = parser.add_argument_group("options of Generator")
    for name in ("--max-seqs", "--max-step-tokens", "--page-size", "--max-model-len"):
        options.add_argument(name, type=int)
    options.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS", help="the file's name has -tpGPUS")
    options.add_argument("--attention")
    options.add_argument("--quantization", choices=["fp8", "int4"], help="the file's name has -fp8 or -int4")
    options.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="... -kv-fp8")
    options.add_argument("--memory-fraction", type=float)
    arguments = parser.parse_args(argv)
    kind = arguments.kind
    if arguments.only and (wrong := only_known(arguments.only, kind)):
        parser.error(wrong)
    if kind == "step" and arguments.tensor_parallel > 1:
        parser.error("--step runs on one GPU; leave --tensor-parallel out")
    return arguments


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    bench = bench_workloads if arguments.kind is None else KINDS[arguments.kind][0]
    bench(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
