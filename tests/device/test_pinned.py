"""Alignment of memory, and how much of the host is free. (Pinning needs a GPU: tests/gpu/test_gpu_host.py.)"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from fastgen.device import pinned_memory
from fastgen.device.pinned import Parts, upload_together
from fastgen.device.pinned_memory import Pinned

CPU = torch.device("cpu")


def test_memory_begins_with_a_page() -> None:
    for size in (1, 5000):
        memory = Pinned(size, torch.device("cpu"), "a test", "skip it").bytes
        assert memory.data_ptr() % pinned_memory.ALIGNMENT == 0
        assert (memory.shape, memory.dtype) == ((size,), torch.uint8)


def test_free_memory_is_what_linux_and_the_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert pinned_memory._free_memory(meminfo, tmp_path) == math.inf
    meminfo.write_text("MemTotal:       24684096 kB\nMemFree:        100 kB\nMemAvailable:   2000 kB\n")
    assert pinned_memory._free_memory(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 500\n")
    assert pinned_memory._free_memory(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    assert pinned_memory._free_memory(meminfo, tmp_path) == 700_000
    assert 0 < pinned_memory._free_memory() <= math.inf


def test_arrays_of_several_dtypes_go_in_one_copy() -> None:
    arrays = [np.arange(3), np.arange(5, dtype=np.int32), np.zeros(0, dtype=np.int64), np.arange(2, dtype=np.int32)]
    found = upload_together(arrays, torch.device("cpu"))
    assert [each.dtype for each in found] == [torch.int64, torch.int32, torch.int64, torch.int32]
    assert [each.tolist() for each in found] == [array.tolist() for array in arrays]
    assert all(each.data_ptr() % 16 == 0 for each in found if len(each))


def test_parts_of_memory_have_room_that_is_filled() -> None:
    parts = Parts.of([4, 6, 3], [np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.int32)])
    assert (parts.starts, parts.size) == ([0, 32, 64], 80)
    host = parts.pack([np.arange(2), np.arange(6, dtype=np.int32), np.arange(1, dtype=np.int32)], CPU, fills=[9, -1])
    first, second, third = parts.tensors(host)
    assert first.tolist() == [0, 1, 9, 9]
    assert second.tolist() == [0, 1, 2, 3, 4, 5]
    assert (third.dtype, len(third), int(third[0])) == (torch.int32, 3, 0)
