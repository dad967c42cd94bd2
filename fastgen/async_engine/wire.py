"""Transport of weights from a trainer to a Generator in another program, through a process group of these two.

Both ends know the name, dtype and shape of each tensor beforehand, and divide the tensors into the same buckets. Each
bucket is one broadcast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from fastgen.device.gpu_memory import IpcMemory
from fastgen.parallel.rank_group import RankGroup
from fastgen.processes.errors import DepartedError

ALIGNMENT = 16  # alignment in bytes of the tensors in a bucket
LONGEST_PAUSE = 1e-3  # maximum seconds between two checks of whether the other end is ready

Header = list[tuple[str, str, list[int]]]
"""Name, dtype and shape of each tensor."""


def header_of(named: Iterable[tuple[str, Tensor]]) -> Header:
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named]


def placeholders(header: Header) -> list[tuple[str, Tensor]]:
    """Return tensors of these names, dtypes and shapes that take no memory. Raises ValueError for an unknown dtype."""
    kinds = {kind: getattr(torch, kind, None) for _, kind, _ in header}
    if unknown := [kind for kind, dtype in kinds.items() if not isinstance(dtype, torch.dtype)]:
        raise ValueError(f"there is no dtype {unknown[0]!r}; give one of torch's, such as 'bfloat16'")
    return [(name, torch.empty((), dtype=kinds[kind], device="cpu").expand(shape)) for name, kind, shape in header]


def is_sender() -> bool:
    """Return whether this process sends the tensors that all ranks of its program gather: it is rank 0 or the only
    rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


def connect(
    address: tuple[str, int], key: str, backend: str, device: torch.device, seconds: float, bucket_bytes: int
) -> Wire:
    """Return a sender's end of the connection. address: host and port of the store. See Wire for the others."""
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))  # type: ignore[attr-defined]
    return Wire(store, key, 0, backend, device, seconds, bucket_bytes)


class Wire:
    """An end of a connection for weights: rank 0 sends, and rank 1 receives.

    store, key: store of torch.distributed, and the key under which the two ends meet in it.
    backend: "gloo" or "nccl" for a process group; "ipc" for two processes on one GPU; the receiver copies from
        the sender's memory.
    device: device of the tensors.
    seconds: maximum time without progress.
    bucket_bytes: maximum bytes of the tensors in a bucket, the same at both ends; a larger tensor has its own bucket.
    broken: True if the two ends may have come to different places in an update; a new connection is then needed.

    check, an argument of the methods, is a function that is called while this end waits, and raises if the other end
    has failed. The methods raise DepartedError if the other end does not answer.
    """

    def __init__(
        self, store: Store, key: str, rank: int, backend: str, device: torch.device, seconds: float, bucket_bytes: int
    ) -> None:
        self.key, self.backend, self.broken = key, backend, False
        self._store, self._rank = PrefixStore(f"{key}/", store), rank
        self._device = torch.device("cpu") if backend == "gloo" else device
        self._seconds, self._bucket_bytes = seconds, bucket_bytes
        self._group: RankGroup | None = None
        self._memory: IpcMemory | None = None
        self._meetings = 0

    def close(self) -> None:
        """Leave the process group. If the other end is waiting, it raises an error: at once with gloo, else at its time
        limit."""
        self.broken = True
        if self._group is not None:
            self._group.leave()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def send(self, named: Iterable[tuple[str, Tensor]], header: Header, check: Callable[[], None]) -> None:
        """Send an update as soon as the other end receives. A DTensor is gathered when it is sent."""
        self._wait(lambda: self._store.check(["receives"]), check)
        with self._moving():
            self._store.delete_key("receives")
            self._join()
            tensors = iter(named)
            for data, views in self._buckets(header):
                for _, view in views:
                    _, tensor = next(tensors)
                    view.copy_((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach())
                    del tensor
                self._broadcast(data, check)

    def receive(self, header: Header, check: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an update. Each is valid until the next one is taken."""
        with self._moving():
            self._store.set("receives", "")
            self._join()
            for data, views in self._buckets(header):
                self._broadcast(data, check)
                yield from views

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Mark this end as broken until the block, which is an update, has ended without an error.

        After an error, leave the group before the caller sees it: an operation of NCCL that waits for the other end
        would block the device, and the caller synchronizes with it.
        """
        self.broken = True
        try:
            yield
        except BaseException:
            self.close()
            raise
        self.broken = False

    def _buckets(self, header: Header) -> Iterator[tuple[Tensor, list[tuple[str, Tensor]]]]:
        """Yield the memory of each bucket (uint8), and the named tensors in it. The memory is used again."""
        memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        for places, size in _layouts(header, self._bucket_bytes):
            if len(memory) < size:
                del memory  # before more is allocated
                memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            views = [
                (name, memory[start : start + like.nbytes].view(like.dtype).view(like.shape))
                for name, like, start in places
            ]
            yield memory[:size], views

    def _join(self) -> None:
        if self.backend == "ipc":
            self._memory = self._memory or self._share()
        elif self._group is None:
            limit = timedelta(seconds=2 * self._seconds)  # longer than the limit of `_wait`, whose error is clearer
            with _departing():
                self._group = RankGroup.join(self._store, self.key, self._rank, 2, self._device, False, limit)

    def _share(self) -> IpcMemory:
        """Return memory for one bucket, which the sender allocates and the receiver opens."""
        try:
            handle = None if self._rank == 0 else self._store.get("memory").decode()
            memory = IpcMemory(self._bucket_bytes, self._device, handle)
            if self._rank == 0:
                self._store.set("memory", memory.handle)
        except RuntimeError as error:
            raise DepartedError(f"the two cannot share memory of the GPU: {error}; give backend='gloo'") from None
        return memory

    def _meet(self, check: Callable[[], None]) -> None:
        """Wait until both ends have come here, and all work that they launched on the device has ended."""
        torch.cuda.synchronize(self._device)
        self._meetings += 1
        with _departing():
            self._store.add(f"rank {self._rank}", 1)
        self._wait(lambda: self._store.add(f"rank {1 - self._rank}", 0) >= self._meetings, check)

    def _broadcast(self, data: Tensor, check: Callable[[], None]) -> None:
        if self._memory is not None:
            for part in torch.split(data, len(self._memory.bytes)):  # a tensor may be larger
                shared = self._memory.bytes[: len(part)]
                if self._rank == 0:
                    shared.copy_(part)
                self._meet(check)
                if self._rank == 1:
                    part.copy_(shared)
                self._meet(check)
            return
        assert self._group is not None
        with _departing():
            work = dist.broadcast(data, group=self._group.process_group, group_src=0, async_op=True)
        self._wait(work.is_completed, check)
        with _departing():
            work.wait()

    def _wait(self, ready: Callable[[], bool], check: Callable[[], None]) -> None:
        """Wait until `ready()`, in short pauses, so that `check` or the time limit can end the wait."""
        pause, deadline = 1e-5, time.monotonic() + self._seconds
        while True:
            with _departing():
                if ready():
                    return
            check()
            if time.monotonic() > deadline:
                raise DepartedError(f"the other end of the weight group has sent nothing for {self._seconds:g} seconds")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _layouts(header: Header, bucket_bytes: int) -> Iterator[tuple[list[tuple[str, Tensor, int]], int]]:
    """Yield the tensors of each bucket, as (name, placeholder, first byte), and the size of the bucket in bytes."""
    places, end = list[tuple[str, Tensor, int]](), 0
    for name, like in placeholders(header):
        size = -(-like.nbytes // ALIGNMENT) * ALIGNMENT
        if places and end + size > bucket_bytes:
            yield places, end
            places, end = [], 0
        places.append((name, like, end))
        end += size
    if places:
        yield places, end


@contextmanager
def _departing() -> Iterator[None]:
    """Raise torch's errors as DepartedError, a type that a process without torch can unpickle."""
    try:
        yield
    except RuntimeError as error:
        raise DepartedError(f"the weight group has failed: {error}") from None
