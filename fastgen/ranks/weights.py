"""Weight updates on several ranks.

The leader sends each tensor in turn to followers that were started for it: through memory that they share, or, from a
GPU, as a CUDA IPC handle. Ranks of a program are given tensors by the program, and only compare what came of them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen.engine.runner import Runner
from fastgen.model.weights import Update
from fastgen.parallel.errors import raise_first


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to all followers. rebuild: a function and arguments that make it; None where it is in the shared
    memory."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rebuild: tuple[Callable[..., Tensor], tuple[Any, ...]] | None = None

    @classmethod
    def of(cls, number: int, name: str, tensor: Tensor, shared: SharedMemory) -> Weight:
        """Pack a tensor, which must live until all followers have read it."""
        tensor, rebuild = tensor.detach(), None
        if tensor.is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            torch.cuda.current_stream(tensor.device).synchronize()
            rebuild = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        else:
            shared.hold(tensor)
        return cls(number, name, tuple(tensor.shape), tensor.dtype, rebuild)

    def read(self, shared: SharedMemory) -> Tensor:
        """Return the tensor in another process."""
        if self.rebuild is None:
            return shared.read(self.shape, self.dtype)
        make, arguments = self.rebuild
        return make(*arguments)


class SharedMemory:
    """Memory for the bytes of one tensor: a file in memory that followers inherit, since /dev/shm may be small."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def make(cls) -> SharedMemory:
        return cls(os.memfd_create("fastgen"))

    def hold(self, tensor: Tensor) -> None:
        """Copy a tensor into the memory, in place of the one before."""
        if os.fstat(self.file).st_size < tensor.nbytes:
            os.ftruncate(self.file, tensor.nbytes)
        self.read(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that the memory holds, in place."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.frombuffer(mmap.mmap(self.file, size), dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)

    def clear(self) -> None:
        """Give the memory back, on each side; tensors that were read are invalid."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self.file, 0)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


@dataclass(frozen=True, slots=True)
class Written:
    """What came of a rank's own update: an error, or the names of the tensors that it has looked at."""

    error: Exception | None
    names: frozenset[str]


def check_or_write(update: Update, runner: Runner, write: bool) -> Written:
    """Check the tensors that a rank's program gives, as far as they can be read twice, or write them."""
    try:
        if write:
            runner.write_weights(update.tensors())
        else:
            update.check()
    except Exception as error:
        return Written(error, frozenset())
    return Written(None, frozenset(update.names))


def check_agreement(outcomes: Mapping[int, Written], wrote: bool) -> None:
    """Raise the error of the lowest rank that has one, and ValueError where the ranks' programs gave other tensors."""
    raise_first({rank: outcome.error for rank, outcome in outcomes.items()})
    for rank in sorted(outcomes):
        mine, its = outcomes[0].names, outcomes[rank].names
        if mine != its and (wrote or (mine and its)):  # tensors that come once are looked at when they are written
            raise ValueError(f"rank {rank} gives other tensors than rank 0: {', '.join(sorted(mine ^ its)[:20])}")


def received(
    next_message: Callable[[], object], taken: Callable[[int], None], shared: SharedMemory
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the leader sends, until a message that is not a Weight. taken: called with the number of
    each when it has been read."""
    while isinstance(weight := next_message(), Weight):
        yield weight.name, weight.read(shared)
        if weight.rebuild is not None:
            torch.cuda.synchronize()
        taken(weight.number)
