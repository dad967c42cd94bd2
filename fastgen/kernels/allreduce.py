"""All-reduce of tensor-parallel ranks with residual addition: the residual stream += the sum of a row-split product.

Letters: T tokens, H hidden size, N ranks. A word is 4 bytes: a float32, or two elements of 2 bytes. Every rank has an
inbox, memory that all ranks can write (NVLink), and every call has a step number, the same on all ranks. A rank pushes
its words to the inboxes, and waits at its own until the words of all others for this step have arrived.

One trip, for few tokens. A rank pushes each word to every rank, with the step number beside it. A store of 8 bytes
arrives whole, so that the number tells that the word is there, and no other wait is needed. Two inboxes take turns. A
rank that begins step s + 2 has ended s + 1, for which it waited for words of every rank; so every rank has begun s + 1,
and ended s. Step s + 2 overwrites the words of step s, which all have read.

Two trips, for more tokens. Words are cut into blocks, and a block into one slice a rank. A program pushes each slice of
its block to the slice's rank, and then a flag (a release store after the stores of all threads). As the slice's rank it
sums the slices that arrive, pushes the result to all ranks, and again a flag. A rank sends (N - 1) / N of the words
twice, instead of N - 1 times with step numbers as long as the words, but there are a second trip and two fences. One
inbox for each trip suffices. Partial sums: a rank that begins step s + 1 has ended s, so it has all results of s, which
their ranks pushed after they had read the partial sums. Results: a rank pushes those of a block of step s + 1 when it
has the block's partial sums from every rank, each of which has thus begun s + 1, and ended s.

Both hold between calls of either kind and any size. They need that a step begins after the one before has ended on its
rank: stream order. Programs wait for programs of the same number on other ranks, all of which must run at the same
time: no more are launched than fit on the chip.

All ranks add in the order of ranks, in float32, and round once. They get the same bits, for one trip as for two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.launch import jit, tl

ONE_TRIP = 3 << 16
"""The most words that a rank sends to all others together in one trip."""

SMALL = 1 << 17
"""Words up to which smaller blocks make two trips faster (on 4 H200s)."""

PROGRAMS = 1024
"""The most programs of a call."""

BLOCKS = 4096
"""The most blocks of a call with two trips."""

SLICE = 4096
"""The most words of a slice."""

POLLS = 60_000_000
"""Polls before a wait is given up, which takes about half a minute."""


class InboxLayout(NamedTuple):
    """The layout of an inbox, in words.

    flagged: the most words of a call in one trip; the inbox begins with 2 N rows of as many 8-byte cells. share: the
    words of all slices of a rank. partials: the offset of the partial sums, N rows of `share` words. results: the
    offset of the N * share results. flags: the offset of the flags, int32 [2, BLOCKS, N] for both trips. end: the words
    of all.
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

    peers: int64 [N], the addresses of all ranks' inboxes, its own included: Inbox.bytes_for(words, N) bytes each,
    aligned to 16. steps: int32 [PROGRAMS], the number of the last step in every cell. expired: int32 [1], 1 after a
    call has given up waiting: its result and those of later calls are wrong, and later calls do not wait. words: the
    most of a call. polls: int32 [1], the polls before a wait is given up; may change at any time.

    Calls of an inbox have one order, the same on all ranks, and do not overlap. (Step numbers wrap around: they are
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
        """Return the bytes of an inbox for calls of up to `words` words among `size` ranks."""
        return 4 * InboxLayout.of(words, size).end

    @staticmethod
    def make(peers: Sequence[int], words: int, rank: int, device: torch.device, polls: int = POLLS) -> Inbox:
        """Return the inbox of a rank, after all inboxes exist as zeros at the addresses `peers`, as this rank sees
        them."""
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
    """The shape of a call. trips: 1 or 2. block: words of a program, or with two trips of a slice. warps: of a
    program."""

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
    return AllReduceConfig(2, block, block // 128)  # 16 bytes a thread and rank


def warps_at_a_time(size: int, chip: Chip) -> int:
    """Return the warps that fit on the chip with the kernels' registers: up to 64 a thread, or 80 for 8 ranks."""
    return (32 if size <= 4 else 24) * chip.processors


def words_of(x: Tensor) -> int:
    """Return the words of a tensor [T, H] of float32, or of an even number of 2-byte elements."""
    count, rest = divmod(x.numel() * x.element_size(), 4)
    assert rest == 0
    return count


def add_reduced(x: Tensor, y: Tensor, inbox: Inbox) -> None:
    """Add the sum of y [T, H] over the ranks to x [T, H] in place. Both are contiguous, in float32, bfloat16 or
    float16.

    x is the same on all ranks, before and after. The host does not wait; see Inbox.expired.
    """
    launch_as(config(words_of(x), inbox, Chip.of(x.device)), x, y, inbox)


def launch_as(chosen: AllReduceConfig, x: Tensor, y: Tensor, inbox: Inbox) -> None:
    """Run add_reduced in the shape of an AllReduceConfig."""
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
    """Add all ranks' y [T, H], in the order of ranks, to x [T, H] in place; the twin of add_reduced, with the same
    bits."""
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
    """Reduce BLOCK words a program."""
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
    """Reduce blocks of SIZE * SLICE words: a program takes a block, and then every num_programs-th after it."""
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
    """Write the step's number to all cells, since the next call may have another grid.

    A program writes its own cell and every num_programs-th after it, which no other program of this call reads. It
    calls this after the first reduction over its warps: each warp reads the number in the cell for itself, and a warp
    that reads it late would take the next step's and wait for ever.
    """
    first = tl.program_id(0)
    while first < CELLS:
        cell = first + tl.arange(0, 32) * tl.num_programs(0)
        tl.store(steps_ptr + cell, tl.broadcast_to(step, [32]), mask=cell < CELLS)
        first += 32 * tl.num_programs(0)


@jit()
def _meet(inboxes, own, flag, step, limit, polls_ptr, RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """Signal to all ranks that this program has stored, and wait for the signals of all ranks. Returns 0, or 1 if a
    signal is missing after `limit` polls. flag: the offset of the N flags of a block and a trip in an inbox, in
    words."""
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
    """Return x plus the sum of parts over the ranks, all as int32 words of DTYPE: x [BLOCK], parts [N, BLOCK]."""
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
