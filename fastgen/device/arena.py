"""Memory for many tensors that are read together, in few large mappings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.device.memory import Memory

BLOCK = 32 << 20  # bytes of a mapping; a larger tensor has its own
ALIGNMENT = 64  # bytes, of a cache line


class Arena:
    """Tensors on the CPU that lie one behind the other, so that small ones are in huge pages too.

    A mapping is given back when none of its tensors is left.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor of zeros. Raises MemoryError."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > BLOCK:
            return self._memory.zeros(shape, dtype)
        if num_bytes > len(self._left):
            self._left = self._memory.zeros([BLOCK], torch.uint8)
        tensor = self._left[:num_bytes].view(dtype).view(*shape)
        self._left = self._left[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return tensor
