"""Work on rows with Ray: this process reads bundles of rows, and actors with one Generator each make the records.

The records of a bundle arrive together. If an actor is lost, Ray starts another one and repeats its calls, which must
have the same results. They do, since each row has its own seed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from fastgen.cli.gen.rows import Row
from fastgen.cli.gen.work import Ask, Done, Work, work
from fastgen.cli.serve.ray import check_room, connect

ROWS = 16  # number of rows in a bundle
LANES = 512  # number of lanes assumed without --max-seqs

Make = Callable[[], tuple[Any, Ask]]
"""A function that loads a Generator, whose import takes seconds, and returns it with its Ask function."""


class Worker:
    """A Ray actor with a Generator that works on several bundles of rows at a time."""

    def __init__(self, make: Make, folder: str, log_level: int) -> None:
        if os.path.isdir(folder):  # folder of the driver, which relative paths refer to, if it exists on this machine
            os.chdir(folder)
        logging.getLogger("fastgen").setLevel(log_level)
        self._rows: SimpleQueue[Row] = SimpleQueue()
        self._under_way: dict[int, Future[Done]] = {}  # by row index, including rows that wait
        self._error: Exception | None = None  # the error that ended the thread
        Thread(target=self._run, args=(make,), daemon=True).start()

    def _run(self, make: Make) -> None:
        try:
            gen, ask = make()
            for done in work(ask, self._arriving(), gen.stream):
                self._under_way.pop(done.index).set_result(done)
        except Exception as error:
            self._error = error  # before the futures are read: `do` adds its own before it checks for an error
            for future in list(self._under_way.values()):
                future.set_exception(error)

    def _arriving(self) -> Iterator[Row | None]:
        while True:
            try:
                yield self._rows.get(block=not self._under_way)
            except Empty:
                yield None

    async def do(self, rows: list[Row]) -> list[Done]:
        """Return the records of rows. Raises the error of the engine or of a model that cannot be loaded."""
        waiting = []
        for row in rows:
            future = self._under_way.get(row.index)  # found if Ray repeats a call while the first one runs
            if future is None:
                future = self._under_way[row.index] = Future()
                self._rows.put(row)
            waiting.append(asyncio.wrap_future(future))
        if self._error is not None:
            raise self._error
        return await asyncio.gather(*waiting)


def work_on_ray(args: argparse.Namespace, make: Make, rows: Iterator[Row], count: int) -> Work:
    """Answer `count` rows, and yield them in the order of completion.

    make: function that loads the model in an actor. Raises ValueError or the error of an actor.
    """
    connect()
    import ray  # after `connect` has set its environment
    from ray.exceptions import RayTaskError

    finished: SimpleQueue[tuple[Any, Future[list[Done]]]] = SimpleQueue()

    def send(actor: Any) -> bool:
        """Send the next bundle to an actor. Return False if there is none."""
        bundle = list(islice(rows, ROWS))
        if bundle:
            actor.do.remote(bundle).future().add_done_callback(lambda future: finished.put((actor, future)))
        return bool(bundle)

    try:
        calls = 2 * (args.max_seqs or LANES) // ROWS + 2  # concurrent calls per actor, of which some wait
        actors = _start_actors(args, make, math.ceil(count / ROWS), calls)
        under_way = sum(send(actor) for _ in range(calls) for actor in actors)
        while under_way:
            actor, future = finished.get()
            under_way += send(actor) - 1
            try:
                result = future.result()
            except RayTaskError as error:
                raise error.cause from None  # Ray's own message has pages of tracebacks
            yield from result
    finally:
        ray.shutdown()


def _start_actors(args: argparse.Namespace, make: Make, bundles: int, calls: int) -> list[Any]:
    """Start actors, at most one per bundle. calls: concurrent calls per actor. Raises ValueError if they do not fit."""
    import ray

    gpus = 0 if (args.device or "").startswith("cpu") else ray.cluster_resources().get("GPU", 0)
    num_gpus = (args.tensor_parallel or 1) if gpus else 0
    num_cpus = 1.0 if args.replica_cpus is None else args.replica_cpus
    replicas = min(args.replicas or max(int(gpus // num_gpus) if gpus else 1, 1), bundles)
    check_room(replicas, CPU=num_cpus, GPU=num_gpus)
    level = logging.INFO if args.verbose else logging.WARNING
    actor = ray.remote(
        num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_task_retries=-1, max_concurrency=calls
    )(Worker)
    return [actor.remote(make, os.getcwd(), level) for _ in range(replicas)]
