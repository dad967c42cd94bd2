"""Functions of NCCL for a group whose unique id another program has made.

torch.cuda.nccl has the same functions, but those that take an id raise SystemError with Python 3.12 (torch 2.11).

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

ID_BYTES = 128
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # of ncclDataType_t and ncclRedOp_t
_SUCCESS, _IN_PROGRESS = 0, 7  # of ncclResult_t


class _UniqueId(ctypes.Structure):
    """ncclUniqueId, which a function takes by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * ID_BYTES)]


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14, which later versions of NCCL read too: `size` and `version` tell them which fields
    there are. cga_cluster_size is of 2.17; in 2.14 it is padding."""

    _fields_ = [
        ("size", _SIZE),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", _INT),
        ("cga_cluster_size", _INT),
    ]


_MAGIC, _VERSION, _UNDEFINED = 0xCAFEBEEF, 21400, -(2**31)
_FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetUniqueId": [_POINTER],
    "ncclCommInitRankConfig": [_POINTER, _INT, _UniqueId, _INT, _POINTER],
    "ncclCommGetAsyncError": [_POINTER, _POINTER],
    "ncclAllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclCommAbort": [_POINTER],
}


@cache
def _library() -> ctypes.CDLL:
    """Return the NCCL library that torch has loaded, which the loader finds by name."""
    loaded = ctypes.CDLL("libnccl.so.2")
    for name, arguments in _FUNCTIONS.items():
        getattr(loaded, name).argtypes = arguments
    loaded.ncclGetErrorString.restype = ctypes.c_char_p
    return loaded


def _call(name: str, *arguments: Any) -> None:
    """Call a function. Raises RuntimeError if it fails."""
    _check(name, getattr(_library(), name)(*arguments))


def _check(name: str, status: int) -> None:
    if status not in (_SUCCESS, _IN_PROGRESS):
        raise RuntimeError(f"{name}: {_library().ncclGetErrorString(status).decode()}")


def unique_id() -> bytes:
    """Return the unique id of a new group."""
    made = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made.bytes)


class Communicator:
    """This process's end of a group of `size` ranks, on the current GPU.

    Making it and its operations only begin their work, since another rank may never come: when `ready` returns True,
    all ranks have joined, or the operation is on the current stream. Nothing else may begin before. Raises RuntimeError
    if NCCL refuses.
    """

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        self._handle = ctypes.c_void_p()
        id = _UniqueId.from_buffer_copy(unique_id)
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _VERSION, 0, _UNDEFINED)
        _call("ncclCommInitRankConfig", ctypes.byref(self._handle), size, id, rank, ctypes.byref(config))

    def ready(self) -> bool:
        """Return whether all ranks have joined and the last operation is on the stream, where it may still run. Raises
        RuntimeError if it has failed."""
        state = _INT(_IN_PROGRESS)
        _call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        _check("NCCL", state.value)
        return state.value == _SUCCESS

    def close(self) -> None:
        """Abort what has been begun and free the communicator, which cannot be used afterwards."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _call("ncclCommAbort", handle)

    def all_reduce(self, x: Tensor) -> None:
        """Sum x, float32 and contiguous, over the ranks in place."""
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        _call("ncclAllReduce", x.data_ptr(), x.data_ptr(), x.numel(), _FLOAT32, _SUM, self._handle, _stream())

    def broadcast(self, x: Tensor) -> None:
        """Overwrite the bytes of x, uint8 and contiguous, with those of rank 0."""
        assert x.dtype == torch.uint8
        assert x.is_contiguous()
        _call("ncclBroadcast", x.data_ptr(), x.data_ptr(), x.numel(), _UINT8, 0, self._handle, _stream())


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
