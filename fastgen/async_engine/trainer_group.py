"""The receiving end of the weight transfer of vLLM's trainers: NCCL broadcasts of packed tensors.

Protocol (vllm/distributed/weight_transfer of vLLM 0.22 to 0.33): rank 0, the trainer, opens a TCPStore and puts NCCL's
unique id there, pickled; or the id comes with the request. All ranks make a communicator and sum one number. For an
update both ends know names, dtypes and shapes. Tensors are packed as bytes, one after the other, and each packed buffer
that has become larger than the agreed size is one broadcast; or each tensor is one.
"""

from __future__ import annotations

import base64
import io
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastgen.async_engine.wire import Header, placeholders
from fastgen.device.nccl import ID_BYTES, Communicator
from fastgen.processes.errors import DepartedError

ID_KEY = "broadcast_from/0/0"  # of the store: the first object that rank 0 broadcasts
ID_TYPE = "vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"
CONNECT_SECONDS = 60.0  # time for the trainer to open its store
JOIN_SECONDS = 120.0  # time for the trainer to put its id into the store, and then again for all ranks to join
LONGEST_PAUSE = 1e-3  # maximum seconds between two looks at the store or at the communicator
VERSIONS = "vLLM 0.22 to 0.33, NCCL backend"


class TrainerGroup:
    """A communicator of a trainer (rank 0) and this process, and perhaps other servers.

    unique_id: NCCL's id of the group, 128 bytes. ranks: index of this process and number of ranks. buffer_bytes: see
    `receive`. seconds: maximum time without progress, of which JOIN_SECONDS are for all ranks to join. broken: True
    after a failure within an update.

    check, an argument of the methods, is a function that is called while this end waits, and raises if the client of
    the running request has gone. The methods raise DepartedError if the trainer does not go on.
    """

    def __init__(
        self,
        unique_id: bytes,
        ranks: tuple[int, int],
        device: torch.device,
        buffer_bytes: int | None,
        seconds: float,
        check: Callable[[], None],
    ) -> None:
        self.broken = False
        self._device, self._buffer_bytes, self._seconds = device, buffer_bytes, seconds
        rank, size = ranks
        with torch.cuda.device(device):
            self._group = Communicator(size, unique_id, rank)
            try:
                self._join(size, check)
                one = torch.zeros(1, dtype=torch.float32, device=device)
                self._group.all_reduce(one)  # the trainer's communicator sums one number at its start
                self._wait(check)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Leave the group. This can be called twice."""
        with torch.cuda.device(self._device):
            self._group.close()

    def receive(
        self, header: Header, buffer_bytes: int | None, check: Callable[[], None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an update. A tensor is valid until the next buffer is taken.

        buffer_bytes: the agreed size of packed buffers; None: as agreed at the start, where None means that each tensor
        is one broadcast.
        """
        self.broken = True
        for tensors in packed(header, buffer_bytes or self._buffer_bytes):
            memory = torch.empty(sum(like.nbytes for _, like in tensors), dtype=torch.uint8, device=self._device)
            with torch.cuda.device(self._device):
                self._group.broadcast(memory)
                self._wait(check)
            yield from unpacked(memory, tensors)
        self.broken = False

    def _join(self, size: int, check: Callable[[], None]) -> None:
        """Wait until all ranks have joined the group. `check` and the time limit work here too, since the communicator
        does not block."""
        seconds = min(JOIN_SECONDS, self._seconds)
        try:
            if _becomes(self._group.ready, seconds, check):
                return
            reason = f"not all {size} ranks of the trainer's group have joined it within {seconds:g} seconds"
        except DepartedError:
            raise
        except RuntimeError as error:
            reason = f"NCCL cannot join the trainer's group ({error})"
        raise DepartedError(
            f"{reason}; the trainer must join, on a GPU of its own, while POST /init_weight_transfer_engine runs: "
            "send this request again, with a new id"
        )

    def _wait(self, check: Callable[[], None]) -> None:
        """Wait until the last operation and all other work on the device have ended. If the trainer does not take part
        in it, leave the group, since an operation that waits for it would block the device."""
        try:
            if not _becomes(self._group.ready, self._seconds, check):
                raise DepartedError(f"the trainer has not connected within {self._seconds:g} seconds")
            done: Any = torch.cuda.current_stream().record_event()
            if not _becomes(lambda: self._group.ready() and done.query(), self._seconds, check):
                raise DepartedError(f"the trainer has sent nothing for {self._seconds:g} seconds")
        except BaseException:
            self.close()
            raise


def _becomes(ready: Callable[[], bool], seconds: float, check: Callable[[], None]) -> bool:
    """Wait until `ready()`, and return whether it has become so within the time."""
    pause, deadline = 1e-5, time.monotonic() + seconds
    while not ready():
        check()
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def packed(header: Header, buffer_bytes: int | None) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the placeholders of the tensors of each broadcast. A buffer ends with the tensor that makes it larger than
    `buffer_bytes`; None: each tensor is one broadcast."""
    tensors, size = list[tuple[str, Tensor]](), 0
    for name, like in placeholders(header):
        tensors.append((name, like))
        size += like.nbytes
        if size > (buffer_bytes or 0) or buffer_bytes is None:
            yield tensors
            tensors, size = [], 0
    if tensors:
        yield tensors


def unpacked(memory: Tensor, tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors in a packed buffer, uint8 [n]. tensors: their placeholders."""
    start = 0
    for name, like in tensors:
        part = memory[start : start + like.nbytes]
        start += like.nbytes
        if part.storage_offset() % like.itemsize:  # after a tensor of smaller numbers
            part = part.clone()
        yield name, part.view(like.dtype).view(like.shape)


# ------------------------------------------------------------------------------------------------- the unique id


def find_id(address: tuple[str, int] | None, seconds: float, check: Callable[[], None]) -> bytes:
    """Return NCCL's unique id from the store that a trainer opens at this host and port. Raises ValueError for another
    object than an id, and DepartedError if the store does not answer."""
    assert address is not None
    host, port = address
    seconds = min(JOIN_SECONDS, seconds)
    try:
        limit = timedelta(seconds=min(CONNECT_SECONDS, seconds))
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        if not _becomes(lambda: store.check([ID_KEY]), seconds, check):
            raise DepartedError(f"the trainer's store at {host}:{port} has no NCCL id after {seconds:g} seconds")
        return read_id(store.get(ID_KEY))
    except RuntimeError as error:
        if isinstance(error, DepartedError):
            raise
        raise DepartedError(f"the trainer's store at {host}:{port} does not answer: {error}") from None


def decode_id(text: str) -> bytes:
    """Return the id that base64 stands for. Raises ValueError."""
    try:
        id_bytes = base64.b64decode(text, validate=True)
    except ValueError:
        id_bytes = b""
    if len(id_bytes) != ID_BYTES:
        raise ValueError(f"nccl_unique_id_b64 is not the base64 of {ID_BYTES} bytes")
    return id_bytes


def read_id(data: bytes) -> bytes:
    """Return the id in a pickle of vLLM's ncclUniqueId. Raises ValueError for any other pickle, of which no code
    runs."""
    try:
        content = _IdReader(io.BytesIO(data)).load()
    except Exception as error:  # a pickle can be wrong in many ways
        raise ValueError(f"the trainer's NCCL id cannot be read ({error}); known senders are {VERSIONS}") from None
    if not isinstance(content, _Id):
        raise ValueError(f"the trainer sent another object than an NCCL id; known senders are {VERSIONS}")
    return content.value


@dataclass(frozen=True, slots=True)  # without a __dict__, which a pickle could fill
class _Id:
    """An id that was read."""

    value: bytes


_STRUCTURE = object()  # stands for the type ncclUniqueId


class _IdReader(pickle.Unpickler):
    """An unpickler that admits only vLLM's ncclUniqueId, a ctypes structure of 128 bytes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ID_TYPE:
            return _STRUCTURE
        if (module, name) == ("_ctypes", "_unpickle"):
            return _make_id
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _make_id(kind: object, state: object) -> _Id:
    """Return the id that ctypes' own function would make of its type and (attributes, bytes)."""
    match state:
        case ({}, bytes() as value) if kind is _STRUCTURE and len(value) == ID_BYTES:
            return _Id(value)
    raise pickle.UnpicklingError("it is not a structure of 128 bytes")
