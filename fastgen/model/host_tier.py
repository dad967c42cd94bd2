"""The host tier: evicted pages of the KV pool, kept in pinned memory until a prompt needs them again.

Copies run on two streams, one for each direction of the bus. They overlap with each other, with the previous step,
which is still running, and with layers of their own step that do not need them yet. Pages go through staging memory on
the GPU, so that contiguous memory crosses the bus: a whole page for a save, one group of layers at a time for a load.

Ordering of the streams:
- A copy does not wait for earlier steps. No sequence of a step in flight holds a page that is evicted or newly
  allocated, and the contents of such a page were computed by steps that the host has collected.
- The step and the loads in the same batch as a save may overwrite the saved pages, so they wait until these pages are
  in staging memory.
- The step of a load waits for each group of layers before it computes the first layer of the group.
- A load waits for the save that filled its host page. A save waits for all earlier loads, because it may reuse their
  host pages.
- After an exception in a step, steps in flight are not collected, so the device must be idle before pages are allocated
  again (`Runner.synchronize`).

On the CPU the same code runs without streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import on_stream, upload
from fastgen.device.pinned_memory import Pinned
from fastgen.kernels.page_copies import copy_pages
from fastgen.model.kv_pool import KVPool

STAGING_BYTES = 1 << 28
STAGING_PAGES = 64  # at most
GROUPS = 4  # of layers; smaller groups arrive earlier, but each page needs one copy per group, which costs host time


@dataclass(frozen=True)
class _LayerGroup:
    """A group of consecutive layers: views of the pool, of the staging memory and of the host tier.

    first: index of the first layer. pool, staging: [2, layers, pages, E]. entries: the pages of the staging memory,
    each [layers, 2, E]. host: [host pages, layers, 2, E]. arrived: event that is recorded when a load of the group is
    complete; None on the CPU.
    """

    first: int
    pool: Tensor
    staging: Tensor
    entries: list[Tensor]
    host: Tensor
    arrived: torch.cuda.Event | None


class HostTier:
    """Pages in pinned host memory. The scheduler knows the contents of each host page.

    pages: [num_pages, layers, 2, E] with E = K x P x D; a group of layers of a page is contiguous. The staging memory
    of each direction has as many pages as STAGING_BYTES holds, at least 1 and at most STAGING_PAGES. Raises ValueError
    if the host has too little memory.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, pool: KVPool, num_pages: int) -> None:
        assert num_pages > 0
        two, layers, _, size = pool.whole.shape
        dtype, self.device = pool.whole.dtype, pool.whole.device
        page_bytes = two * layers * size * dtype.itemsize
        staging = min(max(STAGING_BYTES // page_bytes, 1), STAGING_PAGES)
        self._pool = pool.whole
        arriving, self._leaving = torch.empty(2, staging, layers, two, size, dtype=dtype, device=self.device)
        self._order = torch.arange(staging, device=self.device)
        self._out: torch.cuda.Stream | None = None
        self._in: torch.cuda.Stream | None = None
        self._gathered, self._loaded = self._event(), self._event()
        self._saved: dict[int, torch.cuda.Event] = {}  # {host page: end of the save that filled it}
        self._pinned = Pinned(num_pages * page_bytes, self.device, "the host tier", "lower host_cache_gb")
        if self.device.type == "cuda":
            # With a normal priority their few kernels would wait until the products of a step leave room.
            self._out, self._in = (torch.cuda.Stream(self.device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
            for stream in (self._out, self._in):
                stream.wait_stream(torch.cuda.current_stream(self.device))
        self.pages = self._pinned.bytes.view(dtype).view(num_pages, layers, two, size)
        bounds = [layers * number // GROUPS for number in range(GROUPS + 1)]
        self._groups = [
            _LayerGroup(
                first=first,
                pool=pool.whole[:, first:end],
                staging=arriving.permute(2, 1, 0, 3)[:, first:end],
                entries=list(arriving[:, first:end].unbind()),
                host=self.pages[:, first:end],
                arrived=self._event(),
            )
            for first, end in pairwise(bounds)
            if first < end
        ]

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages to the host. pairs: (page, host page). Later work on the current stream may overwrite the
        pages."""
        entries = list(self._leaving.unbind())
        with on_stream(self._out):
            if self._loaded is not None:
                self._loaded.wait()
            pages = upload(np.array([page for page, _ in pairs], dtype=np.int64), self.device)
            for start in range(0, len(pairs), len(entries)):
                part = pairs[start : start + len(entries)]
                order = self._order[: len(part)]
                copy_pages(self._pool, self._leaving.permute(2, 1, 0, 3), pages[start : start + len(part)], order)
                if self._gathered is not None:
                    self._gathered.record()
                targets = [self.pages[host_page] for _, host_page in part]
                torch._foreach_copy_(targets, entries[: len(part)], non_blocking=True)
                saved = self._event()
                if saved is not None:
                    saved.record()
                    self._saved.update((host_page, saved) for _, host_page in part)
        if self._gathered is not None:
            self._gathered.wait()
            self._gathered.wait(self._in)

    def load(self, pairs: Sequence[tuple[int, int]]) -> dict[int, torch.cuda.Event]:
        """Copy pages from the host. pairs: (host page, page).

        Return {first layer of a group: event}. The current stream must wait for the event before that layer is
        launched. On the CPU there are no events, and the loads are complete.
        """
        with on_stream(self._in):
            for saved in {self._saved.pop(host_page) for host_page, _ in pairs if host_page in self._saved}:
                saved.wait()
            pages = upload(np.array([page for _, page in pairs], dtype=np.int64), self.device)
            for group in self._groups:
                for start in range(0, len(pairs), len(group.entries)):
                    part = pairs[start : start + len(group.entries)]
                    sources = [group.host[host_page] for host_page, _ in part]
                    torch._foreach_copy_(group.entries[: len(part)], sources, non_blocking=True)
                    order = self._order[: len(part)]
                    copy_pages(group.staging, group.pool, order, pages[start : start + len(part)])
                if group.arrived is not None:
                    group.arrived.record()
            if self._loaded is not None:
                self._loaded.record()
        return {group.first: group.arrived for group in self._groups if group.arrived is not None}

    def _event(self) -> torch.cuda.Event | None:
        """Return an event, or None on the CPU. It is recorded again in each step, after all waits for the last one."""
        return torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
