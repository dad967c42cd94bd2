"""The residual stream of a step's tokens between two products, in the two ways that ranks hold it.

Letters: T tokens, R rows that are read, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import RMSNorm
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import HALVES, Exchange, PendingGather

UNFUSED = Fused()


class Linear(Protocol):
    """A linear layer; see `fastgen.model.linear`."""

    def apply(
        self, x: Tensor, fused: Fused = UNFUSED, norm: RMSNorm | None = None, delta: Tensor | None = None
    ) -> Tensor: ...


class ReplicatedResidual:
    """A residual stream x [T, hidden] that every rank holds whole."""

    def __init__(self, group: Group, x: Tensor) -> None:
        self._group = group
        self._x = x
        self._delta: Tensor | None = None  # a sum that is not added to x yet

    def __len__(self) -> int:
        return len(self._x)

    def project(self, linear: Linear, norm: RMSNorm, fused: Fused = UNFUSED) -> Tensor:
        """Return a linear layer of the normed stream."""
        delta, self._delta = self._delta, None
        return linear.apply(self._x, fused, norm, delta)

    def apply(self, linear: Linear, x: Tensor, following: RMSNorm | None) -> None:
        """Add a linear layer of x to the stream, summed over the ranks. following: the norm that comes next, or
        None."""
        if self._group.size == 1:
            linear.apply(x, Fused(add=self._x))
        else:
            self._delta = self._group.add(self._x, linear.apply(x))

    def select(self, rows: Tensor) -> Tensor:
        """Return the rows [R, hidden] with these numbers [R]. Call it between `project` and `apply`."""
        assert self._delta is None
        return self._x[rows]

    def whole(self) -> Tensor:
        """Return the stream [T, hidden] with all that was added."""
        if self._delta is not None:
            self._x.add_(self._delta)
            self._delta = None
        return self._x


class ShardedResidual:
    """A residual stream [T, hidden] whose tokens are shared out: each rank holds some of the rows, and gets the others
    only as the normed input of the next product (`parallel/overlap.py`)."""

    def __init__(self, group: Group, exchange: Exchange, half: int, count: int, xs: Tensor) -> None:
        self._group, self._exchange = group, exchange
        self._half, self._count = half, count
        self._xs = xs  # this rank's rows
        self._pending: PendingGather | None = None

    @classmethod
    def begin(cls, group: Group, exchange: Exchange, half: int, y: Tensor, following: RMSNorm) -> ShardedResidual:
        """Make the stream that is the sum of all ranks' y [T, hidden]."""
        residual = cls(group, exchange, half, len(y), torch.zeros_like(y[exchange.rows_of(len(y))]))
        residual._add(y, following)
        return residual

    def __len__(self) -> int:
        return self._count

    def project(self, linear: Linear, norm: RMSNorm, fused: Fused = UNFUSED) -> Tensor:
        """Return a linear layer of the normed stream. `norm` is the one that `apply` was given, which has applied
        it."""
        return linear.apply(self.whole(), fused)

    def apply(self, linear: Linear, x: Tensor, following: RMSNorm | None) -> None:
        """Add a linear layer of x to the stream, summed over the ranks. following: the norm that comes next; None:
        `whole` comes next."""
        self._add(linear.apply(x), following)

    def _add(self, y: Tensor, following: RMSNorm | None) -> None:
        assert self._pending is None
        self._pending = self._exchange.add(self._half, self._xs, y, following)

    def select(self, rows: Tensor) -> Tensor:
        """Return the rows [R, hidden] with these numbers [R]. Call it between `project` and `apply`."""
        assert self._pending is None
        own = self._exchange.rows_of(self._count)
        if not len(rows) or own.start == own.stop:
            found = self._xs.new_zeros(len(rows), self._xs.shape[1])
        else:
            here = (rows >= own.start) & (rows < own.stop)
            found = self._xs[(rows - own.start).clamp(0, len(self._xs) - 1)].masked_fill_(~here[:, None], 0)
        return self._group.all_reduce(found) if len(rows) else found

    def whole(self) -> Tensor:
        """Return the rows of all ranks [T, hidden]: of the stream, or of the norm that followed. The next step
        overwrites them."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


Residual = ReplicatedResidual | ShardedResidual


def begin(group: Group, sizes: Sequence[int], number: int, y: Tensor, following: RMSNorm) -> Residual:
    """Return the residual stream of part `number` of a step: the sum of all ranks' y [T, hidden].

    sizes: the tokens of the step's parts. following: the norm that comes next.
    """
    exchange = group.exchange
    if exchange is None or len(sizes) != HALVES or max(sizes) > exchange.tokens:
        return ReplicatedResidual(group, group.all_reduce(y))
    return ShardedResidual.begin(group, exchange, number, y, following)
