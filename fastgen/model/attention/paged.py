"""Attention of decodes and prefills by fastgen's kernels, which read the paged KV pool in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.device.pinned import upload_together
from fastgen.kernels import attention as kernel
from fastgen.kernels import work_tiles
from fastgen.kernels.hopper import decode as hopper_decode
from fastgen.kernels.triton.attention import configure
from fastgen.kernels.work_tiles import SharedRows
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
            phase: configure(phase, self.group, head_size, dtype, self.chip, page_size, pool.fp8)
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
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, reads_early: bool = False
    ) -> PagedPlan:
        """Make the lists on the device, inside the step's graph; the list of shared keys is there already."""
        assert len(lanes) <= self.max_seqs
        splits, rows = len(lanes) <= self._most_split, self.prefixes.rows if shared else None
        return self._plan_decode(lanes, kv_lens, page_table, rows, splits, reads_early)

    def _plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, table: Tensor, rows: SharedRows | None, splits: bool, reads_early: bool
    ) -> PagedPlan:
        """See `plan_decode`. rows: the ranges that rows share. splits: whether some sequences may be split."""
        config, most = self.configs[kernel.DECODE], len(lanes) * (self._most_splits + 1 if splits else 1)
        work_tiles.plan_decode(
            lanes, kv_lens, self._windows, self._lists, config.keys, rows, config.unsplit, self._most_split
        )
        plan = PagedPlan(table, {window: [] for window in self.windows})
        for number, window in enumerate(self.windows):
            if rows is not None:
                group = self.configs[kernel.GROUP]
                bases = rows.bases[number]
                tiles = kernel.TileList(rows.list, self.max_seqs, group, kernel.SHARED, rows, bases, kv_lens)
                plan.work[window].append(tiles)
            kind = kernel.PLAIN if rows is None else kernel.PRIVATE
            tiles = kernel.TileList(self._lists[number], most, config, kind, split=splits, reads_early=reads_early)
            plan.work[window].append(tiles)
        return plan

    def plan(self, layout: StepLayout) -> PagedPlan:
        """Plan decodes as `plan_decode` does; make the lists of prefills on the host, and send all in one copy."""
        table, decodes = layout.page_table, layout.decodes
        own: list[NDArray[Any]] = [layout.lanes[:decodes], layout.kv_lens[:decodes].astype(np.int32)]
        lanes, kv_lens, *lists = upload_together([*own, *self.lists(layout)], table.device)
        plan = PagedPlan(table, {window: [] for window in self.windows})
        if decodes:
            plan = self.plan_decode(lanes, kv_lens, table, layout.shared)
        return self._with_prefills(plan, lists)

    def plan_lists(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, lists: Sequence[Tensor], shared: bool = False
    ) -> PagedPlan:
        assert len(lanes) <= self.max_seqs
        rows = self.prefixes.rows if shared else None
        plan = self._plan_decode(lanes, kv_lens, page_table, rows, self._most_split > 0, reads_early=False)
        return self._with_prefills(plan, lists)

    def lists(self, layout: StepLayout) -> list[NDArray[np.int32]]:
        query_lens, decodes = layout.query_lens, layout.decodes
        if len(query_lens) == decodes:
            return []
        first = np.cumsum(query_lens) - query_lens
        chunks = work_tiles.Chunks(*(x[decodes:] for x in (first, query_lens, layout.lanes, layout.kv_lens)))
        config = self.configs[kernel.PREFILL]
        tile = config.rows // self.group
        return [
            work_tiles.list_of(work_tiles.prefill_tiles(chunks, window, tile, config.keys)) for window in self.windows
        ]

    def list_sizes(self, tokens: int) -> list[int]:
        tile = self.configs[kernel.PREFILL].rows // self.group
        most = tokens // tile + min(tokens, self.max_seqs)  # each chunk may end with a tile that is not full
        return [work_tiles.HEADER + most * work_tiles.FIELDS] * len(self.windows)

    def _with_prefills(self, plan: PagedPlan, lists: Sequence[Tensor]) -> PagedPlan:
        """Add the lists of prefills, one for each window or none, to the plan of the decodes."""
        config = self.configs[kernel.PREFILL]
        for window, made in zip(self.windows if lists else (), lists, strict=True):
            most = (len(made) - work_tiles.HEADER) // work_tiles.FIELDS
            plan.work[window].append(kernel.TileList(made, most, config))
        return plan

    @property
    def _most_split(self) -> int:
        """Return up to how many sequences decodes are split into blocks of keys: as many as leave processors idle, and
        as partial results have room for. (Longer splits would have other bits.)"""
        config = self.configs[kernel.DECODE]
        tasks = self.chip.processors * (hopper_decode.SPLIT_BELOW if config.streamed else config.programs)
        idle, room = math.ceil(tasks / self.num_kv) - 1, self.partials // (self._most_splits + 1)
        return min(idle, room) if self._most_splits < work_tiles.SPLITS // 2 else 0

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
