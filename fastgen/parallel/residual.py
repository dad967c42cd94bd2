"""The residual stream between two matrix products: whole on every rank, or with its tokens split over the ranks.

Shape letters: T tokens, R rows that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import BranchEnd, RMSNorm
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import HALVES, Exchange, PendingGather

UNFUSED = Fused()


class Linear(Protocol):
    """The part of a linear layer that a residual stream uses; see `fastgen.model.linear`."""

    def apply(
        self, x: Tensor, fused: Fused = UNFUSED, norm: RMSNorm | None = None, delta: Tensor | None = None
    ) -> Tensor: ...


class ReplicatedResidual:
    """A residual stream x [T, hidden] that every rank holds as a whole."""

    def __init__(self, group: Group, x: Tensor) -> None:
        self._group = group
        self._x = x
        self._delta: Tensor | None = None  # a sum over the ranks that is not yet added to x

    def __len__(self) -> int:
        return len(self._x)

    def project(self, linear: Linear, norm: RMSNorm | None, fused: Fused = UNFUSED) -> Tensor:
        """Return the output of a linear layer for the normed stream; for the stream itself if norm is None."""
        delta, self._delta = self._delta, None
        return linear.apply(self._x, fused, norm, delta)

    def apply(self, linear: Linear, x: Tensor, following: RMSNorm | None, end: BranchEnd | None = None) -> None:
        """Add the output of a linear layer for x, summed over the ranks, to the stream. following: the norm that comes
        next, or None. end: what happens to the sum before it is added; None: nothing, so that the product adds it."""
        if end is not None:
            self._x.add_(end.apply(self._group.sum(linear.apply(x))))
        elif self._group.size == 1:
            linear.apply(x, Fused(add=self._x))
        else:
            self._delta = self._group.add(self._x, linear.apply(x))

    def select(self, rows: Tensor) -> Tensor:
        """Return rows [R, hidden] by their indices [R]. Call it between `project` and `apply`."""
        assert self._delta is None
        return self._x[rows]

    def whole(self) -> Tensor:
        """Return the stream [T, hidden], including the last sum."""
        if self._delta is not None:
            self._x.add_(self._delta)
            self._delta = None
        return self._x


class ShardedResidual:
    """A residual stream [T, hidden] whose tokens are split over the ranks. Each rank holds some of the rows, and sees
    the other rows only as the normed input of the next product (`parallel/overlap.py`).

    half: which half of the step, 0 or 1. count: T. xs: this rank's rows, which are updated in place.
    """

    def __init__(self, group: Group, exchange: Exchange, half: int, count: int, xs: Tensor) -> None:
        self._group, self._exchange = group, exchange
        self._half, self._count = half, count
        self._xs = xs
        self._pending: PendingGather | None = None

    def __len__(self) -> int:
        return self._count

    def project(self, linear: Linear, norm: RMSNorm | None, fused: Fused = UNFUSED) -> Tensor:
        """Return the output of a linear layer for the normed stream. `norm` is ignored: the preceding `apply` has been
        given it as `following`, and has applied it."""
        return linear.apply(self.whole(), fused)

    def apply(self, linear: Linear, x: Tensor, following: RMSNorm | None, end: BranchEnd | None = None) -> None:
        """Add the output of a linear layer for x, summed over the ranks, to the stream. following: the norm that comes
        next; None if `whole` comes next. end: None, since a model with such ends has no exchange."""
        assert end is None
        self.add(linear.apply(x), following)

    def add(self, y: Tensor, following: RMSNorm | None) -> None:
        """Add the sum of all ranks' y [T, hidden]. following: see `apply`."""
        assert self._pending is None
        self._pending = self._exchange.add(self._half, self._xs, y, following)

    def select(self, rows: Tensor) -> Tensor:
        """Return rows [R, hidden] by their indices [R]. Call it between `project` and `apply`."""
        assert self._pending is None
        own = self._exchange.rows_of(self._count)
        if not len(rows) or own.start == own.stop:
            found = self._xs.new_zeros(len(rows), self._xs.shape[1])
        else:
            here = (rows >= own.start) & (rows < own.stop)
            found = self._xs[(rows - own.start).clamp(0, len(self._xs) - 1)].masked_fill_(~here[:, None], 0)
        return self._group.all_reduce(found) if len(rows) else found

    def whole(self) -> Tensor:
        """Return the rows of all ranks [T, hidden]: the stream, or its norm if `add` was given one. The next step
        overwrites them."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


Residual = ReplicatedResidual | ShardedResidual


def begin(group: Group, sizes: Sequence[int], number: int, y: Tensor, following: RMSNorm | None) -> Residual:
    """Return the residual stream of one part of a step, which begins as the sum of all ranks' y [T, hidden].

    sizes: number of tokens in each part of the step. number: index of this part. following: the norm that comes next.
    """
    exchange = group.exchange
    if exchange is None or len(sizes) != HALVES or max(sizes) > exchange.tokens:
        return ReplicatedResidual(group, group.all_reduce(y))
    rows = torch.zeros_like(y[exchange.rows_of(len(y))])
    residual = ShardedResidual(group, exchange, number, len(y), rows)
    residual.add(y, following)
    return residual
