"""The residual stream of a step's tokens between two products, in the two ways that ranks hold it.

Letters: T tokens, R rows that are read, N ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.kernels.norm import RMSNorm
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import Exchange, PendingGather

ProductInput = tuple[Tensor, RMSNorm | None, Tensor | None]
"""The input of a product: x [T, hidden]; a norm that the product applies first, or None where x is normed; and a delta
[T, hidden], which the product adds to x in place before the norm, or None."""


class ReplicatedResidual:
    """A residual stream x [T, hidden] that every rank holds whole."""

    def __init__(self, group: Group, x: Tensor) -> None:
        self._group = group
        self._x = x
        self._delta: Tensor | None = None  # a sum that is not added to x yet

    def __len__(self) -> int:
        return len(self._x)

    def input(self, norm: RMSNorm) -> ProductInput:
        """Return the input of a product whose input is normed. The product adds the delta to the stream."""
        delta, self._delta = self._delta, None
        return self._x, norm, delta

    def add(self, y: Tensor, following: RMSNorm | None) -> None:
        """Add the sum of all ranks' y [T, hidden], which is overwritten. following: the norm that comes next, or
        None."""
        self._delta = self._group.add(self._x, y)

    def select(self, rows: Tensor) -> Tensor:
        """Return the rows [R, hidden] with these numbers [R]. Call it between `input` and `add`."""
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
        residual.add(y, following)
        return residual

    def __len__(self) -> int:
        return self._count

    def input(self, norm: RMSNorm) -> ProductInput:
        """Return the input of a product. `norm` is the one that `add` was given, which has applied it."""
        return self._wait(), None, None

    def add(self, y: Tensor, following: RMSNorm | None) -> None:
        """Add the sum of all ranks' y [T, hidden]. following: the norm that comes next; None: `whole` comes next."""
        assert self._pending is None
        self._pending = self._exchange.add(self._half, self._xs, y, following)

    def select(self, rows: Tensor) -> Tensor:
        """Return the rows [R, hidden] with these numbers [R]. Call it between `input` and `add`."""
        assert self._pending is None
        own = self._exchange.rows_of(self._count)
        if not len(rows) or own.start == own.stop:
            found = self._xs.new_zeros(len(rows), self._xs.shape[1])
        else:
            here = (rows >= own.start) & (rows < own.stop)
            found = self._xs[(rows - own.start).clamp(0, len(self._xs) - 1)].masked_fill_(~here[:, None], 0)
        return self._group.all_reduce(found) if len(rows) else found

    def whole(self) -> Tensor:
        """Return the stream [T, hidden], after an `add` without a following norm. The next step overwrites it."""
        return self._wait()

    def _wait(self) -> Tensor:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


Residual = ReplicatedResidual | ShardedResidual
