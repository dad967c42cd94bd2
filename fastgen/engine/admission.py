"""Admission control: predictions of output lengths, and reservations of pages. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fastgen.engine.pages import PageAllocator
from fastgen.request import Sequence

MOST_ENDS = 64  # times at which `will_fit` counts pages, at most
RETRY_STEPS = 8  # steps between two attempts to admit a sequence, if no other sequence comes or leaves meanwhile
LEAVING_STEPS = 4  # steps from the one that computes a sequence's last token until its pages are released


@dataclass
class LengthEstimate:
    """The predicted output length: exact if only max_len ends the sequence, else learned from finished outputs.

    The prediction is twice a moving average, since most outputs are shorter than that, and longer ones can still be
    preempted. Before any output has finished it is 2048 tokens.
    """

    average: float = 1024.0  # tokens
    least: int = 256  # the smallest prediction, tokens
    weight: float = 1 / 16  # of one output in the average
    exact: bool = True  # False: predict sequences that only max_len ends like all others

    @property
    def tokens(self) -> int:
        return max(self.least, round(2 * self.average))

    def learn(self, tokens: int) -> None:
        """Include the length of a finished output."""
        self.average += self.weight * (tokens - self.average)


class PageReservations:
    """The pages that each running sequence has reserved, and that the waiting ones will reserve.

    A reservation is the predicted final length of a page table, shared pages included. The growth of the running
    sequences is the sum of their reservations less the current lengths of their tables. Another sequence fits if its
    own need, which is its reservation less the pages that others hold already, fits into the available pages beside
    that growth.

    The share of pages that waiting sequences will have in common is unknown before they are admitted. It is assumed to
    be that of the running ones: `distinct_pages` is the final number of their pages, which without sharing is the sum
    of their reservations.
    """

    def __init__(self, pages: PageAllocator, estimate: LengthEstimate, max_seqs: int) -> None:
        self.pages = pages
        self.estimate = estimate
        self.sum = 0  # of the running sequences
        self.waiting_pages = 0  # the sum of what the waiting sequences will reserve
        self._reserved = [0] * max_seqs  # by lane
        self._output_len = estimate.tokens  # the prediction that current reservations are made with

    def expected(self, sequence: Sequence) -> int:
        """Return the pages to reserve for a sequence: as predicted, and at least one more than it needs now."""
        count = self.pages.count
        now = max(count(len(sequence.token_ids)), len(sequence.pages))
        most = max(now, count(sequence.max_len - 1))  # the last token needs no KV
        if sequence.ends_at_length and self.estimate.exact:
            return most
        return min(max(count(sequence.prompt_len + self._output_len), now + 1), most)

    def of(self, lane: int) -> int:
        return self._reserved[lane]

    def reserve(self, lane: int, num_pages: int) -> None:
        self.sum += num_pages - self._reserved[lane]
        self._reserved[lane] = num_pages

    def extend(self, sequence: Sequence) -> None:
        """Renew the reservation of a running sequence if its table has filled it."""
        if len(sequence.pages) >= self._reserved[sequence.lane]:
            self.reserve(sequence.lane, self.expected(sequence))

    def learn(self, output_len: int, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Learn from a finished output. If the prediction has moved by more than 1/8, which is rare, renew all
        reservations."""
        self.estimate.learn(output_len)
        if abs(self.estimate.tokens - self._output_len) * 8 > self._output_len:
            self._output_len = self.estimate.tokens
            self.waiting_pages = sum(map(self.expected, waiting))
            for sequence in running:
                self.reserve(sequence.lane, self.expected(sequence))

    @property
    def growth(self) -> int:
        return self.sum - self.pages.references

    @property
    def distinct_pages(self) -> int:
        return self.pages.num_pages - self.pages.available + self.growth

    def fits(self, need: int) -> bool:
        """Return True if a sequence that needs so many new pages fits beside all running ones."""
        return self.growth + need <= self.pages.available

    def will_fit(self, sequence: Sequence, count: int, running: list[Sequence], budget: int) -> bool:
        """Return True if `count` sequences like a waiting one fit beside the running ones at any time from now on.

        Each decoding sequence grows by a token a step, so that its length at any step is known, and also the step at
        which it leaves at the latest, because of its max_len. Shared pages count once for each holder. A sequence that
        is admitted later is checked against all that run then, so that the result stays valid. budget: the tokens that
        a step has at least for prefills; all prefills are assumed to last until the known tokens of all are computed.
        """
        known, room = len(sequence.token_ids), self.pages.num_pages
        if self.pages.references + self.pages.count(known) * count > room:
            return False  # not even now
        rows = [(s.length, s.prefill_len - s.computed, s.max_len, self._reserved[s.lane], 1) for s in running]
        rows.append((known, known, sequence.max_len, self.expected(sequence), count))
        lengths, prefills, most, reserved, counts = np.array([*zip(*rows, strict=True)], dtype=np.int32)
        delay = np.maximum(prefills, 0) @ counts // budget + 1
        ends = most - lengths + np.where(prefills > 0, delay, 0) + LEAVING_STEPS
        times = np.unique(ends)[::-1]
        times = times[:: -(-len(times) // MOST_ENDS)][::-1, None]  # the last end, and evenly chosen earlier ones
        pages = np.minimum((lengths + (times + self.pages.page_size - 1)) // self.pages.page_size, reserved)
        pages *= ends > np.insert(times[:-1], 0, 0, axis=0)  # an end between two times counts at the later one
        return bool((pages @ counts).max() <= room)

    def all_fit(self) -> bool:
        """Return True if all running and waiting sequences fit at once."""
        return self._total(self.distinct_pages, self.sum) <= self.pages.num_pages

    def waves(self, expected: int, need: int) -> int:
        """Return the number of waves needed to run all sequences if a waiting one is admitted: ceil(total pages / pool
        size). expected: the pages of its reservation; need: the part of them that no other sequence holds."""
        return -(-self._total(self.distinct_pages + need, self.sum + expected) // self.pages.num_pages)

    def _total(self, distinct: int, reserved: int) -> int:
        """Return the pages of all sequences, rounded up, if `distinct` pages hold reservations of `reserved` pages."""
        everything = self.sum + self.waiting_pages
        return -(-everything * distinct // reserved) if reserved else everything
