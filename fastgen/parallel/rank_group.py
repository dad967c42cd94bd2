"""The group of several tensor-parallel ranks that hold a model together, and its collectives."""

from __future__ import annotations

import re
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName, _get_default_store, _world

from fastgen.kernels import allreduce
from fastgen.kernels.launch import triton
from fastgen.kernels.norm import RMSNorm
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import HALVES, Exchange, ExchangeLayout, PeerMemory
from fastgen.parallel.residual import ReplicatedResidual, Residual
from fastgen.parallel.sharded import ShardedResidual
from fastgen.processes.errors import DepartedError, portable, raise_first

T = TypeVar("T")

FUSED_TOKENS = 1024
"""Maximum number of tokens in one launch of our own kernel for sums over the ranks of a host."""

POLLS = 10 * allreduce.POLLS
"""Number of polls before a sum stops waiting for another rank: about five minutes, as that rank may be compiling."""

TIMEOUT = timedelta(minutes=10)  # of a collective


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the objects of all ranks, ordered by rank. They are pickled."""
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, mine, group=group)
    return objects


class RendezvousStore(Store):
    """A store in which ranks meet for symmetric memory. It is the process group's store for torch.

    The keys of torch's rendezvous contain a counter of the process (StoreExchange in CUDASymmetricMemoryUtils.hpp). In
    a process in which earlier Generators ran, the counter is ahead of the one of a follower that has just started, and
    each would wait for the other's keys forever. This store renumbers the keys from 0 in each group.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}  # {number of the process: number in this group}, by first use

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get([self._key(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)

    def _key(self, key: str) -> str:
        return re.sub(r"\d+", lambda found: str(self._numbers.setdefault(found[0], len(self._numbers))), key, count=1)


class RankGroup(Group):
    """A group of ranks of a process group, on their own devices. one_host: whether all ranks are on this host."""

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device | None = None, one_host: bool = True
    ) -> None:
        self.process_group: dist.ProcessGroup | None = process_group
        self.one_host = one_host
        self.rank, self.size = process_group.rank(), process_group.size()
        self._device = torch.device("cpu") if device is None else device
        self._rendezvous: RendezvousStore | None = None
        self._inbox: allreduce.Inbox | None = None
        self._inbox_memory: PeerMemory | None = None
        self._graphs: list[weakref.ref[Any]] = []
        several = self._device.type == "cuda" and self.size > 1
        self._interrupting = torch.cuda.Stream(device) if several else None  # type: ignore[no-untyped-call]

    @classmethod
    def join(
        cls,
        store: Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        one_host: bool = True,
        timeout: timedelta = TIMEOUT,
    ) -> RankGroup:
        """Make a group of `size` ranks, which all call this with the same name and meet in `store`. timeout: time limit
        of a collective.

        torch.distributed does not list the group, so a program can make and destroy its own groups, including the
        default group, while this one exists.
        """
        store = PrefixStore(f"{name}/", store)
        rendezvous = RendezvousStore(store)
        process_group = dist.ProcessGroup(rendezvous, rank, size)
        backend: Any
        if device.type == "cpu":
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            kind, options = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL.Options()
            options._timeout, options.group_name = timeout, GroupName(name)
            options.global_ranks_in_group = list(range(size))
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
        backend._set_sequence_number_for_group()
        process_group._set_default_backend(kind)
        process_group._register_backend(torch.device(device.type), kind, backend)
        process_group._set_group_name(GroupName(name))
        _register_process_group(GroupName(name), process_group)  # symmetric memory finds the group by name
        _world.pg_group_ranks[process_group] = {member: member for member in range(size)}  # and its ranks here
        group = cls(process_group, device, one_host)
        group._rendezvous = rendezvous  # torch calls its methods only while the Python object is alive
        return group

    @classmethod
    def beside(cls, given: dist.ProcessGroup, device: torch.device) -> RankGroup:
        """Make a new group of the ranks of a program's group, all of which call this. The two groups' collectives are
        separate, and an error ends only the new group."""
        boot = Path("/proc/sys/kernel/random/boot_id")  # tells apart hosts of the same name
        host = socket.gethostname(), boot.read_text() if boot.exists() else ""
        names, hosts = zip(*gather_objects((f"fastgen-{secrets.token_hex(8)}", host), given), strict=True)
        one_host = len(set(hosts)) == 1
        return cls.join(_get_default_store(), names[0], given.rank(), given.size(), device, one_host)

    def register_graphs(self, graphs: Any) -> None:
        """Register graphs that contain this group's collectives. `leave` calls their `reset`, since NCCL does not end
        before they are freed. They are not kept alive: the graphs measured at the start are dropped earlier."""
        self._graphs.append(weakref.ref(graphs))

    def leave(self) -> None:
        """End the process group, and reset the graphs that contain its collectives. Further calls do nothing.

        Other ranks that wait for this one raise DepartedError: immediately with gloo; with NCCL, when they are
        interrupted or leave too. Data that they have not yet received is lost.
        """
        group, self.process_group = self.process_group, None
        if group is None:
            return
        self._end_waits()
        self.exchange = None
        if self._device.type == "cuda":
            group.abort()  # `shutdown` would wait for ranks that are gone
        else:
            group.shutdown()
        _unregister_process_group(group.group_name)
        _world.pg_group_ranks.pop(group, None)

    def interrupt(self) -> None:
        """End this rank's waits for others on a GPU after another rank has failed; may be called from any thread. The
        awaited results are wrong."""
        group = self.process_group
        if group is not None and self._interrupting is not None:
            self._end_waits()
            group.abort()

    def _end_waits(self) -> None:
        """End the waits of our own kernels and streams, and reset the registered graphs."""
        if self._interrupting is not None:
            with torch.cuda.stream(self._interrupting), torch.inference_mode():
                if self._inbox is not None:
                    self._inbox.polls.zero_()
                if self.exchange is not None:
                    self.exchange.interrupt()
        for reference in self._graphs:
            if (graphs := reference()) is not None:
                graphs.reset()

    def _run(self, collective: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return the result of a collective. Raises DepartedError if another rank is gone."""
        if self.process_group is None:  # torch would use the program's own group
            raise DepartedError("the ranks have left their group")
        try:
            return collective(*args, **options, group=self.process_group)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            # If the program has a default group, torch logs the error, and then raises ValueError because it does not
            # list our group.
            cause = error.__context__ if isinstance(error, ValueError) and error.__context__ else error
            for each in (error, cause):  # their frames would keep the group's sockets open, and other ranks waiting
                each.__traceback__ = None
            raise DepartedError(f"another rank is gone: {cause}") from cause

    def prepare(self, hidden: int, dtype: torch.dtype, half: int = 0) -> None:
        if self.size > 1 and self._device.type == "cuda" and self.sums_in_order:
            words = FUSED_TOKENS * hidden * dtype.itemsize // 4
            self._inbox_memory = self._peer_memory(allreduce.Inbox.bytes_for(words, self.size))
            peers = self._inbox_memory.peers
            self._inbox = allreduce.Inbox.make(peers, words, self.rank, self._device, polls=POLLS)
            if half:
                memory = self._peer_memory(ExchangeLayout.of(self.size, half, hidden, dtype).end)
                self.exchange = Exchange(self.rank, memory, half, hidden, dtype)

    def _peer_memory(self, num_bytes: int) -> PeerMemory:
        """Allocate memory that all ranks of this host can write. It holds zeros on every rank when this returns."""
        import torch.distributed._symmetric_memory as symmetric_memory

        assert self.process_group is not None
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device).zero_()
        handle = symmetric_memory.rendezvous(memory, self.process_group)
        starts = list(handle.buffer_ptrs)  # addresses of blocks, in which `memory` may be preceded by other memory
        offsets = self._run(gather_objects, memory.data_ptr() - starts[self.rank])
        return PeerMemory(memory, [start + offset for start, offset in zip(starts, offsets, strict=True)], handle)

    @property
    def sums_in_order(self) -> bool:
        """See Group. NCCL, which sums over several hosts, orders them by the size of the message."""
        return self.size == 1 or self._device.type == "cpu" or (triton is not None and self.one_host)

    @property
    def expired(self) -> Tensor | None:
        return None if self._inbox is None else self._inbox.expired

    def begin_residual(self, sizes: Sequence[int], number: int, y: Tensor, following: RMSNorm | None) -> Residual:
        exchange = self.exchange
        if exchange is None or len(sizes) != HALVES or max(sizes) > exchange.tokens:
            return ReplicatedResidual(self, self.all_reduce(y))
        rows = torch.zeros_like(y[exchange.rows_of(len(y))])
        residual = ShardedResidual(self, exchange, number, len(y), rows)
        residual.add(y, following)
        return residual

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        if self._device.type == "cuda" and self._inbox is None:
            self._run(dist.all_reduce, x)
            return x
        self.add(total := torch.zeros_like(x), x)
        return total

    def sum(self, y: Tensor) -> Tensor:
        if self.size == 1:
            return y
        total = torch.zeros_like(y)
        rest = self.add(total, y)
        return total if rest is None else rest

    def add(self, x: Tensor, y: Tensor) -> Tensor | None:
        if self._device.type == "cpu":
            # In order of rank for any shape, so a row's sum does not depend on the other rows.
            parts = [torch.empty_like(y) for _ in range(self.size)]
            self._run(dist.all_gather, parts, y.contiguous())
            allreduce.add_in_order(x, parts)
            return None
        if self._inbox is None:
            self._run(dist.all_reduce, y)
            return y
        for start in range(0, len(y), FUSED_TOKENS):
            rows = slice(start, start + FUSED_TOKENS)
            allreduce.add_reduced(x[rows], y[rows], self._inbox)
        return None

    def gather(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        if self.size == 1:
            return x if out is None else out.copy_(x)
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._run(dist.gather, x.contiguous(), parts, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=1, out=out)

    def broadcast(self, x: Tensor) -> None:
        if self.size > 1:
            self._run(dist.broadcast, x, group_src=0)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        errors: list[Exception | None] = [error]
        if self.size > 1:
            errors = self._run(gather_objects, error and portable(error))
        if error is not None:
            raise error
        raise_first(dict(enumerate(errors)))

    def minimum(self, number: int) -> int:
        return number if self.size == 1 else min(self._run(gather_objects, number))
