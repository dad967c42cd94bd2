"""Prompt scores in a step: hidden states, and the logprobs of given tokens. Logprobs are computed in pieces, since the
logits of all rows would be too large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import to_host, upload
from fastgen.engine.options import EngineConfig
from fastgen.engine.prompt_scores import SCORE_ROWS, ChunkStates, ChunkTargets, Scored, ScorePlan
from fastgen.engine.step import Launched, StepFeature
from fastgen.kernels import scoring
from fastgen.kernels.norm import rms_norm
from fastgen.model.sampler import LARGE
from fastgen.model.transformer import KeptStreams, Transformer
from fastgen.request import Prefill, StepResult


class _Logprobs(NamedTuple):
    """The logprobs of the prompt tokens of a lane at positions start, start + 1, ..., in a copy to the host."""

    lane: int
    start: int
    logprobs: Tensor  # float32 [n]
    top_ids: Tensor | None  # int64 [n, top]
    top_logprobs: Tensor | None  # float32 [n, top]
    ranks: Tensor | None  # int64 [n]

    def read(self) -> Scored:
        scored = Scored(self.lane, self.start, self.logprobs.tolist())
        if self.top_ids is not None and self.top_logprobs is not None and self.ranks is not None:
            pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
            scored.top_logprobs = [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
            scored.ranks = self.ranks.tolist()
        return scored


class _States(NamedTuple):
    """The hidden states at positions of a lane, in copies to the host. first: the first of these positions."""

    lane: int
    first: int
    of_layers: list[Tensor]  # [n, hidden]

    def read(self) -> ChunkStates:
        values = torch.stack(self.of_layers)
        bits = values.view(torch.int16) if values.itemsize == 2 else values
        return ChunkStates(self.lane, self.first, bits.numpy())


class PromptScorer(StepFeature[ScorePlan]):
    """Computes the prompt logprobs and the hidden states that a ScorePlan asks for."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def before(self, step: Launched, payload: ScorePlan) -> None:
        step.all_rows = True
        last = len(self._model.layers)
        if kept := {layer - 1 for chunk in payload.chunks for layer in chunk.layers if layer < last}:
            rows = [rows for _, _, rows in _chunks_with_states(step, payload)]
            device = self._model.parameters.embedding.device
            step.kept = KeptStreams(kept, upload(np.concatenate(rows), device), on_host=True)

    def after(self, step: Launched, payload: ScorePlan, x: Tensor) -> None:
        pending: list[_Logprobs | _States] = []
        for chunk, scored, first in _chunks(step, payload):
            pending += self._logprobs(chunk, scored, x[first + scored.row : first + scored.row + len(scored.targets)])
        start = 0
        for chunk, scored, rows in _chunks_with_states(step, payload):
            assert scored.state_rows is not None
            end = start + len(rows)
            states = [self._states(step, layer, slice(start, end), rows, x) for layer in scored.layers]
            pending.append(_States(chunk.lane, chunk.start + int(scored.state_rows[0]), states))
            start = end
        step.held[ScorePlan] = pending

    def _logprobs(self, chunk: Prefill, scored: ChunkTargets, rows: Tensor) -> Iterator[_Logprobs]:
        """Yield the logprobs of the targets of a chunk. rows: [n, hidden], which predict them."""
        targets = upload(np.array(scored.targets, dtype=np.int64), rows.device)
        temperature = min(max(scored.temperature, 1 / LARGE), LARGE)  # float32 holds no more
        for at in range(0, len(rows), SCORE_ROWS):
            part = slice(at, at + SCORE_ROWS)
            logits = self._model.logits(rows[part])
            if logits is None:
                continue
            logprobs, _ = scoring.score(logits, targets[part], temperature)
            top: tuple[Tensor | None, ...] = (None, None, None)
            if scored.top:
                top = *scoring.alternatives(logits, scored.top), scoring.ranks(logits, targets[part])
            yield _Logprobs(chunk.lane, chunk.start + scored.row + 1 + at, *map(to_host, (logprobs, *top)))

    def _states(self, step: Launched, layer: int, kept: slice, rows: np.ndarray, x: Tensor) -> Tensor:
        """Return the hidden states of a layer, [n, hidden], in a copy to the host. kept: their places in `step.kept`.
        rows: the same rows of the step. x: the residual stream after the last layer."""
        if layer < len(self._model.layers):
            assert step.kept is not None
            return step.kept.streams[layer - 1][kept]
        norm = self._model.parameters.norm
        states: Tensor = rms_norm(x[upload(rows, x.device)], norm)
        return to_host(states)

    def collect(self, step: Launched, payload: ScorePlan, result: StepResult) -> None:
        result.features += [pending.read() for pending in step.held[ScorePlan]]

    def largest_payloads(self, config: EngineConfig, rows: int, top: int) -> Iterator[ScorePlan]:
        if rows:
            yield ScorePlan((ChunkTargets(0, 0, np.zeros(min(rows, SCORE_ROWS), dtype=np.int32), top),))


def _chunks(step: Launched, payload: ScorePlan) -> Iterator[tuple[Prefill, ChunkTargets, int]]:
    """Yield the chunks of a step that are scored, with their targets and the row of the step at which they begin."""
    first, by_lane = len(step.batch.decodes), {each.lane: each for each in payload.chunks}
    for chunk in step.batch.prefills:
        if (scored := by_lane.get(chunk.lane)) is not None:
            yield chunk, scored, first
        first += len(chunk.tokens)


def _chunks_with_states(step: Launched, payload: ScorePlan) -> Iterator[tuple[Prefill, ChunkTargets, np.ndarray]]:
    """Yield the chunks whose hidden states are wanted, with their rows in the step: int64 [n]."""
    for chunk, scored, first in _chunks(step, payload):
        if scored.state_rows is not None:
            yield chunk, scored, first + scored.state_rows
