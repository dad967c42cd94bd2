"""Memory of a GPU that can be released and restored while its tensors keep their addresses.

A range of addresses is reserved with the CUDA driver's virtual memory management, and physical memory is mapped there
as tensors are made. Releasing the memory unmaps it. CUDA graphs contain only addresses, so they stay valid when other
physical memory is mapped to the same addresses.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.device import cuda_driver
from fastgen.device.chip import current
from fastgen.device.memory import Memory, device_memory, release_memory
from fastgen.device.pinned_memory import Pinned

ALIGNMENT = 512  # alignment of tensors, in bytes


class DeviceMemory(Memory):
    """Memory of a GPU. Its tensors follow each other in a reserved range of addresses, whose used part is mapped.

    While the memory is released, kept contents are in pinned host memory. This is pinned only once, because pinning
    takes longer than a copy.
    """

    def __init__(self, driver: VirtualMemory, device: torch.device) -> None:
        self._driver, self._device = driver, device
        self._address, size = driver.reserve()
        self._used = self._mapped = 0  # bytes; _mapped stays the same while the memory is released
        self._mappings: list[tuple[int, int]] = []  # (address, size)
        self._released = False
        self._pinned: Pinned | None = None
        self._kept = False  # the pinned copy holds the tensors' contents
        end = weakref.finalize(self, _free, driver, self._mappings, self._address, size)
        end.atexit = False  # the end of the process frees the memory

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
        if self._released:
            return
        if keep:
            if self._pinned is None or len(self._pinned.bytes) < self._used:
                self._pinned = None
                advice = "pass keep_weights=False, and update_weights after wake"
                self._pinned = Pinned(self._used, self._device, "keeping the weights", advice)
            self._pinned.bytes.copy_(self._bytes(0, self._used))
        self._kept, self._released = keep, True
        _unmap(self._driver, self._mappings)

    def restore(self) -> None:
        if not self._released:
            return
        self._map(0, self._mapped)
        contents = self._bytes(0, self._used)
        if self._kept:
            assert self._pinned is not None
            contents.copy_(self._pinned.bytes, non_blocking=True)
        else:
            contents.zero_()
        self._released = False

    def _map(self, offset: int, size: int) -> None:
        self._driver.map(self._address + offset, size)
        self._mappings.append((self._address + offset, size))
        self._mapped = offset + size

    def _bytes(self, start: int, end: int) -> Tensor:
        """Return uint8 [end - start]. It keeps this object alive, so this object must not hold a reference to it."""
        return self._driver.tensor(self._address + start, end - start, self)


def _unmap(driver: VirtualMemory, mappings: list[tuple[int, int]]) -> None:
    driver.synchronize()
    while mappings:
        driver.unmap(*mappings[-1])
        mappings.pop()


def _free(driver: VirtualMemory, mappings: list[tuple[int, int]], address: int, size: int) -> None:
    """Free memory and addresses; called when the last tensor is gone."""
    _unmap(driver, mappings)
    driver.free(address, size)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# ------------------------------------------------------------------------------------------- virtual memory

UNSHARED = 2 << 20  # bytes; the driver may place smaller allocations together, and the other process would see them all


class _Mapped:
    """Memory of a GPU as torch.as_tensor takes it."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class VirtualMemory:
    """Access to the addresses and the physical memory of a GPU. Sizes and addresses are multiples of `granularity`."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._total = torch.cuda.mem_get_info(self._device)[1]  # this call also initializes the driver
        driver = cuda_driver.library()
        self._allocation = driver.CUmemAllocationProp()
        self._allocation.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._allocation.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._allocation.location.id = self._device.index
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._allocation.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity: int = self._call("cuMemGetAllocationGranularity", self._allocation, minimum)

    def reserve(self) -> tuple[int, int]:
        """Reserve addresses for as much memory as the device has, and return (address, size)."""
        size = _rounded(self._total, self.granularity)
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0)), size

    def free(self, address: int, size: int) -> None:
        """Free a range of addresses that `reserve` has returned."""
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> None:
        """Allocate physical memory and map it. Raises torch.OutOfMemoryError if there is too little."""
        driver = cuda_driver.library()
        out_of_memory = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with current(self._device):
            status, handle = driver.cuMemCreate(size, self._allocation, 0)
            if status == out_of_memory:
                release_memory(str(self._device))
                status, handle = driver.cuMemCreate(size, self._allocation, 0)
        if status == out_of_memory:
            free = device_memory(str(self._device))
            raise torch.OutOfMemoryError(
                f"{size / 1e9:.2f} GB of {self._device} are needed, and {free / 1e9:.2f} are free; free as much, and "
                "call torch.cuda.empty_cache() if it was torch's"
            )
        cuda_driver.check("cuMemCreate", status)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping holds the memory
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, address: int, size: int) -> None:
        """Unmap and free the memory of one call to `map`."""
        self._call("cuMemUnmap", address, size)

    def synchronize(self) -> None:
        """Wait until no work is in flight."""
        torch.cuda.synchronize(self._device)

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """Return mapped memory as uint8 [size]. The tensor keeps `owner` alive."""
        return torch.as_tensor(_Mapped(address, size, owner), device=self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        with current(self._device):
            return cuda_driver.call(name, *arguments)


class IpcMemory:
    """Memory of a GPU that another process on this machine can open by its handle (CUDA IPC).

    bytes: uint8, `size` elements or more. handle: handle of memory of the other process, or None to make new memory.
    The driver allocates it, since memory of torch's allocator may have no handle (expandable segments). Raises
    RuntimeError if the driver refuses, as it does if there is too little memory, and between containers.
    """

    def __init__(self, size: int, device: torch.device, handle: str | None = None) -> None:
        self._device, self._is_mine, size = device, handle is None, _rounded(size, UNSHARED)
        with current(device):
            if handle is None:
                release_memory(str(device))
                self._address = int(cuda_driver.call("cuMemAlloc", size))
                self.handle: str = cuda_driver.call("cuIpcGetMemHandle", self._address).reserved.hex()
            else:
                driver = cuda_driver.library()
                opened = driver.CUipcMemHandle()
                self.handle, opened.reserved = handle, bytes.fromhex(handle)
                peer_access = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
                self._address = int(cuda_driver.call("cuIpcOpenMemHandle", opened, peer_access))
        self.bytes = torch.as_tensor(_Mapped(self._address, size, None), device=device)

    def close(self) -> None:
        """Close the memory when nothing uses it any more. The process that made it has to be the last to close it."""
        with current(self._device):
            torch.cuda.synchronize(self._device)
            cuda_driver.call("cuMemFree" if self._is_mine else "cuIpcCloseMemHandle", self._address)
