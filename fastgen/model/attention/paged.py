"""Attention of decodes and prefills by fastgen's kernels, which read the paged KV pool in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.device.pinned import upload_together
from fastgen.kernels import attention as kernel
from fastgen.kernels import hopper_decode, work_tiles
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.shared import SharedTiles, prefixes, saved_keys, shared_ranges, shared_tiles
from fastgen.model.kv_pool import KVPool

INVARIANT_PARTIALS = 8192  # partial results of a deterministic decode step; a step that would need more does not split
PREFILL_PARTIALS = 2048  # least number of partial results, of one query token each
SHARING_PAYS = 16e6  # from so many bytes of a layer's keys and values on that are not read again
FILLS = 0.5  # least number of unsplit tiles of shared keys, as a fraction of the programs that a chip holds
DEPTH = 64  # most partial results of a row where few rows share


@dataclass(frozen=True)
class PagedPlan:
    """A plan. work: for each window, the lists of work tiles of a layer with that window, one launch for each list."""

    page_table: Tensor
    work: dict[int, list[kernel.TileList]]


class PagedAttention:
    """Attention by fastgen's kernels (see Attention). A plan serves each layer once, and ends with the next plan that
    has decodes.

    num_heads: H; windows: of each layer, 0 for none; max_seqs, max_step_tokens: of a step, with padding; context: the
    largest kv_len. deterministic: the bits of a query's result do not depend on the step.
    The constructor allocates all memory except results and prefill lists, and CUDA graphs share it: `partials` partial
    results of (H * (D + 2) + K) * 4 bytes, and 32 bytes for each and distinct window. With H = 32, K = 8, D = 128
    and 1024 sequences these are 9216 results, 154 MB and 0.3 MB, whatever the size of the pool.
    """

    needs_clean_pages = False  # the kernels load no unwritten values

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        windows: tuple[int, ...],
        max_seqs: int,
        max_step_tokens: int,
        context: int,
        deterministic: bool = False,
    ) -> None:
        _, _, num_kv, page_size, head_size = pool.keys.shape
        device, dtype = pool.keys.device, pool.dtype
        self.pool = pool
        self.num_kv = num_kv
        self.max_seqs = max_seqs
        self.chip = Chip.of(device)
        self.group = num_heads // num_kv
        self.configs = {
            phase: kernel.configure(phase, self.group, head_size, dtype, self.chip, deterministic, page_size, pool.fp8)
            for phase in (kernel.DECODE, kernel.FEW, kernel.PREFILL, kernel.GROUP)
        }
        self._deterministic = deterministic
        shape = self.group, head_size, page_size, pool.keys.element_size()
        streams = hopper_decode.streams(self.chip, dtype, *shape)
        self._split_below = hopper_decode.SPLIT_BELOW if deterministic and streams else None
        self._most_splits = -(-context // self.configs[kernel.DECODE].keys)
        self.windows = tuple(sorted(set(windows)))
        self.shared_partials = max(min(work_tiles.PARTIALS, DEPTH * max_seqs), max_seqs)  # of all rows together
        decode_partials = work_tiles.partials_for(max_seqs, context) + self.shared_partials
        self.partials = max(decode_partials, min(PREFILL_PARTIALS, max_step_tokens * work_tiles.MOST_SPLITS))
        if self._deterministic:  # prefills are not split then, and a row has one partial
            each = self._most_splits + 1
            self.partials = max(min(max_seqs * each, INVARIANT_PARTIALS), each, 2 * max_seqs)
        self._windows = torch.tensor(self.windows, dtype=torch.int32, device=device)
        size = work_tiles.HEADER + self.partials * work_tiles.FIELDS
        self._lists = torch.zeros(len(self.windows), size, dtype=torch.int32, device=device)
        self._shared = _SharedTable(max_seqs, self.shared_partials, len(self.windows), device)
        self._partial_results = kernel.PartialResults.empty(self.partials, num_heads, num_kv, head_size, device)

    @property
    def capturable(self) -> bool:
        on_gpu = self.pool.keys.device
        return kernel.attention.runs_on(on_gpu) and work_tiles.plan_decode.runs_on(on_gpu)

    @property
    def shares(self) -> bool:
        return self.pool.keys.device not in kernel.sharing.refused

    def share(self, lanes: NDArray[np.int64], full: NDArray[np.int64], tables: NDArray[np.int32]) -> bool:
        levels = shared_ranges(tables, lanes, full)
        page_size, head_size = self.pool.keys.shape[3:]
        config = self.configs[kernel.GROUP]
        tile, tasks = config.rows // self.group, max(self.chip.processors * config.programs // self.num_kv, 1)
        if self._deterministic:
            levels = prefixes(levels, page_size, config.keys, tile)
        key_bytes = 2 * self.num_kv * head_size * self.pool.keys.element_size()
        if not levels or saved_keys(levels, page_size) * key_bytes < SHARING_PAYS:
            self._shared.clear()
            return False
        most = 0 if self._deterministic else self.shared_partials  # 0: no range is split
        found = shared_tiles(levels, lanes, page_size, tile, config.keys, tasks, most)
        idle = self._deterministic and len(found.tiles) < FILLS * tasks  # where it is slower than each row's own splits
        if idle or int(found.partials.sum()) > self.shared_partials:  # or trees are so deep that there is no room
            self._shared.clear()
            return False
        self._shared.write(found)
        return True

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, alone: bool = False
    ) -> PagedPlan:
        """Make the lists on the device, inside the step's graph; the list of shared keys is there already."""
        sequences = len(lanes)
        assert sequences <= self.max_seqs
        split, most = self._splits(sequences)
        rows = self._shared.rows if shared else None
        work_tiles.plan_decode(lanes, kv_lens, self._windows, self._lists, split, most, rows)
        few = sequences * self.num_kv <= kernel.FILLED * self.chip.processors
        config = self.configs[kernel.FEW if few else kernel.DECODE]
        plan = PagedPlan(page_table, {window: [] for window in self.windows})
        for number, window in enumerate(self.windows):
            if rows is not None:
                group = self.configs[kernel.GROUP]
                bases = rows.bases[number]
                tiles = kernel.TileList(rows.list, self.shared_partials, group, kernel.SHARED, rows, bases, kv_lens)
                plan.work[window].append(tiles)
            kind = kernel.PRIVATE if shared else kernel.PLAIN
            tiles = kernel.TileList(
                self._lists[number], sequences * (most + 1), config, kind, split=most > 1, alone=alone
            )
            plan.work[window].append(tiles)
        return plan

    def _splits(self, sequences: int) -> tuple[int, int]:
        """Return the keys of one split of a decode, and the most splits of a sequence, above which splits get longer.

        Deterministic splits do not get longer: they would have other bits.
        """
        if not self._deterministic:
            return work_tiles.split_of(sequences, self.num_kv, self.chip), work_tiles.splits_of(sequences)
        config = self.configs[kernel.DECODE]
        tasks = config.programs if self._split_below is None else self._split_below
        idle = sequences * self.num_kv < self.chip.processors * tasks
        room = sequences * (self._most_splits + 1) <= self.partials and self._most_splits < work_tiles.SPLITS // 2
        if idle and room:
            return config.keys, self._most_splits
        return work_tiles.WHOLE, 1

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
            tasks = max(self.chip.processors * config.programs // self.num_kv, 1)
            for window in self.windows:
                most = 0 if self._deterministic else self.partials  # 0: no tile's keys are split
                tiles = work_tiles.prefill_tiles(chunks, window, tile, config.keys, tasks, most)
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
        q = q.contiguous()  # results of the kernels are contiguous, those of their torch twins may not be
        out = torch.empty_like(q)
        for tiles in plan.work[window]:
            launch: Callable[..., Any] = kernel.attention if tiles.kind == kernel.PLAIN else kernel.sharing
            # Where it does not compile, no twin gives the same bits for all steps. (Of shared keys that is known from
            # the start on, and nothing is shared then.)
            if self._deterministic and tiles.kind == kernel.PLAIN:
                launch = kernel.attention.launch
            launch(
                q, out, self.pool.keys, self.pool.values, plan.page_table, tiles, self._partial_results, layer, window
            )
        return out


class _SharedTable:
    """The shared keys of a step at fixed addresses, for CUDA graphs, in one tensor that the host sends in one copy."""

    def __init__(self, max_seqs: int, partials: int, windows: int, device: torch.device) -> None:
        sizes = [
            -(-size // 4) * 4
            for size in (max_seqs, max_seqs, partials, work_tiles.HEADER + partials * work_tiles.FIELDS)
        ]
        self._whole = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        ends, counts, members, tiles = torch.split(self._whole, sizes)
        bases = torch.zeros(windows, sizes[0], dtype=torch.int32, device=device)
        self.rows = work_tiles.SharedRows(tiles, members, ends, counts, bases)

    def clear(self) -> None:
        """Share nothing."""
        self._whole.zero_()

    def write(self, found: SharedTiles) -> None:
        """Send what rows share, without waiting for the device. Rows after the last one share nothing."""
        rows = self.rows
        listed = work_tiles.list_of(found.tiles)
        sizes = [len(rows.ends), len(rows.partials), len(rows.members), len(listed)]
        host = torch.zeros(sum(sizes), dtype=torch.int32)
        numbers = (found.ends, found.partials, found.members, listed)
        for part, each in zip(torch.split(host, sizes), numbers, strict=True):
            part[: len(each)] = torch.from_numpy(each)
        if self._whole.device.type == "cuda":
            host = host.pin_memory()
        self._whole[: len(host)].copy_(host, non_blocking=True)
