"""Capture and replay of CUDA graphs, and the sizes of the decode steps that are captured.

Each size has a graph; some have a second one for rows that share keys. The graphs of steps with prefills are in
`engine/prefill_graphs.py`.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from fastgen.parallel.errors import DepartedError


def batch_sizes(most: int) -> list[int]:
    """Return the captured sizes up to `most`, ascending. A step runs in the smallest size that holds it.

    Close sizes waste little. Above 384 they are 128 apart, since matrix products take no less time for fewer rows
    there."""
    steps = ((8, 1), (32, 4), (64, 8), (256, 16), (384, 32), (most, 128))
    sizes, size = [], 1
    for upto, step in steps:
        while size < min(upto, most):
            sizes.append(size)
            size = (size // step + 1) * step
    return [*sizes, most]


def shared_sizes(sizes: list[int]) -> list[int]:
    """Return the sizes that are captured again for rows that share keys: fewer, since small steps cost little."""
    return [size for size in sizes[:-1] if size >= 256 or size in (4, 8, 16, 24, 32, 48, 64, 96, 128, 192)] + sizes[-1:]


# Capture streams of graphs that are gone. torch keeps a cuBLAS workspace of 32 MB for each stream to the end of the
# process, so each new Generator would leave 32 MB behind if it took a new stream.
_spare: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class Graphs:
    """CUDA graphs of steps, or of pieces of steps. Each has a number; for decode steps it is the number of lanes.

    sizes: the numbers, ascending. The graphs share one memory pool and one stream, also with those of `beside`. A
    replay overwrites the temporary tensors of the last one, so a step must keep its results in tensors of its own."""

    def __init__(self, sizes: list[int], device: torch.device, beside: Graphs | None = None) -> None:
        self.sizes = sizes  # ascending
        self._device = device
        self._beside = beside
        self._pool: Any = None if beside is None else beside._pool  # torch's handle of it
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._lock = threading.Lock()

    def capture(self, step: Callable[[int], None], compiled: bool = False) -> None:
        """Capture `step(size)` for each of `sizes`, the largest first, so that the others share its memory.

        Each size runs once before its capture, which compiles its kernels. compiled: all kernels are compiled already,
        so only the largest size runs, for the workspaces that libraries keep for the stream. `step` must read and write
        memory at fixed addresses only; the graphs do not keep `step` itself.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                if not compiled or size == self.sizes[-1]:
                    step(size)
                    torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()  # not torch.cuda.graph, which collects garbage each time
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    step(size)
                finally:
                    graph.capture_end()
                self._pool = graph.pool()
                self._graphs[size] = graph
        torch.cuda.current_stream(self._device).wait_stream(stream)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """The capture stream; it is reused by other graphs when this object is gone."""
        if self._beside is not None:
            return self._beside._stream
        spare = _spare[self._device]
        stream = spare.pop() if spare else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        weakref.finalize(self, spare.append, stream).atexit = False
        return stream

    def reset(self) -> None:
        """Free the graphs, from any thread. Called when a group of ranks ends."""
        with self._lock:
            for graph in self._graphs.values():
                graph.reset()
            self._graphs.clear()

    def size_of(self, lanes: int) -> int:
        """Return the size in which `lanes` lanes run."""
        return self.sizes[bisect.bisect_left(self.sizes, lanes)]

    def run(self, size: int) -> None:
        """Replay the graph of one of `sizes`, on the current stream. Raises DepartedError after `reset`."""
        with self._lock:
            if not self._graphs:
                raise DepartedError("the ranks have left their group")
            self._graphs[size].replay()
