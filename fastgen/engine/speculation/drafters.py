"""What drafts tokens: the interface of all drafters, and the drafter that copies from texts."""

from __future__ import annotations

from typing import Protocol

import torch

from fastgen.device.pinned import upload
from fastgen.engine.speculation.planning import HISTORY, LONGEST, DraftPlan
from fastgen.kernels.drafts import Drafts, Drawn, Texts, recall


class Drafter(Protocol):
    """Drafts the next tokens of lanes on the device, without a wait. No draft can change a bit of an output, since each
    is verified by the draw that would have happened anyway."""

    @property
    def name(self) -> str:
        """The name of the drafter in `Stats`."""

    def begin(self, plan: DraftPlan) -> None:
        """Act before a step whose Batch has this payload: begin lanes that draft from now on."""

    def draft(self, drawn: Drawn, plan: DraftPlan, drafts: Drafts) -> None:
        """Draft the next tokens of the lanes that a step drew for. Writes `drafts.tokens` and `drafts.counts` for these
        lanes, and the first token of each draft, or -1, to `drawn.found`."""


class TextDrafter:
    """Copies drafts from the text of a lane, which holds earlier outputs and its own tokens; see kernels/drafts.py."""

    name = "text"

    def __init__(self, lanes: int, max_model_len: int, device: torch.device) -> None:
        self._texts = Texts.empty(lanes, HISTORY + min(max_model_len, LONGEST), device)
        self._device = device

    def begin(self, plan: DraftPlan) -> None:
        for lane, first, tokens in plan.texts:
            self._texts.begin(lane, first, upload(tokens, self._device))

    def draft(self, drawn: Drawn, plan: DraftPlan, drafts: Drafts) -> None:
        recall(drawn.lanes, drawn, self._texts, drafts)
