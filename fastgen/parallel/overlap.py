"""The sums of a long prefill over the tensor-parallel ranks, with the residual stream shared out over these.

A step of many tokens goes through the layers in two halves, so that one's sums are made while the other computes
(`Transformer.forward`). An all-reduce beside a product takes processors from it, and each rank norms all tokens
afterwards. Here each rank holds the residual stream of a share of a half's tokens alone (sequence parallelism,
arXiv 2205.05198), adds up and norms these, and copies take no processors: the GPU's copy engines make them.

Letters: T tokens of a half, N ranks, S = ceil(T / N). Rank r holds xs, rows r S and on of the residual stream, up to S.
A phase turns every rank's part y [T, hidden] of a sum into the normed input of the next product, the same on all ranks:

1. Each rank copies its part of p's rows into its place in rank p's stage [N, S, hidden], and then writes a flag to p.
2. When all flags are there, rank p adds up the parts, and adds them to xs, in one kernel. It writes the normed rows
   into its rows of what is gathered, [T, hidden].
3. It copies these rows to all others, and writes a flag to each. When all flags are there, the half goes on.

Flags are numbers of phases, which only grow, written and waited for by the streams themselves: no processor is taken.
A stream's write to a flag comes after all that it has copied before, as seen from any device.

What keeps the ranks apart, for either half, which has memory, flags and a stream of its own, is that each call has all
in order that came before it on the current stream of its rank:

- The stage. Rank r copies its part of phase k + 1 to rank p when it is computed, which is after what was gathered in
  phase k, rank p's rows too; and these rank p sent when its kernel had read the stage.
- What is gathered. Rank r sends rows of phase k + 1 when its kernel of that phase has run, for which it has waited for
  rank p's part of k + 1. Rank p computed this part when it had all rows of phase k, and after all that it launched to
  read them. (So these launches must come before the next call for the same half.)

No rank waits forever for one that takes part. All ranks make the same launches in the same order, and in that order
whatever is waited for comes before the wait. This holds even where the GPU puts several streams in one queue.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.kernels.norm import RMSNorm
from fastgen.kernels.sumnorm import sum_norm
from fastgen.parallel.errors import DepartedError

HALVES = 2
STAGED, GATHERED = 0, 1  # kinds of flags
LETTING_GO = 5.0  # seconds in which waits that are interrupted end
ALIGNMENT = 256


@dataclass(frozen=True)
class Gathering:
    """The next product's input on its way. y is kept, since it is being read."""

    x: Tensor
    y: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """[T, hidden], which may be read by what is launched from now on, on the current stream, and before the next
        phase of this half; the host does not wait."""
        if self.done is not None:
            self.done.wait()
        return self.x


class Exchange(ABC):
    """What the ranks of a group add up halves of steps through, of up to `tokens` tokens each.

    All ranks call the same methods in the same order, with halves of equal sizes.
    """

    def __init__(self, rank: int, size: int, tokens: int) -> None:
        assert size > 1
        self.rank, self.size, self.tokens = rank, size, tokens
        self._adding = self._interrupted = False  # whether `add` runs, and whether it may not

    def rows(self, count: int, rank: int | None = None) -> slice:
        """Those of a half of `count` tokens that a rank (None: this one) holds; may be none."""
        rank, share = self.rank if rank is None else rank, -(-count // self.size)
        return slice(min(rank * share, count), min((rank + 1) * share, count))

    def add(self, half: int, xs: Tensor, y: Tensor, norm: RMSNorm | None) -> Gathering:
        """Add the sum of all ranks' y [T, hidden] to xs, this rank's rows of the residual stream, in place, and gather
        the norm of all rows; the residual stream itself where norm is None.

        half: 0 or 1. Until the result is waited for, xs is not to be touched.
        """
        own = self.rows(len(y))
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
        """From any thread: end this rank's waits for others, where they do not end with these; what they waited for is
        wrong. `add` raises DepartedError from now on."""
        self._interrupted = True

    @abstractmethod
    def _add(self, half: int, xs: Tensor, y: Tensor, own: slice, norm: RMSNorm | None) -> Gathering: ...


def _sum(xs: Tensor, y: Tensor, stage: Tensor, rank: int, norm: RMSNorm | None, out: Tensor) -> None:
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    sum_norm(xs, y, stage, rank, weight, eps, out)


class CollectiveExchange(Exchange):
    """By collectives, one after the other: for the CPU. all_gather: as torch.distributed's, of the ranks' group."""

    def __init__(self, rank: int, size: int, all_gather: Callable[[list[Tensor], Tensor], object], tokens: int) -> None:
        super().__init__(rank, size, tokens)
        self._all_gather = all_gather

    def _add(self, half: int, xs: Tensor, y: Tensor, own: slice, norm: RMSNorm | None) -> Gathering:
        parts = [torch.empty_like(y) for _ in range(self.size)]
        self._all_gather(parts, y)
        share = y.new_zeros(-(-len(y) // self.size), y.shape[1])
        if len(xs):
            _sum(xs, y[own], torch.stack([part[own] for part in parts]), self.rank, norm, share[: len(xs)])
        shares = [torch.empty_like(share) for _ in range(self.size)]
        self._all_gather(shares, share)
        return Gathering(torch.cat(shares)[: len(y)], y, None)


class Layout(NamedTuple):
    """Where things lie in the memory of each rank, in bytes.

    stage: [2, N, share, hidden] at 0; gathered: [2, N * share, hidden]; flags: int32 [2 kinds, 2, N]; end: of all.
    """

    share: int  # tokens
    row: int
    gathered: int
    flags: int
    end: int

    @staticmethod
    def of(size: int, tokens: int, hidden: int, dtype: torch.dtype) -> Layout:
        share, row = -(-tokens // size), hidden * dtype.itemsize
        gathered = HALVES * size * share * row
        flags = -(-2 * gathered // ALIGNMENT) * ALIGNMENT
        return Layout(share, row, gathered, flags, flags + 4 * 2 * HALVES * size)


class Shared(NamedTuple):
    """Memory uint8 [bytes] of each rank of a host, which all can write. peers: the addresses that this rank sees."""

    memory: Tensor
    peers: list[int]
    handle: Any  # keeps what the peers' addresses are of


class CopyExchange(Exchange):
    """By copies into memory that all ranks can write: `shared`, of Layout.end bytes. sides: a stream a half."""

    def __init__(
        self, rank: int, shared: Shared, sides: Sequence[Side], tokens: int, hidden: int, dtype: torch.dtype
    ) -> None:
        size, memory = len(shared.peers), shared.memory
        super().__init__(rank, size, tokens)
        self._layout = at = Layout.of(size, tokens, hidden, dtype)
        assert len(memory) == at.end
        assert len(sides) == HALVES
        self._shared, self._sides = shared, sides
        self._others = [(rank + step) % size for step in range(1, size)]  # each rank begins with another
        self._stages = memory[: at.gathered].view(dtype).view(HALVES, size, at.share, hidden)
        self._gathered = memory[at.gathered : 2 * at.gathered].view(dtype).view(HALVES, size * at.share, hidden)
        self._flags = memory[at.flags :].view(torch.int32)
        self._phases = [0] * HALVES

    @classmethod
    def make(cls, rank: int, shared: Shared, tokens: int, hidden: int, dtype: torch.dtype) -> CopyExchange:
        """Among the GPUs of one host; the shared memory is zeros."""
        sides = [Side(shared.memory.device) for _ in range(HALVES)]
        return cls(rank, shared, sides, tokens, hidden, dtype)

    def interrupt(self) -> None:
        super().interrupt()
        beyond, deadline = (max(self._phases) + 2**30) % 2**32, time.monotonic() + LETTING_GO
        while (self._adding or not all(side.is_idle() for side in self._sides)) and time.monotonic() < deadline:
            self._flags.fill_(beyond if beyond < 2**31 else beyond - 2**32)  # again, as others may still write theirs
            time.sleep(0.001)

    def _add(self, half: int, xs: Tensor, y: Tensor, own: slice, norm: RMSNorm | None) -> Gathering:
        side, at, count = self._sides[half], self._layout, len(y)
        gathered = self._gathered[half, :count]
        assert y.dtype == gathered.dtype
        self._phases[half] = (self._phases[half] + 1) % 2**32

        side.begin()
        place = (half * self.size + self.rank) * at.share * at.row
        for peer in self._others:
            self._send(side, self._shared.peers[peer] + place, y, self.rows(count, peer))
        self._meet(side, STAGED, half)
        if len(xs):
            side.launch(_sum, xs, y[own], self._stages[half], self.rank, norm, gathered[own])
        place = at.gathered + (half * self.size * at.share + own.start) * at.row
        for peer in self._others:
            self._send(side, self._shared.peers[peer] + place, gathered, own)
        self._meet(side, GATHERED, half)
        return Gathering(gathered, y, side.end())

    def _send(self, side: Side, target: int, source: Tensor, rows: slice) -> None:
        if rows.start < rows.stop:
            row = self._layout.row
            side.copy(target, source.data_ptr() + rows.start * row, (rows.stop - rows.start) * row)

    def _meet(self, side: Side, kind: int, half: int) -> None:
        """Tell all that they have what was sent to them, and wait until all have told."""
        for peer in self._others:
            side.write(self._flag_at(kind, half, peer, self.rank), self._phases[half])
        self._wait(side, kind, half)

    def _wait(self, side: Side, kind: int, half: int) -> None:
        for peer in self._others:
            side.wait(self._flag_at(kind, half, self.rank, peer), self._phases[half])

    def _flag_at(self, kind: int, half: int, holder: int, sender: int) -> int:
        """The address of a flag in the holder's memory, which the sender writes."""
        return self._shared.peers[holder] + self._layout.flags + 4 * ((kind * HALVES + half) * self.size + sender)


class Side:
    """A stream beside the current one; through the driver, as torch has nothing to wait for a value with. Addresses are
    what this rank sees memory of any rank at."""

    def __init__(self, device: torch.device) -> None:
        # Its few kernels come first, or they would wait until the products of the other half leave room.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._handle = self._stream.cuda_stream
        self._driver = _driver()

    def begin(self) -> None:
        """What comes next waits for all that the current stream holds by now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: int, source: int, size: int) -> None:
        """`size` bytes."""
        _check(self._driver.cuMemcpyAsync(target, source, size, self._handle))

    def write(self, address: int, value: int) -> None:
        """Set a flag, behind all that was copied before."""
        _check(self._driver.cuStreamWriteValue32_v2(self._handle, address, value, 0))

    def wait(self, address: int, value: int) -> None:
        """Until a flag is `value`, or by less than 2 ** 31 beyond it."""
        _check(self._driver.cuStreamWaitValue32_v2(self._handle, address, value, 0))

    def launch(self, function: Callable[..., object], *arguments: Any) -> None:
        """What the function launches on the current stream comes here."""
        with torch.cuda.stream(self._stream):
            function(*arguments)

    def end(self) -> torch.cuda.Event:
        """That all this is done."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def is_idle(self) -> bool:
        """Whether all is done."""
        idle: bool = self._stream.query()
        return idle


@cache
def _driver() -> ctypes.CDLL:
    """What is called of the driver's functions, with their types. Flags of 0: a write is behind a memory barrier; a
    wait is for the value or a later one, in the order of numbers that wrap around."""
    driver = ctypes.CDLL("libcuda.so.1")
    stream, address, value, flags = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    driver.cuMemcpyAsync.argtypes = [address, address, ctypes.c_size_t, stream]
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = [stream, address, value, flags]
    return driver


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the GPU's driver can not copy between ranks (CUDA error {status})")
