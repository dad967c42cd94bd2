"""Memory of a GPU that can be released and restored while its tensors keep their addresses.

A range of addresses is reserved with the CUDA driver's virtual memory management, and physical memory is mapped there
as tensors are made. Releasing the memory unmaps it. CUDA graphs contain only addresses, so they stay valid when other
physical memory is mapped to the same addresses.
"""

from __future__ import annotations

import ctypes
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

ON_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED and CU_MEM_LOCATION_TYPE_DEVICE
READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
UNSHARED = 2 << 20  # bytes; the driver may place smaller allocations together, and the other process would see them all


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("win32_metadata", ctypes.c_void_p), ("flags", ctypes.c_uint8 * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


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
        self._location = _Location(ON_DEVICE, self._device.index)
        self._allocation = _Allocation(type=ON_DEVICE, location=self._location)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._allocation), 0)
        self.granularity = granularity.value

    def reserve(self) -> tuple[int, int]:
        """Reserve addresses for as much memory as the device has, and return (address, size)."""
        address, size = ctypes.c_uint64(), _rounded(self._total, self.granularity)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value, size

    def free(self, address: int, size: int) -> None:
        """Free a range of addresses that `reserve` has returned."""
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> None:
        """Allocate physical memory and map it. Raises torch.OutOfMemoryError if there is too little."""
        handle = ctypes.c_uint64()
        create = ctypes.byref(handle), size, ctypes.byref(self._allocation), 0
        with current(self._device):
            status = cuda_driver.library().cuMemCreate(*create)
            if status == OUT_OF_MEMORY:
                release_memory(str(self._device))
                status = cuda_driver.library().cuMemCreate(*create)
        if status == OUT_OF_MEMORY:
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
        access = _Access(self._location, READ_AND_WRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)

    def unmap(self, address: int, size: int) -> None:
        """Unmap and free the memory of one call to `map`."""
        self._call("cuMemUnmap", address, size)

    def synchronize(self) -> None:
        """Wait until no work is in flight."""
        torch.cuda.synchronize(self._device)

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """Return mapped memory as uint8 [size]. The tensor keeps `owner` alive."""
        return torch.as_tensor(_Mapped(address, size, owner), device=self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        with current(self._device):
            cuda_driver.call(name, *arguments)


class IpcMemory:
    """Memory of a GPU that another process on this machine can open by its handle (CUDA IPC).

    bytes: uint8, `size` elements or more. handle: handle of memory of the other process, or None to make new memory.
    The driver allocates it, since memory of torch's allocator may have no handle (expandable segments). Raises
    RuntimeError if the driver refuses, as it does if there is too little memory, and between containers.
    """

    def __init__(self, size: int, device: torch.device, handle: str | None = None) -> None:
        self._device, self._address, self._is_mine = device, ctypes.c_uint64(), handle is None
        address, found, size = ctypes.byref(self._address), cuda_driver.IpcHandle(), _rounded(size, UNSHARED)
        with current(device):
            if handle is None:
                release_memory(str(device))
                cuda_driver.call("cuMemAlloc_v2", address, size)
                cuda_driver.call("cuIpcGetMemHandle", ctypes.byref(found), self._address)
            else:
                found = cuda_driver.IpcHandle.from_buffer_copy(bytes.fromhex(handle))
                cuda_driver.call("cuIpcOpenMemHandle_v2", address, found, PEER_ACCESS)
        self.handle = bytes(found).hex()
        self.bytes = torch.as_tensor(_Mapped(self._address.value, size, None), device=device)

    def close(self) -> None:
        """Close the memory when nothing uses it any more. The process that made it has to be the last to close it."""
        with current(self._device):
            torch.cuda.synchronize(self._device)
            cuda_driver.call("cuMemFree_v2" if self._is_mine else "cuIpcCloseMemHandle", self._address)
