"""Prompt scores in a step: the logprobs of given tokens, in pieces, since the logits of all rows would be too large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fastgen.device.pinned import to_host, upload
from fastgen.engine.options import EngineConfig
from fastgen.engine.prompt_scores import SCORE_ROWS, ChunkTargets, Scored, ScorePlan
from fastgen.engine.step import Launched, StepFeature
from fastgen.kernels import scoring
from fastgen.kernels.norm import rms_norm
from fastgen.model.sampler import LARGE
from fastgen.model.transformer import Transformer
from fastgen.request import Prefill, StepResult


class _Pending(NamedTuple):
    """The logprobs of the prompt tokens of a lane at positions start, start + 1, ..., in a copy to the host; or its
    embedding."""

    lane: int
    start: int
    logprobs: Tensor | None  # float32 [n]
    top_ids: Tensor | None  # int64 [n, top]
    top_logprobs: Tensor | None  # float32 [n, top]
    embedding: Tensor | None = None  # float32 [hidden]

    def read(self) -> Scored:
        if self.embedding is not None:
            return Scored(self.lane, self.start, [], embedding=self.embedding.tolist())
        assert self.logprobs is not None
        top = None
        if self.top_ids is not None and self.top_logprobs is not None:
            pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
            top = [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
        return Scored(self.lane, self.start, self.logprobs.tolist(), top)


class PromptScorer(StepFeature[ScorePlan]):
    """Computes the prompt logprobs that a ScorePlan asks for."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def before(self, step: Launched, payload: ScorePlan) -> None:
        step.all_rows = True

    def after(self, step: Launched, payload: ScorePlan, x: Tensor) -> None:
        pending: list[_Pending] = []
        first, by_lane = len(step.batch.decodes), {each.lane: each for each in payload.chunks}
        for chunk in step.batch.prefills:
            if (scored := by_lane.get(chunk.lane)) is not None:
                rows = x[first + scored.row : first + scored.row + len(scored.targets)]
                targets = upload(np.array(scored.targets, dtype=np.int64), x.device)
                temperature = min(max(scored.temperature, 1 / LARGE), LARGE)  # float32 holds no more
                for at in range(0, len(rows), SCORE_ROWS):
                    part = slice(at, at + SCORE_ROWS)
                    logits = self._model.logits(rows[part])
                    if logits is None:
                        continue
                    logprobs, _ = scoring.score(logits, targets[part], temperature)
                    top = scoring.alternatives(logits, scored.top) if scored.top else (None, None)
                    start = chunk.start + scored.row + 1 + at
                    pending.append(_Pending(chunk.lane, start, *map(to_host, (logprobs, *top))))
                if scored.embed:
                    pending.append(self._embedding(chunk, x[first + len(chunk.tokens) - 1]))
            first += len(chunk.tokens)
        step.held[ScorePlan] = pending

    def _embedding(self, chunk: Prefill, x: Tensor) -> _Pending:
        norm = self._model.parameters.norm
        state = rms_norm(x[None], norm.weight, norm.eps)[0].float()
        return _Pending(chunk.lane, chunk.start + len(chunk.tokens), None, None, None, to_host(state))

    def collect(self, step: Launched, payload: ScorePlan, result: StepResult) -> None:
        result.features += [pending.read() for pending in step.held[ScorePlan]]

    def largest_payloads(self, config: EngineConfig, rows: int, top: int) -> Iterator[ScorePlan]:
        if rows:
            yield ScorePlan((ChunkTargets(0, 0, np.zeros(min(rows, SCORE_ROWS), dtype=np.int32), top),))
