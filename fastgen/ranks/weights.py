"""Weights that are sent to other ranks, and the check that all ranks of a program give the same weights.

The leader sends weights to spawned followers one tensor at a time: through shared memory or, from a GPU, as a CUDA IPC
handle. Each rank of a program gives the same tensors itself, and the ranks compare only the names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is sent to all followers. rebuild: a function and its arguments that make the tensor in another
    process; None if its bytes are in the shared memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rebuild: tuple[Callable[..., Tensor], tuple[Any, ...]] | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor, shared: SharedMemory) -> Weight:
        """Pack a tensor. It must stay alive until all followers have read it."""
        tensor, rebuild = tensor.detach(), None
        if tensor.is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            torch.cuda.current_stream(tensor.device).synchronize()
            rebuild = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        else:
            shared.hold(tensor)
        return cls(name, tuple(tensor.shape), tensor.dtype, rebuild)

    def read(self, shared: SharedMemory) -> Tensor:
        """Return the tensor, in the process that received this message."""
        if self.rebuild is None:
            return shared.read(self.shape, self.dtype)
        make, arguments = self.rebuild
        return make(*arguments)


class SharedMemory:
    """Memory for the bytes of one tensor: an anonymous file that followers inherit, since /dev/shm may be small.

    file: file descriptor of the memory, which is created by default; -1 after `close`.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = os.memfd_create("fastgen") if file is None else file
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def hold(self, tensor: Tensor) -> None:
        """Copy a tensor into the memory, over the previous one."""
        self.read(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor in the memory, without a copy."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if len(self._bytes) < size:
            file = f"/proc/self/fd/{self.file}"
            self._bytes = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)  # which enlarges the file
        return self._bytes[:size].view(dtype).view(shape)

    def clear(self) -> None:
        """Free the memory in this process. Each process has to call this; tensors that were read become invalid."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        os.ftruncate(self.file, 0)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


def check_same_names(names: Mapping[int, frozenset[str]], written: bool) -> None:
    """Raise ValueError if the program of any rank gave other tensors than the program of rank 0.

    names: {rank: names of the tensors that it has seen}. A rank whose tensors come from an iterator sees them only when
    they are written. written: whether the tensors have been written.
    """
    for rank in sorted(names):
        mine, its = names[0], names[rank]
        if mine != its and (written or (mine and its)):
            raise ValueError(f"rank {rank} gives other tensors than rank 0: {', '.join(sorted(mine ^ its)[:20])}")
