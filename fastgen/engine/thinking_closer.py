"""Thinking budgets in a step: masks that force the closing marks when a budget is used up."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import upload
from fastgen.engine.step import Launched, StepFeature
from fastgen.engine.thinking import LIKELY, Closing, ClosingPlan
from fastgen.model.transformer import Transformer

ROWS = 16  # number of rows whose logits are copied and compared at a time, to save memory


class ThinkingCloser(StepFeature[ClosingPlan]):
    """Restricts the lanes of a ClosingPlan to their closing marks, unless a mask forbids these."""

    def __init__(self, _: Transformer) -> None:
        """Take what every feature in BY_PAYLOAD gets; this one does not need the model."""

    def restrict(self, step: Launched, payload: ClosingPlan, bits: Tensor | None, last_tokens: Tensor) -> Tensor:
        assert step.logits is not None
        rows, vocab = step.logits.shape
        if bits is None:
            bits = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, device=step.logits.device)
        for at in range(0, len(payload.closings), ROWS):
            self._close(step.logits, step.lanes, payload.closings[at : at + ROWS], bits, last_tokens)
        return bits

    def _close(
        self, logits: Tensor, lanes: Tensor, closings: tuple[Closing, ...], bits: Tensor, last_tokens: Tensor
    ) -> None:
        """Change the mask of at most ROWS lanes."""
        columns = np.array([(c.lane, c.token, c.always, c.last, c.unless) for c in closings], dtype=np.int64).T
        lane, token, always, last, unless = upload(columns.copy(), logits.device)
        row = (lanes == lane[:, None]).int().argmax(1)  # one row each, which the host may not know
        logits = logits[row]
        likely = (logits > logits.gather(1, token[:, None])).sum(1) < LIKELY
        word, bit = token[:, None] // 32, (1 << token % 32).int()
        before = bits[row]
        allowed = (before.gather(1, word).squeeze(1) & bit) != 0
        fits = (last_tokens[lane] != last) == unless.bool()
        only = torch.zeros_like(before).scatter_(1, word, bit[:, None])
        closed = (likely | always.bool()) & allowed & fits
        bits.index_copy_(0, row, torch.where(closed[:, None], only, before))
