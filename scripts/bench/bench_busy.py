"""Measures fggen and fgserve on a CPU that other programs use: with the default number of threads, with one thread, and
with two. The default must reach 0.7 of the better of the two.

    python scripts/bench/bench_busy.py                              # both, beside 0, 2 and 10 programs; 10 minutes
    python scripts/bench/bench_busy.py --loads 10 --only fgserve    # the file keeps its other figures
    python scripts/bench/bench_busy.py --smoke                      # in seconds, to see that it runs

fggen answers 24 rows, and reports its speed itself. fgserve answers 16 requests at once; its three servers run all the
time and take turns. The other programs only compute. Begin with `taskset -c 0,1` on a machine with more than two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from reports import RESULTS, processor, write_json
from serve_load import Clients, Load, figures
from serve_process import Server

THREADS = ("default", "1", "2")
MUST = 0.7
ROWS, REQUESTS = 24, 16

FIXED = """
import os
from fastgen.device import threads
threads.FreeCores.step = lambda self: threads.at_most(int(os.environ["BENCH_THREADS"]))
"""
"""A sitecustomize.py, which Python imports at its start: all steps use a fixed number of threads."""

PROGRAM = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(1_000_000))
"""
"""A program that computes until its parent has ended. Each has a separate session, since Linux may share the CPU evenly
among sessions (sched_autogroup_enabled)."""


def environment(threads: str, folder: Path) -> dict[str, str]:
    """Return the environment variables of a program whose steps use so many threads. folder: has FIXED."""
    if threads == "default":
        return dict(os.environ)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "BENCH_THREADS": threads}


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """Let so many programs compute during this block."""
    command = [sys.executable, "-c", PROGRAM, str(os.getpid())]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(programs)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def measure_fggen(variables: Mapping[str, str], tokens: int) -> float:
    """Run fggen; return its tokens per second, without its start."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(f'{{"prompt": "What is {n} + {n + 3}?"}}\n' for n in range(ROWS)))
        options = ["-o", f"{folder}/out.jsonl", "--max-tokens", str(tokens), "--ignore-eos", "--device", "cpu"]
        command = [sys.executable, "-m", "fastgen.cli.gen", "fastgen-tiny", str(rows), *options]
        told = subprocess.run(command, env=dict(variables), stderr=subprocess.PIPE, text=True, check=True).stderr
    rates = re.findall(rf"{ROWS * tokens} out, (\S+) tok/s", told)
    assert len(rates) == 1, told
    return float(rates[0])


def measure_server(url: str, clients: Clients, tokens: int, seed: int) -> float:
    """Send requests all at once; return tokens per second from the first request to the last answer."""
    load = Load(f"{url}/v1", "fastgen-tiny", REQUESTS, 64, tokens, REQUESTS, low=100, high=300, seed=seed)
    found = figures(clients.run(load, progress=False))
    assert not found["errors"], found["first_error"]
    return float(found["tokens_per_second"])


def bench_fggen(programs: int, rounds: int, tokens: int, folder: Path) -> dict[str, list[float]]:
    """Return the tokens per second of each round, by THREADS."""
    rates: dict[str, list[float]] = {threads: [] for threads in THREADS}
    with busy(programs):
        for number in range(rounds):
            for threads in turns(number):
                rates[threads].append(measure_fggen(environment(threads, folder), fewer(tokens, threads, programs)))
    return rates


def bench_fgserve(programs: int, rounds: int, tokens: int, folder: Path) -> dict[str, list[float]]:
    """Return the tokens per second of each round, by THREADS."""
    rates: dict[str, list[float]] = {threads: [] for threads in THREADS}
    with Clients(1) as clients, ExitStack() as stack:
        servers = {
            threads: stack.enter_context(Server(None, ["--device", "cpu"], environment(threads, folder)))
            for threads in THREADS
        }
        for server in servers.values():
            measure_server(server.url, clients, 2, -1)  # warms up
        with busy(programs):
            for number in range(rounds):
                for threads in turns(number):
                    short = fewer(tokens, threads, programs)
                    rates[threads].append(measure_server(servers[threads].url, clients, short, number))
    return rates


def fewer(tokens: int, threads: str, programs: int) -> int:
    """Return how many tokens an answer has with a number of threads: fewer with two beside other programs, or this
    benchmark would take an hour."""
    return max(tokens // 16, 2) if programs and threads == "2" else tokens


def turns(number: int) -> tuple[str, ...]:
    """Return THREADS in another order in each round."""
    first = number % len(THREADS)
    return THREADS[first:] + THREADS[:first]


KINDS = {"fggen": bench_fggen, "fgserve": bench_fgserve}


def summary(rates: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Return medians, and the ratio of the default to the better of one and two threads."""
    medians = {threads: statistics.median(each) for threads, each in rates.items()}
    return {
        "tokens": tokens,
        "rates": rates,
        "median": medians,
        "ratio": medians["default"] / max(medians["1"], medians["2"]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 2, 10], help="numbers of other programs")
    parser.add_argument("--only", choices=list(KINDS), nargs="+", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3, help="runs with each number of threads (default 3)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer (default 64)")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: scripts/results/cpu-busy.json)")
    parser.add_argument("--smoke", action="store_true", help="a few tokens; writes only with --out")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.loads, arguments.rounds, arguments.tokens = [0], 1, 4
    elif arguments.out is None:
        arguments.out = RESULTS / "cpu-busy.json"
    return arguments


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the servers
    arguments = parse()
    out, tokens = arguments.out, arguments.tokens
    earlier = json.loads(out.read_text()) if out is not None and out.is_file() else {}
    report: dict[str, Any] = earlier | {"machine": processor(), "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(FIXED)
        for kind in arguments.only:
            for programs in arguments.loads:
                found = summary(KINDS[kind](programs, arguments.rounds, tokens, Path(folder)), tokens)
                medians = ", ".join(f"{threads} {rate:.0f}" for threads, rate in found["median"].items())
                verdict = "" if found["ratio"] >= MUST else f", below {MUST}"
                print(f"{kind:8} beside {programs}: {medians} tok/s, ratio {found['ratio']:.2f}{verdict}", flush=True)
                report.setdefault(kind, {})[str(programs)] = found
                if out is not None:
                    write_json(out, report)


if __name__ == "__main__":
    main()
