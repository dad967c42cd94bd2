"""Work on rows by Ray Data: a task reads bundles of rows, and actors with a Generator each make the records.

The records of a bundle come together, when all are there: if an actor or a block is lost, Ray repeats its tasks, whose
results must be the same again. They are, as each row has a seed of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import pickle
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from fastgen.cli.gen.outputs import Indices
from fastgen.cli.gen.rows import Row, Source, read_rows
from fastgen.cli.gen.work import Done, Job, Work, work
from fastgen.cli.serve.ray import check_room, connect

ROWS = 16  # of a bundle
LANES = 512  # assumed for an engine without --max-seqs

Engine = Any  # a fastgen.Generator, whose import takes seconds and which the driver does not need


class Worker:
    """An actor's function for Ray Data: it takes bundles of rows, several at a time, and returns their records."""

    def __init__(self, make: Callable[[], tuple[Engine, Job]], folder: str, log_level: int) -> None:
        _enter(folder)
        logging.getLogger("fastgen").setLevel(log_level)
        self._rows: SimpleQueue[Row] = SimpleQueue()
        self._under_way: dict[int, Future[Done]] = {}  # by the indices of rows, waiting ones too
        self._ended: Future[None] = Future()
        Thread(target=self._run, args=(make,), daemon=True).start()

    def _run(self, make: Callable[[], tuple[Engine, Job]]) -> None:
        try:
            gen, job = make()
            for done in work(job, self._arriving(), gen.stream):
                self._under_way.pop(done.index).set_result(done)
        except Exception as error:
            self._ended.set_exception(error)

    def _arriving(self) -> Iterator[Row | None]:
        while True:
            try:
                yield self._rows.get(block=not self._under_way)
            except Empty:
                yield None

    async def __call__(self, bundle: dict[str, Any]) -> dict[str, Any]:
        waiting = []
        for row in pickle.loads(bundle["rows"]):
            found = self._under_way.get(row.index)  # there if Ray repeats a task while the first one runs
            if found is None:
                found = self._under_way[row.index] = Future()
                self._rows.put(row)
            waiting.append(asyncio.wrap_future(found))
        records = asyncio.gather(*waiting)
        await asyncio.wait((records, asyncio.wrap_future(self._ended)), return_when=asyncio.FIRST_COMPLETED)
        if records.done():
            return {"done": pickle.dumps(await records)}
        error = self._ended.exception()
        if isinstance(error, ValueError | OSError):  # raised here, Ray would show pages of traces, and try again
            return {"done": pickle.dumps(error)}
        raise RuntimeError("the engine has failed") from error


def _read(_: Any, files: list[Path], done: Container[int], folder: str) -> Iterator[dict[str, Any]]:
    _enter(folder)
    rows = read_rows(files, done)
    while bundle := list(islice(rows, ROWS)):
        yield {"rows": pickle.dumps(bundle)}


def _enter(folder: str) -> None:
    """Change to the driver's folder, to which relative paths refer, if this machine has it."""
    if os.path.isdir(folder):
        os.chdir(folder)


def work_on_ray(
    args: argparse.Namespace, make: Callable[[], tuple[Engine, Job]], source: Source, done: Indices
) -> Work:
    """Do a job on the rows that are not done, in the order of completion, or with args.ordered in that of the files.

    make: loads the model and makes the job, in an actor. The files are read on this machine. Raises ValueError, or
    RuntimeError for a failure in an actor.
    """
    if args.ray_address is not None:
        os.environ["RAY_ADDRESS"] = args.ray_address
    connect()
    import ray  # when its environment is set

    try:
        for bundle in _pipeline(args, make, source, done).iter_rows():
            found: list[Done] | Exception = pickle.loads(bundle["done"])
            if isinstance(found, Exception):
                raise found
            yield from found
    finally:
        ray.shutdown()


def _pipeline(args: argparse.Namespace, make: Callable[[], tuple[Engine, Job]], source: Source, done: Indices) -> Any:
    """Return a ray.data.Dataset of bundles of records."""
    import ray.data

    assert source.total is not None  # Ray does not get stdin
    gpus = 0 if (args.device or "").startswith("cpu") else ray.cluster_resources().get("GPU", 0)
    num_gpus = (args.tensor_parallel or 1) if gpus else 0
    num_cpus = 1.0 if args.replica_cpus is None else args.replica_cpus
    replicas = args.replicas or max(int(gpus // num_gpus) if gpus else 1, 1)
    replicas = min(replicas, math.ceil((source.total - len(done)) / ROWS))  # each gets a bundle
    check_room(replicas, CPU=num_cpus, GPU=num_gpus)

    level = logging.INFO if args.verbose else logging.WARNING
    logging.getLogger("ray.data").setLevel(logging.INFO if args.verbose else logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # a bundle is a block, and is passed on at once
    context.execution_options.preserve_order = args.ordered
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    tasks = 2 * (args.max_seqs or LANES) // ROWS + 2  # with some that wait
    pool = ray.data.ActorPoolStrategy(
        size=replicas, max_tasks_in_flight_per_actor=tasks, max_concurrent_calls_per_actor=tasks
    )
    folder = os.getcwd()
    bundles = ray.data.range(1, override_num_blocks=1).flat_map(
        partial(_read, files=source.files, done=done, folder=folder), num_cpus=0, label_selector=here
    )
    return bundles.map(
        Worker, fn_constructor_args=(make, folder, level), compute=pool, num_cpus=num_cpus, num_gpus=num_gpus
    )
