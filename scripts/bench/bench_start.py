"""Measures, as `bench.py gpu --start` and `--chat`, the seconds from the start of a process to its first token, or
word.

First with an empty folder for Triton's cache ("cold"), then with the kernels that were left there ("warm"). The figures
are seconds since the process was started: to its first line of Python, to the import of fastgen, until the Generator is
ready (only with --start), and to the first token or word.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_engine

MEASURED = """
import json, sys, time
marks = {"interpreter": time.time()}
import fastgen


def resolve(name, resolve=fastgen.__getattr__):
    found = resolve(name)
    if name == "Generator":
        marks.setdefault("imported", time.time())
    return found


fastgen.__getattr__ = resolve
"""

FIRST_TOKEN = """
from fastgen import Generator, SamplingParams

generator = Generator(sys.argv[1], **json.loads(sys.argv[2]))
marks["generator"] = time.time()
outputs = generator.generate([list(range(3, 131))], SamplingParams(max_tokens=1, ignore_eos=True))
assert len(outputs[0].completions[0].token_ids) == 1, outputs
marks["first_token"] = time.time()
"""

FIRST_WORD = """
from fastgen.cli import chat


say_text = chat.Console.say


def say(self, text, thinking=False):
    if text.strip():
        marks.setdefault("first_word", time.time())
    say_text(self, text, thinking)


chat.Console.say = say
status = chat.main(json.loads(sys.argv[1]))
assert status == 0, status
"""

REPORT = """
print()
print(json.dumps(marks))
"""


def bench_start(arguments: argparse.Namespace) -> None:
    """Measure the seconds from starting a process to its first token, with random weights."""
    with bench_engine.dummy_folder(arguments.model, arguments.smoke) as folder:
        options = json.dumps(bench_engine.engine_options(arguments))
        report = cold_and_warm(FIRST_TOKEN, [str(folder), options], "first_token", arguments.smoke)
    bench_engine.write_report(arguments, "start", report)


def bench_chat(arguments: argparse.Namespace) -> None:
    """Measure the seconds from starting fgchat, with the bundled model, to the first word of its answer."""
    options = ["--device", "cpu", "--max-tokens", "8"] if arguments.smoke else []
    report = cold_and_warm(FIRST_WORD, [json.dumps(options)], "first_word", arguments.smoke)
    bench_engine.write_report(argparse.Namespace(**{**vars(arguments), "model": "bundled"}), "chat", report)


def cold_and_warm(program: str, arguments: list[str], last: str, smoke: bool) -> dict[str, Any]:
    """Measure two processes, without and with compiled kernels. last: the name of the mark that counts."""
    with tempfile.TemporaryDirectory(prefix="fastgen-bench-") as cache:
        cold = measured(program, arguments, cache)
        print(f"cold {cold}", flush=True)
        warm = [measured(program, arguments, cache) for _ in range(1 if smoke else 3)]
    totals = [marks[last] for marks in warm]
    seconds = {"cold_seconds": cold[last], "warm_seconds": statistics.median(totals)}
    spread = [min(totals), max(totals)]
    return {"cores": len(os.sched_getaffinity(0)), **seconds, "spread": spread, "cold": cold, "warm": warm}


def measured(program: str, arguments: list[str], cache: str) -> dict[str, float]:
    """Start a process, ask one question on its stdin, and return its marks, in seconds since the start."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", MEASURED + program + REPORT, *arguments]
    start = time.time()
    question = "Who are you?\n"
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, input=question)
    return {name: mark - start for name, mark in json.loads(ran.stdout.splitlines()[-1]).items()}
