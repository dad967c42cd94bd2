"""Admission control: the queue, predictions of output lengths, reservations of pages, and lanes. No torch here."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter

import numpy as np

from fastgen.engine.options import EngineConfig
from fastgen.engine.pages import PageAllocator
from fastgen.request import LaneStart, Sequence

MAX_ENDS = 64  # maximum number of times at which `_will_fit` counts pages
LEAVING_STEPS = 4  # number of steps from the last token of a sequence until its pages are released


@dataclass
class LengthEstimate:
    """The predicted output length: exact if only max_len ends a sequence, else a moving average of finished outputs.

    A sequence whose output gets longer may be preempted, which costs less than lanes that stay empty.
    """

    average: float = 1024.0  # tokens
    weight: float = 1 / 16  # of one output in the average

    def predict(self, sequence: Sequence) -> int:
        """Return the predicted output length of a sequence in tokens, which max_len may cut."""
        return sequence.max_len if sequence.ends_at_length else round(self.average)

    def learn(self, tokens: int) -> None:
        """Include the length of a finished output."""
        self.average += self.weight * (tokens - self.average)


class PageReservations:
    """The queue, in the order of priorities and then of arrival, and the pages that each running sequence has reserved.
    Decides whether the first waiting sequence fits.

    A reservation is the predicted final length of a page table, shared pages included. The growth of the running
    sequences is the sum of their reservations less the current lengths of their tables. Another sequence fits if its
    own need, which is its reservation minus the pages that others hold already, and that growth fit into the
    available pages; or if it will fit at any later time, because running sequences reach their max_len and leave. So as
    long as outputs end as predicted, or at a max_tokens below that, nothing is preempted.

    **Waves.** If nothing else will come and not all sequences fit at once, the number of running sequences is limited
    such that all waves have the same size: a small remainder at the end would take as long as a wave and leave the GPU
    idle. A wave begins before the previous one ends, as soon as all of it will have room.

    The share of pages that waiting sequences will have in common is unknown before they are admitted. It is assumed to
    be the same as among the running ones: `distinct_pages` is the final number of their pages, which is the sum of
    their reservations if they have none in common.
    """

    def __init__(self, config: EngineConfig, pages: PageAllocator, estimate: LengthEstimate) -> None:
        self.config = config
        self.pages = pages
        self.estimate = estimate
        self.reserved_pages = 0  # by the running sequences
        self.waiting: OrderedDict[Sequence, int] = OrderedDict()  # with the pages expected of each when it came
        self.waiting_pages = 0  # the sum of these

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into the queue, after all others of its priority."""
        later = list(takewhile(lambda other: other.priority > sequence.priority, reversed(self.waiting)))
        self.waiting[sequence] = self.expected(sequence)
        self.waiting_pages += self.waiting[sequence]
        for other in reversed(later):
            self.waiting.move_to_end(other)

    def move_first(self, sequence: Sequence) -> None:
        """Move a waiting sequence before all others of its priority."""
        earlier = list(takewhile(lambda other: other.priority < sequence.priority, self.waiting))
        for each in (sequence, *reversed(earlier)):
            self.waiting.move_to_end(each, last=False)

    def dequeue(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue."""
        self.waiting_pages -= self.waiting.pop(sequence)

    def expected(self, sequence: Sequence) -> int:
        """Return the pages to reserve for a sequence: as predicted, and at least one more than it needs now."""
        count = self.pages.count
        now = max(count(len(sequence.token_ids)), len(sequence.pages))
        predicted = max(count(sequence.prompt_len + self.estimate.predict(sequence)), now + 1)
        return min(predicted, max(now, count(sequence.max_len - 1)))  # the last token needs no KV

    def reserve(self, sequence: Sequence, num_pages: int) -> None:
        self.reserved_pages += num_pages - sequence.reserved
        sequence.reserved = num_pages

    def extend(self, sequence: Sequence) -> None:
        """Renew the reservation of a running sequence if its table has filled it."""
        if len(sequence.pages) >= sequence.reserved:
            self.reserve(sequence, self.expected(sequence))

    @property
    def growth(self) -> int:
        return self.reserved_pages - self.pages.references

    @property
    def distinct_pages(self) -> int:
        return self.pages.num_pages - self.pages.available + self.growth

    def all_fit(self) -> bool:
        """Return True if all running and waiting sequences fit at once."""
        return self._total(self.distinct_pages, self.reserved_pages) <= self.pages.num_pages

    def _total(self, distinct: int, reserved: int) -> int:
        """Return the pages of all sequences, rounded up, if `distinct` pages hold reservations of `reserved` pages."""
        everything = self.reserved_pages + self.waiting_pages
        return -(-everything * distinct // reserved) if reserved else everything

    def fits(self, sequence: Sequence, expected: int, need: int, running: list[Sequence], complete: bool) -> bool:
        """Return True if a waiting sequence may run.

        expected: the number of pages of its reservation. need: how many of them no other sequence holds. complete:
        nothing will be added before all current sequences have ended.
        """
        if not running:
            return True
        count, waiting = 1, len(self.waiting)  # count: number of sequences to admit at once
        if complete and sequence.ends_at_length:
            waves = -(-self._total(self.distinct_pages + need, self.reserved_pages + expected) // self.pages.num_pages)
            wave = -(-(len(running) + waiting) // waves)  # maximum number of sequences that run at a time
            if len(running) >= wave:
                count = (waiting - 1) % wave + 1  # this wave is full: admit all that the next one lacks, or none
        if count == 1 and self.growth + need <= self.pages.available:
            return True
        return self._will_fit(sequence, expected, count, running)

    def _will_fit(self, sequence: Sequence, expected: int, count: int, running: list[Sequence]) -> bool:
        """Return True if `count` sequences like a waiting one fit next to the running ones at any time from now on.

        Each decoding sequence grows by one token per step, so its length at any step is known, and so is the last step
        at which it can leave, because of its max_len. A page with several holders counts once for each. A sequence that
        is admitted later is checked against all that run then, so that the result stays valid. All prefills are assumed
        to last until the known tokens of all are computed, in steps of the smallest budget. With
        `speculate`, sequences with right drafts overtake others, and one of these may then be preempted.
        """
        length, room = len(sequence.token_ids), self.pages.num_pages
        if self.pages.references + self.pages.count(length) * count > room:
            return False  # not even now
        rows = [(s.length, s.prefill_len - s.computed, s.max_len, s.reserved, 1) for s in running]
        rows.append((length, length, sequence.max_len, expected, count))
        lengths, prefills, most, reserved, counts = np.array([*zip(*rows, strict=True)], dtype=np.int32)
        budget = self.config.prefill_tokens(min(len(running) + count, self.config.max_seqs) - 1)
        delay = np.maximum(prefills, 0) @ counts // budget + 1
        ends = most - lengths + np.where(prefills > 0, delay, 0) + LEAVING_STEPS
        times = np.unique(ends)[::-1]
        times = times[:: -(-len(times) // MAX_ENDS)][::-1, None]  # the last end, and evenly chosen earlier ones
        pages = np.minimum((lengths + (times + self.pages.page_size - 1)) // self.pages.page_size, reserved)
        pages *= ends > np.insert(times[:-1], 0, 0, axis=0)  # an end between two times counts at the later one
        return bool((pages @ counts).max() <= room)


class LaneTable:
    """The table of lanes and their sequences, with the changes that the device does not know yet.

    sequences: by lane, None for a free lane. free: the free lanes, a heap. masked: the lanes whose sequences have a
    TokenMask.
    """

    def __init__(self, count: int) -> None:
        self.sequences: list[Sequence | None] = [None] * count
        self.free = list(range(count))
        self.masked: set[int] = set()
        self._starts: list[LaneStart] = []
        self._page_updates: list[tuple[int, int, tuple[int, ...]]] = []

    def __getitem__(self, lane: int) -> Sequence:
        sequence = self.sequences[lane]
        assert sequence is not None, f"lane {lane} is empty"
        return sequence

    def take(self, sequence: Sequence) -> None:
        """Give a sequence the lowest free lane, which starts in the next batch."""
        sequence.lane = lane = heapq.heappop(self.free)
        self.sequences[lane] = sequence
        if sequence.mask is not None:
            self.masked.add(lane)
        counted = tuple(sequence.token_ids) if sequence.params.penalized else ()
        start = LaneStart(
            lane, sequence.params, sequence.seed, sequence.index, sequence.prompt_len, sequence.stop_ids, counted
        )
        self._starts.append(start)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's lane back."""
        lane, sequence.lane = sequence.lane, -1
        self.sequences[lane] = None
        heapq.heappush(self.free, lane)
        self.masked.discard(lane)
        self._page_updates = [update for update in self._page_updates if update[0] != lane]

    def send_pages(self, sequence: Sequence, first: int) -> None:
        """Put the pages of a sequence, from entry `first` of its table on, into the next batch."""
        if first < len(sequence.pages):
            self._page_updates.append((sequence.lane, first, tuple(sequence.pages[first:])))

    def take_changes(self) -> tuple[tuple[LaneStart, ...], tuple[tuple[int, int, tuple[int, ...]], ...]]:
        """Return the starts and the page updates of the batch that is now complete (see Batch)."""
        changes = tuple(self._starts), tuple(self._page_updates)
        self._starts, self._page_updates = [], []
        return changes


def next_chunk(prefilling: list[Sequence], budget: int, reserve: int) -> tuple[Sequence, int]:
    """Return the sequence whose known tokens a step computes next, and how many of them.

    Among the sequences with the lowest priority number, the oldest goes first, unless the shortest lacks less than half
    as many tokens: overtaking then saves the short one more time than it costs the oldest. `reserve` tokens of
    each step are left to the oldest, so that it never starves. prefilling: the sequences in their prefill, in order of
    admission. budget: number of prefill tokens that the step has left.
    """
    oldest = min(prefilling, key=attrgetter("priority"))  # the first of these
    shortest = min(prefilling, key=attrgetter("priority", "prefill_left"))
    spare = budget - min(oldest.prefill_left, reserve)
    if 2 * shortest.prefill_left < oldest.prefill_left and spare > 0:
        return shortest, min(shortest.prefill_left, spare)
    return oldest, min(oldest.prefill_left, budget)


def begins_like(sequence: Sequence, other: Sequence, page_size: int) -> bool:
    """Return True if a waiting sequence can share the page that another one's prefill has reached, or be its fork."""
    at = other.computed
    end, tokens, others = min((at // page_size + 1) * page_size, other.prefill_len), sequence.token_ids, other.token_ids
    return tokens[at:end] == others[at:end] and tokens[:at] == others[:at]
