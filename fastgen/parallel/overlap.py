"""Sums of a long prefill over the tensor-parallel ranks, with the tokens of the residual stream shared out over them.

A step of many tokens goes through the layers in two halves, so that the sums of one half are made while the other half
computes (`Transformer.forward`). An all-reduce beside a matrix product takes processors from it, and each rank would
norm all tokens afterwards. Instead, each rank holds the residual stream of a share of a half's tokens (sequence
parallelism, arXiv 2205.05198), adds up and norms these tokens alone, and the GPU's copy engines move the data.

Letters: T tokens of a half, N ranks, S = ceil(T / N). Rank r holds xs, the rows r S .. r S + S - 1 of the residual
stream. A phase turns the ranks' partial sums y [T, hidden] into the normed input of the next product, the same on all
ranks:

1. Each rank copies its rows for rank p into its place in rank p's stage [N, S, hidden], and then writes a flag to p.
2. When all flags have arrived, rank p adds up the partial sums, and adds them to xs, in one kernel. The kernel writes
   the normed rows into rank p's rows of the gathered input [T, hidden].
3. Rank p copies these rows to all other ranks, and writes a flag to each. When all flags have arrived, the half goes
   on.

A flag holds the number of a phase, which only grows. Streams write flags and wait for them without a processor. A
stream's write to a flag is visible, on any device, only after all that the stream has copied before.

Each half has its own memory, flags and stream. Each call of `add` runs after everything that came before it on the
current stream of its rank. So no rank overwrites what another still reads:

- The stage. Rank r copies its rows of phase k + 1 to rank p after it has computed them, and so after it has received
  all rows of phase k. Rank p sent its rows of phase k when its kernel had read the stage.
- The gathered input. Rank r sends rows of phase k + 1 after its kernel of that phase, which has waited for rank p's
  rows of k + 1. Rank p computed them after it had all rows of phase k, and after all that it launched to read them. (So
  these launches must come before the next call for the same half.)

No rank waits forever for a rank that takes part. All ranks make the same launches in the same order, and in that order
each wait comes after the write that it waits for. This holds even where the GPU puts several streams in one queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.device import cuda_driver
from fastgen.kernels.norm import RMSNorm, sum_norm
from fastgen.processes.errors import DepartedError

HALVES = 2
STAGED, GATHERED = 0, 1  # kinds of flags
INTERRUPT_SECONDS = 5.0  # within which interrupted waits end
ALIGNMENT = 256


@dataclass(frozen=True)
class PendingGather:
    """The input of the next product, x [T, hidden], which is complete at the event `done`. y: the partial sums, which
    are kept while they are read."""

    x: Tensor
    y: Tensor
    done: torch.cuda.Event

    def wait(self) -> Tensor:
        """Return x. Launches on the current stream may read it from now on, until the next phase of this half; the host
        does not wait."""
        self.done.wait()
        return self.x


class ExchangeLayout(NamedTuple):
    """Offsets in the exchange memory of each rank, in bytes.

    The stages [2, N, share, hidden] are at 0, the gathered inputs [2, N * share, hidden] at `gathered`, and the flags,
    int32 [2 kinds, 2, N], at `flags`. end: the size of the memory. share: tokens. row: bytes of a token.
    """

    share: int
    row: int
    gathered: int
    flags: int
    end: int

    @staticmethod
    def of(size: int, tokens: int, hidden: int, dtype: torch.dtype) -> ExchangeLayout:
        share, row = -(-tokens // size), hidden * dtype.itemsize
        gathered = HALVES * size * share * row
        flags = -(-2 * gathered // ALIGNMENT) * ALIGNMENT
        return ExchangeLayout(share, row, gathered, flags, flags + 4 * 2 * HALVES * size)


class PeerMemory(NamedTuple):
    """Memory uint8 [bytes] of this rank that all ranks of a host can write. peers: the address of each rank's memory,
    as this rank sees it. handle: the owner of the mappings of the peers' memory."""

    memory: Tensor
    peers: list[int]
    handle: Any


class Exchange:
    """The sums over a group's ranks of the halves of steps, by copies into peer memory.

    All ranks call the same methods in the same order, with halves of equal sizes. shared: ExchangeLayout.end bytes,
    zeros at first. tokens: the most of a half. sides: a stream for each half; made here by default.
    """

    def __init__(
        self,
        rank: int,
        shared: PeerMemory,
        tokens: int,
        hidden: int,
        dtype: torch.dtype,
        sides: Sequence[SideStream] | None = None,
    ) -> None:
        size, memory = len(shared.peers), shared.memory
        assert size > 1
        self.rank, self.size, self.tokens = rank, size, tokens
        self._adding = self._interrupted = False  # whether `add` runs, and whether it may not
        self._layout = at = ExchangeLayout.of(size, tokens, hidden, dtype)
        self._shared, self._sides = shared, sides or [SideStream(memory.device) for _ in range(HALVES)]
        assert len(memory) == at.end
        assert len(self._sides) == HALVES
        self._others = [(rank + step) % size for step in range(1, size)]  # each rank begins with another
        self._stages = memory[: at.gathered].view(dtype).view(HALVES, size, at.share, hidden)
        self._gathered = memory[at.gathered : 2 * at.gathered].view(dtype).view(HALVES, size * at.share, hidden)
        self._flags = memory[at.flags :].view(torch.int32)
        self._phases = [0] * HALVES

    def rows_of(self, count: int, rank: int | None = None) -> slice:
        """Return the rows of a half of `count` tokens that a rank (None: this one) holds, which may be none."""
        rank, share = self.rank if rank is None else rank, -(-count // self.size)
        return slice(min(rank * share, count), min((rank + 1) * share, count))

    def add(self, half: int, xs: Tensor, y: Tensor, norm: RMSNorm | None) -> PendingGather:
        """Add the sum of all ranks' y [T, hidden] to xs, this rank's rows of the residual stream, in place. Gather the
        norm of all rows, or the residual stream itself where norm is None.

        half: 0 or 1. xs must not be touched until the result is waited for. Raises DepartedError after `interrupt`.
        """
        own = self.rows_of(len(y))
        assert 0 <= half < HALVES
        assert 0 < len(y) <= self.tokens
        assert y.is_contiguous()
        assert xs.shape == y[own].shape
        self._adding = True
        try:
            if self._interrupted:
                raise DepartedError("another rank is gone")
            return self._add(half, xs, y, own, norm)
        finally:
            self._adding = False

    def interrupt(self) -> None:
        """End this rank's waits for others, from any thread; results that were waited for are wrong."""
        self._interrupted = True
        beyond, deadline = (max(self._phases) + 2**30) % 2**32, time.monotonic() + INTERRUPT_SECONDS
        while (self._adding or not all(side.is_idle() for side in self._sides)) and time.monotonic() < deadline:
            self._flags.fill_(beyond if beyond < 2**31 else beyond - 2**32)  # again, as others may still write theirs
            time.sleep(0.001)

    def _add(self, half: int, xs: Tensor, y: Tensor, own: slice, norm: RMSNorm | None) -> PendingGather:
        side, at, count = self._sides[half], self._layout, len(y)
        gathered = self._gathered[half, :count]
        assert y.dtype == gathered.dtype
        self._phases[half] = (self._phases[half] + 1) % 2**32

        side.begin()
        place = (half * self.size + self.rank) * at.share * at.row
        for peer in self._others:
            self._send(side, self._shared.peers[peer] + place, y, self.rows_of(count, peer))
        self._exchange_flags(side, STAGED, half)
        if len(xs):
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            side.launch(sum_norm, xs, y[own], self._stages[half], self.rank, weight, eps, gathered[own])
        place = at.gathered + (half * self.size * at.share + own.start) * at.row
        for peer in self._others:
            self._send(side, self._shared.peers[peer] + place, gathered, own)
        self._exchange_flags(side, GATHERED, half)
        return PendingGather(gathered, y, side.end())

    def _send(self, side: SideStream, target: int, source: Tensor, rows: slice) -> None:
        if rows.start < rows.stop:
            row = self._layout.row
            side.copy(target, source.data_ptr() + rows.start * row, (rows.stop - rows.start) * row)

    def _exchange_flags(self, side: SideStream, kind: int, half: int) -> None:
        """Tell each other rank that its copies from this rank are done, and wait until all have told this one."""
        for peer in self._others:
            side.write(self._flag_at(kind, half, peer, self.rank), self._phases[half])
        self._wait(side, kind, half)

    def _wait(self, side: SideStream, kind: int, half: int) -> None:
        for peer in self._others:
            side.wait(self._flag_at(kind, half, self.rank, peer), self._phases[half])

    def _flag_at(self, kind: int, half: int, holder: int, sender: int) -> int:
        """Return the address of a flag in the holder's memory, which the sender writes."""
        return self._shared.peers[holder] + self._layout.flags + 4 * ((kind * HALVES + half) * self.size + sender)


class SideStream:
    """A CUDA stream beside the current one, which can also write flags and wait for them. It calls the CUDA driver,
    since torch has no such operations. Addresses are those that this rank sees."""

    def __init__(self, device: torch.device) -> None:
        # High priority: else its few kernels would wait until the products of the other half leave room.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._handle = self._stream.cuda_stream

    def begin(self) -> None:
        """Let all later operations wait for what the current stream holds now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy `size` bytes."""
        cuda_driver.call("cuMemcpyAsync", target, source, size, self._handle)

    def write(self, address: int, value: int) -> None:
        """Set a flag, after all copies so far."""
        cuda_driver.call("cuStreamWriteValue32_v2", self._handle, address, value, 0)

    def wait(self, address: int, value: int) -> None:
        """Wait until a flag is `value`, or is beyond it by less than 2 ** 31."""
        cuda_driver.call("cuStreamWaitValue32_v2", self._handle, address, value, 0)

    def launch(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function whose launches go to this stream."""
        with torch.cuda.stream(self._stream):
            function(*arguments)

    def end(self) -> torch.cuda.Event:
        """Return an event at the end of all operations so far."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def is_idle(self) -> bool:
        """Return whether all operations are done."""
        idle: bool = self._stream.query()
        return idle
