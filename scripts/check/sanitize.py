"""Run the kernels' tests on a GPU under compute-sanitizer, a process for each of PARTS, and count what it reports.

    PYTHONPATH=. python scripts/check/sanitize.py                     # memcheck, initcheck and racecheck
    PYTHONPATH=. python scripts/check/sanitize.py racecheck --parts sampling --seconds 600

Each tensor has an allocation of its own, so that memory behind it is nobody's. memcheck and racecheck watch fastgen's
kernels alone. The exit status is 1 where something is reported, a test fails, or a part runs out of time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "initcheck", "racecheck")
# A file of tests/, and which of its tests: an expression of pytest's -k.
PARTS = {
    "sampling": ("kernels/test_kernels_sampling.py", "draws or scores or kept or edits or alternatives or padding"),
    "drafts": ("kernels/test_kernels_drafts.py", ""),
    "norm, rope, KV": ("kernels/test_kernels.py", "rms_norm or over_ranks or swiglu or pool or advance"),
    "products": ("kernels/test_kernels_batch_invariant.py", "twin or rope_behind or any_tile"),
    "products on Hopper": ("gpu/test_gpu_deterministic.py", "product_is_right"),
    "fp8": ("kernels/test_kernels_fp8.py", "quantize or norm or product_is"),
    "attention": ("kernels/test_kernels_attention.py", "decode_lists or list_ofs or agree_with_the_twin or programs"),
    "attention with prefills": ("kernels/test_kernels_attention.py", "agree_with_the_reference or one_answer"),
    "shared prefixes": ("kernels/test_kernels_shared.py", "tree or swapped or lists or come_and_go or prefills"),
    "decodes on Hopper": ("gpu/test_gpu_deterministic.py", "decodes_in_gluon and 3-700"),
    "prefills on Hopper": ("gpu/test_gpu_prefill.py", "lengths_are_right and (lens3 or lens4)"),
    "shapes of prefills on Hopper": ("gpu/test_gpu_prefill.py", "all_shapes"),
}
REPORTS = r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.+)"
TORCH = "regex=at6native|cub[0-9]|cutlass|nvjet|cublas"  # names of kernels


def run_part(name: str) -> int:
    """Run the tests of a part in this process, which a sanitizer watches."""
    import pytest
    import torch

    from fastgen.device.memory import Memory
    from fastgen.model import kv_pool

    class Allocated(Memory):
        def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device="cuda")

    kv_pool.memory_on = lambda device: Allocated()
    path, tests = PARTS[name]
    options = ["-k", tests, "-n", "0", "-vv", "-o", "timeout=0", "-p", "no:cacheprovider"]
    return pytest.main([str(ROOT / "tests" / path), *options])


def sanitize(tool: str, name: str, seconds: float) -> dict[str, object]:
    """Return what a tool reports of a part."""
    command = ["compute-sanitizer", "--tool", tool, "--launch-timeout", "0", "--print-limit", "5"]
    command += ["--show-backtrace", "no", "--report-api-errors", "no", "--target-processes", "application-only"]
    command += ["--port", str(49152 + 100 * list(PARTS).index(name))]
    if tool != "initcheck":  # which has to see all that writes
        command += ["--kernel-name-exclude", TORCH]
    command += [sys.executable, __file__, "--run", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        said = log.read()
    found = {
        "passed": len(re.findall(r"\bPASSED\b", said)),
        "failed": len(re.findall(r"(?:FAILED|ERROR) +\[", said)),
        "report": "; ".join(re.findall(REPORTS, said)) or "none: out of time or ended early",
        "seconds": round(time.monotonic() - start, 1),
    }
    print(f"{tool}, {name}: {found}", flush=True)
    if process.returncode or not re.match(r"0 (errors|hazards)", str(found["report"])):
        print("\n".join(line for line in said.splitlines() if "=====" in line), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=TOOLS, help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--processes", type=int, default=4, help="at a time (default 4)")
    parser.add_argument("--seconds", type=float, default=900, help="that a part may take (default 900)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_part(args.run)
    found = {}
    with ThreadPoolExecutor(args.processes) as pool:
        for tool in args.tools:
            reports = pool.map(lambda name, tool=tool: sanitize(tool, name, args.seconds), args.parts)
            found[tool] = dict(zip(args.parts, reports, strict=True))
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    every = [report for reports in found.values() for report in reports.values()]
    clean = all(re.match(r"0 (errors|hazards)", str(report["report"])) and not report["failed"] for report in every)
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
