"""Sums over the tensor-parallel ranks in a long prefill, with the tokens of the residual stream split over the ranks.

A step of many tokens goes through the layers in two halves, so that one half's sums are made while the other half
computes (`Transformer.forward`). An all-reduce during a matrix product would take processors from it, and afterwards
every rank would norm all tokens. Instead, each rank holds the residual stream of some of a half's tokens (sequence
parallelism, arXiv 2205.05198), sums and norms only these tokens, and the GPU's copy engines move the data.

Shape letters: T tokens in a half, N ranks, S = ceil(T / N). Rank r holds xs: rows r S .. r S + S - 1 of the residual
stream. A phase turns the ranks' partial sums y [T, hidden] into the normed input of the next product, which is the same
on all ranks:

1. Each rank copies its partial sums of rank p's rows to its place in rank p's stage [N, S, hidden], and then writes a
   flag on p.
2. When all flags have arrived, rank p runs one kernel, which sums the partial sums and adds them to xs. The kernel
   writes the normed rows to rank p's rows of its gathered input [T, hidden].
3. Rank p copies these rows to all other ranks, and writes a flag on each. When all flags have arrived, the half
   continues.

A flag holds the number of a phase, which only grows. Streams write flags and wait for them without occupying a
processor. A stream's write to a flag becomes visible, on any device, only after everything that the stream has copied
before.

Each half has its own memory, flags and stream. A call of `add` runs after everything that preceded it on the current
stream of its rank. Therefore no rank overwrites what another one still reads:

- The stage. Rank r copies its rows of phase k + 1 to rank p after it has computed them, and therefore after it has
  received all rows of phase k. Rank p sent its rows of phase k after its kernel had read the stage.
- The gathered input. Rank r sends its rows of phase k + 1 after its kernel of that phase, which has waited for rank p's
  rows of k + 1. Rank p computed those after it had all rows of phase k, and after everything that it launched to read
  them. (These launches must therefore precede the next call for the same half.)

No rank waits forever for a rank that takes part: all ranks make the same launches in the same order, and in that order
each wait comes after the write that it waits for. This holds even if the GPU puts several streams into one queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.device import cuda_driver
from fastgen.kernels.norm import RMSNorm
from fastgen.kernels.sum_norm import sum_norm
from fastgen.processes.errors import DepartedError

HALVES = 2
STAGED, GATHERED = 0, 1  # kinds of flags
INTERRUPT_SECONDS = 5.0  # time limit for interrupted waits to end
ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class PendingGather:
    """The input of the next product, x [T, hidden], which is complete after the event `done`. y: the partial sums,
    which are kept alive while they are read."""

    x: Tensor
    y: Tensor
    done: torch.cuda.Event

    def wait(self) -> Tensor:
        """Return x, for launches on the current stream until the next phase of this half. The host does not wait."""
        self.done.wait()
        return self.x


class ExchangeLayout(NamedTuple):
    """The layout of each rank's exchange memory. The offsets are in bytes.

    The stages [2, N, share, hidden] are at offset 0, the gathered inputs [2, N * share, hidden] at `gathered`, and the
    flags, int32 [2 kinds, 2, N], at `flags`. end: size of the memory. share: maximum number of tokens that a rank
    holds. row: bytes per token.
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
    """Memory of this rank, uint8 [bytes], that all ranks of a host can write.

    peers: address of each rank's memory, as this rank sees it. handle: the object that keeps the peers' memory mapped.
    """

    memory: Tensor
    peers: list[int]
    handle: Any


class Exchange:
    """Sums over a group's ranks of the halves of steps, made by copies into peer memory.

    All ranks call the same methods in the same order, with halves of equal sizes. shared: ExchangeLayout.end bytes,
    initially zeros. tokens: maximum number of tokens in a half. sides: one stream per half; created by default.
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
        self._adding = False  # whether `add` is running
        self._interrupted = False
        self._layout = at = ExchangeLayout.of(size, tokens, hidden, dtype)
        self._shared, self._sides = shared, sides or [SideStream(memory.device) for _ in range(HALVES)]
        assert len(memory) == at.end
        assert len(self._sides) == HALVES
        self._others = [(rank + step) % size for step in range(1, size)]  # each rank starts with a different peer
        self._stages = memory[: at.gathered].view(dtype).view(HALVES, size, at.share, hidden)
        self._gathered = memory[at.gathered : 2 * at.gathered].view(dtype).view(HALVES, size * at.share, hidden)
        self._flags = memory[at.flags :].view(torch.int32)
        self._phases = [0] * HALVES

    def rows_of(self, count: int, rank: int | None = None) -> slice:
        """Return the rows, in a half of `count` tokens, that a rank holds, possibly none. rank: this one by default."""
        rank, share = self.rank if rank is None else rank, -(-count // self.size)
        return slice(min(rank * share, count), min((rank + 1) * share, count))

    def add(self, half: int, xs: Tensor, y: Tensor, norm: RMSNorm | None) -> PendingGather:
        """Add the sum of all ranks' y [T, hidden] in place to xs, this rank's rows of the residual stream. Gather the
        norm of all rows, or the residual stream itself if norm is None.

        half: 0 or 1. xs must not be used before the result has been waited for. Raises DepartedError after
        `interrupt`.
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
        """End this rank's waits for other ranks; may be called from any thread. The awaited results are wrong."""
        self._interrupted = True
        beyond, deadline = (max(self._phases) + 2**30) % 2**32, time.monotonic() + INTERRUPT_SECONDS
        while (self._adding or not all(side.is_idle() for side in self._sides)) and time.monotonic() < deadline:
            self._flags.fill_(beyond if beyond < 2**31 else beyond - 2**32)  # again, as others may yet write theirs
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
        """Tell all other ranks that the copies to them are complete, and wait until all of them have told this rank."""
        for peer in self._others:
            side.write(self._flag_at(kind, half, peer, self.rank), self._phases[half])
        for peer in self._others:
            side.wait(self._flag_at(kind, half, self.rank, peer), self._phases[half])

    def _flag_at(self, kind: int, half: int, holder: int, sender: int) -> int:
        """Return the address of the flag in the holder's memory that the sender writes."""
        return self._shared.peers[holder] + self._layout.flags + 4 * ((kind * HALVES + half) * self.size + sender)


class SideStream:
    """A CUDA stream, in addition to the current one, that can write flags and wait for them. It calls the CUDA driver,
    since torch has no such operations. All addresses are as this rank sees them."""

    def __init__(self, device: torch.device) -> None:
        # High priority: otherwise its few kernels would wait until the other half's products leave room.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._handle = self._stream.cuda_stream

    def begin(self) -> None:
        """Make all later operations wait for everything that is now in the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy `size` bytes between two addresses."""
        cuda_driver.call("cuMemcpyAsync", target, source, size, self._handle)

    def write(self, address: int, value: int) -> None:
        """Set a flag, after all copies made so far and a memory barrier, which flags of 0 add."""
        cuda_driver.call("cuStreamWriteValue32", self._handle, address, value, 0)

    def wait(self, address: int, value: int) -> None:
        """Wait until a flag is `value`, or has passed it by less than 2 ** 31."""
        cuda_driver.call("cuStreamWaitValue32", self._handle, address, value, 0)

    def launch(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function; its launches go to this stream."""
        with torch.cuda.stream(self._stream):
            function(*arguments)

    def end(self) -> torch.cuda.Event:
        """Return an event after all operations so far."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def is_idle(self) -> bool:
        """Return whether all operations are done."""
        idle: bool = self._stream.query()
        return idle
