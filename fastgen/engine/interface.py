"""Protocols of the objects that the loop calls (a Runner on one rank, or the Leader of several ranks), and the hooks
that the scheduler calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fastgen.engine.options import EngineConfig
from fastgen.request import Batch, Prefill, Sequence, StepResult

if TYPE_CHECKING:  # the scheduler imports this module too; step and weights import torch
    from fastgen.engine.admission import LaneTable
    from fastgen.engine.pages import PageAllocator
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

    def checksums(self) -> list[dict[str, str]]: ...

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


class EarlierOutputs(Protocol):
    """Protocol of the outputs of earlier requests that a feature keeps. tokens: how many, prompts included."""

    tokens: int

    def add(self, prompt: list[int], output: list[int]) -> None: ...

    def clear(self) -> None: ...


class PlanFeature:
    """The hooks of a feature in the scheduler; see engine.step.StepFeature for the hooks in the runner.

    `Scheduler.schedule` calls `plan_rows` of the feature with `plans_rows`, then `cut` and `chunk` for each prefill
    chunk, then `payload` once. `Scheduler.update` calls `update` first, `accepts` of the feature with `makes_masks` for
    each token of a masked step, and `finish` and `leave` for sequences that end.

    history: the outputs that it keeps of earlier requests, if it does. makes_masks: it fills the masks of masked steps.
    plans_rows: decodes may have several rows. At most one feature does either. in_flight: number of steps of several
    rows that are not read; until then `computed` and `pending` of their sequences are upper bounds.
    """

    history: EarlierOutputs | None = None
    makes_masks = False
    plans_rows = False
    in_flight = 0

    def make_allocator(self, config: EngineConfig) -> PageAllocator | None:
        """Return an allocator of the pages, if the feature has its own."""
        return None

    def reset(self, lanes: LaneTable) -> None:
        """Forget all sequences. lanes: a new table, which is empty."""

    def plan_rows(
        self, decoding: Collection[Sequence], prefills: bool, in_flight: int, room: Callable[[Sequence, int], int]
    ) -> tuple[int, ...] | None:
        """Return the maximum number of rows of each decode in the next batch; () for one row each. None if the step in
        flight must be read first.

        prefills: the batch may have prefill chunks too. in_flight: number of steps that are not read. room: returns how
        many of a sequence's wanted rows its pages have room for.
        """
        return ()

    def cut(self, sequence: Sequence, count: int) -> int:
        """Return how many of the next `count` known tokens of a sequence are its next prefill chunk, at least one."""
        return count

    def chunk(self, chunk: Prefill, num_sequences: int) -> None:
        """Note a prefill chunk of the next batch. num_sequences: how many run or wait."""

    def payload(self, batch: Batch) -> object | None:
        """Return the feature's payload for a batch whose other fields are complete, or None; forget what `chunk`
        noted."""
        return None

    def fill_masks(self, sequences: SequenceOf[Sequence], vocab_size: int) -> np.ndarray:
        """Return the tokens that the sequences which draw in a masked step may draw: int32 [R, ceil(V / 32)], see
        TokenMask. All must know their last token. By default all tokens are allowed."""
        return np.full((len(sequences), -(-vocab_size // 32)), -1, dtype=np.int32)

    def update(self, batch: Batch, result: StepResult) -> None:
        """Read the feature's results of a batch, before its tokens are appended to their sequences."""

    def accepts(self, sequence: Sequence, token: int) -> bool:
        """Return whether a sequence can go on with a token of a masked step, or with one that could not be drawn (-1);
        if not, `sequence.error` may say why."""
        return True

    def leave(self, sequence: Sequence) -> None:
        """Forget the lane of a sequence, which leaves it. `sequence.lane` is still set."""

    def finish(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended with "stop" or "length", with at least one token."""
