"""The residual stream between two matrix products: whole on every rank here, with its tokens split over the ranks in
`parallel/sharded.py`.

Shape letters: T tokens, R rows that are read.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fastgen.kernels.batch_invariant import UNFUSED, Fused
from fastgen.kernels.norm import BranchEnd, RMSNorm


class LinearLayer(Protocol):
    """The part of a linear layer that a residual stream uses; see `fastgen.model.linear`."""

    def apply(
        self, x: Tensor, fused: Fused = UNFUSED, norm: RMSNorm | None = None, delta: Tensor | None = None
    ) -> Tensor: ...


class Sums(Protocol):
    """The part of a group of ranks that a residual stream uses; see `Group`."""

    size: int

    def sum(self, y: Tensor) -> Tensor: ...

    def add(self, x: Tensor, y: Tensor) -> Tensor | None: ...


class Residual(Protocol):
    """A residual stream [T, hidden] of one part of a step."""

    def __len__(self) -> int:
        """Return the number of tokens T."""

    def project(self, linear: LinearLayer, norm: RMSNorm | None, fused: Fused = UNFUSED) -> Tensor:
        """Return the output of a linear layer for the normed stream; for the stream itself if norm is None."""

    def apply(self, linear: LinearLayer, x: Tensor, following: RMSNorm | None, end: BranchEnd | None = None) -> None:
        """Add the output of a linear layer for x, summed over the ranks, to the stream. following: the norm that comes
        next, or None. end: the operations on the sum before it is added; None: nothing, so that the product adds it."""

    def select(self, rows: Tensor) -> Tensor:
        """Return rows [R, hidden] by their indices [R]. Call it between `project` and `apply`."""

    def whole(self) -> Tensor:
        """Return the stream [T, hidden], including the last sum."""


class ReplicatedResidual:
    """A residual stream x [T, hidden] that every rank holds as a whole; see Residual."""

    def __init__(self, group: Sums, x: Tensor) -> None:
        self._group = group
        self._x = x
        self._delta: Tensor | None = None  # a sum over the ranks that is not yet added to x

    def __len__(self) -> int:
        return len(self._x)

    def project(self, linear: LinearLayer, norm: RMSNorm | None, fused: Fused = UNFUSED) -> Tensor:
        delta, self._delta = self._delta, None
        return linear.apply(self._x, fused, norm, delta)

    def apply(self, linear: LinearLayer, x: Tensor, following: RMSNorm | None, end: BranchEnd | None = None) -> None:
        if end is not None:
            self._x.add_(end.apply(self._group.sum(linear.apply(x))))
        elif self._group.size == 1:
            linear.apply(x, Fused(add=self._x))
        else:
            self._delta = self._group.add(self._x, linear.apply(x))

    def select(self, rows: Tensor) -> Tensor:
        assert self._delta is None
        return self._x[rows]

    def whole(self) -> Tensor:
        if self._delta is not None:
            self._x.add_(self._delta)
            self._delta = None
        return self._x
