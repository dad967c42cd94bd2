"""Recurrent layers as a feature of an engine; see engine/features.py. No torch here: the scheduler needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastgen.engine.features import Feature
from fastgen.engine.options import EngineConfig
from fastgen.engine.recurrent_states import RecurrentStates
from fastgen.engine.stats import Stats
from fastgen.recurrent.planning import StateKeeper

if TYPE_CHECKING:  # it imports torch
    from fastgen.engine.runner import Runner


class RecurrentFeature(Feature):
    """The states of recurrent layers, which a hybrid model asks for."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        for name, value in (("speculate", config.speculate), ("host_cache_gb", config.host_pages)):
            if value:
                raise ValueError(f"{name} does not work with models that have recurrent layers; leave it out")
        if config.device != "cpu" and config.dtype == "float32":
            raise ValueError(
                "models with recurrent layers run in bfloat16 or float16 on a GPU, whose kernels multiply no float32; "
                "take dtype='bfloat16', or device='cpu'"
            )
        if config.device != "cpu" and config.kernels == "torch":
            raise ValueError("models with recurrent layers need Triton on a GPU; install it, or take device='cpu'")
        if config.attention == "flash":
            raise ValueError("attention='flash' does not work with models that have recurrent layers; use 'auto'")

    def plan(self, stats: Stats) -> StateKeeper:
        assert isinstance(self.config.recurrent, RecurrentStates)
        return StateKeeper(self.config.recurrent)

    def attach(self, runner: Runner) -> None:
        """The import stands here because it loads torch."""
        from fastgen.recurrent.hybrid import attach

        assert isinstance(self.config.recurrent, RecurrentStates)
        attach(runner, self.config.recurrent)
