"""The residual stream of some tokens on their way through the layers, in the two ways that ranks may hold it.

Letters: T tokens, N ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.kernels.norm import RMSNorm
from fastgen.parallel.group import Group, Sum
from fastgen.parallel.overlap import Exchange, Gathering


class Input(NamedTuple):
    """What the next product is made of: x [T, hidden], `delta` [T, hidden] to be added to it in place, and a norm; None
    where that is done."""

    x: Tensor
    norm: RMSNorm | None
    delta: Tensor | None


class ReplicatedResidual:
    """x [T, hidden] is on every rank, the same on all."""

    def __init__(self, group: Group, x: Tensor) -> None:
        self._group = group
        self._x = x
        self._sum: Sum | None = None  # what is still to be added

    def __len__(self) -> int:
        return len(self._x)

    def input(self, norm: RMSNorm) -> Input:
        """What a product reads whose input is normed; who takes it adds the delta."""
        waited, self._sum = self._sum, None
        return Input(self._x, norm, None if waited is None else waited.wait())

    def add(self, y: Tensor, following: RMSNorm | None) -> None:
        """Add the sum of all ranks' y [T, hidden], which is lost. following: the norm that comes next, if one does."""
        self._sum = self._group.add(self._x, y)

    def rows(self, rows: Tensor) -> Tensor:
        """Rows [R, hidden], by their numbers [R]; between `input` and `add`."""
        assert self._sum is None
        return self._x[rows]

    def whole(self) -> Tensor:
        """[T, hidden], with all that was added."""
        if self._sum is not None:
            self._x.add_(self._sum.wait())
            self._sum = None
        return self._x


class ShardedResidual:
    """Each rank holds some of the rows, and has all others only as input of the next product
    (`parallel/overlap.py`)."""

    def __init__(self, group: Group, exchange: Exchange, half: int, count: int, xs: Tensor) -> None:
        self._group, self._exchange = group, exchange
        self._half, self._count = half, count
        self._xs = xs  # this rank's rows
        self._gathering: Gathering | None = None

    @classmethod
    def begin(cls, group: Group, exchange: Exchange, half: int, y: Tensor, following: RMSNorm) -> ShardedResidual:
        """The sum of all ranks' y [T, hidden]."""
        found = cls(group, exchange, half, len(y), torch.zeros_like(y[exchange.rows(len(y))]))
        found.add(y, following)
        return found

    def __len__(self) -> int:
        return self._count

    def input(self, norm: RMSNorm) -> Input:
        """What a product reads whose input is normed by `norm`, which `add` was told of."""
        return Input(self._wait(), None, None)

    def add(self, y: Tensor, following: RMSNorm | None) -> None:
        """Add the sum of all ranks' y [T, hidden]. following: the norm that comes next; None: `whole` does."""
        assert self._gathering is None
        self._gathering = self._exchange.add(self._half, self._xs, y, following)

    def rows(self, rows: Tensor) -> Tensor:
        """Rows [R, hidden], by their numbers [R]; between `input` and `add`."""
        assert self._gathering is None
        own = self._exchange.rows(self._count)
        if not len(rows) or own.start == own.stop:
            found = self._xs.new_zeros(len(rows), self._xs.shape[1])
        else:
            here = (rows >= own.start) & (rows < own.stop)
            found = self._xs[(rows - own.start).clamp(0, len(self._xs) - 1)].masked_fill_(~here[:, None], 0)
        return self._group.all_reduce(found) if len(rows) else found

    def whole(self) -> Tensor:
        """[T, hidden], when it was told that no norm follows. It is overwritten by the next step."""
        return self._wait()

    def _wait(self) -> Tensor:
        assert self._gathering is not None
        waited, self._gathering = self._gathering, None
        return waited.wait()


Residual = ReplicatedResidual | ShardedResidual
