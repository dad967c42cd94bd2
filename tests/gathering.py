"""An exchange by collectives, with which the CPU can run steps that are cut in two halves, as GPUs do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastgen.kernels.norm import RMSNorm
from fastgen.kernels.sum_norm import sum_norm
from fastgen.parallel.overlap import Exchange, PendingGather
from fastgen.parallel.rank_group import RankGroup

DONE: Any = SimpleNamespace(wait=lambda: None)
"""An event that has happened."""


class GatheringExchange(Exchange):
    """The exchange of a rank by collectives that wait. tokens: maximum number of tokens in a half."""

    def __init__(self, group: RankGroup, tokens: int) -> None:
        self.rank, self.size, self.tokens = group.rank, group.size, tokens
        self._group = group
        self._interrupted = False

    def _add(self, half: int, xs: Tensor, y: Tensor, own: slice, norm: RMSNorm | None) -> PendingGather:
        parts = self._gather(y)
        share = y.new_zeros(-(-len(y) // self.size), y.shape[1])
        if len(xs):
            stage = torch.stack([part[own] for part in parts])
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            sum_norm(xs, y[own], stage, self.rank, weight, eps, share[: len(xs)])
        return PendingGather(torch.cat(self._gather(share))[: len(y)], y, DONE)

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group.process_group)
        return parts


prepare = RankGroup.prepare


def prepare_and_cut(self: RankGroup, hidden: int, dtype: torch.dtype, half: int = 0) -> None:
    """Prepare a group for steps that are cut in two, also on the CPU."""
    prepare(self, hidden, dtype, half)
    if half:
        self.exchange = GatheringExchange(self, half)


def cut_steps() -> None:
    """Make all groups that are made from now on cut steps on the CPU too."""
    RankGroup.prepare = prepare_and_cut  # type: ignore[method-assign]
