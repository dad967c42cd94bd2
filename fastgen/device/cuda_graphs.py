"""Capture and replay of CUDA graphs, and the sizes of decode steps: a graph each, and for some another where rows share
keys. (Those of steps with prefills: `engine/prefill_graphs.py`.)"""

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
    """The sizes that are captured, up to `most`: a step runs in the least that holds it.

    Close ones waste little; but between 384 and 512, and above, matrix products take no less time for fewer rows.
    """
    steps = ((8, 1), (32, 4), (64, 8), (256, 16), (384, 32), (most, 128))
    sizes, size = [], 1
    for upto, step in steps:
        while size < min(upto, most):
            sizes.append(size)
            size = (size // step + 1) * step
    return [*sizes, most]


def shared_sizes(sizes: list[int]) -> list[int]:
    """Those of `sizes` that are captured once more for rows that share keys: fewer, since small steps cost little."""
    return [size for size in sizes[:-1] if size >= 256 or size in (4, 8, 16, 24, 32, 48, 64, 96, 128, 192)] + sizes[-1:]


# Streams that graphs were captured on, which are gone. torch keeps a workspace of cuBLAS for each stream to the end of
# the process: 32 MB that each Generator would leave behind if it took new ones.
_spare: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class Graphs:
    """Replays steps, or pieces of them, without the host's work for each launch. They go by numbers, `sizes`: a decode
    step of up to so many lanes by that.

    The graphs share one memory pool and one workspace (`beside`: with those too): what a step leaves in temporary
    tensors is gone with the next replay, so that it must keep its results in tensors of its own.
    """

    def __init__(self, sizes: list[int], device: torch.device, beside: Graphs | None = None) -> None:
        self.sizes = sizes  # ascending
        self._device = device
        self._beside = beside
        self._pool: Any = None if beside is None else beside._pool  # torch's handle of it
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._lock = threading.Lock()

    def capture(self, step: Callable[[int], None], compiled: bool = False) -> None:
        """Capture `step(size)`, the launches of the graph of that number, for each of `sizes`; the largest first, whose
        memory the others then share. Each runs once before, so that all kernels are compiled; where they are `compiled`
        the largest alone does, so that the stream has what a library keeps for it.

        It reads and writes memory at fixed addresses only. Kept is what it launched, and not `step` itself.
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
        """One that is another's again when this object is gone."""
        if self._beside is not None:
            return self._beside._stream
        spare = _spare[self._device]
        stream = spare.pop() if spare else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        weakref.finalize(self, spare.append, stream).atexit = False
        return stream

    def reset(self) -> None:
        """Give back what the graphs hold, from any thread: when a group of ranks ends."""
        with self._lock:
            for graph in self._graphs.values():
                graph.reset()
            self._graphs.clear()

    def size_of(self, lanes: int) -> int:
        """The size that `lanes` lanes run in."""
        return self.sizes[bisect.bisect_left(self.sizes, lanes)]

    def run(self, size: int) -> None:
        """Replay the graph of one of `sizes`, on the current stream. Raises DepartedError after `reset`."""
        with self._lock:
            if not self._graphs:
                raise DepartedError("the ranks have left their group")
            self._graphs[size].replay()
