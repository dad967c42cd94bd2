"""Recurrent layers as a feature of an engine; see engine/features.py. No torch here: the scheduler needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastgen.engine.features import Feature
from fastgen.engine.options import EngineConfig
from fastgen.engine.stats import Stats
from fastgen.recurrent.planning import StateKeeper

if TYPE_CHECKING:  # it imports torch
    from fastgen.engine.runner import Runner

KEPT_STATES = 32  # for prefixes, at least; as many as lanes if these are more


class RecurrentFeature(Feature):
    """The states of recurrent layers, which a hybrid model asks for."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        for name in ("speculate", "host_cache_gb"):
            if getattr(config, name):
                raise ValueError(f"{name} does not work with models that have recurrent layers; leave it out")
        if config.device != "cpu" and config.dtype == "float32":
            raise ValueError(
                "models with recurrent layers run in bfloat16 or float16 on a GPU, whose kernels multiply no float32; "
                "take dtype='bfloat16', or device='cpu'"
            )
        if config.device != "cpu" and config.kernels == "torch":
            raise ValueError("models with recurrent layers need Triton on a GPU; install it, or take device='cpu'")

    def plan(self, stats: Stats) -> StateKeeper:
        return StateKeeper(num_slots(self.config))

    def attach(self, runner: Runner) -> None:
        """The import stands here because it loads torch."""
        from fastgen.recurrent.hybrid import attach

        assert self.config.recurrent is not None
        attach(runner, self.config.recurrent, num_slots(self.config))


def num_slots(config: EngineConfig) -> int:
    """Return how many states are kept for prefixes."""
    return max(config.max_seqs, KEPT_STATES) if config.prefix_cache else 0
