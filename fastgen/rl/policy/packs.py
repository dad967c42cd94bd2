"""Sequences in packs: the rows of a forward pass, in which sequences with one prompt share its full pages.

Shape letters: T rows of a pack, S segments, N tokens whose logprobs are wanted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass
class Segment:
    """Consecutive tokens of a sequence, or of a prompt that several sequences share, as rows of a pack.

    ids: their ids. start: position of the first one. first: its row. shared: the segment of the tokens before it.
    pages: the pages of all tokens up to the last.
    """

    ids: Sequence[int]
    start: int
    first: int
    pages: list[int]
    shared: Segment | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def rows(self, start: int, end: int) -> Ints:
        """Return the rows of the tokens at positions start to end - 1: int64 [end - start]."""
        own = np.arange(self.first + max(start, self.start) - self.start, self.first + end - self.start)
        if self.shared is None or start >= self.start:
            return own
        return np.concatenate([self.shared.rows(start, min(end, self.start)), own])


@dataclass
class Pack:
    """The rows of one forward pass, and the tokens whose logprobs they predict.

    page_size: tokens per page.
    """

    page_size: int
    segments: list[Segment] = field(default_factory=list)
    tokens: int = 0
    num_pages: int = 0
    _wanted: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)  # rows, targets and places of each sequence

    def add(self, ids: Sequence[int], start: int, shared: Segment | None = None) -> Segment:
        """Add a segment of at least one token, and return it."""
        pages = [] if shared is None else list(shared.pages)
        new = -(-(start + len(ids)) // self.page_size) - len(pages)
        pages += range(self.num_pages, self.num_pages + new)
        segment = Segment(ids, start, self.tokens, pages, shared)
        self.segments.append(segment)
        self.num_pages, self.tokens = self.num_pages + new, self.tokens + len(ids)
        return segment

    def want(self, segment: Segment, ids: Sequence[int], start: int, place: int) -> None:
        """Ask for the logprobs of the tokens of a sequence `ids` from position `start` on, whose last segment is
        `segment`. place: of the first one among the results of all packs."""
        rows = segment.rows(start - 1, len(ids) - 1)
        self._wanted.append((rows, np.asarray(ids[start:], dtype=np.int64), place + np.arange(len(rows))))

    @property
    def rows(self) -> Ints:
        """The row that predicts each target: int64 [N]."""
        return np.concatenate([rows for rows, _, _ in self._wanted])

    @property
    def targets(self) -> Ints:
        """The tokens whose logprobs are wanted: int64 [N]."""
        return np.concatenate([targets for _, targets, _ in self._wanted])

    @property
    def places(self) -> Ints:
        """The place of each target among the results of all packs: int64 [N]."""
        return np.concatenate([places for _, _, places in self._wanted])

    @property
    def ids(self) -> Ints:
        return np.concatenate([np.asarray(segment.ids, dtype=np.int64) for segment in self.segments])

    @property
    def positions(self) -> Ints:
        return np.concatenate([np.arange(segment.start, segment.end) for segment in self.segments])

    @property
    def slots(self) -> Ints:
        """The slots of the KV pool for the rows: int64 [T]."""
        of_segments = []
        for segment in self.segments:
            positions = np.arange(segment.start, segment.end)
            pages = np.array(segment.pages, dtype=np.int64)[positions // self.page_size]
            of_segments.append(pages * self.page_size + positions % self.page_size)
        return np.concatenate(of_segments)

    @property
    def page_table(self) -> NDArray[np.int32]:
        """The pages of each segment: int32 [S, longest], padded with page 0."""
        table = np.zeros((len(self.segments), max(len(segment.pages) for segment in self.segments)), dtype=np.int32)
        for row, segment in zip(table, self.segments, strict=True):
            row[: len(segment.pages)] = segment.pages
        return table

    @property
    def query_lens(self) -> Ints:
        return np.array([len(segment.ids) for segment in self.segments], dtype=np.int64)

    @property
    def kv_lens(self) -> Ints:
        return np.array([segment.end for segment in self.segments], dtype=np.int64)

    @property
    def key_rows(self) -> Ints | None:
        """The rows of each segment's keys, one segment after the other: int64 [sum of kv_lens]. None if no segment
        shares any, so that the rows are in this order already."""
        if all(segment.shared is None for segment in self.segments):
            return None
        return np.concatenate([segment.rows(0, segment.end) for segment in self.segments])


def make_packs(
    sequences: Sequence[Sequence[int]], starts: Sequence[int], page_size: int, most_tokens: int
) -> Iterator[Pack]:
    """Yield packs of whole sequences that hold at most `most_tokens` rows, or one sequence that is longer.

    starts: the first position of each sequence whose logprob is wanted, at least 1. Sequences that are equal before it
    share the full pages before it within a pack. The last token of a sequence predicts nothing, and has no row.
    """
    places = [0, *itertools.accumulate(len(ids) - at for ids, at in zip(sequences, starts, strict=True))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
        if len(ids) > start:  # else nothing is wanted
            groups.setdefault(tuple(ids[: start // page_size * page_size]), []).append(number)
    pack = Pack(page_size)
    for prefix, members in groups.items():
        common = len(prefix) if len(members) > 1 else 0
        shared: Segment | None = None
        for number in members:
            ids, start = sequences[number], starts[number]
            own = len(ids) - 1 - common
            if pack.tokens and pack.tokens + own + (common if shared is None else 0) > most_tokens:
                yield pack
                pack, shared = Pack(page_size), None
            if common and shared is None:
                shared = pack.add(prefix, 0)
            segment = pack.add(ids[common:-1], common, shared) if own else shared
            assert segment is not None
            pack.want(segment, ids, start, places[number])
    if pack.tokens:
        yield pack
