"""The second KV pool of `free_windows` in the runner: that of layers with windows, in places (window_pages.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device.pinned import upload, upload_together
from fastgen.engine.runner import Runner
from fastgen.engine.step import Launched, StepFeature
from fastgen.engine.window_pages import FreeWindows, Places
from fastgen.model.attention.interface import CapturableAttention, StepLayout
from fastgen.model.kv_pool import KVPool


class WindowedPool(KVPool):
    """Two pools that the model uses as one. full: of the layers without windows, by pages. windowed: of the others, by
    places. layers: the numbers of these others. place: int32 [pages + 1], the place of each page. number: of each layer
    in its pool."""

    def __init__(self, full: KVPool, windowed: KVPool, layers: Sequence[int]) -> None:
        self.__dict__.update(full.__dict__)
        self.full, self.windowed = full, windowed
        others = [layer for layer in range(len(full.keys) + len(layers)) if layer not in layers]
        places = {layer: (pool, at) for pool, of in ((full, others), (windowed, layers)) for at, layer in enumerate(of)}
        pairs = [places[layer] for layer in sorted(places)]
        self.number = [at for _, at in pairs]
        self.keys = [pool.keys[at] for pool, at in pairs]  # type: ignore[assignment]  # a sequence of tensors as well
        self.values = [pool.values[at] for pool, at in pairs]  # type: ignore[assignment]
        self.place = torch.full((full.spare + 1,), windowed.spare, dtype=torch.int32, device=full.whole.device)

    def slots_of_windows(self, slots: Tensor) -> Tensor:
        page = slots.div(self.page_size, rounding_mode="floor")  # padding has page -1, which is the spare one
        return torch.where(slots < 0, slots, self.place[page].long() * self.page_size + slots % self.page_size)

    def table_of_windows(self, table: Tensor) -> Tensor:
        """Return the places of the pages in a page table."""
        return self.place.index_select(0, table.flatten()).view_as(table)

    def wipe(self, fresh: Tensor) -> None:
        self.full.wipe(fresh)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        self.full.copy(sources, targets)
        self.windowed.copy(self.place[sources].long(), self.place[targets].long())


@dataclass(frozen=True)
class _Plan:
    full: Any
    windowed: Any


class WindowedAttention:
    """The attention of layers with windows over places, and of the others over pages (see Attention). Keys that rows
    share are read once only in the layers without windows, which does not change the results."""

    def __init__(self, pool: WindowedPool, full: CapturableAttention, windowed: CapturableAttention) -> None:
        self.pool, self._full, self._windowed = pool, full, windowed
        self.needs_clean_pages, self.prefixes = full.needs_clean_pages, full.prefixes

    @property
    def capturable(self) -> bool:
        return self._full.capturable

    def plan(self, layout: StepLayout) -> _Plan:
        own = replace(layout, page_table=self.pool.table_of_windows(layout.page_table), shared=False)
        return _Plan(self._full.plan(layout), self._windowed.plan(own))

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, reads_early: bool = False
    ) -> _Plan:
        own = self.pool.table_of_windows(page_table)
        full = self._full.plan_decode(lanes, kv_lens, page_table, shared, reads_early)
        return _Plan(full, self._windowed.plan_decode(lanes, kv_lens, own, False, reads_early))

    def lists(self, layout: StepLayout) -> list[NDArray[np.int32]]:
        return [*self._full.lists(layout), *self._windowed.lists(layout)]

    def list_sizes(self, tokens: int) -> list[int]:
        return [*self._full.list_sizes(tokens), *self._windowed.list_sizes(tokens)]

    def plan_lists(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, lists: Sequence[Tensor], shared: bool = False
    ) -> _Plan:
        count, own = len(self._full.list_sizes(0)) if lists else 0, self.pool.table_of_windows(page_table)
        full = self._full.plan_lists(lanes, kv_lens, page_table, lists[:count], shared)
        return _Plan(full, self._windowed.plan_lists(lanes, kv_lens, own, lists[count:]))

    def attend(self, plan: _Plan, layer: int, q: Tensor, window: int) -> Tensor:
        attention, own = (self._windowed, plan.windowed) if window else (self._full, plan.full)
        return attention.attend(own, self.pool.number[layer], q, window)


class PlaceKeeper(StepFeature[Places]):
    """Writes the places of pages before a step is built. wipes: see `Attention.needs_clean_pages`."""

    def __init__(self, pool: WindowedPool, wipes: bool) -> None:
        self._pool, self._wipes, self._device = pool, wipes, pool.place.device

    def before(self, step: Launched, payload: Places) -> None:
        pages, places = np.array(payload.pages, dtype=np.int64), np.array(payload.places, dtype=np.int32)
        self._pool.place.index_copy_(0, *upload_together([pages, places], self._device))
        if self._wipes:
            taken = places[places < self._pool.windowed.spare]
            self._pool.windowed.wipe(upload(taken.astype(np.int64), self._device))

    def clear(self) -> None:
        self._pool.place.fill_(self._pool.windowed.spare)


def attach(runner: Runner, options: FreeWindows) -> None:
    """Give a runner, whose pool has only the layers without windows, the pool of the others."""
    from fastgen.engine.startup import make_attention

    config, c, full = runner.config, runner.model.config, runner.pool
    num_kv, page_size, head_size = full.keys.shape[2:]
    sizes = len(options.layers), options.places(config), num_kv, page_size, head_size
    stored = full.dtype if full.fp8 else full.keys.dtype
    pool = WindowedPool(full, KVPool(*sizes, stored, full.whole.device, full.fp8, full.memory), options.layers)

    def attention_of(part: KVPool, windows: tuple[int, ...]) -> CapturableAttention:
        made = make_attention(
            config.attention, part, c.num_heads, windows, config.most_rows, config.max_model_len,
            config.deterministic, c.attention_scale,
        )  # fmt: skip
        return cast(CapturableAttention, made)

    of_windows = attention_of(pool.windowed, tuple(c.windows[layer] for layer in options.layers))
    attention = WindowedAttention(pool, attention_of(full, (0,)), of_windows)
    runner.pool, runner.attention = pool, attention
    runner.prefixes = attention.prefixes if config.max_seqs > 1 else None
    runner.features[Places] = PlaceKeeper(pool, attention.needs_clean_pages)
