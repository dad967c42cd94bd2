"""All-reduce of tensor-parallel ranks with residual addition: the residual stream += the sum of a row-split product.

Letters: T tokens, E hidden size, N ranks. A word is 4 bytes: a float32, or two elements of 2 bytes. Every rank has an
inbox, memory that all ranks can write to (NVLink), and every call has a step number, the same on all ranks. A rank
pushes its words to the inboxes, and waits at its own inbox until the words of all other ranks for this step have
arrived.

One trip, for few tokens. A rank pushes each word to every rank, together with the step number. A store of 8 bytes
arrives as a whole, so the step number shows that the word has arrived, and no other wait is needed. Two inboxes
alternate. A rank that begins step s + 2 has ended step s + 1, for which it waited for words of every rank; so every
rank has begun step s + 1, and ended step s. Step s + 2 overwrites the words of step s, which all ranks have read.

Two trips, for more tokens. The words are divided into blocks, and each block into one slice per rank. A program pushes
each slice of its block to the slice's rank, followed by a flag (a release store after the stores of all threads). As
the slice's rank it sums the slices that arrive, pushes the result to all ranks, and again a flag. A rank sends
(N - 1) / N of the words twice, instead of sending them N - 1 times with step numbers of the same size, at the cost of a
second trip and two fences. One inbox for each trip suffices. Partial sums: a rank that begins step s + 1 has ended step
s, so it has all results of step s, which their ranks pushed after they had read the partial sums. Results: a rank
pushes the results of a block of step s + 1 when it has the block's partial sums from every rank, so every rank has
begun step s + 1, and ended step s.

Both arguments hold for any sequence of calls of both kinds and of any size. They require that a step begins after the
previous one has ended on its rank, which stream order ensures. A program waits for the programs with the same number on
other ranks, so all of these must run at the same time: no more programs are launched than fit on the chip.

All ranks add in the order of ranks, in float32, and round once. They get the same bits, with one trip or with two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.triton.jit import jit, tl

ONE_TRIP = 3 << 16
"""Maximum number of words, over all receivers, that a rank sends in one trip."""

SMALL = 1 << 17
"""Number of words up to which two trips are faster with smaller blocks (on 4 H200s)."""

PROGRAMS = 1024
"""Maximum number of programs of a call."""

BLOCKS = 4096
"""Maximum number of blocks of a call with two trips."""

SLICE = 4096
"""Maximum number of words of a slice."""

POLLS = 60_000_000
"""Number of polls before a wait is given up, which take about half a minute."""


class InboxLayout(NamedTuple):
    """The layout of an inbox. All sizes and offsets are in words.

    flagged: maximum number of words of a call with one trip; the inbox begins with 2 N rows of `flagged` cells of 8
    bytes. share: size of all slices of a rank. partials: offset of the partial sums, N rows of `share` words. results:
    offset of the N * share results. flags: offset of the flags of both trips, int32 [2, BLOCKS, N]. end: total size.
    """

    flagged: int
    share: int
    partials: int
    results: int
    flags: int
    end: int

    @staticmethod
    def of(words: int, size: int) -> InboxLayout:
        flagged = min(-(-words // 16), ONE_TRIP // (size - 1) // 16) * 16
        share = -(-words // (size * SLICE)) * SLICE
        partials = 2 * size * flagged * 2
        results = partials + size * share
        flags = results + size * share
        return InboxLayout(flagged, share, partials, results, flags, flags + 2 * BLOCKS * size)


@dataclass(frozen=True)
class Inbox:
    """A rank's end of the exchange. All memory is zeros before any rank's first call.

    peers: int64 [N], addresses of the inboxes of all ranks, including this one, with Inbox.bytes_for(words, N) bytes
    each, aligned to 16 bytes. steps: int32 [PROGRAMS], the number of the last step in every cell. expired: int32 [1], 1
    after a call has given up waiting; the results of this call and of later ones are wrong, and later calls do not
    wait. polls: int32 [1], number of polls before a wait is given up; it may change at any time. words: maximum number
    of words of a call.

    The calls of an inbox do not overlap, and have the same order on all ranks. (Step numbers wrap around. They are
    ambiguous only in a cell that no call has written for 2 ** 32 steps.)
    """

    peers: Tensor
    steps: Tensor
    expired: Tensor
    polls: Tensor
    words: int
    rank: int
    size: int

    @staticmethod
    def bytes_for(words: int, size: int) -> int:
        """Return the size in bytes of an inbox for calls of up to `words` words among `size` ranks."""
        return 4 * InboxLayout.of(words, size).end

    @staticmethod
    def make(peers: Sequence[int], words: int, rank: int, device: torch.device, polls: int = POLLS) -> Inbox:
        """Return the inbox of a rank. All inboxes have to exist already, filled with zeros.

        peers: addresses of the inboxes, as this rank sees them.
        """
        size = len(peers)
        assert size > 1
        assert 0 <= rank < size
        assert all(address % 16 == 0 for address in peers)
        return Inbox(
            torch.tensor(peers, dtype=torch.int64, device=device),
            torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.full((1,), polls, dtype=torch.int32, device=device),
            words,
            rank,
            size,
        )


@dataclass(frozen=True)
class AllReduceConfig:
    """The shape of a call.

    trips: 1 or 2. block: number of words per program, or with two trips per slice. warps: number of warps per program.
    """

    trips: int
    block: int
    warps: int


def config(words: int, inbox: Inbox, chip: Chip) -> AllReduceConfig:
    """Return the configuration for calls of `words` words."""
    block = max(64, power_of_two(-(-words // 512)))
    warps = block // 64 if block <= 256 else min(block // 128, 8)
    fits = -(-words // block) * warps <= warps_at_a_time(inbox.size, chip)
    if fits and words <= InboxLayout.of(inbox.words, inbox.size).flagged:
        return AllReduceConfig(1, block, warps)
    block = 512 if words <= SMALL else 1024
    while words > inbox.size * block * BLOCKS:
        block *= 2
    return AllReduceConfig(2, block, block // 128)  # 16 bytes per thread and rank


def warps_at_a_time(size: int, chip: Chip) -> int:
    """Return how many warps fit on the chip at a time, given up to 64 registers per thread, or 80 for 8 ranks."""
    return (32 if size <= 4 else 24) * chip.processors


def words_of(x: Tensor) -> int:
    """Return the number of words of a tensor [T, E] of float32, or of an even number of 2-byte elements."""
    count, rest = divmod(x.numel() * x.element_size(), 4)
    assert rest == 0
    return count


def add_reduced(x: Tensor, y: Tensor, inbox: Inbox) -> None:
    """Add the sum of y [T, E] over the ranks to x [T, E] in place.

    Both are contiguous, in float32, bfloat16 or float16. x is the same on all ranks, before and after the call. The
    host does not wait; see Inbox.expired.
    """
    launch_as(config(words_of(x), inbox, Chip.of(x.device)), x, y, inbox)


def launch_as(chosen: AllReduceConfig, x: Tensor, y: Tensor, inbox: Inbox) -> None:
    """Run add_reduced with the shape of an AllReduceConfig."""
    words, size = words_of(x), inbox.size
    assert x.shape == y.shape
    assert x.dtype == y.dtype
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert 0 < words <= inbox.words
    at = InboxLayout.of(inbox.words, size)
    pdl = Chip.of(x.device).dependent_launch
    options = {"num_warps": chosen.warps, "launch_pdl": pdl}
    ranks = power_of_two(size)
    if chosen.trips == 1:
        programs = -(-words // chosen.block)
        assert words <= at.flagged
        assert programs <= PROGRAMS
        _one_trip_kernel[(programs,)](
            x, y, inbox.peers, inbox.steps, inbox.expired, words, at.flagged, inbox.polls,
            inbox.rank, size, ranks, chosen.block, PROGRAMS, pdl, **options,
        )  # fmt: skip
    else:
        blocks = -(-words // (size * chosen.block))
        assert blocks <= BLOCKS
        assert chosen.block <= SLICE
        programs = min(blocks, PROGRAMS, warps_at_a_time(size, Chip.of(x.device)) // chosen.warps)
        _two_trips_kernel[(programs,)](
            x, y, inbox.peers, inbox.steps, inbox.expired, words, blocks, at.share, at.partials, at.results, at.flags,
            inbox.polls, inbox.rank, size, ranks, chosen.block, PROGRAMS, BLOCKS, pdl, **options,
        )  # fmt: skip


def add_in_order(x: Tensor, parts: Sequence[Tensor]) -> None:
    """Add `parts`, the y [T, E] of all ranks in order, to x [T, E] in place; the twin of add_reduced, with the same
    bits.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    x.copy_(total + x.float())


@jit()
def _one_trip_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, peers_ptr: tl.tensor, steps_ptr: tl.tensor, expired_ptr: tl.tensor,
    words: tl.tensor, flagged: tl.tensor, polls_ptr: tl.tensor,
    RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, CELLS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Reduce BLOCK words per program."""
    rank = tl.arange(0, RANKS)
    peer = (RANK + rank) % SIZE  # each rank begins with a different peer
    inboxes = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64), bitcast=True)
    own = tl.load(peers_ptr + RANK).to(tl.pointer_type(tl.int64), bitcast=True)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = tl.load(steps_ptr + tl.program_id(0)) + 1
    limit = tl.where(tl.load(expired_ptr) != 0, 0, tl.load(polls_ptr))
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = word < words
    both = (rank < SIZE)[:, None] & here[None, :]
    y = tl.load(y_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=here, other=0)
    x = tl.load(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=here, other=0)

    turn = (step & 1) * SIZE
    cell = (y.to(tl.int64) & 0xFFFFFFFF) | (step.to(tl.int64) << 32)
    to = inboxes[:, None] + ((turn + RANK) * flagged + word)[None, :]
    tl.store(tl.multiple_of(to, (1, 16)), tl.broadcast_to(cell[None, :], [RANKS, BLOCK]), mask=both & (limit > 0))

    at = tl.multiple_of(own + ((turn + rank) * flagged)[:, None] + word[None, :], (1, 16))
    found = tl.load(at, mask=both, other=0, volatile=True)
    missing = tl.max(tl.max((((found >> 32).to(tl.int32) != step) & both).to(tl.int32), 0), 0)
    while (missing > 0) & (limit > 0):
        found = tl.load(at, mask=both, other=0, volatile=True)
        missing = tl.max(tl.max((((found >> 32).to(tl.int32) != step) & both).to(tl.int32), 0), 0)
        limit = tl.minimum(limit - 1, tl.load(polls_ptr, volatile=True))
    _end(steps_ptr, step, CELLS)
    if missing > 0:
        tl.store(expired_ptr, 1)
    x = _total(found.to(tl.int32), x, x_ptr.dtype.element_ty, SIZE)
    tl.store(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, x, mask=here)


@jit()
def _two_trips_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, peers_ptr: tl.tensor, steps_ptr: tl.tensor, expired_ptr: tl.tensor,
    words: tl.tensor, blocks: tl.tensor, share: tl.tensor, partials: tl.tensor, results: tl.tensor, flags: tl.tensor,
    polls_ptr: tl.tensor,
    RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, SLICE: tl.constexpr, CELLS: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Reduce blocks of SIZE * SLICE words. A program takes one block, and then every num_programs-th block after it."""
    rank = tl.arange(0, RANKS)
    real = rank < SIZE
    peer = (RANK + rank) % SIZE  # each rank begins with a different peer
    inboxes = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int32), bitcast=True)
    own = tl.load(peers_ptr + RANK).to(tl.pointer_type(tl.int32), bitcast=True)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = tl.load(steps_ptr + tl.program_id(0)) + 1
    limit = tl.where(tl.load(expired_ptr) != 0, 0, tl.load(polls_ptr))
    x_ptr32 = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    y_ptr32 = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    column = tl.arange(0, SLICE)
    block = tl.program_id(0)
    while block < blocks:
        slices = block * SIZE * SLICE + column
        word = (peer * SLICE)[:, None] + slices[None, :]
        here = real[:, None] & (word < words)
        y = tl.load(y_ptr32 + word, mask=here, other=0)
        to = inboxes[:, None] + (partials + RANK * share + block * SLICE + column)[None, :]
        tl.store(tl.multiple_of(to, (1, 16)), y, mask=here)
        mine = RANK * SLICE + slices
        x = tl.load(x_ptr32 + mine, mask=mine < words, other=0)
        missing = _meet(inboxes, own, flags + block * SIZE, step, limit, polls_ptr, RANK, SIZE, RANKS)
        limit = tl.where(missing > 0, 0, limit)

        at = own + (partials + rank * share)[:, None] + (block * SLICE + column)[None, :]
        both = real[:, None] & (mine < words)[None, :]
        parts = tl.load(tl.multiple_of(at, (1, 16)), mask=both, other=0, cache_modifier=".cg")
        x = _total(parts, x, x_ptr.dtype.element_ty, SIZE)
        to = inboxes[:, None] + (results + mine)[None, :]
        tl.store(tl.multiple_of(to, (1, 16)), tl.broadcast_to(x[None, :], [RANKS, SLICE]), mask=both)
        missing = _meet(inboxes, own, flags + (BLOCKS + block) * SIZE, step, limit, polls_ptr, RANK, SIZE, RANKS)
        limit = tl.where(missing > 0, 0, limit)

        word = (rank * SLICE)[:, None] + slices[None, :]
        here = real[:, None] & (word < words)
        x = tl.load(tl.multiple_of(own + results + word, (1, 16)), mask=here, other=0, cache_modifier=".cg")
        tl.store(x_ptr32 + word, x, mask=here)
        block += tl.num_programs(0)
    _end(steps_ptr, step, CELLS)
    if limit == 0:
        tl.store(expired_ptr, 1)


@jit()
def _end(steps_ptr, step, CELLS: tl.constexpr):
    """Write the step number to all cells, since the next call may have a different grid.

    A program writes its own cell and every num_programs-th cell after it, which no other program of this call reads. It
    calls this after its first reduction over warps, because each warp reads the number from the cell separately: a warp
    that reads it too late would get the number of the next step, and wait for ever.
    """
    first = tl.program_id(0)
    while first < CELLS:
        cell = first + tl.arange(0, 32) * tl.num_programs(0)
        tl.store(steps_ptr + cell, tl.broadcast_to(step, [32]), mask=cell < CELLS)
        first += 32 * tl.num_programs(0)


@jit()
def _meet(inboxes, own, flag, step, limit, polls_ptr, RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """Signal to all ranks that this program has stored, and wait for the signals of all ranks.

    Return 0, or 1 if a signal is missing after `limit` polls. flag: offset, in words, of the N flags of a block and
    trip in an inbox.
    """
    rank = tl.arange(0, RANKS)
    real = rank < SIZE
    tl.debug_barrier()  # all threads have stored before one of them signals
    signals = real & (limit > 0)  # after a wait was given up, results are wrong
    tl.atomic_xchg(inboxes + flag + RANK, tl.broadcast_to(step, [RANKS]), mask=signals, sem="release", scope="sys")
    missing = 1
    while (missing > 0) & (limit >= 0):
        found = tl.atomic_add(own + flag + rank, tl.full([RANKS], 0, tl.int32), mask=real, sem="acquire", scope="sys")
        missing = tl.max(((found != step) & real).to(tl.int32), 0)
        limit = tl.minimum(limit - 1, tl.load(polls_ptr, volatile=True))
    tl.debug_barrier()  # all signals have arrived before any thread loads
    return missing


@jit()
def _total(parts, x, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Return x [BLOCK] plus the sum of parts [N, BLOCK] over the ranks, all given as int32 words that hold DTYPE."""
    rank = tl.arange(0, parts.shape[0])[:, None]
    halves: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    words = tl.full(x.shape, 0, tl.int32)
    for half in tl.static_range(halves):
        if halves == 1:
            part, own = parts.to(DTYPE, bitcast=True), x.to(DTYPE, bitcast=True)
        else:
            part = (parts >> 16 * half).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            own = (x >> 16 * half).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        total = tl.sum(tl.where(rank == 0, part, 0.0), 0)
        for other in tl.static_range(1, SIZE):  # tl.sum promises no order
            total += tl.sum(tl.where(rank == other, part, 0.0), 0)
        total += own
        if halves == 1:
            words = total.to(tl.int32, bitcast=True)
        else:
            words |= (total.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) << 16 * half
    return words
