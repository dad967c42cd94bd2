"""Pinned host memory, whose pages stay in place, so that copies to and from a GPU run at full speed."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4096  # bytes; a page of host memory is pinned as a whole
ALIGNED = 16  # bytes; see `upload_together`


class Pinned:
    """Host memory that is pinned until this object is deleted, if `device` is a GPU.

    bytes: uint8 [num_bytes], the memory. use, advice: for error messages, what the memory is for ("the host tier") and
    how the user can do with less. Raises ValueError if the host has too little memory.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, num_bytes: int, device: torch.device, use: str, advice: str) -> None:
        wanted = f"{use} takes {num_bytes / 1e9:.1f} GB of the host's memory"
        free = _free_memory()
        if num_bytes > free:
            raise ValueError(f"{wanted}, of which {free / 1e9:.1f} GB are free; {advice}")
        raw = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.bytes = torch.from_numpy(raw[start : start + num_bytes])
        if device.type == "cuda" and num_bytes:
            # The memory is registered instead of allocated by torch, which would round its size up to a power of two.
            # zero_ touches the pages with all threads; the driver would touch one after the other.
            self.bytes.zero_()
            status = int(_cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0))
            if status:
                raise ValueError(f"{wanted}, which the GPU's driver cannot pin (CUDA error {status}); {advice}")
            weakref.finalize(self, _unpin, self.bytes, device)


def _unpin(memory: Tensor, device: torch.device) -> None:
    """Unpin memory after the last copy, before the memory is freed."""
    torch.cuda.synchronize(device)
    status = int(_cudart().cudaHostUnregister(memory.data_ptr()))
    assert not status, f"host memory cannot be unpinned (CUDA error {status})"


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _free_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many bytes of memory Linux and the limit of this container leave, or infinity on other systems."""
    free = math.inf
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        free = int(found[1]) * 1024 if found else free
    limit, used = group / "memory.max", group / "memory.stat"
    if limit.exists() and limit.read_text().strip() != "max":
        found = re.search(r"^anon (\d+)$", used.read_text(), re.MULTILINE)  # cached files can be dropped
        free = min(free, int(limit.read_text()) - (int(found[1]) if found else 0))
    return free


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
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


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
        host = torch.empty(self.size, dtype=torch.uint8, pin_memory=device.type == "cuda")
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
