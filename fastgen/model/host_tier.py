"""The host tier: pages of the KV pool that go next or have gone, kept in pinned memory until a prompt wants them.

Copies run on two streams of their own, one a direction, since the bus carries both at once: beside each other, beside
the step before, which is still running, and beside the layers of their own step that do not need them yet. A page goes
through staging memory on the GPU, so that what crosses the bus is one contiguous piece: whole for a save, a group of
layers at a time for a load.

What keeps the streams apart. A page that is given out, or evicted, is held by no sequence of a step in flight, and what
it holds was computed by steps that the host has collected: so a copy has no step to wait for. What a save comes with,
the step and its loads, may write to the page at once: they wait until it is in staging memory. The step that a load
comes with waits for each group of layers before it computes the first of them. A load waits for the save that filled
its slot, and a save for all loads before it, whose slots it may be given. After an exception in a step, the steps in
flight are not collected: the device must be idle before pages are given out again (`Runner.settle`).

On the CPU the same code runs without streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import Pinned, upload
from fastgen.kernels.state import copy_pages
from fastgen.model.kv_pool import KVPool

STAGING_BYTES = 1 << 28
STAGING_PAGES = 64  # at most
GROUPS = 4  # of layers; more arrive earlier, and take more of the host's time, which is a copy a page and group


@dataclass(frozen=True)
class Arrivals:
    """The loads of a step on their way. events: by the first layer of each group; none where all is there."""

    events: dict[int, torch.cuda.Event]

    def wait(self, layer: int) -> None:
        """Let what is launched from now on, on the current stream, wait until this layer's pages are in the pool."""
        event = self.events.get(layer)
        if event is not None:
            event.wait()


@dataclass(frozen=True)
class _Group:
    """Layers first, first + 1, ... of the pool, of the staging memory and of the slots.

    pool, staging: [2, layers, pages, E]; entries: of the staging memory, [layers, 2, E] each; slots: [slots, layers, 2,
    E].
    """

    first: int
    pool: Tensor
    staging: Tensor
    entries: list[Tensor]
    slots: Tensor
    arrived: torch.cuda.Event | None


class HostTier:
    """`num_slots` slots of pinned host memory, of a page each: [slots, layers, 2, E], E = K x P x D, of which a group
    of layers is one contiguous piece. Which slot holds what is for the scheduler to know.

    staging: pages of staging memory in each direction; None: as many as STAGING_BYTES holds, up to STAGING_PAGES.
    Raises ValueError where the host's memory does not suffice.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, pool: KVPool, num_slots: int, staging: int | None = None) -> None:
        assert num_slots > 0
        two, layers, _, size = pool.whole.shape
        dtype, self.device = pool.whole.dtype, pool.whole.device
        page_bytes = two * layers * size * dtype.itemsize
        if staging is None:
            staging = min(max(STAGING_BYTES // page_bytes, 1), STAGING_PAGES)
        self._pool = pool.whole
        arriving, self._leaving = torch.empty(2, staging, layers, two, size, dtype=dtype, device=self.device)
        self._order = torch.arange(staging, device=self.device)
        self._out: torch.cuda.Stream | None = None
        self._in: torch.cuda.Stream | None = None
        self._gathered, self._loaded = self._event(), self._event()
        self._saved: dict[int, torch.cuda.Event] = {}  # by slot: the save that filled it
        self._pinned = Pinned(num_slots * page_bytes, self.device, "the host tier", "lower host_cache_gb")
        if self.device.type == "cuda":
            # Their few kernels come first, or they would wait until the products of a step leave room.
            self._out, self._in = (torch.cuda.Stream(self.device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
            for stream in (self._out, self._in):
                stream.wait_stream(torch.cuda.current_stream(self.device))
        self.slots = self._pinned.bytes.view(dtype).view(num_slots, layers, two, size)
        bounds = [layers * number // GROUPS for number in range(GROUPS + 1)]
        self._groups = [
            _Group(
                first=first,
                pool=pool.whole[:, first:end],
                staging=arriving.permute(2, 1, 0, 3)[:, first:end],
                entries=list(arriving[:, first:end].unbind()),
                slots=self.slots[:, first:end],
                arrived=self._event(),
            )
            for first, end in pairwise(bounds)
            if first < end
        ]

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages to slots (page, slot). What is launched next on the current stream may overwrite the pages."""
        entries = list(self._leaving.unbind())
        with self._beside(self._out):
            if self._loaded is not None:
                self._loaded.wait()
            pages = upload(np.array([page for page, _ in pairs], dtype=np.int64), self.device)
            for start in range(0, len(pairs), len(entries)):
                part = pairs[start : start + len(entries)]
                order = self._order[: len(part)]
                copy_pages(self._pool, self._leaving.permute(2, 1, 0, 3), pages[start : start + len(part)], order)
                if self._gathered is not None:
                    self._gathered.record()
                slots = [self.slots[slot] for _, slot in part]
                torch._foreach_copy_(slots, entries[: len(part)], non_blocking=True)
                saved = self._event()
                if saved is not None:
                    saved.record()
                    self._saved.update((slot, saved) for _, slot in part)
        if self._gathered is not None:
            self._gathered.wait()
            self._gathered.wait(self._in)

    def load(self, pairs: Sequence[tuple[int, int]]) -> Arrivals:
        """Copy slots to pages (slot, page). A layer may read and write the pages when it has waited for the arrival."""
        with self._beside(self._in):
            for saved in {self._saved.pop(slot) for slot, _ in pairs if slot in self._saved}:
                saved.wait()
            pages = upload(np.array([page for _, page in pairs], dtype=np.int64), self.device)
            for group in self._groups:
                for start in range(0, len(pairs), len(group.entries)):
                    part = pairs[start : start + len(group.entries)]
                    slots = [group.slots[slot] for slot, _ in part]
                    torch._foreach_copy_(group.entries[: len(part)], slots, non_blocking=True)
                    order = self._order[: len(part)]
                    copy_pages(group.staging, group.pool, order, pages[start : start + len(part)])
                if group.arrived is not None:
                    group.arrived.record()
            if self._loaded is not None:
                self._loaded.record()
        return Arrivals({group.first: group.arrived for group in self._groups if group.arrived is not None})

    @staticmethod
    def _beside(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """What is launched within goes to this stream."""
        return torch.cuda.stream(stream) if stream is not None else nullcontext()

    def _event(self) -> torch.cuda.Event | None:
        """Recorded anew for each step: who waits for it is told to before that."""
        return torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
