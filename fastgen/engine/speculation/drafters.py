"""The interface of all drafters, which propose tokens, and the drafter that copies from texts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastgen.device.pinned import upload
from fastgen.engine.speculation.planning import HISTORY, LONGEST, DraftPlan
from fastgen.kernels.drafts import StepDraws, Texts, recall


class Drafter(Protocol):
    """Drafts the next tokens of lanes on the device, without a wait. No draft can change a bit of an output, since each
    is verified by the draw that would have happened anyway."""

    def begin(self, plan: DraftPlan) -> None:
        """Act before a step whose Batch has this payload: begin lanes that draft from now on."""

    def draft(self, drawn: StepDraws, plan: DraftPlan, rows: Tensor, tokens: Tensor, counts: Tensor) -> bool:
        """Draft the next tokens of the lanes that a step drew for. Return whether it drafts now.

        rows: `Drafts.rows`. tokens: int64 [L, D], and counts: int32 [L], are written for these lanes.
        """


class TextDrafter:
    """Copies drafts from the text of a lane, which holds earlier outputs and its own tokens; see kernels/drafts.py."""

    def __init__(self, lanes: int, max_model_len: int, device: torch.device) -> None:
        self._texts = Texts.empty(lanes, HISTORY + min(max_model_len, LONGEST), device)
        self._device = device

    def begin(self, plan: DraftPlan) -> None:
        for lane, first, tokens in plan.texts:
            self._texts.begin(lane, first, upload(tokens, self._device))

    def draft(self, drawn: StepDraws, plan: DraftPlan, rows: Tensor, tokens: Tensor, counts: Tensor) -> bool:
        recall(drawn.lanes, drawn, rows, self._texts, tokens, counts)
        return True
