"""The group of ranks that hold a model together: of one rank here, of several in `parallel/rank_group.py`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastgen.kernels.norm import RMSNorm
from fastgen.parallel.residual import ReplicatedResidual, Residual

if TYPE_CHECKING:  # only for several ranks
    from fastgen.parallel.overlap import Exchange


class Group:
    """The ranks that hold a model together, and their collectives. size: number of ranks; rank: index of this one.

    All ranks call the same methods in the same order, with tensors of equal shapes on their own device. This class is
    the group of a single rank, whose sums are its own numbers; `RankGroup` is the group of several.
    """

    rank = 0
    size = 1
    exchange: Exchange | None = None
    """For steps that are cut into two halves."""

    def prepare(self, hidden: int, dtype: torch.dtype, half: int = 0) -> None:
        """Allocate the memory for sums of [T, hidden]: for sums of few tokens, and for steps that are cut into halves
        of at most `half` tokens (0: no step is cut). Waits for all ranks."""

    def register_graphs(self, graphs: Any) -> None:
        """Register graphs that contain this group's collectives, so that they are reset when the group ends."""

    @property
    def sums_in_order(self) -> bool:
        """True if sums have the same bits for any number of tokens: every element is summed in the order of the ranks,
        in float32, and rounded once."""
        return True

    @property
    def expired(self) -> Tensor | None:
        """int32 [1] on the device: 1 after a sum has stopped waiting for other ranks, and is wrong. None if no sum can
        do this."""
        return None

    def begin_residual(self, sizes: Sequence[int], number: int, y: Tensor, following: RMSNorm | None) -> Residual:
        """Return the residual stream of one part of a step, which begins as the sum of all ranks' y [T, hidden].

        sizes: number of tokens in each part of the step. number: index of this part. following: the norm that comes
        next.
        """
        return ReplicatedResidual(self, self.all_reduce(y))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x [T, hidden]. At each place, at most one rank has a number other than zero, so
        that the order does not matter. x is overwritten."""
        return x

    def sum(self, y: Tensor) -> Tensor:
        """Return the sum of all ranks' y [T, hidden], which is overwritten. See `sums_in_order`."""
        return y

    def add(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Add the sum of all ranks' y [T, hidden] to x [T, hidden], which is the same on all ranks and stays so.

        Return None, or the sum if the caller has to add it to x, as with ranks on several hosts. y is overwritten. The
        host does not wait. See `sums_in_order`.
        """
        x.add_(y)
        return None

    def gather(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return all ranks' x [R, n], concatenated to [R, size * n], on rank 0, and None on other ranks. out: a tensor
        for the result."""
        return x if out is None else out.copy_(x)

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x on all other ranks with rank 0's x."""

    def agreeing(self) -> AbstractContextManager[None]:
        """Share errors: if any rank raises one within the block, all ranks raise it at the end of the block."""
        return nullcontext()

    def minimum(self, number: int) -> int:
        """Return the minimum of all ranks' numbers. Waits for them."""
        return number
