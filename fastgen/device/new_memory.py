"""New memory for tensors, on any device."""

from __future__ import annotations

import torch

from fastgen.device.memory import Memory


def memory_on(device: torch.device, huge_pages: bool = True) -> Memory:
    """Return a Memory for tensors on `device`. huge_pages: see Memory. Only GPUs need the module of DeviceMemory."""
    if device.type != "cuda":
        return Memory(huge_pages)
    from fastgen.device.gpu_memory import DeviceMemory, VirtualMemory

    return DeviceMemory(VirtualMemory(device), device)
