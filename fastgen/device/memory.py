"""Memory that is given back and taken again while its tensors stay where they are.

On a GPU a range of addresses is reserved, and physical memory is mapped there as tensors are made, with the CUDA
driver's virtual memory management. To give it back is to unmap it: CUDA graphs, which know addresses alone, are as good
as before when other physical memory is mapped at the same place. On the CPU the operating system does the same for
anonymous mappings.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgen.device.pinned import Pinned
from fastgen.kernels.launch import current

ALIGNMENT = 512  # bytes, of each tensor on a GPU
HUGE = 4 << 20  # bytes from which on a mapping is to have huge pages, as numpy's arrays have them

KEPT = "keeping the weights"
ADVICE = "pass keep_weights=False, and update_weights after wake"


def device_memory(device: str) -> int:
    """Bytes of a GPU's memory that are free; 0 for the CPU."""
    return torch.cuda.mem_get_info(torch.device(device))[0] if torch.device(device).type == "cuda" else 0


def release_memory(device: str) -> None:
    """Give the GPU back what torch only keeps for later, so that it counts as free."""
    if torch.device(device).type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with current(torch.device(device)):
            torch.cuda.empty_cache()


def taken(device: str) -> int:
    """Bytes that are not free: of a GPU, all that is in use; on the CPU, what this process has in memory (0 where the
    system does not tell). Only differences mean something."""
    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(torch.device(device))
        return total - free
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * mmap.PAGESIZE if told.exists() else 0


class Memory(ABC):
    """Makes tensors, which may outlive this object. Between `release` and `restore` nobody may touch them."""

    @staticmethod
    def on(device: torch.device) -> Memory:
        """A GPU's where `device` is one, else that of the CPU."""
        return DeviceMemory(CudaDriver(device), device) if device.type == "cuda" else HostMemory()

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises torch.OutOfMemoryError on a GPU, and MemoryError on the CPU, where there is too little."""

    @abstractmethod
    def release(self, keep: bool) -> None:
        """Give all memory back. keep: `restore` brings back what the tensors hold; else they are zeros behind it.
        Nothing that uses them may be on its way. Does nothing where the memory is released already."""

    @abstractmethod
    def restore(self) -> None:
        """Take as much memory as was released, at the same addresses. What is launched next, on the current stream,
        finds it filled. Does nothing where it is not released; raises torch.OutOfMemoryError, and it stays so, where
        there is too little."""


class HostMemory(Memory):
    """An anonymous mapping a tensor. What is to be kept stays, as copies would take what is given back."""

    def __init__(self) -> None:
        self._blocks: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # which live as long as their tensors

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """No memory is taken before it is written to."""
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{num_bytes / 1e9:.1f} GB of memory can not be had") from error
        if num_bytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        self._blocks.add(block)
        return torch.frombuffer(block, dtype=dtype).view(*shape)

    def release(self, keep: bool) -> None:
        for block in [] if keep else list(self._blocks):
            if sys.platform == "linux":
                block.madvise(mmap.MADV_DONTNEED)
            else:  # where this may leave them as they are
                block[:] = bytes(len(block))

    def restore(self) -> None:
        pass  # the system does it as they are written to


class DeviceMemory(Memory):
    """Tensors one behind the other in a reserved range, where memory is mapped as far as they go. Copies of what is
    kept are in pinned memory of the host, which stays for the next time: to pin it takes longer than the copy."""

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver, self._device = driver, device
        self._address, size = driver.reserve()
        self._used = self._mapped = 0  # bytes; the latter also while it is released
        self._pieces: list[tuple[int, int]] = []  # (address, size), as mapped
        self._released = False
        self._kept: Pinned | None = None
        self._keep = False  # whether the copy holds what the tensors did
        end = weakref.finalize(self, _give_up, driver, self._pieces, self._address, size)
        end.atexit = False  # the process's end does it

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert not self._released
        start = _rounded(self._used, ALIGNMENT)
        end = start + math.prod(shape) * dtype.itemsize
        if end > self._mapped:
            self._map(self._mapped, _rounded(end - self._mapped, self._driver.granularity))
        self._used = end
        return self._bytes(start, end).zero_().view(dtype).view(*shape)

    def release(self, keep: bool) -> None:
        if not self._released:
            if keep:
                self._save()
            self._keep, self._released = keep, True
            _unmap(self._driver, self._pieces)

    def restore(self) -> None:
        if not self._released:
            return
        self._map(0, self._mapped)
        whole = self._bytes(0, self._used)
        if self._keep:
            assert self._kept is not None
            whole.copy_(self._kept.bytes, non_blocking=True)
        else:
            whole.zero_()
        self._released = False

    def _save(self) -> None:
        if self._kept is None:
            self._kept = Pinned(self._used, self._device, KEPT, ADVICE)
        self._kept.bytes.copy_(self._bytes(0, self._used))

    def _map(self, offset: int, size: int) -> None:
        self._driver.map(self._address + offset, size)
        self._pieces.append((self._address + offset, size))
        self._mapped = offset + size

    def _bytes(self, start: int, end: int) -> Tensor:
        """Not to be kept here, as it keeps this object."""
        return self._driver.tensor(self._address + start, end - start, self)


def _unmap(driver: CudaDriver, pieces: list[tuple[int, int]]) -> None:
    driver.settle()
    while pieces:
        driver.unmap(*pieces[-1])
        pieces.pop()


def _give_up(driver: CudaDriver, pieces: list[tuple[int, int]], address: int, size: int) -> None:
    """When the last tensor is gone."""
    _unmap(driver, pieces)
    driver.free(address, size)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# ------------------------------------------------------------------------------------------- the CUDA driver

ON_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, and CU_MEM_LOCATION_TYPE_DEVICE
READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Mapped:
    """Memory of a GPU, as torch takes it."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class CudaDriver:
    """A GPU's addresses and physical memory. Sizes and addresses are multiples of `granularity`.

    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._total = torch.cuda.mem_get_info(self._device)[1]  # which also initializes the driver
        self._location = _Location(ON_DEVICE, self._device.index)
        self._allocation = _Allocation(type=ON_DEVICE, location=self._location)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._allocation), 0)
        self.granularity = granularity.value

    def reserve(self) -> tuple[int, int]:
        """A range of addresses for as much as the device has: its address and size."""
        address, size = ctypes.c_uint64(), _rounded(self._total, self.granularity)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value, size

    def free(self, address: int, size: int) -> None:
        """Give such a range back."""
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> None:
        """Take physical memory. Raises torch.OutOfMemoryError where there is too little."""
        handle = ctypes.c_uint64()
        create = "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._allocation), 0
        status = self._status(*create)
        if status == OUT_OF_MEMORY:
            release_memory(str(self._device))
            status = self._status(*create)
        if status == OUT_OF_MEMORY:
            free = device_memory(str(self._device))
            raise torch.OutOfMemoryError(
                f"{size / 1e9:.2f} GB of {self._device} are needed, and {free / 1e9:.2f} are free; free as much, and "
                "call torch.cuda.empty_cache() where it was torch's"
            )
        _check("cuMemCreate", status)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping holds it
        access = _Access(self._location, READ_AND_WRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)

    def unmap(self, address: int, size: int) -> None:
        """Give back what one call of `map` took."""
        self._call("cuMemUnmap", address, size)

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        torch.cuda.synchronize(self._device)

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """uint8 [size] of memory that is mapped; keeps `owner` alive."""
        return torch.as_tensor(_Mapped(address, size, owner), device=self._device)

    def _status(self, name: str, *arguments: Any) -> int:
        with current(self._device):
            status: int = getattr(_driver(), name)(*arguments)
        return status

    def _call(self, name: str, *arguments: Any) -> None:
        _check(name, self._status(name, *arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"the GPU's driver refuses {name} (CUDA error {status})")


@cache
def _driver() -> ctypes.CDLL:
    """What is called of the driver's functions, with their types."""
    driver = ctypes.CDLL("libcuda.so.1")
    address, handle, size, flags, pointer = (
        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
    )  # fmt: skip
    types: dict[str, list[Any]] = {
        "cuMemGetAllocationGranularity": [pointer, pointer, ctypes.c_int],
        "cuMemAddressReserve": [pointer, size, size, address, flags],
        "cuMemAddressFree": [address, size],
        "cuMemCreate": [pointer, size, pointer, flags],
        "cuMemMap": [address, size, size, handle, flags],
        "cuMemSetAccess": [address, size, pointer, size],
        "cuMemUnmap": [address, size],
        "cuMemRelease": [handle],
    }
    for name, arguments in types.items():
        getattr(driver, name).argtypes = arguments
    return driver
