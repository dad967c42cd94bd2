"""Attention of decodes and prefills by fastgen's kernels, which read the paged KV pool in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.device.pinned import upload_together
from fastgen.kernels import attention as kernel
from fastgen.kernels import hopper_decode, work_tiles
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.shared import SharedPrefixes
from fastgen.model.kv_pool import KVPool

PARTIALS = 8192  # number of partial results of a decode step; a step that would need more does not split


@dataclass(frozen=True)
class PagedPlan:
    """The tile lists of a step. work: for each window, the lists of work tiles of a layer with that window, one launch
    per list."""

    page_table: Tensor
    work: dict[int, list[kernel.TileList]]


class PagedAttention:
    """Attention by fastgen's kernels (see Attention). A plan can be used once per layer, since its lists hold a
    counter for each, and is overwritten by the next plan that has decodes.

    num_heads: H; windows: of each layer, 0 for none; max_seqs: of a step, with padding; context: the largest kv_len.
    deterministic: a kernel that does not compile is an error, because the bits of its torch twin depend on the step.
    scale: factor of the scores; None: D ** -0.5.
    The constructor allocates all memory except results and prefill lists, and CUDA graphs share it: `partials` partial
    results of (H * (D + 2) + K) * 4 bytes, and 32 bytes for each and distinct window. With H = 32, K = 8, D = 128
    and 1024 sequences these are 8192 results, 137 MB and 0.3 MB, whatever the size of the pool.
    """

    needs_clean_pages = False  # the kernels load no unwritten values

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        windows: tuple[int, ...],
        max_seqs: int,
        context: int,
        deterministic: bool = False,
        scale: float | None = None,
    ) -> None:
        _, _, num_kv, page_size, head_size = pool.keys.shape
        device, dtype = pool.keys.device, pool.dtype
        self.pool = pool
        self.scale = head_size**-0.5 if scale is None else scale
        self.num_kv = num_kv
        self.max_seqs = max_seqs
        self.chip = Chip.of(device)
        self.group = num_heads // num_kv
        self.configs = {
            phase: kernel.configure(phase, self.group, head_size, dtype, self.chip, page_size, pool.fp8)
            for phase in (kernel.DECODE, kernel.PREFILL, kernel.GROUP)
        }
        self._launch = kernel.attention.launch if deterministic else kernel.attention
        self._most_splits = -(-context // self.configs[kernel.DECODE].keys)
        self.windows = tuple(sorted(set(windows)))
        each = self._most_splits + 1  # of a row: its splits, and what it shares
        self.partials = max(min(max_seqs * each, PARTIALS), each, 2 * max_seqs)
        self.prefixes = SharedPrefixes(pool, self.group, self.configs[kernel.GROUP], max_seqs, len(self.windows))
        self._windows = torch.tensor(self.windows, dtype=torch.int32, device=device)
        size = work_tiles.HEADER + self.partials * work_tiles.FIELDS
        self._lists = torch.zeros(len(self.windows), size, dtype=torch.int32, device=device)
        self._partial_results = kernel.PartialResults.empty(self.partials, num_heads, num_kv, head_size, device)

    @property
    def capturable(self) -> bool:
        on_gpu = self.pool.keys.device
        return kernel.attention.runs_on(on_gpu) and work_tiles.plan_decode.runs_on(on_gpu)

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, alone: bool = False
    ) -> PagedPlan:
        """Make the lists on the device, inside the step's graph; the list of shared keys is there already."""
        sequences = len(lanes)
        assert sequences <= self.max_seqs
        splits = self._splits(sequences)
        split, most = (self.configs[kernel.DECODE].keys, self._most_splits + 1) if splits else (work_tiles.WHOLE, 1)
        rows = self.prefixes.rows if shared else None
        config = self.configs[kernel.DECODE]
        work_tiles.plan_decode(lanes, kv_lens, self._windows, self._lists, split, rows, config.unsplit)
        plan = PagedPlan(page_table, {window: [] for window in self.windows})
        for number, window in enumerate(self.windows):
            if rows is not None:
                group = self.configs[kernel.GROUP]
                bases = rows.bases[number]
                tiles = kernel.TileList(rows.list, self.max_seqs, group, kernel.SHARED, rows, bases, kv_lens)
                plan.work[window].append(tiles)
            kind = kernel.PRIVATE if shared else kernel.PLAIN
            tiles = kernel.TileList(self._lists[number], sequences * most, config, kind, split=splits, alone=alone)
            plan.work[window].append(tiles)
        return plan

    def _splits(self, sequences: int) -> bool:
        """Return whether decodes are split into blocks of keys. (Longer splits would have other bits.)"""
        config = self.configs[kernel.DECODE]
        tasks = hopper_decode.SPLIT_BELOW if config.streamed else config.programs
        idle = sequences * self.num_kv < self.chip.processors * tasks
        room = sequences * (self._most_splits + 1) <= self.partials and self._most_splits < work_tiles.SPLITS // 2
        return idle and room

    def plan(self, layout: StepLayout) -> PagedPlan:
        """Plan decodes as `plan_decode` does; make the lists of prefills on the host, and send all in one copy."""
        query_lens, kv_lens, lanes = layout.query_lens, layout.kv_lens, layout.lanes
        first = np.cumsum(query_lens) - query_lens
        decodes, device = layout.decodes, layout.page_table.device
        pieces = [np.ascontiguousarray(lanes[:decodes]).view(np.int32), kv_lens[:decodes].astype(np.int32)]
        chunks = work_tiles.Chunks(*(x[decodes:] for x in (first, query_lens, lanes, kv_lens)))
        counts = []
        if len(query_lens) > decodes:
            config = self.configs[kernel.PREFILL]
            tile = config.rows // self.group
            for window in self.windows:
                tiles = work_tiles.prefill_tiles(chunks, window, tile, config.keys)
                counts.append(len(tiles))
                pieces.append(work_tiles.list_of(tiles))
        on_device = upload_together(pieces, device)
        plan = PagedPlan(layout.page_table, {window: [] for window in self.windows})
        if decodes:
            lens = on_device[1]
            plan = self.plan_decode(on_device[0].view(torch.int64), lens, layout.page_table, layout.shared)
        for window, count, made in zip(self.windows, counts, on_device[2:], strict=False):  # counts: none or all
            plan.work[window].append(kernel.TileList(made, count, config))
        return plan

    def attend(self, plan: PagedPlan, layer: int, q: Tensor, window: int) -> Tensor:
        q = q.contiguous()  # results of the kernels are contiguous, results of their torch twins may not be
        out = torch.empty_like(q)
        for tiles in plan.work[window]:
            # Whether sharing compiles is known from the start on; where it does not, nothing is shared.
            launch: Callable[..., Any] = self._launch if tiles.kind == kernel.PLAIN else kernel.sharing
            launch(
                q, out, self.pool.keys, self.pool.values, plan.page_table, tiles, self._partial_results, layer, window,
                self.scale,
            )  # fmt: skip
        return out
