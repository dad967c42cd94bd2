"""CUDA graphs of steps, and the sizes of the steps that are captured.

Each size of decode steps has a graph, and some sizes have a second one for rows that share keys. Steps with prefills
have graphs up to a number of tokens (`prefill_graphs.py`).
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from fastgen.processes.errors import DepartedError

Key = TypeVar("Key")

PREFILL_SIZES = (16, 32, 64, 96, 128, 192, *range(256, 2305, 128), *range(2560, 4097, 256), *range(4608, 8193, 512))
"""Numbers of tokens of the steps with prefills that can be captured, multiples of ROW_TILE. Sizes above 256 are whole
tiles of the kernels for many tokens, so padding adds no tiles."""

PREFILL_TOKENS = 2304
"""Number of tokens up to which steps of any model are captured. A larger step is launched kernel by kernel, unless the
model is small: else the GPU takes longer than the host."""


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


def prefill_sizes(most: int) -> list[int]:
    """Return the PREFILL_SIZES up to `most`, the tokens of the largest step."""
    return [size for size in PREFILL_SIZES if size <= most]


def smallest_size(sizes: Sequence[int], count: int) -> int:
    """Return the first of ascending `sizes` that holds `count` lanes or tokens."""
    return sizes[bisect.bisect_left(sizes, count)]


# Capture streams of graphs that are gone. torch keeps a cuBLAS workspace of 32 MB for each stream to the end of the
# process, so each new Generator would leave 32 MB behind if it took a new stream.
_spare: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class Graphs(Generic[Key]):
    """CUDA graphs by key: of decode steps by the number of lanes, of steps with prefills by the number of tokens.

    keys: ascending. The graphs share one memory pool and one stream, also with the graphs of `partner`. A replay
    overwrites the temporary tensors of the last one, so a step must keep its results in tensors of its own."""

    def __init__(self, keys: list[Key], device: torch.device, partner: Graphs[Any] | None = None) -> None:
        self.keys: list[Key] = keys
        self._device = device
        self._partner = partner
        self._pool: Any = None if partner is None else partner._pool  # torch's handle of it
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._lock = threading.Lock()

    def capture(self, step: Callable[[Key], None], compiled: bool = False) -> None:
        """Capture `step(key)` for each of `keys`, the largest first, so that the others share its memory.

        Each step runs once before its capture, which compiles its kernels. compiled: all kernels are compiled already,
        so only the largest step runs, for the workspaces that libraries keep for the stream. `step` must read and write
        memory at fixed addresses only; the graphs do not keep `step` itself.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for key in reversed(self.keys):
                if not compiled or key == self.keys[-1]:
                    step(key)
                    torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()  # not torch.cuda.graph, which collects garbage each time
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    step(key)
                finally:
                    graph.capture_end()
                self._pool = graph.pool()
                self._graphs[key] = graph
        torch.cuda.current_stream(self._device).wait_stream(stream)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """The capture stream; it is reused by other graphs when this object is gone."""
        if self._partner is not None:
            return self._partner._stream
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

    def size_for(self: Graphs[int], count: int) -> int:
        """Return the smallest key that holds `count` lanes or tokens."""
        return smallest_size(self.keys, count)

    def run(self, key: Key) -> None:
        """Replay a graph on the current stream. Raises DepartedError after `reset`."""
        with self._lock:
            if not self._graphs:
                raise DepartedError("the ranks have left their group")
            self._graphs[key].replay()
