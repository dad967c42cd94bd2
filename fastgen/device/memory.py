"""Memory for tensors, which on a GPU (gpu_memory.py) can be released and restored."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.device.chip import current

HUGE = 4 << 20  # bytes from which on a mapping asks for huge pages, as numpy does for its arrays, or for none


def device_memory(device: str) -> int:
    """Return the number of free bytes of a GPU, or 0 for the CPU."""
    return torch.cuda.mem_get_info(torch.device(device))[0] if torch.device(device).type == "cuda" else 0


def release_memory(device: str) -> None:
    """Empty torch's cache of GPU memory, so that this memory counts as free."""
    if torch.device(device).type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with current(torch.device(device)):
            torch.cuda.empty_cache()


def gpu_id(device: torch.device) -> str | None:
    """Return the UUID of a GPU, or None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


class Memory:
    """Memory for tensors on the CPU, which is never released. DeviceMemory, for a GPU, is released.

    The tensors may outlive the object. They must not be used between `release` and `restore`.

    huge_pages: whether large tensors on the CPU ask for huge pages, or ask for none, even where the system gives them
    unasked. These are faster to read, but where a virtual machine's host provides memory when it is first touched, the
    first touch of each takes milliseconds.
    """

    def __init__(self, huge_pages: bool = True) -> None:
        self._huge_pages = huge_pages

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor of zeros. Raises torch.OutOfMemoryError on a GPU and MemoryError on the CPU.

        On the CPU it is an anonymous mapping, which takes up memory only as it is written to.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{num_bytes / 1e9:.1f} GB of memory cannot be had") from error
        advice = "MADV_HUGEPAGE" if self._huge_pages else "MADV_NOHUGEPAGE"
        if num_bytes >= HUGE and hasattr(mmap, advice):
            block.madvise(getattr(mmap, advice))
        return torch.frombuffer(block, dtype=dtype).view(*shape)

    def release(self, keep: bool) -> None:
        """Release all memory. No work that uses the tensors may be in flight; a second call does nothing.

        keep: whether `restore` brings the contents back; otherwise it fills the tensors with zeros.
        """

    def restore(self) -> None:
        """Restore the memory at the same addresses, with contents that are ready for later work on the current stream.

        Raises torch.OutOfMemoryError if there is too little, and leaves the memory released. Does nothing if the memory
        is not released.
        """
