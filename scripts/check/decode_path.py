"""Count the files and lines of fastgen that one steady decode step passes through.

    python scripts/check/decode_path.py --json scripts/results/decode-path-h200.json

A small Llama with random weights decodes four requests; one step in the middle is recorded: which functions were
called, and in which files. Lines are the lines of these functions. On a GPU the functions that the step's CUDA graph
was captured from are included. The bodies of kernels are not seen, as they run on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import fastgen
from fastgen import Generator

ROOT = Path(fastgen.__file__).parent
SETTINGS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
STEPS_BEFORE = 12  # so that prefills are over, and the steps before were decodes too


def functions_of_a_step(gen: Generator) -> set[CodeType]:
    """Return the code of all functions of fastgen that one decode step calls."""
    for seed in range(4):
        gen.add([seed + 1, 2, 3, 4], {"max_tokens": 64, "temperature": 1.0, "ignore_eos": True})
    for _ in range(STEPS_BEFORE):
        gen.step()
    called: set[CodeType] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(record)
    try:
        gen.step()
        if torch.cuda.is_available():  # a replayed CUDA graph calls no function: what it holds is recorded here
            gen._loop.runner.decode_body(4)
    finally:
        sys.setprofile(None)
    return {code for code in called if ROOT in Path(code.co_filename).parents}


def lines_of(code: CodeType) -> int:
    """Return the number of lines of a function, without its docstring's if it is the first statement."""
    lines = {line for _, _, line in code.co_lines() if line is not None}
    return max(lines) - code.co_firstlineno + 1 if lines else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SETTINGS))
        device = "cuda" if cuda else "cpu"
        options: dict[str, Any] = {"load": "dummy", "device": device, "max_seqs": 8, "max_model_len": 256}
        with Generator(folder, **options, memory_fraction=0.2 if cuda else 0.01) as gen:
            called = functions_of_a_step(gen)
    files: dict[str, dict[str, int]] = {}
    for code in sorted(called, key=lambda each: (each.co_filename, each.co_firstlineno)):
        name = str(Path(code.co_filename).relative_to(ROOT))
        files.setdefault(name, {})[code.co_qualname if hasattr(code, "co_qualname") else code.co_name] = lines_of(code)
    lines = sum(sum(functions.values()) for functions in files.values())
    chip = torch.cuda.get_device_name() if cuda else "CPU"
    result = {"device": chip, "files": len(files), "functions": len(called), "lines": lines, "by_file": files}
    print(f"{len(files)} files, {len(called)} functions, {lines} lines on {chip}")
    for name, functions in files.items():
        print(f"  {name}: {', '.join(functions)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
