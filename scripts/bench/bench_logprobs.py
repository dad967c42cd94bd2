"""Measures, as `bench.py gpu --logprobs`, the share of a decode step that computing logprobs takes.

A draw needs no sum over the vocabulary, only a maximum. Logprobs need the sum of exp(logit / temperature), and raw
logprobs that of exp(logit), which at temperature 1 without edits is the same. Steady decode steps are traced as they
are, and with a draw that does not sum. Its tokens are the same; its logprobs are wrong.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest.mock import patch

import bench_engine
from bench_engine import write_report
from bench_limits import WORKLOADS
from bench_parts import Recorder, read_trace, record

from fastgen import Generator
from fastgen.kernels import sampling
from fastgen.kernels.launch import jit, tl

SAMPLER = ("_draw_kernel",)
STEPS = 64


@jit()
def _top_alone(x, scale):
    """Replace fastgen.kernels.sampler_rows.chunk_sum, without the sum."""
    top = tl.max(tl.where(x == x, x, float("inf")))
    return top, top


def bench_logprobs(arguments: argparse.Namespace) -> None:
    """Measure the sampler with raw logprobs and without. share: the difference, as a share of a step's time."""
    if arguments.smoke:
        raise SystemExit("--logprobs is about kernels; it needs a GPU")
    with_them = sampler_times(arguments)
    with patch.object(sampling, "chunk_sum", _top_alone):
        bare = jit("lanes_ptr", "positions_ptr", "edits", "keep")(sampling._draw_kernel.fn)
        with patch.object(sampling, "_draw_kernel", bare):
            without = sampler_times(arguments)
    assert bare.device_caches, "the draw without sums has not run"
    extra = with_them["sampler_us"] - without["sampler_us"]
    report = {"with": with_them, "without": without, "extra_us": extra, "share": extra / with_them["us_per_step"]}
    write_report(arguments, "logprobs", report)


def sampler_times(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the microseconds of a steady decode step, and of its sampling kernels."""
    with bench_engine.dummy_folder(arguments.model, smoke=False) as folder:
        generator = Generator(folder, **bench_engine.engine_options(arguments))
    with generator:
        bench_engine.warm_up(generator, smoke=False)
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
