"""The residual stream of a step that is cut into halves, with its tokens split over the ranks.

Shape letters: T tokens, R rows that are read.
"""

from __future__ import annotations

from torch import Tensor

from fastgen.kernels.batch_invariant import UNFUSED, Fused
from fastgen.kernels.norm import BranchEnd, RMSNorm
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import Exchange, PendingGather
from fastgen.parallel.residual import LinearLayer


class ShardedResidual:
    """A residual stream [T, hidden] whose tokens are split over the ranks. Each rank holds some of the rows, and sees
    the other rows only as the normed input of the next product (`parallel/overlap.py`). See Residual.

    half: which half of the step, 0 or 1. count: T. xs: this rank's rows, which are updated in place.
    """

    def __init__(self, group: Group, exchange: Exchange, half: int, count: int, xs: Tensor) -> None:
        self._group, self._exchange = group, exchange
        self._half, self._count = half, count
        self._xs = xs
        self._pending: PendingGather | None = None

    def __len__(self) -> int:
        return self._count

    def project(self, linear: LinearLayer, norm: RMSNorm | None, fused: Fused = UNFUSED) -> Tensor:
        """Return the output of a linear layer for the normed stream. `norm` is ignored: the preceding `apply` has been
        given it as `following`, and has applied it."""
        return linear.apply(self.whole(), fused)

    def apply(self, linear: LinearLayer, x: Tensor, following: RMSNorm | None, end: BranchEnd | None = None) -> None:
        """Add the output of a linear layer for x, summed over the ranks, to the stream. following: the norm that comes
        next; None if `whole` comes next. end: None, since a model with such ends has no exchange."""
        assert end is None
        self.add(linear.apply(x), following)

    def add(self, y: Tensor, following: RMSNorm | None) -> None:
        """Add the sum of all ranks' y [T, hidden]. following: see `apply`."""
        assert self._pending is None
        self._pending = self._exchange.add(self._half, self._xs, y, following)

    def select(self, rows: Tensor) -> Tensor:
        assert self._pending is None
        mine = self._exchange.rows_of(self._count)
        if not len(rows) or mine.start == mine.stop:
            part = self._xs.new_zeros(len(rows), self._xs.shape[1])
        else:
            is_mine = (rows >= mine.start) & (rows < mine.stop)
            part = self._xs[(rows - mine.start).clamp(0, len(self._xs) - 1)].masked_fill_(~is_mine[:, None], 0)
        return self._group.all_reduce(part) if len(rows) else part

    def whole(self) -> Tensor:
        """Return the rows of all ranks [T, hidden]: the stream, or its norm if `add` was given one. The next step
        overwrites them."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()
