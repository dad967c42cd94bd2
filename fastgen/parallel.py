"""Tensor parallelism: what of a model each of several ranks holds, and how they add up what they compute."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """The slice of a checkpoint's tensor that a rank holds.

    view: where it belongs; shape: of the whole tensor; the slice is view.shape[dim] long, from `start` on, along `dim`
    (0: rows, 1: columns), and whole along the others. May be empty (a bias that another rank adds).
    """

    view: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        held = tuple(self.view.shape)
        if held == self.shape:
            assert self.start == 0
            return
        assert self.dim in (0, 1)
        assert 0 <= self.start <= self.start + held[self.dim] <= self.shape[self.dim]
        assert held == (*self.shape[: self.dim], held[self.dim], *self.shape[self.dim + 1 :])

    @classmethod
    def whole(cls, view: Tensor) -> Part:
        return cls(view, tuple(view.shape))

    @property
    def is_whole(self) -> bool:
        return self.view.shape == self.shape

    def of(self, tensor: Tensor) -> Tensor:
        """The slice of a tensor [*shape], as a view of it."""
        return tensor if self.is_whole else tensor.narrow(self.dim, self.start, self.view.shape[self.dim])


@dataclass(frozen=True)
class Sum:
    """A sum over all ranks on its way: total is it when `work` is done."""

    total: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """What is launched from now on, on the current stream, may read the sum; the host does not wait for it."""
        self.work.wait()
        return self.total


class Group:
    """The ranks that hold a model together: this one's number, how many there are, and what they tell each other.

    All ranks call the same methods in the same order, with tensors of equal shapes on their own `device`. A group of
    one, which needs no process group, is what there is without tensor parallelism.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.process_group = process_group
        self.rank = 0 if process_group is None else process_group.rank()
        self.size = 1 if process_group is None else process_group.size()
        self._on_cpu = device is None or device.type == "cpu"
        self._device = device

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        if self.size == 1:
            return x
        if self._on_cpu:
            return x.copy_(self._sum_in_order(x))
        dist.all_reduce(x, group=self.process_group)
        return x

    def add(self, x: Tensor, y: Tensor) -> Sum | None:
        """Add the sum of all ranks' y [T, hidden] to x [T, hidden], which is the same on all ranks and stays so.

        None: it is done, as far as the current stream knows. A Sum: the caller adds it when it needs x. y is lost.
        """
        if self.size == 1:
            x.add_(y)
            return None
        if self._on_cpu:
            x.add_(self._sum_in_order(y))
            return None
        work = dist.all_reduce(y, group=self.process_group, async_op=True)
        assert work is not None
        return Sum(y, work)

    def _sum_in_order(self, x: Tensor) -> Tensor:
        """By rank, whatever the shape: what becomes of a row does not depend on the rows beside it."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return functools.reduce(torch.add, parts)

    def gather(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """All ranks' x [R, n] side by side, [R, size * n], in `out` where it is given; None on all ranks but 0."""
        if self.size == 1:
            return x if out is None else out.copy_(x)
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x.contiguous(), parts, group=self.process_group, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=1, out=out)

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's x, in place of the others' own."""
        if self.size > 1:
            dist.broadcast(x, group=self.process_group, group_src=0)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers. Waits for them."""
        if self.size == 1:
            return number
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self.process_group)
        return int(numbers)
