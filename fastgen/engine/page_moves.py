"""The host tier in the runner: pages are saved before a step, and loaded while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from fastgen.engine.host_pages import PageMoves
from fastgen.engine.options import EngineConfig
from fastgen.engine.step import Launched, StepFeature
from fastgen.model.host_tier import HostTier


class PageMover(StepFeature[PageMoves]):
    """Moves pages to a host tier and back."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier

    def before(self, step: Launched, payload: PageMoves) -> None:
        """Loads are only started; see HostTier.load."""
        if payload.saves:
            self.tier.save(payload.saves)
        if payload.loads:
            assert step.batch.prefills, "a CUDA graph cannot wait for loads"
            step.arrivals = self.tier.load(payload.loads)

    def largest_payloads(self, config: EngineConfig, rows: int, top: int) -> Iterator[PageMoves]:
        """The spare page goes to the host, and comes back."""
        yield PageMoves(((config.num_pages, 0),), ((0, config.num_pages),))
