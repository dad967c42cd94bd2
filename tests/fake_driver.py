"""A fake CUDA driver for the CPU's memory, which checks each call."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

MB = 1 << 20


class FakeDriver:
    """A range of CPU memory that is overwritten when it is mapped or unmapped. total: size of the device in bytes."""

    granularity = 4096

    def __init__(self, total: int = 8 * MB) -> None:
        self.total, self.capacity = total, total
        self.ranges: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.log: list[tuple[str, int]] = []

    def reserve(self) -> tuple[int, int]:
        memory = (ctypes.c_uint8 * (self.total + self.granularity))()
        start = -(-ctypes.addressof(memory) // self.granularity) * self.granularity
        self.ranges[start] = memory
        return start, self.total

    def free(self, address: int, size: int) -> None:
        assert size == self.total
        assert not any(address <= start < address + size for start in self.mapped), "something is mapped"
        del self.ranges[address]

    def map(self, address: int, size: int) -> None:
        assert address % self.granularity == size % self.granularity == 0 < size
        if sum(self.mapped.values()) + size > self.capacity:
            raise torch.OutOfMemoryError("too little")
        assert any(start <= address and address + size <= start + self.total for start in self.ranges)
        for start, length in self.mapped.items():
            assert address + size <= start or start + length <= address, "is mapped already"
        self.mapped[address] = size
        self._tear(address, size)
        self.log.append(("map", size))

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size, "is no mapping"
        assert self.log[-1][0] in ("synchronize", "unmap"), "something may be on its way"
        self._tear(address, size)
        self.log.append(("unmap", size))

    def synchronize(self) -> None:
        self.log.append(("synchronize", 0))

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        at = address
        while at < address + size:  # across mappings that follow each other
            at = next(start + length for start, length in self.mapped.items() if start <= at < start + length)
        owned = (ctypes.c_uint8 * size).from_address(address)
        owned.owner = owner
        return torch.frombuffer(owned, dtype=torch.uint8)

    def _tear(self, address: int, size: int) -> None:
        ctypes.memset(address, 0xFF, size)
