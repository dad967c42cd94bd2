"""Measures, as `bench.py gpu --wire`, new weights for a server of `fgserve --rollout`, from tensors of this process on
the server's GPU, or on the first of two, while a request is in flight."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import torch
from bench_engine import write_report
from bench_sleep import seconds, state_dict
from reports import median_and_spread
from serve_process import Server, model_folder

from fastgen.model.config import read_config
from fastgen.rl.remote import RemoteGenerator

REPEATS = 5
ROOM = 0.6  # share of the free memory, so that a second set of weights fits
BEFORE = 20  # number of tokens of the running request before an update begins


def bench_wire(arguments: argparse.Namespace) -> None:
    """Measure medians of seconds: of an update, and of the longest time without a token meanwhile."""
    mine, theirs = "cpu", "cpu"
    if not arguments.smoke:
        mine, theirs = "cuda:0", f"cuda:{min(torch.cuda.device_count(), 2) - 1}"
    room = str(arguments.memory_fraction or ROOM)
    with model_folder(arguments.model, arguments.smoke) as (folder, flags):
        assert folder is not None
        server = Server(folder, ["--rollout", *flags, "--device", theirs, "--memory-fraction", room])
        weights = state_dict(read_config(Path(folder)), mine)  # while the server starts
        report: dict[str, Any] = {"weights_gb": sum(tensor.nbytes for tensor in weights.values()) / 1e9}
        with server:
            best = "gloo" if arguments.smoke else "ipc" if mine == theirs else "nccl"
            for backend, repeats in {best: REPEATS, "gloo": 1}.items():
                report[backend] = updates(server.url, weights, None if backend == best else backend, repeats)
                write_report(arguments, "wire", report)


def updates(url: str, weights: Mapping[str, torch.Tensor], backend: str | None, repeats: int) -> dict[str, Any]:
    """Return the seconds of updates. first: the first one, which also connects."""
    with RemoteGenerator(url, backend=backend) as gen:
        first, *others = (
            timed(url, partial(gen.update_weights, weights, in_flight="keep")) for _ in range(repeats + 1)
        )
    taken, paused = zip(*others, strict=True)
    return {"first": first[0], "update": median_and_spread(taken), "paused": median_and_spread(paused)}


def timed(url: str, update: Any) -> tuple[float, float]:
    """Return the seconds of an update, and the longest time between two tokens of a request meanwhile."""
    body = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True}
    times, updating = [], None
    with ThreadPoolExecutor(1) as pool, httpx.stream("POST", f"{url}/completions", json=body, timeout=None) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(perf_counter())
            if len(times) == BEFORE and updating is None:
                updating = pool.submit(seconds, update)
            if updating is not None and updating.done():
                break
        assert updating is not None, "the request ended before the update"
        return updating.result()[0], max(after - before for before, after in pairwise(times[BEFORE - 2 :]))
