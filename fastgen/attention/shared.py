"""What the rows of a decode step share: ranges of keys in pages that several page tables name.

Page tables share prefixes alone (see fastgen.cache.pages): where two name the same page in a slot, they name the same
pages in all slots before it. So the ranges form trees: a system prompt, behind it few-shot prompts, behind each its
samples.

Shape letters: S rows of the step, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastgen.kernels.items import SPLIT, SPLITS, cut

SHORTEST = 128  # keys of a shared range's split, unless the range has fewer

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Range:
    """Pages first .. last - 1 of their tables are the same for `rows` [n], two or more of a step."""

    rows: Ints
    first: int
    last: int


def shared_ranges(tables: NDArray[np.int32], lanes: Ints, full: Ints) -> list[Range]:
    """The ranges that rows share; those of fewer rows after those that they follow.

    tables: [all lanes, slots], page tables; lanes: [S], which of them each row has; full: [S], how many of its pages
    are full.
    """
    found = []
    todo = [(np.arange(len(full)), 0)]
    while todo:
        rows, slot = todo.pop()
        rows = rows[full[rows] > slot]
        for group in _equal(rows, tables[lanes[rows], slot]) if len(rows) > 1 else ():
            pages = tables[lanes[group], slot : full[group].min()]
            same = (pages == pages[0]).all(0)
            last = slot + (len(same) if same.all() else int(same.argmin()))
            found.append(Range(group, slot, last))
            if last < tables.shape[1]:
                todo.append((group, last))
    return found


def _equal(rows: Ints, pages: NDArray[np.int32]) -> list[Ints]:
    """Groups of two or more rows with the same page."""
    order = np.argsort(pages, kind="stable")
    cuts = np.flatnonzero(np.diff(pages[order])) + 1
    begin, end = np.append(0, cuts), np.append(cuts, len(rows))
    many = end - begin > 1
    return [rows[order[a:b]] for a, b in zip(begin[many], end[many], strict=True)]


def saved_keys(ranges: list[Range], page_size: int) -> int:
    """Keys that are not read because others have read them, in all rows together."""
    return sum((len(each.rows) - 1) * (each.last - each.first) for each in ranges) * page_size


@dataclass(frozen=True)
class SharedItems:
    """For fastgen.kernels.items.SharedRows, all int32: items [n, FIELDS], members [m], ends and priors [S]."""

    items: NDArray[np.int32]
    members: NDArray[np.int32]
    ends: NDArray[np.int32]
    priors: NDArray[np.int32]


def shared_items(
    ranges: list[Range], lanes: Ints, page_size: int, tile: int, block: int, units: int, slots: int
) -> SharedItems:
    """The items of ranges, in tiles of up to `tile` rows, longest first. lanes: [S].

    Ranges are split, evenly and at multiples of `block` keys, where they have more than their even share of `units`
    items, but not so far that all priors together are more than `slots`.
    """
    count = np.array([len(each.rows) for each in ranges])
    first_key = np.array([each.first for each in ranges]) * page_size
    last_key = np.array([each.last for each in ranges]) * page_size
    length, tiles = last_key - first_key, -(-count // tile)
    share = max(int((length * tiles).sum()) // units, SHORTEST)
    while True:
        splits = np.maximum((length + share // 2) // share, 1)
        split = -(-length // (splits * block)) * block
        splits = -(-length // split)
        if splits.max() == 1 or int((splits * count).sum()) <= slots:
            break
        share *= 2
    ends, priors = np.zeros(len(lanes), np.int32), np.zeros(len(lanes), np.int32)
    number = np.zeros(len(ranges), np.int64)  # of a range's first prior, the same for all its rows
    for at, each in enumerate(ranges):
        number[at] = priors[each.rows[0]]
        priors[each.rows] += splits[at]
        ends[each.rows] = last_key[at]
    members = np.concatenate([each.rows for each in ranges])
    owner = np.repeat(np.arange(len(ranges)), tiles)
    offset = (np.arange(len(owner)) - (np.cumsum(tiles) - tiles)[owner]) * tile
    first = (np.cumsum(count) - count)[owner] + offset
    tokens = np.minimum(count[owner] - offset, tile)
    begin, end = first_key[owner], last_key[owner]
    items, nominal = cut(first, tokens, lanes[members[first]], end, begin, end, begin, split[owner])
    items[:, SPLIT] = items[:, SPLIT] % SPLITS + np.repeat(number[owner], splits[owner])
    return SharedItems(items[np.argsort(-nominal, kind="stable")], members.astype(np.int32), ends, priors)
