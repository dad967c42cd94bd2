"""The properties of a GPU by which kernels are configured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

HOPPER = (9, 0)


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU by which kernels are configured.

    capability: compute capability, (9, 0) for Hopper. processors: number of streaming multiprocessors. shared_memory:
    maximum number of bytes of shared memory per block.
    """

    capability: tuple[int, int]
    processors: int
    shared_memory: int

    @property
    def dependent_launch(self) -> bool:
        """Return whether a kernel can start before the previous one has ended (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @staticmethod
    @cache
    def of(device: torch.device) -> Chip:
        """Return the properties of a GPU. For the CPU, return those of a small imaginary GPU, for Triton's
        interpreter."""
        if device.type != "cuda":
            return Chip((8, 0), 4, 100_000)
        properties = torch.cuda.get_device_properties(device)
        shared_memory: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return Chip((properties.major, properties.minor), properties.multi_processor_count, shared_memory)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Prepare this device for the work in a block: make a GPU the current one, for launches and streams, and turn off
    the program's autocast, which would change the bits of products."""
    if torch.is_autocast_enabled(device.type):
        return _current_without_autocast(device)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _current_without_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), current(device):
        yield


def power_of_two(size: int) -> int:
    """Return the smallest power of two >= size."""
    return 1 << (size - 1).bit_length()
