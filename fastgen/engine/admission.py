"""Who may run beside whom: the pages that sequences are expected to fill. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fastgen.engine.pages import PageAllocator
from fastgen.request import Sequence

LOOKS = 64  # ends of sequences that are looked at, at the most: who ends between two is taken to stay for the second
PATIENCE = 8  # steps until one that had no room is looked at again, where nobody comes or leaves
LEAVING = 4  # steps from the one that computes a last token until its sequence, and what is copied of it, is gone


@dataclass
class LengthEstimate:
    """How long answers get. One that nothing but its length ends gets as long as that; of others, finished ones tell.

    Twice a moving average, since most answers are shorter than that and those that are not can still be preempted.
    Before any has finished: 2048 tokens.
    """

    average: float = 1024.0  # tokens
    least: int = 256  # what is expected at the least, tokens
    weight: float = 1 / 16  # of one answer in the average
    exact: bool = True  # whether an end that is certain is known

    @property
    def tokens(self) -> int:
        return max(self.least, round(2 * self.average))

    def learn(self, tokens: int) -> None:
        """An answer has finished with so many tokens."""
        self.average += self.weight * (tokens - self.average)


class PageReservations:
    """The pages that each running sequence has reserved, and those that the waiting ones will.

    A reservation is the length that a page table is expected to come to, shared pages too. What the running ones still
    take of the pool is their growth: what is reserved less the lengths of their tables. So one more fits where its own
    need, which is its reservation less the pages that others hold already, fits into what is available beside that.

    What those who wait will share is not known before they are admitted. It is taken to be as much as those share that
    run: `shared_pages` is what these will hold in the end, which without sharing is the sum of their reservations.
    """

    def __init__(self, pages: PageAllocator, estimate: LengthEstimate, max_seqs: int) -> None:
        self.pages = pages
        self.estimate = estimate
        self.sum = 0  # of those that run
        self.wanted_sum = 0  # of those that wait
        self._reserved = [0] * max_seqs  # by lane
        self._answer_len = estimate.tokens  # the estimate that these numbers are made with

    def expected(self, sequence: Sequence) -> int:
        """How many pages a sequence will hold at the end: as expected, or else one more than now."""
        count = self.pages.count
        now = max(count(len(sequence.token_ids)), len(sequence.pages))
        most = max(now, count(sequence.max_len - 1))  # the last token needs no place
        if sequence.ends_at_length and self.estimate.exact:
            return most
        return min(max(count(sequence.prompt_len + self._answer_len), now + 1), most)

    def of(self, lane: int) -> int:
        return self._reserved[lane]

    def reserve(self, lane: int, num_pages: int) -> None:
        self.sum += num_pages - self._reserved[lane]
        self._reserved[lane] = num_pages

    def renew(self, sequence: Sequence) -> None:
        """A sequence that runs has more pages; one that has filled its reservation gets another."""
        if len(sequence.pages) >= self._reserved[sequence.lane]:
            self.reserve(sequence.lane, self.expected(sequence))

    def learn(self, answer_len: int, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Learn from a finished answer. Recompute all reservations if the estimate has moved by more than an eighth."""
        self.estimate.learn(answer_len)
        if abs(self.estimate.tokens - self._answer_len) * 8 > self._answer_len:
            self._answer_len = self.estimate.tokens
            self.wanted_sum = sum(map(self.expected, waiting))
            for sequence in running:
                self.reserve(sequence.lane, self.expected(sequence))

    @property
    def growth(self) -> int:
        return self.sum - self.pages.references

    @property
    def shared_pages(self) -> int:
        return self.pages.num_pages - self.pages.available + self.growth

    def fits(self, need: int) -> bool:
        """Whether one that needs so many pages beyond those that others hold has room beside all that run."""
        return self.growth + need <= self.pages.available

    def fit_in_time(self, sequence: Sequence, count: int, running: list[Sequence], budget: int) -> bool:
        """Whether so many as one that waits fit beside those that run at any time from now on.

        All that decode go on by a token a step, so that it is known how long each will be at a step, and at which one
        it has left, if by nothing else then at its max_len. What is shared counts for each that holds it. Whoever is
        admitted later is weighed against all that then run, so that what is found here stays true. budget: tokens that
        a step has at least for prefills; those to prefill may wait until all that is known, of all, is computed.
        """
        known, room = len(sequence.token_ids), self.pages.num_pages - self.pages.copied
        if self.pages.references + self.pages.count(known) * count > room:
            return False  # not even now
        rows = [(s.length, s.prefill_len - s.computed, s.max_len, self._reserved[s.lane], 1) for s in running]
        rows.append((known, known, sequence.max_len, self.expected(sequence), count))
        lengths, prefills, most, reserved, counts = np.array([*zip(*rows, strict=True)], dtype=np.int32)
        delay = np.maximum(prefills, 0) @ counts // budget + 1
        ends = most - lengths + np.where(prefills > 0, delay, 0) + LEAVING
        looks = np.unique(ends)[::-1]
        looks = looks[:: -(-len(looks) // LOOKS)][::-1, None]  # the last of all, and evenly of those before
        pages = np.minimum((lengths + (looks + self.pages.page_size - 1)) // self.pages.page_size, reserved)
        pages *= ends > np.insert(looks[:-1], 0, 0, axis=0)
        return bool((pages @ counts).max() <= room)

    def all_fit(self) -> bool:
        """Whether all that run and wait have room at once."""
        return self._in_all(self.shared_pages, self.sum) <= self.pages.num_pages

    def waves(self, expected: int, need: int) -> int:
        """How many times the pool all that run and wait would fill, if one that waits were admitted: one that is
        expected to hold, and needs, so many pages."""
        return -(-self._in_all(self.shared_pages + need, self.sum + expected) // self.pages.num_pages)

    def _in_all(self, shared_pages: int, reserved: int) -> int:
        """The pages of all, where `shared_pages` are what becomes of so many that are reserved; rounded up."""
        everything = self.sum + self.wanted_sum
        return -(-everything * shared_pages // reserved) if reserved else everything
