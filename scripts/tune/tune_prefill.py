"""Times prefill attention on a Hopper GPU: the variants of fastgen.kernels.hopper_prefill beside the kernel in Triton.

    python scripts/tune/tune_prefill.py --out tuned.json            # about three minutes on an H200
    python scripts/tune/tune_prefill.py --out x.json --only 4x2048 --flash

Each variant has a process of its own, which ends after LONGEST seconds, so that one that hangs costs no more. In a case
it is first checked: against a softmax in float32, and in deterministic mode against the kernel in Triton, to the bit.
What is wrong is not timed. Cases, and how they are timed: see tune_attention.py. The best variants go by hand into
VARIANT and DETERMINISTIC of fastgen.kernels.hopper_prefill.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor
from tune_attention import TOLERANCE, Case, Setup, time_flash, time_paged

from fastgen.kernels import attention
from fastgen.kernels.hopper_prefill import Variant
from fastgen.kernels.launch import Chip

LONGEST = 60
CASES = [
    Case("4x2048 over 8192", 4, 2048, 8192), Case("8x1024", 8, 1024, 0), Case("1x8192", 1, 8192, 0),
    Case("64x128 over 512", 64, 128, 512),
]  # fmt: skip
VARIANTS: list[tuple[bool, Variant | None]] = [
    (False, None), (False, Variant()), (False, Variant(held=True)), (False, Variant(overlap=False)),
    (False, Variant(turns=False)), (False, Variant(keys=64, held=True)), (True, None), (True, Variant(keys=64)),
    (True, Variant(keys=64, held=True)), (True, Variant(keys=64, held=True, overlap=False)),
]  # fmt: skip
"""(deterministic mode or not, variant; None: the kernel in Triton)"""


def answer_of(setup: Setup, config: attention.AttentionConfig) -> Tensor:
    """Return the answer in the first layer."""
    setup.paged.configs[attention.PREFILL] = config
    return setup.paged.attend(setup.paged.plan(setup.layout), 0, setup.q, 0)


def measure(case: Case, shape: tuple[int, int, int], deterministic: bool, variant: Variant | None) -> dict[str, object]:
    """Check and time a variant in a case."""
    setup = Setup(case, *shape, 64, deterministic)
    chip, size = Chip.of(setup.q.device), (setup.paged.group, shape[2], torch.bfloat16)
    triton = attention.configure(attention.PREFILL, *size, chip, deterministic)
    config = triton
    if variant is not None:
        config = attention.configure(attention.PREFILL, *size, chip, deterministic, page_size=64)
        assert config.variant is not None, "the GPU is no Hopper, or this Triton is unknown"
        config = replace(config, keys=variant.keys, variant=variant)
    begun = time.monotonic()
    answer = answer_of(setup, config)
    torch.cuda.synchronize()
    row: dict[str, object] = {"first call s": round(time.monotonic() - begun, 1), "error": setup.error(answer)}
    if not setup.error(answer) < TOLERANCE:
        return row | {"wrong": "inaccurate"}
    if deterministic and not torch.equal(answer, answer_of(setup, triton)):
        return row | {"wrong": "has other bits than the kernel in Triton"}
    taken, _ = time_paged(setup, config)
    return row | {"us": round(taken * 1e6, 1), "TFLOP/s": round(setup.flops / taken / 1e12, 1)}


def measure_all(number: int, cases: list[Case], shape: tuple[int, int, int]) -> None:
    """Measure a variant, and print a line of JSON for each case."""
    deterministic, variant = VARIANTS[number]
    what = {"kernel": "triton"} if variant is None else asdict(variant)
    for case in cases:
        with torch.inference_mode():
            row = measure(case, shape, deterministic, variant)
        print(json.dumps({"case": case.name, "deterministic": deterministic, **what, **row}), flush=True)
        torch.cuda.empty_cache()


def measure_flash(cases: list[Case], shape: tuple[int, int, int]) -> None:
    for case in cases:
        with torch.inference_mode():
            setup = Setup(case, *shape, 64)
            found = time_flash(setup)
        row: dict[str, object] = {"wrong": found}
        if not isinstance(found, str):
            row = {
                "us": round(found[0] * 1e6, 1),
                "TFLOP/s": round(setup.flops / found[0] / 1e12, 1),
                "error": found[1],
            }
        print(json.dumps({"case": case.name, "kernel": "flash", **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases (or the beginnings of them)")
    parser.add_argument("--shape", default="32,8,128", help="query heads, KV heads, head size")
    parser.add_argument("--flash", action="store_true", help="time flash-attn too")
    parser.add_argument("--number", type=int, help="measure one of VARIANTS, in this process")
    options = parser.parse_args()
    heads, num_kv, head_size = (int(x) for x in options.shape.split(","))
    cases = [case for case in CASES if not options.only or case.name.startswith(tuple(options.only))]
    if options.number is not None:
        shape = heads, num_kv, head_size
        measure_flash(cases, shape) if options.number < 0 else measure_all(options.number, cases, shape)
        return
    rows = []
    for number in [*range(len(VARIANTS)), *[-1] * options.flash]:
        command = ["timeout", str(LONGEST), sys.executable, *sys.argv, "--number", str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                rows.append(json.loads(line))
                print(line, end="", flush=True)
        if process.returncode:
            print(f"number {number} ended with {process.returncode} (124: it hangs)", flush=True)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": options.shape}
    if options.out:
        options.out.write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
