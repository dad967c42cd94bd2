"""A self-draft: an int4 copy of the model drafts for it.

A draft is a decode step of the copy: the row of the last token gives the first draft, the row of this draft the second
one, and so on. These rows attend to the model's keys and values, and write theirs to the same pages, at their own
positions. The model's next step computes the last token and the drafts that it verifies, which overwrites them; later
positions are written before they are read, as they are after wrong drafts. Pages are shared, cached and moved to the
host only with tokens that the model has computed.

Embedding and head are the model's. When its weights have changed, the copy is made again before the next draft.
Shape letters: see head.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.engine.warm_up import products_of
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.drafts import StepDraws
from fastgen.model.int4_linear import check_int4
from fastgen.model.linear import Linear
from fastgen.model.parameters import Parameters
from fastgen.model.quantization import Int4
from fastgen.model.transformer import StepPart
from fastgen.model.weights import Tensors, write
from fastgen.speculation.head import Head, HeadPlace, HeadWeights
from fastgen.speculation.heads import SelfDraftConfig
from fastgen.speculation.planning import DraftPlan

GROUPS = 128, 64, 32  # numbers of inputs with one scale; the first that divides all layers' inputs, else all inputs


class SelfDraftWeights(HeadWeights):
    """The int4 copy of the model's parameters, rounded to the nearest. On the CPU they are dequantized. changes: value
    of the target's `changes` at the last copy."""

    def __init__(self, config: SelfDraftConfig, target: Parameters, deterministic: bool) -> None:
        self.config, self._target = config, target
        group = next((size for size in GROUPS if not any(n % size for n in target.config.input_sizes)), 0)
        # Scales in the model's dtype: those of another one would take the kernels of a GPU more instructions.
        rounded = Int4(group_size=group, scale_dtype=str(target.dtype).removeprefix("torch."))
        form = replace(target.config, quantization=rounded)
        try:
            if target.device.type != "cpu":
                check_int4(target.config, rounded)
            self.parameters = Parameters(form, target.dtype, target.device, deterministic=deterministic, shared=target)
        except ValueError as error:
            raise ValueError(
                f"speculate='int4' cannot copy this model; leave it out, or take 'auto' ({error})"
            ) from error
        self.memory, self.changes = self.parameters.memory, -1

    @torch.no_grad()
    def load(self, dummy: bool = False) -> None:
        """Copy the model's weights if they have changed."""
        if self.changes == self._target.changes:
            return
        try:
            self._on_both(Parameters.unpack)
            targets = self.parameters.targets()
            views = ((name, shard.view) for name, shard in self._target.targets().items() if name in targets)
            write(targets, views)  # a head that the target got of its own is shared, and no target
        finally:
            self._on_both(Parameters.pack)
        self.changes = self._target.changes

    def _on_both(self, change: Callable[[Parameters], None]) -> None:
        """Pack or unpack the target and the copy. The head stays one, although packing on the CPU makes a new one."""
        change(self._target)
        self.parameters.lm_head = self._target.lm_head
        change(self.parameters)

    def update(self, named: Tensors) -> None:
        raise ValueError("speculate='int4' drafts with a copy of the model, which update_weights changes too")

    def attach(self, place: HeadPlace) -> SelfDraft:
        return SelfDraft(self, place)


class SelfDraft(Head):
    """The int4 copy of a model in a Runner. model: this copy."""

    layers: frozenset[int] = frozenset()

    def __init__(self, weights: SelfDraftWeights, place: HeadPlace) -> None:
        super().__init__(weights, place, weights.config.ahead)
        self._weights, self._attention, self.model = weights, place.attention, copy.copy(place.target)
        self.model.parameters, self.model.layers = weights.parameters, weights.parameters.layers

    @property
    def linears(self) -> Iterable[tuple[Linear, Fused]]:
        zero = torch.zeros(1, dtype=torch.int64, device=self._tokens.device)
        return products_of(self.model, self.model.slot_mapping(self._pool, zero, zero - 1, 1), self._pool)

    def observe(self, part: StepPart, number: int) -> None:
        raise AssertionError("a self-draft reads no layer")

    def draft(self, drawn: StepDraws, plan: DraftPlan, rows: Tensor, tokens: Tensor, counts: Tensor) -> bool:
        if plan.limits:
            self._weights.load()
        return super().draft(drawn, plan, rows, tokens, counts)

    def release(self) -> None:
        self._weights.memory.release(keep=False)
        self._weights.changes = -1

    def body(self, size: int) -> None:
        lanes, most = self._draw_lanes[:size], self.most_drafts(size)
        start, limits, ids = self._lanes.kv_lens[lanes], self._limits[lanes], self._lanes.state.last_token[lanes]
        for number in range(most):
            position = start + number
            ids = self.draw(self._logits(lanes, ids, position, position < limits), lanes, position + 1)
            self._tokens[lanes, number] = ids
        self._counts[lanes] = (limits - start).clamp(0, most)

    def _logits(self, lanes: Tensor, ids: Tensor, position: Tensor, inside: Tensor) -> Tensor:
        """Return the logits, float32 [S, V], of tokens ids, int64 [S]. position: int32 [S]. inside: bool [S], whether
        the lanes have slots for these positions."""
        at = torch.where(inside, position, 0).long()
        plan = self._attention.plan_decode(lanes, at.int() + 1, self._lanes.page_table)
        count, padding = len(at), (0, -len(at) % self.model.row_tile)
        slots = F.pad(self._slots(lanes, at, inside), padding, value=-1)
        mapping = self.model.slot_mapping(self._pool, F.pad(at, padding), slots, count)
        x = self.model.forward([StepPart(F.pad(ids, padding), mapping, plan)], self._pool, self._attention)
        return cast(Tensor, self.model.logits(x[:count]))
