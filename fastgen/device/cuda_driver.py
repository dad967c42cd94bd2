"""Functions of the CUDA driver that torch does not expose: virtual memory, memory that two processes share, and flags
that streams write and wait for.

https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_ADDRESS, _HANDLE, _SIZE, _FLAGS = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
_POINTER, _STREAM, _INT, _UINT = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint


class IpcHandle(ctypes.Structure):
    """The driver's CUipcMemHandle, which functions take by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


_FUNCTIONS: dict[str, list[Any]] = {
    "cuMemGetAllocationGranularity": [_POINTER, _POINTER, _INT],
    "cuMemAddressReserve": [_POINTER, _SIZE, _SIZE, _ADDRESS, _FLAGS],
    "cuMemAddressFree": [_ADDRESS, _SIZE],
    "cuMemCreate": [_POINTER, _SIZE, _POINTER, _FLAGS],
    "cuMemMap": [_ADDRESS, _SIZE, _SIZE, _HANDLE, _FLAGS],
    "cuMemSetAccess": [_ADDRESS, _SIZE, _POINTER, _SIZE],
    "cuMemUnmap": [_ADDRESS, _SIZE],
    "cuMemRelease": [_HANDLE],
    "cuMemAlloc_v2": [_POINTER, _SIZE],
    "cuMemFree_v2": [_ADDRESS],
    "cuIpcGetMemHandle": [_POINTER, _ADDRESS],
    "cuIpcOpenMemHandle_v2": [_POINTER, IpcHandle, _UINT],
    "cuIpcCloseMemHandle": [_ADDRESS],
    "cuMemcpyAsync": [_ADDRESS, _ADDRESS, _SIZE, _STREAM],
    # With flags of 0, a memory barrier precedes the write, and a wait ends at the given value or a later one, where
    # "later" is meant for numbers that wrap around.
    "cuStreamWriteValue32_v2": [_STREAM, _ADDRESS, ctypes.c_uint32, _UINT],
    "cuStreamWaitValue32_v2": [_STREAM, _ADDRESS, ctypes.c_uint32, _UINT],
}


@cache
def library() -> ctypes.CDLL:
    """Load the driver's library, and set the argument types of these functions."""
    loaded = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _FUNCTIONS.items():
        getattr(loaded, name).argtypes = arguments
    return loaded


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver, for the current GPU. Raises RuntimeError if it fails."""
    check(name, getattr(library(), name)(*arguments))


def check(name: str, status: int) -> None:
    """Raise RuntimeError if a function has returned an error."""
    if status:
        raise RuntimeError(f"the GPU's driver refuses {name} (CUDA error {status})")
