"""Measures, as `bench.py gpu --wire`, new weights for a server of `fgserve --rollout`, while a request is in flight.

They are tensors of this process on the server's GPU, or on the first of two, where the server has the second. They are
also written to a folder, in memory and on a disk, which the server reads. With two GPUs there is also a trainer of two
ranks, one on each GPU, whose weights are DTensors, as FSDP has them. With `--quantization fp8` the server quantizes
what it gets.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from time import perf_counter
from typing import Any

import httpx
import torch
import torch.distributed as dist
from bench_engine import write_report
from bench_sleep import seconds, state_dict
from reports import median_and_spread
from safetensors.torch import save_file
from serve_process import Server, model_folder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

from fastgen.model.config import read_config
from fastgen.model.parameters import checkpoint_shards
from fastgen.rl.remote import RemoteGenerator

REPEATS = 5
FOLDER_REPEATS = 2
TRAINER_RANKS = 2
ROOM = 0.6  # share of the free memory, so that a second set of weights fits
FOLDERS = {"folder in memory": "/dev/shm", "folder on disk": gettempdir()}
BEFORE = 20  # number of tokens of the running request before an update begins


def bench_wire(arguments: argparse.Namespace) -> None:
    """Measure medians of seconds: of an update, and of the longest time without a token meanwhile."""
    smoke = arguments.smoke
    gpus = 0 if smoke else torch.cuda.device_count()
    mine, theirs = ("cpu", "cpu") if smoke else ("cuda:0", f"cuda:{min(gpus, 2) - 1}")
    room = str(arguments.memory_fraction or ROOM)
    with model_folder(arguments.model, smoke) as (folder, flags):
        assert folder is not None
        flags += ["--quantization", arguments.quantization] if arguments.quantization else []
        server = Server(folder, ["--rollout", *flags, "--device", theirs, "--memory-fraction", room])
        weights = state_dict(read_config(Path(folder)), mine)  # while the server starts
        report: dict[str, Any] = {"weights_gb": sum(tensor.nbytes for tensor in weights.values()) / 1e9}
        with server:
            best = "gloo" if smoke else "ipc" if mine == theirs else "nccl"
            for backend, repeats in {best: REPEATS, "gloo": 1}.items():
                report[backend] = updates(server.url, weights, None if backend == best else backend, repeats)
                write_report(arguments, "wire", report)
            for name, place in FOLDERS.items():
                report[name] = by_folder(server.url, weights, place)
                write_report(arguments, "wire", report)
            if smoke or gpus > 1:
                weights.clear()
                out = Path(folder) / "shards.json"
                spawn(trainer_rank, (folder, server.url, out, smoke), TRAINER_RANKS)
                report["shards"] = json.loads(out.read_text())
                write_report(arguments, "wire", report)


def trainer_rank(rank: int, folder: str, url: str, out: Path, smoke: bool) -> None:
    """Run a rank of a trainer that shards its weights; rank 0 writes the seconds of updates to `out`.

    Weights are made and divided one at a time, so that no rank holds all of them.
    """
    device = "cpu" if smoke else f"cuda:{rank}"
    if not smoke:
        torch.cuda.set_device(device)
    store = dist.FileStore(str(out.with_name("ranks")), TRAINER_RANKS)
    dist.init_process_group("gloo" if smoke else "nccl", store=store, rank=rank, world_size=TRAINER_RANKS)
    mesh = init_device_mesh("cpu" if smoke else "cuda", (TRAINER_RANKS,))
    config = read_config(Path(folder))
    dtype = torch.float32 if smoke else torch.bfloat16

    def shard(shape: Iterable[int]) -> DTensor:
        return distribute_tensor(torch.empty(*shape, dtype=dtype, device=device).normal_(0, 0.02), mesh, [Shard(0)])

    weights = {name: shard(part.shape) for name, part in checkpoint_shards(config).items()}
    if rank == 0:
        out.write_text(json.dumps(updates(url, weights, None, REPEATS)))
    else:
        with RemoteGenerator(url) as gen:
            for _ in range(REPEATS + 1):
                gen.update_weights(weights)
    dist.destroy_process_group()


def by_folder(url: str, weights: Mapping[str, torch.Tensor], place: str) -> dict[str, Any]:
    """Return the seconds of updates from a folder at a place, and of writing it. A disk caches it in memory."""
    if not Path(place).is_dir():
        return {"skipped": f"there is no {place}"}
    free = shutil.disk_usage(place).free
    if free < 1.1 * sum(tensor.nbytes for tensor in weights.values()):
        return {"skipped": f"{place} has only {free} bytes free"}
    with TemporaryDirectory(dir=place) as folder:
        file = Path(folder) / "model.safetensors"
        written, _ = seconds(partial(save_file, dict(weights), file))
        return {"write": written, **updates(url, folder, None, FOLDER_REPEATS)}


def updates(url: str, weights: Mapping[str, torch.Tensor] | str, backend: str | None, repeats: int) -> dict[str, Any]:
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
