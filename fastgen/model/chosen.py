"""Logprobs of ids that requests choose (`SamplingParams.logprob_token_ids`), for losses on single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import upload
from fastgen.option import MAX_CHOSEN
from fastgen.request import LaneStart, SamplingParams


class ChosenTokens:
    """The chosen ids of S lanes on the device. ids: int64 [S, MAX_CHOSEN], a lane's ids first; the rest is unused."""

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self.ids = torch.zeros(max_seqs, MAX_CHOSEN, dtype=torch.int64, device=device)

    def start(self, starts: Sequence[LaneStart]) -> None:
        """Write the ids of lanes that start."""
        asking = [(s.lane, list(s.params.logprob_token_ids)) for s in starts if len(s.params.logprob_token_ids)]
        if not asking:
            return
        width = max(len(ids) for _, ids in asking)
        rows = np.array([[lane, *ids, *[0] * (width - len(ids))] for lane, ids in asking], dtype=np.int64)
        uploaded = upload(rows, self.ids.device)
        self.ids[:, :width].index_copy_(0, uploaded[:, 0], uploaded[:, 1:])

    def logprobs(self, logits: Tensor, lanes: Tensor, count: int, totals: Tensor | None = None) -> Tensor:
        """Return the raw logprobs of the first `count` ids of lanes [R]: float32 [R, count].

        logits: [R, V], untouched. totals: float32 [2, R], the largest logit of each row and the logarithm of its sum of
        exp(logit - largest); None: they are computed.
        """
        ids = self.ids[lanes, :count]
        if totals is None:
            return logits.float().log_softmax(1).gather(1, ids)
        best, log_total = totals[:, :, None]
        result: Tensor = logits.gather(1, ids).float() - best - log_total
        return result


def alternatives_of(
    params: Sequence[SamplingParams], ids: Tensor | None, logprobs: Tensor | None, chosen: Tensor | None
) -> list[dict[int, float]] | None:
    """Return the alternatives of each token, {id: logprob}, or None if no row asks for any: the likeliest, best first,
    and then the ids that the row has chosen.

    ids, logprobs: [R, k], the likeliest tokens of each row, of which it may want fewer. chosen: float32 [R, c], the
    logprobs of each row's chosen ids, and then unused values. All are on the host.
    """
    if ids is None and chosen is None:
        return None
    alternatives: list[dict[int, float]] = [{} for _ in params]
    if ids is not None and logprobs is not None:
        rows = zip(params, ids.tolist(), logprobs.tolist(), strict=True)
        alternatives = [dict(zip(top[: p.logprobs or 0], values, strict=False)) for p, top, values in rows]
    if chosen is not None:
        for row, p, values in zip(alternatives, params, chosen.tolist(), strict=True):
            row.update(zip(map(int, p.logprob_token_ids), values, strict=False))
    return alternatives
