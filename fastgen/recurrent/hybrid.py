"""Recurrent layers in the runner: the KV pool and the attention of a hybrid model, whose recurrent layers have lanes
with states instead of KV, and the moves of states between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device.pinned import upload_together
from fastgen.engine.options import EngineConfig
from fastgen.engine.recurrent_states import RecurrentStates
from fastgen.engine.runner import Runner
from fastgen.engine.step import Launched, StepFeature
from fastgen.model.attention.interface import CapturableAttention, StepLayout
from fastgen.model.kv_pool import KVPool
from fastgen.model.parameters import Layer
from fastgen.model.recurrent_config import Recurrent
from fastgen.recurrent.planning import StateMoves
from fastgen.recurrent.states import KeptStates, LaneStates


class HybridPool(KVPool):
    """The KV pool of a hybrid model. own: of the layers with attention. number: of each layer in it; recurrent layers,
    which do not use it, have that of another."""

    def __init__(self, own: KVPool, shape: Recurrent) -> None:
        self.__dict__.update(own.__dict__)
        self.own, recurrent = own, set(shape.layers)
        self.number, count = list[int](), 0
        for layer in range(len(own.keys) + len(recurrent)):
            self.number.append(min(count, len(own.keys) - 1))
            count += layer not in recurrent
        self.keys = [own.keys[at] for at in self.number]  # type: ignore[assignment]  # a sequence of tensors as well
        self.values = [own.values[at] for at in self.number]  # type: ignore[assignment]


@dataclass(frozen=True)
class HybridPlan:
    """The plans of a step: `own` of attention, `recurrent` of the recurrent layers."""

    own: Any
    recurrent: Any


class Mixer(Protocol):
    """An implementation of recurrent layers. Its plans have their own type; see Attention."""

    def plan(self, layout: StepLayout) -> Any: ...

    def plan_decode(self, lanes: Tensor, kv_lens: Tensor) -> Any: ...

    def mix(self, plan: Any, number: int, layer: Layer, x: Tensor) -> Tensor:
        """Return the input of o of the `number`-th recurrent layer; see Recurrence.run."""


class CapturableMixer(Mixer, Protocol):
    """A Mixer whose steps with prefills a CUDA graph can hold; see CapturableAttention."""

    def lists(self, layout: StepLayout) -> list[NDArray[np.int32]]: ...

    def list_sizes(self, tokens: int) -> list[int]: ...

    def plan_lists(self, lanes: Tensor, kv_lens: Tensor, lists: Sequence[Tensor]) -> Any: ...


class HybridAttention:
    """The attention of a hybrid model (see Attention), whose plans are those of its recurrent layers as well."""

    def __init__(self, pool: HybridPool, own: CapturableAttention, mixer: CapturableMixer) -> None:
        self.pool, self._own, self._mixer = pool, own, mixer
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
        return self._own.attend(plan.own, self.pool.number[layer], q, window)


class RecurrentLayers:
    """Computes the recurrent layers of a model; see transformer.Recurrence. layers: their numbers."""

    def __init__(self, mixer: Mixer, layers: Sequence[int]) -> None:
        self._mixer, self._place = mixer, {layer: at for at, layer in enumerate(layers)}

    def run(self, plan: HybridPlan, number: int, layer: Layer, x: Tensor) -> Tensor:
        return self._mixer.mix(plan.recurrent, self._place[number], layer, x)


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


def attach(runner: Runner, options: RecurrentStates) -> None:
    """Give a runner, whose pool has only the layers with attention, the states of the others."""
    model, own, shape = runner.model, runner.pool, options.shape
    lanes = LaneStates.empty(shape, runner.config.max_seqs + 1, model.parameters.dtype, own.memory)
    pool, mixer = HybridPool(own, shape), make_mixer(runner, shape, lanes)
    attention = HybridAttention(pool, cast(CapturableAttention, runner.attention), cast(CapturableMixer, mixer))
    runner.pool, runner.attention = pool, attention
    model.recurrence = RecurrentLayers(mixer, shape.layers)
    kept = KeptStates(lanes, options.slots, own.memory) if options.slots else None
    runner.features[StateMoves] = StateMover(lanes, kept, runner.device)


def make_mixer(runner: Runner, shape: Recurrent, lanes: LaneStates) -> Mixer:
    """Return the implementation for the runner's device. Only this one is imported."""
    if runner.device.type == "cpu":
        from fastgen.recurrent.on_cpu import CpuMixer

        return CpuMixer(shape, lanes, runner.model.parameters.config.norm_eps)
    from fastgen.recurrent.on_gpu import GpuMixer

    return GpuMixer(shape, lanes, runner.config.max_seqs, runner.model.parameters.config.norm_eps)
