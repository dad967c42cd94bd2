"""Compilation of kernels on all cores, before their first launch.

A first launch compiles its kernel on one core, and all later launches wait for it. Therefore the steps that launch
kernels run once without launching anything: each launch is noted with the types of its arguments, and then several
threads compile the noted kernels. (Triton's passes, LLVM and ptxas take three quarters of the time, and release the
GIL.) Kernels in Triton's cache on disk are read from there. Each kernel is also loaded onto the GPU.
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

from fastgen.device.chip import current
from fastgen.kernels.launch import KNOWN, triton
from fastgen.kernels.triton.jit import Notes, launcher, noting

log = logging.getLogger(__name__)

MAX_THREADS = 16  # more threads would wait for the GIL
PATIENCE = 1.0  # seconds before progress is shown; reading kernels from Triton's cache takes less
LOG_SECONDS = 5.0  # seconds between two lines in the log


def compile_ahead(steps: Callable[[], None], device: torch.device, show: bool = False) -> None:
    """Compile the kernels that `steps` launches.

    With a known version of Triton nothing is launched, and torch's own operations run on tensors that no kernel has
    written. With another version, or if a kernel does not compile, `steps` runs and launches, since a launch handles
    such errors. show: whether to write a progress line to the terminal.
    """
    # `noting` is set in a copy of the context only.
    if not KNOWN or not copy_context().run(_compile_noted, steps, device, show):
        steps()


def _compile_noted(steps: Callable[[], None], device: torch.device, show: bool) -> bool:
    """Compile the kernels that `steps` would launch, and return whether all of them compile."""
    notes = Notes()
    noting.set(notes)
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS)) as threads:
        try:
            # Triton computes a digest of its 400 MB library once. Without this, each thread would begin with that.
            digest = threads.submit(triton.runtime.cache.triton_key)
            steps()
            start = time.perf_counter()
            digest.result()
            futures = [threads.submit(_load, compile_kernel, device) for compile_kernel in notes.kernels]
            _wait(futures, show)
        finally:  # after an error, do not wait for the other kernels
            threads.shutdown(cancel_futures=True)
    log.debug("%d kernels in %.1f s", len(futures), time.perf_counter() - start)
    return not any(future.exception() for future in futures)


def _load(compile_kernel: Callable[[], Any], device: torch.device) -> None:
    with current(device):
        launcher(compile_kernel())


def _wait(futures: list[Future[None]], show: bool) -> None:
    """Wait for all kernels. If this takes long, show a progress bar, or write lines to the log."""
    done, waiting = wait(futures, PATIENCE)
    form = "compiling kernels {n_fmt}/{total_fmt}, once for this machine"
    logged = time.monotonic()
    if waiting and not show:
        log.info(form.format(n_fmt=len(done), total_fmt=len(futures)))
    with tqdm(total=len(futures), initial=len(done), bar_format=form, disable=not (show and waiting)) as bar:
        for count, _ in enumerate(as_completed(waiting), len(done) + 1):
            bar.update()
            if not show and time.monotonic() - logged >= LOG_SECONDS:
                log.info(form.format(n_fmt=count, total_fmt=len(futures)))
                logged = time.monotonic()
