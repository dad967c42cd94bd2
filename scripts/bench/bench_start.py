"""Measures, as `bench.py gpu --start` and `--chat`, the seconds from the start of a process to its first token, or
word.

First with an empty folder for Triton's cache ("cold"), then with what was left there ("warm"). `marks` are seconds
since the process was started; a thread of its own reads the tokenizer, until the mark `tokenizer`. `parts` are seconds
that parts of the start took: finding the device, loading the weights, compiling kernels, running the largest steps,
capturing graphs. `kernels` says of each kernel how long it took, how much of that in Python, and whether it was
compiled ahead, by one of several threads, or late, at its first launch.
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
import json, sys, threading, time
marks, parts, kernels, within = {"interpreter": time.time()}, {}, [], []
import fastgen


def measure(owner, name, part):
    function = getattr(owner, name)

    def call(*args, **options):
        start = time.time()
        within.append(part)
        try:
            return function(*args, **options)
        finally:
            within.pop()
            if not within:
                parts[part] = parts.get(part, 0) + time.time() - start

    setattr(owner, name, call)


def note(*, src, metadata, metadata_group, times, cache_hit):
    stages = sum(spent for _, spent in times.lowering_stages)
    seconds = (times.ir_initialization + stages + times.store_results) / 1e6
    known = {"kernel": src.fn.__name__, "seconds": seconds, "python_seconds": times.ir_initialization / 1e6}
    late = threading.current_thread() is threading.main_thread()
    kernels.append({**known, "late": late, "cached": cache_hit})


def resolve(name, resolve=fastgen.__getattr__):
    found = resolve(name)
    if name == "Generator" and "imported" not in marks:
        marks["imported"] = time.time()
        instrument()
    return found


def instrument():
    from fastgen import generator
    from fastgen.engine import startup
    from fastgen.kernels.launch import triton
    from fastgen.ranks import start

    def find_tokenizer(*arguments, find=generator.find_tokenizer):
        found = find(*arguments)
        marks["tokenizer"] = time.time()
        return found

    generator.find_tokenizer = find_tokenizer
    measure(start, "find_device", "device")
    for name, part in (
        ("build_model", "weights"), ("compile_kernels", "compile"), ("run_largest_steps", "largest_steps"),
        ("capture", "graphs"),
    ):
        measure(startup, name, part)
    if triton is not None:
        triton.knobs.compilation.listener = note


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
from fastgen.cli.chat_backends import LocalBackend


def check(self, messages, check=LocalBackend.check):
    marks["generator"] = time.time()
    check(self, messages)


def say(self, text, say=chat.Console.say):
    if text.strip():
        marks.setdefault("first_word", time.time())
    say(self, text)


LocalBackend.check, chat.Console.say = check, say
status = chat.main(json.loads(sys.argv[1]))
assert status == 0, status
"""

REPORT = """
print()
print(json.dumps({"marks": marks, "parts": parts, "kernels": kernels}))
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
        print(f"cold {cold['marks']} {cold['parts']}", flush=True)
        warm = [measured(program, arguments, cache) for _ in range(1 if smoke else 3)]
    totals = [each["marks"][last] for each in warm]
    seconds = {"cold_seconds": cold["marks"][last], "warm_seconds": statistics.median(totals)}
    for each in warm:
        each["kernels"] = [kernel for kernel in each["kernels"] if kernel["late"] or not kernel["cached"]]
    spread = [min(totals), max(totals)]
    return {"cores": len(os.sched_getaffinity(0)), **seconds, "spread": spread, "cold": cold, "warm": warm}


def measured(program: str, arguments: list[str], cache: str) -> dict[str, Any]:
    """Start a process, ask one question on its stdin, and return its report."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", MEASURED + program + REPORT, *arguments]
    start = time.time()
    question = "Who are you?\n"
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, input=question)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    found["marks"] = {name: mark - start for name, mark in found["marks"].items()}
    return found


if __name__ == "__main__":
    raise SystemExit(__doc__)  # says how bench.py runs it
