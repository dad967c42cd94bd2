"""Compilation of kernels before their first launch, on all cores.

A kernel that is compiled at its first launch is compiled by one core, while the launches behind it wait. So the steps
that launch kernels run once without any launch: each launch is noted with the types of its arguments, and then threads
compile what was noted. (Triton's passes, LLVM and ptxas release the interpreter's lock; three quarters of the time is
theirs.) A kernel that Triton's cache on disk holds is read from there. Each is loaded onto the GPU as well.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextvars import copy_context
from typing import Any

import torch
from tqdm import tqdm

from fastgen.kernels.launch import KNOWN, current, launcher, noting

log = logging.getLogger(__name__)

MOST_THREADS = 16  # more would wait for the interpreter's lock
PATIENCE = 1.0  # seconds; kernels that Triton's cache holds take less


def compile_ahead(steps: Callable[[], None], device: torch.device, show: bool = False) -> None:
    """Compile the kernels that `steps` launches. With the Tritons that we know, nothing is launched, and torch's own
    operations run on tensors that kernels have not written.

    show: write a line to the terminal while it lasts. Where a kernel does not compile, `steps` runs once more and
    launches: a launch knows what to do then.
    """
    if not (KNOWN and copy_context().run(_compile_noted, steps, device, show)):  # a copy, so that nothing is left set
        steps()


def _compile_noted(steps: Callable[[], None], device: torch.device, show: bool) -> bool:
    """Whether all kernels that `steps` would launch could be compiled."""
    notes = _Notes()
    noting.set(notes)
    steps()
    start = time.perf_counter()
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_THREADS)) as threads:
        try:
            futures = [threads.submit(_load, compile_kernel, device) for compile_kernel in notes.kernels]
            _wait(futures, show)
        finally:  # the other kernels need not be waited for
            threads.shutdown(cancel_futures=True)
    log.debug("%d kernels in %.1f s", len(futures), time.perf_counter() - start)
    return not any(future.exception() for future in futures)


class _Notes:
    """The kernels that steps would launch."""

    def __init__(self) -> None:
        self.kernels: list[Callable[[], Any]] = []
        self._seen: set[object] = set()

    def is_new(self, launch: object) -> bool:
        new = launch not in self._seen
        self._seen.add(launch)
        return new

    def add(self, compile_kernel: Callable[[], Any]) -> None:
        self.kernels.append(compile_kernel)


def _load(compile_kernel: Callable[[], Any], device: torch.device) -> None:
    with current(device):
        launcher(compile_kernel())


def _wait(futures: list[Future[None]], show: bool) -> None:
    """Wait until all are done, and say so where it takes long."""
    done, waiting = wait(futures, PATIENCE)
    if waiting:
        log.info("compiling %d kernels, once for this machine", len(futures))
    form = "compiling kernels {n_fmt}/{total_fmt}, once for this machine"
    with tqdm(total=len(futures), initial=len(done), bar_format=form, disable=not (show and waiting)) as bar:
        for _ in as_completed(waiting):
            bar.update()
