"""device/pinned.py: alignment, and how much host memory is free. (Pinning needs a GPU: tests/gpu/test_gpu_host.py.)"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from fastgen.device import pinned
from fastgen.device.pinned import Pinned


def test_memory_begins_with_a_page() -> None:
    for size in (1, 5000):
        memory = Pinned(size, torch.device("cpu"), "a test", "skip it").bytes
        assert memory.data_ptr() % pinned.ALIGNMENT == 0
        assert (memory.shape, memory.dtype) == ((size,), torch.uint8)


def test_free_memory_is_what_linux_and_the_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert pinned._free_memory(meminfo, tmp_path) == math.inf
    meminfo.write_text("MemTotal:       24684096 kB\nMemFree:        100 kB\nMemAvailable:   2000 kB\n")
    assert pinned._free_memory(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 500\n")
    assert pinned._free_memory(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    assert pinned._free_memory(meminfo, tmp_path) == 700_000
    assert 0 < pinned._free_memory() <= math.inf
