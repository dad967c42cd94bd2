"""Recurrent layers in the runner: the plans of a hybrid model's steps, whose lanes have states as well as KV, and the
moves of states between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device.pinned import upload_together
from fastgen.engine.options import EngineConfig
from fastgen.engine.runner import Runner
from fastgen.engine.step import Launched, StepFeature
from fastgen.model.attention.interface import CapturableAttention, StepLayout
from fastgen.model.recurrent_layers import DeltaWeights, Recurrent
from fastgen.recurrent.planning import StateMoves
from fastgen.recurrent.states import KeptStates, LaneStates

if TYPE_CHECKING:  # only one of them is imported
    from fastgen.recurrent.on_cpu import CpuMixer
    from fastgen.recurrent.on_gpu import GpuMixer


@dataclass(frozen=True)
class HybridPlan:
    """The plans of a step: `own` of attention, `recurrent` of the recurrent layers (`MixPlan`, on a CPU `Runs`)."""

    own: object
    recurrent: Any


class HybridAttention:
    """The attention of a hybrid model (see Attention), whose plans are those of its recurrent layers as well.

    own: attention alone. mixer: computes recurrent layers. On a CPU, both lack the methods that only graphs need.
    """

    def __init__(self, own: CapturableAttention, mixer: GpuMixer) -> None:
        self._own, self._mixer = own, mixer
        self.needs_clean_pages, self.prefixes = own.needs_clean_pages, own.prefixes

    @property
    def capturable(self) -> bool:
        return self._own.capturable

    def plan(self, layout: StepLayout) -> HybridPlan:
        return HybridPlan(self._own.plan(layout), self._mixer.plan(layout))

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, reads_early: bool = False
    ) -> HybridPlan:
        own = self._own.plan_decode(lanes, kv_lens, page_table, shared, reads_early)
        return HybridPlan(own, self._mixer.plan_decode(lanes, kv_lens))

    def lists(self, layout: StepLayout) -> list[NDArray[np.int32]]:
        own = self._own.lists(layout)
        return [*own, *self._mixer.lists(layout)] if own else []

    def list_sizes(self, tokens: int) -> list[int]:
        return [*self._own.list_sizes(tokens), *self._mixer.list_sizes(tokens)]

    def plan_lists(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, lists: Sequence[Tensor], shared: bool = False
    ) -> HybridPlan:
        count = len(self._own.list_sizes(0)) if lists else 0
        own = self._own.plan_lists(lanes, kv_lens, page_table, lists[:count], shared)
        return HybridPlan(own, self._mixer.plan_lists(lanes, kv_lens, lists[count:]))

    def attend(self, plan: HybridPlan, layer: int, q: Tensor, window: int) -> Tensor:
        """See Attention. layer: its place in the pool, which has no recurrent layers."""
        return self._own.attend(plan.own, layer, q, window)

    def mix(self, plan: HybridPlan, number: int, weights: DeltaWeights, x: Tensor) -> Tensor:
        """Return the input of o, [T, value_size], of the `number`-th recurrent layer, and advance the states of the
        lanes. x: [T or more, outputs], the results of the layer's first product."""
        return self._mixer.mix(plan.recurrent, number, weights, x)


class StateMover(StepFeature[StateMoves]):
    """Moves states between lanes and slots. kept: the slots, if there are some."""

    def __init__(self, lanes: LaneStates, kept: KeptStates | None, device: torch.device) -> None:
        self._lanes, self._kept, self._device = lanes, kept, device

    def before(self, step: Launched, payload: StateMoves) -> None:
        if self._kept is None:
            assert not payload.saves, "nothing is kept"
            assert not payload.restores, "nothing is kept"
            return
        if payload.saves:
            self._kept.save(*self._send(payload.saves))
        if payload.restores:
            self._kept.restore(*self._send(payload.restores))

    def drawn(self, step: Launched, payload: StateMoves, tokens: Tensor) -> None:
        if payload.forks:
            self._lanes.copy(*self._send(payload.forks))

    def largest_payloads(self, config: EngineConfig, rows: int, top: int) -> Iterable[StateMoves]:
        lanes = range(config.max_seqs)
        slots = () if self._kept is None else range(self._kept.slots)
        forks = tuple((0, lane) for lane in lanes[1:])
        return [StateMoves(tuple(zip(lanes, slots, strict=False)), tuple(zip(slots, lanes, strict=False)), forks)]

    def _send(self, pairs: tuple[tuple[int, int], ...]) -> list[Tensor]:
        sources, targets = zip(*pairs, strict=True)
        return upload_together([np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)], self._device)


def attach(runner: Runner, shape: Recurrent, slots: int) -> None:
    """Give a runner, whose pool has only the layers with attention, the states of the others. slots: number of states
    that are kept for prefixes."""
    memory = runner.pool.memory
    lanes = LaneStates.empty(shape, runner.config.max_seqs + 1, runner.model.parameters.dtype, memory)
    mixer = make_mixer(runner, shape, lanes)
    runner.attention = HybridAttention(cast(CapturableAttention, runner.attention), cast("GpuMixer", mixer))
    kept = KeptStates(lanes, slots, memory) if slots else None
    runner.features[StateMoves] = StateMover(lanes, kept, runner.device)


def make_mixer(runner: Runner, shape: Recurrent, lanes: LaneStates) -> CpuMixer | GpuMixer:
    """Return what computes recurrent layers on the runner's device. Only this one is imported."""
    if runner.device.type == "cpu":
        from fastgen.recurrent.on_cpu import CpuMixer

        return CpuMixer(shape, lanes, runner.model.parameters.config.norm_eps)
    from fastgen.recurrent.on_gpu import GpuMixer

    return GpuMixer(shape, lanes, runner.config.max_seqs, runner.model.parameters.config.norm_eps)
