"""The host tier as a feature of an engine; see features.py. No torch here: the scheduler needs this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastgen.engine.features import Feature
from fastgen.engine.host_pages import PageMoves, TieredPageAllocator
from fastgen.engine.interface import PlanFeature
from fastgen.engine.options import EngineConfig
from fastgen.engine.pages import PageAllocator
from fastgen.engine.stats import Stats
from fastgen.request import Batch

if TYPE_CHECKING:  # it imports torch
    from fastgen.engine.runner import Runner


class HostPages(PlanFeature):
    """The moves of each batch between the KV pool and the host tier. stats: they are counted there."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def make_allocator(self, config: EngineConfig) -> PageAllocator:
        self._pages = TieredPageAllocator(config.num_pages, config.page_size, config.host_pages)
        return self._pages

    def payload(self, batch: Batch) -> PageMoves | None:
        moves = self._pages.take_moves()
        if moves is not None:
            self._stats.pages_saved += len(moves.saves)
            self._stats.pages_loaded += len(moves.loads)
        return moves


class HostTierFeature(Feature):
    """The host tier, which `EngineConfig.host_pages` asks for."""

    def plan(self, stats: Stats) -> HostPages:
        return HostPages(stats)

    def attach(self, runner: Runner) -> None:
        """The imports stand here because they load torch."""
        from fastgen.engine.page_moves import PageMover
        from fastgen.model.host_tier import HostTier

        runner.features[PageMoves] = PageMover(HostTier(runner.pool, runner.config.host_pages))
