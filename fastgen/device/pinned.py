"""Memory of the host that a GPU copies from and to at full speed, as the driver knows that its pages stay."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4096  # bytes; a page of the host's memory is pinned as a whole


class Pinned:
    """`bytes`, uint8 [num_bytes], in memory that is pinned where `device` is a GPU, and unpinned with this object.

    It is what `use` says, as in "the host tier", and `advice` what to do where there is less: both are for errors.
    Raises ValueError where the host's memory does not suffice.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, num_bytes: int, device: torch.device, use: str, advice: str) -> None:
        self.bytes = _allocate(num_bytes, f"{use} takes {num_bytes / 1e9:.1f} GB of the host's memory", advice)
        if device.type == "cuda":
            _pin(self.bytes, f"the {num_bytes / 1e9:.1f} GB of the host's memory that {use} takes", advice)
            weakref.finalize(self, _unpin, self.bytes, device)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch what is inside the block on `stream`; None stands for the CPU, where nothing changes."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor on a device, in the order of the current stream; the host does not wait for the copy, as it
    would for one from memory that is not pinned."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays [n] of one dtype to a device as `upload` does, in one transfer.

    Each tensor begins at a multiple of 16 bytes: Triton would compile kernels anew for another alignment.
    """
    multiple = max(16 // arrays[0].itemsize, 1)
    sizes = [-(-len(array) // multiple) * multiple for array in arrays]
    whole = np.zeros(sum(sizes), arrays[0].dtype)
    for start, array in zip(np.cumsum(sizes) - sizes, arrays, strict=True):
        whole[start : start + len(array)] = array
    parts = torch.split(upload(whole, device), sizes)
    return [part[: len(array)] for part, array in zip(parts, arrays, strict=True)]


def _allocate(num_bytes: int, wanted: str, advice: str) -> Tensor:
    """uint8 [num_bytes], at a multiple of ALIGNMENT; raises ValueError where there is less."""
    free = _free_memory()
    if num_bytes > free:
        raise ValueError(f"{wanted}, of which {free / 1e9:.1f} GB are free; {advice}")
    try:
        raw = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    except MemoryError as error:
        raise ValueError(f"{wanted}, which can not be had; {advice}") from error
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes])


def _free_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that Linux, and the limit of the container that this runs in, leave; infinite on other systems."""
    free = math.inf
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        free = int(found[1]) * 1024 if found else free
    limit, used = group / "memory.max", group / "memory.stat"
    if limit.exists() and limit.read_text().strip() != "max":
        found = re.search(r"^anon (\d+)$", used.read_text(), re.MULTILINE)  # files that are cached can be dropped
        free = min(free, int(limit.read_text()) - (int(found[1]) if found else 0))
    return free


def _pin(memory: Tensor, what: str, advice: str) -> None:
    """Registered, not allocated by torch, which would take the next power of two."""
    memory.zero_()  # by all threads, since the driver would touch the pages one after the other
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(driver.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status:
        raise ValueError(f"the GPU's driver can not pin {what} (CUDA error {status}); {advice}")


def _unpin(memory: Tensor, device: torch.device) -> None:
    """Before the memory is freed, and after the last copy."""
    torch.cuda.synchronize(device)
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(driver.cudaHostUnregister(memory.data_ptr()))
    assert not status, f"host memory can not be unpinned (CUDA error {status})"
