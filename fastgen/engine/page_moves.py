"""The pages of a step: those that leave for the host tier, fresh ones, and those that come back."""

from __future__ import annotations

import numpy as np

from fastgen.device.pinned import upload
from fastgen.engine.pages import PageMoves
from fastgen.engine.step import Launched, StepFeature
from fastgen.model.host_tier import HostTier
from fastgen.model.kv_pool import KVPool


class PageMover(StepFeature[PageMoves]):
    """Saves, wipes and loads pages before a step. wipes: see Attention.needs_clean_pages."""

    def __init__(self, pool: KVPool, tier: HostTier | None, wipes: bool) -> None:
        self.tier = tier
        self._pool, self._wipes = pool, wipes

    def before(self, step: Launched, payload: PageMoves) -> None:
        """Loads are only started; see HostTier.load."""
        if payload.saves:
            assert self.tier is not None
            self.tier.save(payload.saves)
        if payload.fresh and self._wipes:
            self._pool.wipe(upload(np.array(payload.fresh, dtype=np.int64), self._pool.whole.device))
        if payload.loads:
            assert self.tier is not None
            assert step.batch.prefills, "a CUDA graph cannot wait for loads"
            step.arrivals = self.tier.load(payload.loads)
