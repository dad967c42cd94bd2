"""The sum over tensor-parallel ranks of what each has of a row-split product, added to the residual stream.

Letters: T tokens, H hidden size, N ranks. A word is 4 bytes: a float32, or two elements of 2 bytes. Every rank has an
inbox, memory that all ranks can write (NVLink), and every call a step number, the same on all ranks; a rank pushes its
words into the inboxes, and waits at its own until what the others push for this step is there.

One trip, for few tokens. Each word is pushed to every rank with the step number beside it: a store of 8 bytes arrives
whole, so that a word is there when its number is, and nothing else need be waited for. There are two inboxes in turn.
A rank that begins step s + 2 has ended s + 1, for which it waited for words of every rank; so every rank has begun
s + 1, and ended s. What step s + 2 overwrites, that of step s, has been read.

Two trips, for more tokens. Words are cut into blocks, a block into one slice a rank. A program pushes each slice of its
block to the slice's rank, then a flag (a release store behind all threads' stores); as the slice's rank it sums what
comes, pushes the result to all ranks, and a flag again. A rank sends (N - 1) / N of the words twice, instead of N - 1
times and with numbers as long as themselves; but there are a second trip and two fences. One inbox a trip is enough.
Partial sums: a rank that begins step s + 1 has ended s, so has all results of s, which their ranks pushed after they
had read the partial sums. Results: a rank pushes those of a block of step s + 1 when it has the block's partial sums
from every rank, each of which has thus begun s + 1, and ended s.

Both hold with calls of either kind, and of any size, between. They need that a step begins when the one before has
ended on its rank: stream order. Programs wait for programs of the same number on other ranks, all of which must get to
run: no more are launched than fit on the chip at a time.

All ranks add in the order of ranks, in float32, and round once: they get the same bits, the same for one trip and two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.kernels.launch import Chip, jit, tl, triton

ONE_TRIP = 3 << 16
"""Words that a rank sends to all others together, up to which one trip is chosen."""

SMALL = 1 << 17
"""Words up to which smaller blocks make two trips sooner (on 4 H200s)."""

PROGRAMS = 1024
"""The most programs of a call."""

BLOCKS = 4096
"""The most blocks of a call with two trips."""

SLICE = 4096
"""The most words of a slice."""

POLLS = 60_000_000
"""Times to look for what other ranks push, which takes half a minute or so."""


class InboxLayout(NamedTuple):
    """Where things lie in an inbox, in words.

    flagged: words of a call that can go in one trip; at the inbox's start there are 2 N such rows of 8-byte cells.
    share: the words of all slices of a rank. partials: where the N rows of share words of the partial sums are;
    results: the N * share results; flags: int32 [2, BLOCKS, N], of either trip; end: the words of all.
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
    """What the ranks of a group push to each other through; all begins as zeros, before any rank's first call.

    peers: int64 [N], the address of every rank's inbox, own one included: Inbox.bytes_for(words, N) bytes each,
    aligned to 16. steps: int32 [PROGRAMS], the number of the last step, in every cell. expired: int32 [1], 1 when a
    call has given up waiting: what it and later calls leave in x is worthless, and later calls do not wait. words: the
    most a call may have. polls: int32 [1], after how many looks a wait is given up; may be changed at any time.

    Calls of an inbox must be in one order, the same on all ranks, and no two of them at a time. (Step numbers wrap
    around: one is mistaken for another where a call reads what none has written for 2 ** 32 steps.)
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
        """The bytes of an inbox for calls of up to `words` words among `size` ranks."""
        return 4 * InboxLayout.of(words, size).end

    @staticmethod
    def make(peers: Sequence[int], words: int, rank: int, device: torch.device, polls: int = POLLS) -> Inbox:
        """The inbox of a rank, when all inboxes are there: zeros, at the addresses `peers` as this rank sees them."""
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
    """How a call is cut up. trips: 1 or 2; block: words of a program, or with two trips of a slice; warps a program."""

    trips: int
    block: int
    warps: int


def config(words: int, inbox: Inbox, chip: Chip) -> AllReduceConfig:
    """For calls of so many words."""
    block = max(64, triton.next_power_of_2(-(-words // 512)))
    warps = block // 64 if block <= 256 else min(block // 128, 8)
    fits = -(-words // block) * warps <= warps_at_a_time(inbox.size, chip)
    if fits and words <= InboxLayout.of(inbox.words, inbox.size).flagged:
        return AllReduceConfig(1, block, warps)
    block = 512 if words <= SMALL else 1024
    while words > inbox.size * block * BLOCKS:
        block *= 2
    return AllReduceConfig(2, block, block // 128)  # 16 bytes a thread and rank


def warps_at_a_time(size: int, chip: Chip) -> int:
    """Warps that fit on the chip, with the registers a thread that the kernels take: up to 64, or 80 for 8 ranks."""
    return (32 if size <= 4 else 24) * chip.processors


def words_of(x: Tensor) -> int:
    """The words of a tensor [T, H] of float32, or of 2-byte elements of which there is an even number."""
    count, rest = divmod(x.numel() * x.element_size(), 4)
    assert rest == 0
    return count


def add_reduced(x: Tensor, y: Tensor, inbox: Inbox) -> None:
    """x [T, H] += the sum of y [T, H] over the ranks, in place: float32, bfloat16 or float16, contiguous.

    x is to be the same on all ranks, and is so after the call. The host does not wait; see Inbox.expired.
    """
    launch_as(config(words_of(x), inbox, Chip.of(x.device)), x, y, inbox)


def launch_as(chosen: AllReduceConfig, x: Tensor, y: Tensor, inbox: Inbox) -> None:
    """add_reduced, cut up as a AllReduceConfig says."""
    words, size = words_of(x), inbox.size
    assert x.shape == y.shape
    assert x.dtype == y.dtype
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert 0 < words <= inbox.words
    at = InboxLayout.of(inbox.words, size)
    pdl = Chip.of(x.device).dependent_launch
    options = {"num_warps": chosen.warps, **({"launch_pdl": True} if pdl else {})}
    ranks = triton.next_power_of_2(size)
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
    """The twin of add_reduced, for when every rank's y is at hand, in the order of ranks: the same bits."""
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
    """A program BLOCK words."""
    rank = tl.arange(0, RANKS)
    peer = (RANK + rank) % SIZE  # each rank begins with another
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
    _end(steps_ptr, step, CELLS)

    at = tl.multiple_of(own + ((turn + rank) * flagged)[:, None] + word[None, :], (1, 16))
    found = tl.load(at, mask=both, other=0, volatile=True)
    missing = tl.max(tl.max((((found >> 32).to(tl.int32) != step) & both).to(tl.int32), 0), 0)
    while (missing > 0) & (limit > 0):
        found = tl.load(at, mask=both, other=0, volatile=True)
        missing = tl.max(tl.max((((found >> 32).to(tl.int32) != step) & both).to(tl.int32), 0), 0)
        limit = tl.minimum(limit - 1, tl.load(polls_ptr, volatile=True))
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
    """A program a block of SIZE * SLICE words, and then the one as many blocks ahead as there are programs."""
    rank = tl.arange(0, RANKS)
    real = rank < SIZE
    peer = (RANK + rank) % SIZE  # each rank begins with another
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
    """Writes the step's number to all cells, though a program reads its own alone: the next call may have another grid.

    A program's cells are its own and those that as many cells ahead as there are programs, which none reads now.
    """
    first = tl.program_id(0)
    while first < CELLS:
        cell = first + tl.arange(0, 32) * tl.num_programs(0)
        tl.store(steps_ptr + cell, tl.broadcast_to(step, [32]), mask=cell < CELLS)
        first += 32 * tl.num_programs(0)


@jit()
def _meet(inboxes, own, flag, step, limit, polls_ptr, RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """Tells all ranks that this program's stores to them are done, and waits until all have told so: 0, or 1 if some
    have not after `limit` looks. `flag` is where the N flags of a block and a trip lie in the inboxes, in words."""
    rank = tl.arange(0, RANKS)
    real = rank < SIZE
    tl.debug_barrier()  # all threads have stored before one of them tells
    tells = real & (limit > 0)  # what comes of a wait given up is for nobody
    tl.atomic_xchg(inboxes + flag + RANK, tl.broadcast_to(step, [RANKS]), mask=tells, sem="release", scope="sys")
    missing = 1
    while (missing > 0) & (limit >= 0):
        found = tl.atomic_add(own + flag + rank, tl.full([RANKS], 0, tl.int32), mask=real, sem="acquire", scope="sys")
        missing = tl.max(((found != step) & real).to(tl.int32), 0)
        limit = tl.minimum(limit - 1, tl.load(polls_ptr, volatile=True))
    tl.debug_barrier()  # one has seen before any thread loads
    return missing


@jit()
def _total(parts, x, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """x plus the sum over ranks of parts: words [BLOCK] and [N, BLOCK] of DTYPE, as int32."""
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
