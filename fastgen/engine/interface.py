"""Protocols of the objects that the loop of the engine calls: a Runner on one rank, or the Leader of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fastgen.engine.options import EngineConfig
from fastgen.request import Batch, StepResult

if TYPE_CHECKING:  # these modules import torch
    from fastgen.engine.step import Launched
    from fastgen.model.weights import Update


class Weights(Protocol):
    """Protocol of the weights of all ranks; see LiveWeights."""

    @property
    def adapted(self) -> frozenset[str]: ...

    def update(self, update: Update, begin: Callable[[], None]) -> None: ...

    def keep_bases(self, layers: Collection[str], place: str) -> None: ...

    def find_not_finite(self) -> list[str]: ...

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int: ...

    def wake(self, tags: Collection[str]) -> None: ...


class StepRunner(Protocol):
    """Protocol of an object that computes steps; see Runner. A step is launched, then sampled if it is masked, and
    collected later."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def weights(self) -> Weights: ...

    def launch(self, batch: Batch) -> Launched: ...

    def sample(self, launched: Launched, masks: np.ndarray | None) -> None: ...

    def collect(self, launched: Launched) -> StepResult: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...
