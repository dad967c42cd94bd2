"""Weights on their way to other ranks, and the comparison of weights that each rank gives.

The leader sends spawned followers one tensor after the other: through shared memory, or, from a GPU, as a CUDA IPC
handle. The ranks of a program each give the same tensors, and only compare their names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor for all followers. rebuild: a function and its arguments, which make the tensor; None where its bytes
    are in the shared memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rebuild: tuple[Callable[..., Tensor], tuple[Any, ...]] | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor, shared: SharedMemory) -> Weight:
        """Pack a tensor, which must live until all followers have read it."""
        tensor, rebuild = tensor.detach(), None
        if tensor.is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            torch.cuda.current_stream(tensor.device).synchronize()
            rebuild = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        else:
            shared.hold(tensor)
        return cls(name, tuple(tensor.shape), tensor.dtype, rebuild)

    def read(self, shared: SharedMemory) -> Tensor:
        """Return the tensor in another process."""
        if self.rebuild is None:
            return shared.read(self.shape, self.dtype)
        make, arguments = self.rebuild
        return make(*arguments)


class SharedMemory:
    """Memory for the bytes of one tensor: an anonymous file that followers inherit, since /dev/shm may be small. file:
    its descriptor."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def make(cls) -> SharedMemory:
        return cls(os.memfd_create("fastgen"))

    def hold(self, tensor: Tensor) -> None:
        """Copy a tensor into the memory, in place of the one before."""
        self.read(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that the memory holds, in place."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if len(self._bytes) < size:
            file = f"/proc/self/fd/{self.file}"
            self._bytes = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)  # which enlarges the file
        return self._bytes[:size].view(dtype).view(shape)

    def clear(self) -> None:
        """Give the memory back, on each side; tensors that were read are invalid."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self.file, 0)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


def received(
    next_message: Callable[[], object], taken: Callable[[], None], shared: SharedMemory
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the leader sends, until a message that is not a Weight. taken: called when a tensor has
    been read."""
    while isinstance(weight := next_message(), Weight):
        yield weight.name, weight.read(shared)
        if weight.rebuild is not None:
            torch.cuda.synchronize()
        taken()


def check_same_names(names: Mapping[int, frozenset[str]], written: bool) -> None:
    """Raise ValueError where the programs of the ranks gave other tensors than rank 0's.

    names: of the tensors that each rank has looked at. A rank looks at tensors that come only once when they are
    `written`, not before.
    """
    for rank in sorted(names):
        mine, its = names[0], names[rank]
        if mine != its and (written or (mine and its)):
            raise ValueError(f"rank {rank} gives other tensors than rank 0: {', '.join(sorted(mine ^ its)[:20])}")
