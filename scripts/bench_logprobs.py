"""What `bench.py gpu --logprobs` measures: the part of a decode step that computing logprobs takes.

Sampling itself needs the sum of exp(logit / temperature), of which the logprob under the sampled distribution is a
by-product. Raw logprobs need another sum, of exp(logit), over the vocabulary. Steady decode steps are traced as they
are, and with a scan that does not sum: what it leaves is the same but for the raw logprobs, which are then wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import bench_gpu
from bench_limits import WORKLOADS
from bench_parts import Recorder, read_trace, record, write_report

from fastgen import Generator
from fastgen.kernels import columns, sampling
from fastgen.kernels.launch import jit, tl
from fastgen.kernels.lottery import ids_of

FULL_SCAN = sampling._scan_kernel
SAMPLER = ("_scan_kernel", "_draw_kernel", "_bare_scan_kernel")
STEPS = 64


@jit("lanes_ptr", "positions_ptr", "width", "edits")
def _bare_scan_kernel(
    logits_ptr, chunks_ptr, record_ptr, lanes_ptr, positions_ptr, table_ptr, token_ids_ptr, addends_ptr, width,
    counts_ptr, in_prompt_ptr, mask_ptr, edits, edited_ptr, tops_ptr, bins_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BINS: tl.constexpr, FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The plain variant of fastgen.kernels.sampling._scan_kernel, without the sum."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    chunks = chunks_ptr + row * 4 * C + chunk
    record = record_ptr + row * columns.RECORD
    ids = ids_of(chunk, CHUNK, SUB)
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.where(x == x, x, float("inf")))
    tl.store(chunks, top)
    tl.store(chunks + C, top)
    if chunk == 0:
        tl.store(record + columns.DONE, 0)
        tl.store(record + columns.TOTAL, 0)
        tl.store(record + columns.KEPT, columns.NO_KEY)


class Scan:
    """Launches the bare kernel in place of the plain variant; the full one, which the start runs too, as it is."""

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            *_, full, _ = arguments
            (FULL_SCAN if full else _bare_scan_kernel)[grid](*arguments, **options)

        return launch


def bench_logprobs(arguments: argparse.Namespace) -> None:
    """share: of a step's time, what the sampler takes more with raw logprobs than without."""
    if arguments.smoke:
        raise SystemExit("--logprobs is about kernels; it needs a GPU")
    with_them = sampler_times(arguments)
    with patch.object(sampling, "_scan_kernel", Scan()):
        without = sampler_times(arguments)
    assert "_bare_scan_kernel" in without["kernels"], without
    extra = with_them["sampler_us"] - without["sampler_us"]
    report = {"with": with_them, "without": without, "extra_us": extra, "share": extra / with_them["us_per_step"]}
    write_report(arguments, "logprobs", report)


def sampler_times(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a steady decode step, and of its sampling kernels."""
    with bench_gpu.dummy_folder(arguments.model, smoke=False) as folder:
        generator = Generator(folder, **bench_gpu.engine_options(arguments))
    with generator:
        bench_gpu.warm_up(generator, smoke=False)
        recorder = Recorder(generator, STEPS, on_gpu=True)
        record(generator, WORKLOADS["decode"], recorder)
        found = read_trace(recorder, "kernel")
    kernels = {
        kernel["name"]: kernel["us"] * kernel["per_step"] for kernel in found["top"] if kernel["name"] in SAMPLER
    }
    return {
        "lanes": found["lanes"],
        "us_per_step": found["us_per_step"],
        "sampler_us": sum(kernels.values()),
        "kernels": kernels,
    }
