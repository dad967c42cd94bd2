"""Tensors of an arena lie one behind the other, and its mappings go with their last tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastgen.device.arena import BLOCK, Arena
from fastgen.device.memory import Memory

MAPS = Path("/proc/self/maps")


def is_mapped(address: int) -> bool:
    """Return whether this process has memory at an address."""
    ranges = (line.split()[0].split("-") for line in MAPS.read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


def test_small_tensors_share_a_mapping() -> None:
    arena = Arena(Memory())
    tensors = [arena.zeros([3, 5], dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int32)]
    starts = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    assert starts == [0, 64, 128, 192]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [tensor.float().unique().tolist() for tensor in tensors] == [[1], [2], [3], [4]]


def test_a_large_tensor_has_a_mapping_of_its_own_and_leaves_the_others_together() -> None:
    arena = Arena(Memory())
    small, large, after = (arena.zeros([size], torch.uint8) for size in (100, BLOCK + 1, 100))
    assert len(large) == BLOCK + 1
    assert after.data_ptr() - small.data_ptr() == 128
    whole, last = (arena.zeros([size], torch.uint8) for size in (BLOCK, 1))
    assert whole.data_ptr() != last.data_ptr()
    assert not whole.any()


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list a process's mappings")
def test_a_mapping_goes_with_its_last_tensor() -> None:
    arena = Arena(Memory())
    first, second = (arena.zeros([BLOCK // 2], torch.uint8) for _ in range(2))
    address = first.data_ptr()
    arena.zeros([1], torch.uint8)
    del first
    assert is_mapped(address)
    del second
    assert not is_mapped(address)
