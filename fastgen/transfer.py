"""Weight updates on their way to the ranks.

To ranks that were started for this process, it sends each tensor in turn: through memory that they share, or, where it
is on a GPU, as a CUDA IPC handle. Each takes its part, and says so. Ranks that a program has are given their tensors by
the program, and only tell each other what came of it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen.links import Answer, Link, Message
from fastgen.processes import raise_first
from fastgen.runner import Runner
from fastgen.weights import Update

# ------------------------------------------------------------------------------------------- ranks that are started


@dataclass(frozen=True, slots=True)
class Weight(Message):
    """To all ranks: a whole tensor, in the shared memory (`file`, its number), or where `rebuild` finds it: a function
    and its arguments."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: int
    rebuild: tuple[Callable[..., Tensor], tuple[Any, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Taken(Answer):
    """To a Weight: it was read."""


class SharedMemory:
    """A tensor's bytes, in a file that is in memory only, and which ranks inherit: /dev/shm may be small."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def make(cls) -> SharedMemory:
        return cls(os.memfd_create("fastgen"))

    def hold(self, tensor: Tensor) -> None:
        """Copy a tensor into it, for who calls `read`; the one before is lost."""
        if os.fstat(self.file).st_size < tensor.nbytes:
            os.ftruncate(self.file, tensor.nbytes)
        self.read(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that it holds, in place."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.frombuffer(mmap.mmap(self.file, size), dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)

    def clear(self) -> None:
        """Give the memory back; nobody may read it any more."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self.file, 0)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


def packed(number: int, name: str, tensor: Tensor, shared: SharedMemory) -> Weight:
    """The message that brings a tensor, which must live until all have taken it."""
    tensor, rebuild = tensor.detach(), None
    if tensor.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(tensor.device).synchronize()
        rebuild = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    else:
        shared.hold(tensor)
    return Weight(number, name, tuple(tensor.shape), tensor.dtype, shared.file, rebuild)


class Arriving:
    """On a rank: the tensors of an update, from a first message on.

    following: behind the last of them, the message that came next; None at the end of the connection.
    """

    def __init__(self, first: Weight, link: Link) -> None:
        self.following: Message | None = first
        self._link = link

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        shared: SharedMemory | None = None
        while isinstance(weight := self.following, Weight):
            if weight.rebuild is not None:
                make, arguments = weight.rebuild
                yield weight.name, make(*arguments)
                torch.cuda.synchronize()
            else:
                shared = shared or SharedMemory(weight.file)
                yield weight.name, shared.read(weight.shape, weight.dtype)
            self._link.send(Taken(weight.number))
            self.following = self._link.receive()


# ------------------------------------------------------------------------------------------- ranks that a program has


@dataclass(frozen=True, slots=True)
class TakePart(Message):
    """To all followers: check the tensors that your program gave, or write them."""

    number: int
    write: bool
    partial: bool


@dataclass(frozen=True, slots=True)
class TookPart(Answer):
    """From a follower: what came of it, and the names of the tensors that it has looked at."""

    error: Exception | None
    names: frozenset[str]


def take_part(asked: TakePart, update: Update, runner: Runner) -> TookPart:
    """Do on a rank what is asked."""
    update.partial = asked.partial
    try:
        if asked.write:
            runner.write_weights(update.tensors())
        else:
            update.check()
    except Exception as error:
        return TookPart(asked.number, error, frozenset())
    return TookPart(asked.number, None, frozenset(update.names))


def check_agreement(outcomes: Mapping[int, TookPart], wrote: bool) -> None:
    """Raise what the first of the ranks has raised, and ValueError where their programs gave other tensors."""
    raise_first({rank: outcome.error for rank, outcome in outcomes.items()})
    for rank in sorted(outcomes):
        mine, its = outcomes[0].names, outcomes[rank].names
        if mine != its and (wrote or (mine and its)):  # tensors that come once are looked at when they are written
            raise ValueError(f"rank {rank} gives other tensors than rank 0: {', '.join(sorted(mine ^ its)[:20])}")
