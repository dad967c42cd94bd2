"""A trainer that sends weights as vLLM's NCCL senders do (TRL, SkyRL), without vLLM."""

from __future__ import annotations

import base64
import ctypes
import pickle
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from fastgen.async_engine.trainer_group import ID_KEY, ID_TYPE
from fastgen.device.nccl import Communicator, unique_id

MODULE, NAME = ID_TYPE
FIELDS = (("internal", ctypes.c_byte * 128),)
Structure: Any = type(NAME, (ctypes.Structure,), {"__module__": MODULE, "_fields_": FIELDS})
"""vLLM's type of an NCCL id, under its name."""


def pickled(value: Any, protocol: int = 5) -> bytes:
    """Pickle an id as vLLM does, or another value."""
    names = [".".join(MODULE.split(".")[:end]) for end in range(1, MODULE.count(".") + 2)]
    modules = {name: ModuleType(name) for name in names}
    setattr(modules[MODULE], NAME, Structure)
    before = {name: sys.modules.get(name) for name in names}
    try:
        sys.modules.update(modules)
        return pickle.dumps(value, protocol)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class BlockingCommunicator(Communicator):
    """The end of a trainer: as vLLM's senders do, it waits until all ranks have joined."""

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        self._handle = ctypes.c_void_p()
        join, id = ctypes.CDLL("libnccl.so.2").ncclCommInitRank, Structure.from_buffer_copy(unique_id)
        assert join(ctypes.byref(self._handle), size, id, rank) == 0


class Trainer:
    """Rank 0 of a group of two, on a GPU. buffer_bytes: size of packed buffers; None: each tensor is one broadcast.
    by_id: the server gets NCCL's id in the request, and not from a store."""

    def __init__(self, url: str, device: str, buffer_bytes: int | None, by_id: bool = False) -> None:
        self._http, self._device, self._buffer_bytes = httpx.Client(base_url=url, timeout=100), device, buffer_bytes
        id = unique_id()
        info: dict[str, Any] = {"rank_offset": 1, "world_size": 2, "packed": buffer_bytes is not None}
        if buffer_bytes is not None:
            info["packed_buffer_size_bytes"] = buffer_bytes
        if by_id:
            info["nccl_unique_id_b64"] = base64.b64encode(id).decode()
        else:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            self._store.set(ID_KEY, pickled(Structure.from_buffer_copy(id)))
            info |= {"master_address": "127.0.0.1", "master_port": self._store.port}
        with ThreadPoolExecutor(1) as pool, torch.cuda.device(device):
            asking = pool.submit(self.post, "/init_weight_transfer_engine", {"init_info": info})
            self._group = BlockingCommunicator(2, id, 0)
            self._group.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
            torch.cuda.synchronize(device)
            asking.result()

    def post(self, path: str, body: Any = None) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def update(self, weights: Mapping[str, Tensor], start: str = "/start_weight_update") -> int:
        """Send weights that are on the device. Return their version. start: the route that begins the update."""
        names, tensors = list(weights), list(weights.values())
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        info = {"names": names, "dtype_names": dtypes, "shapes": [list(tensor.shape) for tensor in tensors]}
        self.post(start, {})
        with ThreadPoolExecutor(1) as pool, torch.cuda.device(self._device):
            asking = pool.submit(self.post, "/update_weights", {"update_info": info})
            for buffer in self._buffers(tensors):
                self._group.broadcast(buffer.contiguous().view(-1).view(torch.uint8))
            torch.cuda.synchronize(self._device)
            asking.result()
        return int(self.post("/finish_weight_update", {})["weight_version"])

    def _buffers(self, tensors: list[Tensor]) -> Iterator[Tensor]:
        """Yield what is broadcast: bytes of several tensors, or each tensor."""
        if self._buffer_bytes is None:
            yield from tensors
            return
        parts, size = list[Tensor](), 0
        for tensor in tensors:
            parts.append(tensor.contiguous().view(-1).view(torch.uint8))
            size += parts[-1].numel()
            if size > self._buffer_bytes:
                yield torch.cat(parts)
                parts, size = [], 0
        if parts:
            yield torch.cat(parts)
