"""Run the kernels' tests on a GPU under compute-sanitizer, several processes for each of PARTS, and count its reports.

    PYTHONPATH=. python scripts/check/sanitize.py                     # memcheck, racecheck and initcheck
    PYTHONPATH=. python scripts/check/sanitize.py racecheck --parts drafts scores --seconds 600

Each tensor has an allocation of its own, so that the memory after it belongs to no other. memcheck and racecheck watch
only fastgen's kernels. A process that runs out of time reports the tests that it has finished. The exit status is 1 if
something is reported, or a test fails or is missing.
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
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck")
# A file of tests/; which of its tests, an expression of pytest's -k; the processes that share them.
PARTS = {
    "prefills on Hopper": ("gpu/test_gpu_prefill.py", "lengths_are_right and (lens3 or lens4)", 4),
    "shapes of prefills on Hopper": ("gpu/test_gpu_prefill.py", "all_shapes", 6),
    "attention with prefills": (
        "kernels/test_kernels_attention.py", "agree_with_the_reference or one_answer or in_fp8", 4,
    ),
    "truncation": ("kernels/test_kernels_sampling.py", "kept or nothing_can", 4),
    "shared prefixes": ("kernels/test_kernels_shared.py", "tree or lists or come_and_go or prefills", 3),
    "attention": ("kernels/test_kernels_attention.py", "decode_lists or planned", 2),
    "decodes on Hopper": ("gpu/test_gpu_deterministic.py", "decodes_in_gluon and 1-65", 4),
    "draws": ("kernels/test_kernels_sampling.py", "draws or drawn or padding or company or among_few", 2),
    "scores": ("kernels/test_kernels_sampling.py", "score or alternatives or weights or keys_order or noise", 1),
    "drafts": ("kernels/test_kernels_drafts.py", "", 1),
    "products": ("kernels/test_kernels_batch_invariant.py", "twin or rope_fused or any_tile", 2),
    "products on Hopper": ("gpu/test_gpu_deterministic.py", "product_is_right", 1),
    "fp8": ("kernels/test_kernels_fp8.py", "quantize or norm or product_is", 1),
    "recurrent layers": ("recurrent/test_delta_kernels.py", "mixed_steps or padding", 3),
    "pages": ("model/test_kv_pool.py", "copied_between", 1),
    "norms, adapters": ("kernels/test_kernels.py", "rms_norm or over_ranks or gate or pool or advance or merged", 1),
}  # fmt: skip
SUMMARY = r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.+)"
REPORTED = r"^========= ((?:Error|Warning|Invalid|Uninitialized|Race|Address|Internal).*)\n=========\s+(.*)"
TORCH = "regex=at6native|cub[0-9]|cutlass|nvjet|cublas"  # names of kernels


class Share:
    """A pytest plugin that runs every `shares`-th test, and prints which kernels have been launched."""

    def __init__(self, place: int, shares: int) -> None:
        self.place, self.shares = place, shares
        self.launched: set[str] = set()

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[self.place :: self.shares]
        print(f"\nTESTS {len(items)}")

    def pytest_runtest_logfinish(self) -> None:
        rooms = ("fastgen.kernels.", "fastgen.recurrent.")
        modules = [module for name, module in sys.modules.items() if name.startswith(rooms)]
        for module in modules:
            for name, kernel in vars(module).items():
                if getattr(kernel, "_compiled", None) and kernel.__module__ == module.__name__:
                    self.launched.add(f"{module.__name__.removeprefix('fastgen.kernels.')}.{name}")
        print(f"\nLAUNCHED {' '.join(sorted(self.launched))}")


def run_part(name: str, place: int) -> int:
    """Run a share of the tests of a part in this process, which a sanitizer watches."""
    import torch

    from fastgen.device import new_memory
    from fastgen.device.memory import Memory
    from fastgen.model import kv_pool

    class Allocated(Memory):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            self._device = device

        def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self._device)

    new_memory.memory_on = kv_pool.memory_on = lambda device, huge_pages=True: Allocated(device)
    path, tests, shares = PARTS[name]
    options = ["-k", tests, "-n", "0", "-vv", "-s", "-o", "timeout=0", "-p", "no:cacheprovider"]
    return pytest.main([str(ROOT / "tests" / path), *options], [Share(place, shares)])


def sanitize(tool: str, name: str, place: int, seconds: float) -> dict[str, Any]:
    """Return what a tool reports of a share of a part."""
    number = 10 * (len(PARTS) * TOOLS.index(tool) + list(PARTS).index(name)) + place
    command = ["compute-sanitizer", "--tool", tool, "--launch-timeout", "0", "--print-limit", "5"]
    command += ["--show-backtrace", "no", "--report-api-errors", "no", "--target-processes", "application-only"]
    command += ["--port", str(49152 + 20 * number)]
    if tool != "initcheck":  # which has to see all that writes
        command += ["--kernel-name-exclude", TORCH]
    command += [sys.executable, __file__, "--run", name, str(place)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if tool != "racecheck":  # which watches shared memory
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        said = log.read()
    summary = re.search(SUMMARY, said)
    reported = {re.sub(r"\+?0x[0-9a-f]+", "", " ".join(each)) for each in re.findall(REPORTED, said, re.M)}
    found = {
        "tests": int((re.findall(r"^TESTS (\d+)", said, re.M) or [0])[-1]),
        "passed": len(re.findall(r"\bPASSED\b", said)),
        "failed": len(re.findall(r"^(?:FAILED|ERROR) tests", said, re.M)),
        "kernels": (re.findall(r"^LAUNCHED (.*)", said, re.M) or [""])[-1].split(),
        "reported": sorted(reported),
        "summary": summary[1] if summary else "out of time",
        "seconds": round(time.monotonic() - start, 1),
    }
    print(f"{tool}, {name} {place}: {found | {'kernels': len(found['kernels'])}}", flush=True)
    if process.returncode:
        print("\n".join([line for line in said.splitlines() if re.match("=====|E  |FAILED", line)][:30]), flush=True)
    return found


def total(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the reports of a part's shares."""
    counts = {name: sum(share[name] for share in shares) for name in ("tests", "passed", "failed")}
    lists = {name: sorted({each for share in shares for each in share[name]}) for name in ("kernels", "reported")}
    return {**counts, **lists, "summaries": sorted({share["summary"] for share in shares})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=TOOLS, help=f"of {', '.join(TOOLS)} (default: all, in this order)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--processes", type=int, default=4, help="number of processes at a time (default 4)")
    parser.add_argument("--seconds", type=float, default=900, help="time limit of a process (default 900)")
    parser.add_argument(
        "--whole", type=float, default=7200, help="time limit of all together, in seconds (default 7200)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_part(args.run[0], int(args.run[1]))
    end = time.monotonic() + args.whole
    shares = [(name, place) for name in args.parts for place in range(PARTS[name][2])]
    jobs = [(tool, *share) for tool in args.tools for share in shares]
    reports: dict[tuple[str, str], list[dict[str, Any]]] = {}
    found: dict[str, dict[str, Any]] = {tool: {} for tool in args.tools}

    def run(job: tuple[str, str, int]) -> dict[str, Any]:
        return sanitize(*job, min(args.seconds, end - time.monotonic()))

    with ThreadPoolExecutor(args.processes) as pool:
        for (tool, name, _), share in zip(jobs, pool.map(run, jobs), strict=True):
            reports.setdefault((tool, name), []).append(share)
            found[tool][name] = total(reports[tool, name])
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    every = [part for parts in found.values() for part in parts.values()]
    return int(any(part["reported"] or part["failed"] or part["passed"] < part["tests"] for part in every))


if __name__ == "__main__":
    sys.exit(main())
