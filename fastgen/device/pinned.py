"""Copies between the host and a device, through pinned memory, so that the host does not wait. Pinned memory that
lasts is in pinned_memory.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16  # bytes; see `upload_together`


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch the work of a block on `stream`. None stands for the CPU, where nothing changes."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, in the order of the current stream, through pinned memory, so the host does not
    wait."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


Sent = TypeVar("Sent", Tensor, Tensor | None)


def to_host(tensor: Sent) -> Sent:
    """Start a copy to the host, and return it. It is complete when all launches so far have run."""
    if tensor is None or tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy one-dimensional arrays to a device in one transfer, as `upload` does.

    Each tensor begins at a multiple of 16 bytes, because Triton would compile kernels again for other alignments.
    """
    parts = Parts.of([len(array) for array in arrays], [array.dtype for array in arrays])
    return parts.tensors(parts.pack(arrays, device).to(device, non_blocking=True))


@dataclass(frozen=True)
class Parts:
    """One-dimensional arrays that follow each other in memory, at multiples of ALIGNED bytes.

    lengths: their maximum numbers of elements. dtypes: their dtypes. starts: their first bytes. size: all bytes.
    """

    lengths: list[int]
    dtypes: list[np.dtype[Any]]
    starts: list[int]
    size: int

    @classmethod
    def of(cls, lengths: list[int], dtypes: list[np.dtype[Any]]) -> Parts:
        """Lay out arrays of these lengths and dtypes."""
        sizes = [length * dtype.itemsize for length, dtype in zip(lengths, dtypes, strict=True)]
        ends = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
        return cls(lengths, dtypes, ends[:-1], ends[-1])

    def pack(self, arrays: Sequence[np.ndarray], device: torch.device, fills: Sequence[int] = ()) -> Tensor:
        """Return new memory of the host with these arrays, pinned for a GPU: uint8 [size]. fills: what follows the ends
        of the first arrays; it is undefined after the others."""
        host = torch.empty(self.size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        memory = host.numpy()
        for start, length, array, fill in zip_longest(self.starts, self.lengths, arrays, fills):
            part = memory[start : start + length * array.itemsize].view(array.dtype)
            part[: len(array)] = array
            if fill is not None:
                part[len(array) :] = fill
        return host

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """Return the arrays as views of memory, uint8 [size]."""
        return [
            memory[start : start + length * dtype.itemsize].view(getattr(torch, dtype.name))
            for start, length, dtype in zip(self.starts, self.lengths, self.dtypes, strict=True)
        ]
