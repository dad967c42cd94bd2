"""Protocols of the objects that the loop calls (a Runner on one rank, or the Leader of several ranks), and the hooks
that the scheduler calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fastgen.engine.options import EngineConfig
from fastgen.request import Batch, Prefill, Sequence, StepResult

if TYPE_CHECKING:  # these modules import torch
    from fastgen.engine.step import Launched
    from fastgen.model.weight_updates import WeightUpdate
    from fastgen.model.weights import Tensors


class Weights(Protocol):
    """Protocol of the weights of all ranks; see LiveWeights."""

    @property
    def adapted(self) -> frozenset[str]: ...

    def update(self, update: WeightUpdate, begin: Callable[[], None]) -> None: ...

    def keep_bases(self, layers: Collection[str], place: str) -> None: ...

    def update_drafter(self, named: Tensors) -> None: ...

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


class PlanFeature:
    """The hooks of a feature in the scheduler; see engine.step.StepFeature for the hooks in the runner.

    `Scheduler.schedule` calls `chunk` for each prefill chunk, then `payload` once. `Scheduler.update` calls `update`
    first, and then `finish` and `leave` for sequences that end.
    """

    def chunk(self, chunk: Prefill, num_sequences: int) -> None:
        """Note a prefill chunk of the next batch. num_sequences: how many run or wait."""

    def payload(self, batch: Batch) -> object | None:
        """Return the feature's payload for a batch whose other fields are complete, or None; forget what `chunk`
        noted."""

    def update(self, batch: Batch, result: StepResult) -> None:
        """Read the feature's results of a batch, before its tokens are appended to their sequences."""

    def leave(self, sequence: Sequence) -> None:
        """Forget the lane of a sequence, which leaves it. `sequence.lane` is still set."""

    def finish(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended with "stop" or "length", with at least one token."""
