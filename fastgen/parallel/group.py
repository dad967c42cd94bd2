"""Tensor parallelism: the ranks that hold a model together, and the sums over what each of them computes."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName, _get_default_store, _world

from fastgen.kernels import allreduce
from fastgen.kernels.launch import triton
from fastgen.parallel.errors import DepartedError, portable, raise_first
from fastgen.parallel.overlap import CollectiveExchange, CopyExchange, Exchange, Layout, Shared

T = TypeVar("T")

FUSED_TOKENS = 1024
"""Up to so many tokens, a kernel of our own adds up what the ranks of one host have; NCCL's way is longer for few."""

PATIENT = 10 * allreduce.POLLS  # looks for what other ranks send, while they compile

TIMEOUT = timedelta(minutes=10)  # of a collective


class Captured(Protocol):
    """CUDA graphs."""

    def reset(self) -> None: ...


def host() -> tuple[str, str]:
    """Differs between hosts, of one name too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else ""


@dataclass(frozen=True)
class Sum:
    """A sum over all ranks on its way: total is it when `work` is done."""

    total: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """What is launched from now on, on the current stream, may read the sum; the host does not wait for it."""
        self.work.wait()
        return self.total


class Group:
    """The ranks that hold a model together: this one's number, how many there are, and what they tell each other.

    All ranks call the same methods in the same order, with tensors of equal shapes on their own `device`. A group of
    one, which needs no process group, is what there is without tensor parallelism.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.process_group = process_group
        self.rank = 0 if process_group is None else process_group.rank()
        self.size = 1 if process_group is None else process_group.size()
        self._device = torch.device("cpu") if device is None else device
        self.exchange: Exchange | None = None  # for steps that are cut in two
        self._inbox: allreduce.Inbox | None = None
        self._shared: Shared | None = None  # its memory
        self._latest: dist.Work | None = None  # of NCCL, beside the current stream
        self._captured: list[Captured] = []
        several = self._device.type == "cuda" and self.size > 1
        self._rescue = torch.cuda.Stream(device) if several else None  # type: ignore[no-untyped-call]

    @classmethod
    def join(cls, store: Store, name: str, rank: int, size: int, device: torch.device) -> Group:
        """Make a group of `size` ranks, which all call this with the same name, and meet in `store`.

        torch.distributed does not list the group: a program can make and destroy its own groups meanwhile, the default
        one too.
        """
        store = PrefixStore(f"{name}/", store)
        process_group = dist.ProcessGroup(store, rank, size)
        backend: Any
        if device.type == "cpu":
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        else:
            kind, options = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL.Options()
            options._timeout, options.group_name = TIMEOUT, GroupName(name)
            options.global_ranks_in_group = list(range(size))
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
        backend._set_sequence_number_for_group()
        process_group._set_default_backend(kind)
        process_group._register_backend(torch.device(device.type), kind, backend)
        process_group._set_group_name(GroupName(name))
        _register_process_group(GroupName(name), process_group)  # symmetric memory finds the group by its name
        _world.pg_group_ranks[process_group] = {member: member for member in range(size)}  # and its ranks here
        return cls(process_group, device)

    @classmethod
    def beside(cls, given: dist.ProcessGroup, device: torch.device) -> Group:
        """Make a group of the ranks of a program's group, which all call this. The program's collectives do not come
        between the group's own, and an error ends only this group."""
        names = [""] * given.size()
        dist.all_gather_object(names, f"fastgen-{secrets.token_hex(8)}", group=given)
        return cls.join(_get_default_store(), names[0], given.rank(), given.size(), device)

    def hold(self, captured: Captured) -> None:
        """Of graphs that hold sums of this group: NCCL does not end before they do, so `leave` ends them."""
        self._captured.append(captured)

    def leave(self) -> None:
        """End the process group, and the graphs that hold its sums, which are of no use then; more calls do nothing.

        Other ranks that wait for this one raise DepartedError: at once where gloo makes the sums; where NCCL does, when
        they are interrupted or leave too. What they read of this rank's must be read by now, or is lost.
        """
        group, self.process_group = self.process_group, None
        if group is None:
            return
        self._let_go()
        self._latest = self.exchange = None
        if self._device.type == "cuda":
            group.abort()  # `shutdown` waits for what ranks that are gone will not do
        else:
            group.shutdown()
        _unregister_process_group(group.group_name)
        _world.pg_group_ranks.pop(group, None)

    def interrupt(self) -> None:
        """From any thread, when another rank has failed: what waits for it on a GPU ends, and is wrong."""
        group = self.process_group
        if group is not None and self._rescue is not None:
            self._let_go()
            group.abort()

    def _let_go(self) -> None:
        """End our own waits for others on the GPU, and the graphs."""
        if self._rescue is not None:
            with torch.cuda.stream(self._rescue), torch.inference_mode():
                if self._inbox is not None:
                    self._inbox.polls.zero_()
                if self.exchange is not None:
                    self.exchange.interrupt()
        for captured in self._captured:
            captured.reset()

    def _together(self, collective: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return the result of a collective; raise DepartedError where another rank is gone."""
        if self.process_group is None:  # torch would take the program's own group
            raise DepartedError("the ranks have left their group")
        try:
            return collective(*args, **options, group=self.process_group)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            # Where a program has a default group, torch logs the error, and raises ValueError as it does not list ours.
            cause = error.__context__ if isinstance(error, ValueError) and error.__context__ else error
            for each in (error, cause):  # whose frames hold the group, and so its sockets, whose end others wait for
                each.__traceback__ = None
            raise DepartedError(f"another rank is gone: {cause}") from cause

    def prepare(self, hidden: int, dtype: torch.dtype, half: int = 0) -> None:
        """Take the memory that is needed to add up [T, hidden] for few tokens T, and in the halves of steps that are
        cut in two, of up to `half` tokens. Waits for all ranks."""
        if self.process_group is None or self.size == 1:
            return
        if self._device.type == "cpu":
            gather = partial(self._together, dist.all_gather)
            self.exchange = CollectiveExchange(self.rank, self.size, gather, half) if half else None
            return
        if triton is None:
            return
        hosts = [("", "")] * self.size
        self._together(dist.all_gather_object, hosts, host())
        if len({*hosts}) == 1:
            self._inbox = self._open_inbox(FUSED_TOKENS * hidden * dtype.itemsize // 4)
            if half:
                shared = self._share(Layout.of(self.size, half, hidden, dtype).end)
                self.exchange = CopyExchange.make(self.rank, shared, half, hidden, dtype)

    def _open_inbox(self, words: int) -> allreduce.Inbox:
        self._shared = self._share(allreduce.Inbox.bytes_for(words, self.size))
        return allreduce.Inbox.make(self._shared.peers, words, self.rank, self._device, polls=PATIENT)

    def _share(self, num_bytes: int) -> Shared:
        """Memory that all ranks, of one host, can write; zeros on each of them when this returns."""
        import torch.distributed._symmetric_memory as symmetric_memory

        assert self.process_group is not None
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device).zero_()
        handle = symmetric_memory.rendezvous(memory, self.process_group)
        starts, offsets = list(handle.buffer_ptrs), [0] * self.size  # of blocks, which may hold other memory before it
        self._together(dist.all_gather_object, offsets, memory.data_ptr() - starts[self.rank])
        return Shared(memory, [start + offset for start, offset in zip(starts, offsets, strict=True)], handle)

    def ready(self) -> None:
        """From now on a rank is waited for no longer than one that works can take. (At the start, they compile.)"""
        if self._inbox is not None:
            self._inbox.polls.fill_(allreduce.POLLS)

    @property
    def expired(self) -> Tensor | None:
        """int32 [1] on the device: 1 when a sum was given up waiting for others, and is wrong; None: can not be."""
        return None if self._inbox is None else self._inbox.expired

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x [T, hidden]; x is lost."""
        if self.size == 1:
            return x
        if self._device.type == "cpu":
            total = torch.zeros_like(x)
            self.add(total, x)
            return total
        if self._fused(x):
            self._add_few(total := torch.zeros_like(x), x)
            return total
        self._together(dist.all_reduce, x)
        return x

    def add(self, x: Tensor, y: Tensor) -> Sum | None:
        """Add the sum of all ranks' y [T, hidden] to x [T, hidden], which is the same on all ranks and stays so.

        None: it is done, as far as the current stream knows. A Sum: the caller adds it when it needs x. y is lost.
        """
        if self._device.type == "cpu":
            # By rank, whatever the shape: what becomes of a row does not depend on the rows beside it.
            parts = [torch.empty_like(y) for _ in range(self.size)]
            self._together(dist.all_gather, parts, y.contiguous())
            allreduce.add_in_order(x, parts)
            return None
        if self._fused(y):
            self._add_few(x, y)
            return None
        if torch.cuda.is_current_stream_capturing():  # there is nothing beside a decode
            self._together(dist.all_reduce, y)
            x.add_(y)
            return None
        self._latest = work = self._together(dist.all_reduce, y, async_op=True)
        assert work is not None
        return Sum(y, work)

    def _fused(self, y: Tensor) -> bool:
        """Whether a kernel of our own adds up y."""
        return self._inbox is not None and allreduce.words_of(y) <= self._inbox.words

    def _add_few(self, x: Tensor, y: Tensor) -> None:
        assert self._inbox is not None
        if self._latest is not None:  # the kernel must not keep NCCL's from the processors, which others wait for
            self._latest.wait()
            self._latest = None
        allreduce.add_reduced(x, y, self._inbox)

    def gather(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """All ranks' x [R, n] side by side, [R, size * n], in `out` where it is given; None on all ranks but 0."""
        if self.size == 1:
            return x if out is None else out.copy_(x)
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._together(dist.gather, x.contiguous(), parts, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=1, out=out)

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's x, in place of the others' own."""
        if self.size > 1:
            self._together(dist.broadcast, x, group_src=0)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """An error within, on any rank, is raised on all of them behind it."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        errors: list[Exception | None] = [error]
        if self.size > 1:
            errors = [None] * self.size
            self._together(dist.all_gather_object, errors, error and portable(error))
        if error is not None:
            raise error
        raise_first(dict(enumerate(errors)))

    def minimum(self, number: int) -> int:
        """The least of all ranks' numbers. Waits for them."""
        if self.size == 1:
            return number
        numbers = torch.tensor([number], device=self._device)
        self._together(dist.all_reduce, numbers, dist.ReduceOp.MIN)
        return int(numbers)
