"""Pinned host memory, whose pages stay in place, so that copies to and from a GPU run at full speed."""

from __future__ import annotations

import math
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4096  # bytes; a page of host memory is pinned as a whole


class Pinned:
    """Host memory that is pinned until this object is deleted, if `device` is a GPU.

    bytes: uint8 [num_bytes], the memory. use, advice: for error messages, what the memory is for ("the host tier") and
    how the user can do with less. Raises ValueError if the host has too little memory.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, num_bytes: int, device: torch.device, use: str, advice: str) -> None:
        demand = f"{use} takes {num_bytes / 1e9:.1f} GB of the host's memory"
        free = _free_memory()
        if num_bytes > free:
            raise ValueError(f"{demand}, of which {free / 1e9:.1f} GB are free; {advice}")
        raw = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.bytes = torch.from_numpy(raw[start : start + num_bytes])
        if device.type == "cuda" and num_bytes:
            # The memory is registered instead of allocated by torch, which would round its size up to a power of two.
            # zero_ touches the pages with all threads; the driver would touch one after the other.
            self.bytes.zero_()
            status = int(_cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0))
            if status:
                raise ValueError(f"{demand}, which the GPU's driver cannot pin (CUDA error {status}); {advice}")
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
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        free = int(match[1]) * 1024 if match else free
    limit, used = group / "memory.max", group / "memory.stat"
    if limit.exists() and limit.read_text().strip() != "max":
        match = re.search(r"^anon (\d+)$", used.read_text(), re.MULTILINE)  # cached files can be dropped
        free = min(free, int(limit.read_text()) - (int(match[1]) if match else 0))
    return free
