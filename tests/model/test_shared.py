"""attention/shared.py: the pages that rows share are found in their page tables, and divided into tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fastgen.kernels.work_tiles import BEGIN, END, FIRST, LANE, TOKENS
from fastgen.model.attention.shared import Level, prefixes, saved_keys, shared_ranges, shared_tiles

PAGE = 16


def random_tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return page tables of random trees [S, columns], and the number of full pages of each row [S]."""
    rng = np.random.default_rng(seed)
    numbers = iter(rng.permutation(10_000).tolist())
    prefixes: list[list[int]] = [[]]
    for _ in range(rng.integers(0, 12)):
        before = prefixes[rng.integers(len(prefixes))]
        prefixes.append(before + [next(numbers) for _ in range(rng.integers(1, 6))])
    rows = []
    for _ in range(rng.integers(1, 40)):
        before = prefixes[rng.integers(len(prefixes))]
        before = before[: rng.integers(len(before) + 1)]
        rows.append(before + [next(numbers) for _ in range(rng.integers(0, 4))])
    full = np.array([len(row) for row in rows])
    tables = rng.integers(0, 3, (len(rows), max(full) + 2)).astype(np.int32)  # garbage after the full pages
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return tables, full


@dataclass
class Range:
    rows: list[int]
    first: int
    last: int


def ranges_of(*levels: Level | None) -> list[Range]:
    found = []
    for level in filter(None, levels):
        parts = np.split(level.rows, np.cumsum(level.count)[:-1])
        found += [Range(r.tolist(), *ends) for r, *ends in zip(parts, level.first, level.last, strict=True)]
    return found


def covered(ranges: list[Range], row: int) -> list[int]:
    """Return the columns of a row that its ranges cover, in their order."""
    return [column for each in ranges if row in each.rows for column in range(each.first, each.last)]


@pytest.mark.parametrize("seed", range(60))
def test_all_shared_pages_are_found_once(seed: int) -> None:
    tables, full = random_tables(seed)
    levels = shared_ranges(tables, np.arange(len(full)), full)
    ranges = ranges_of(*levels)
    holders: dict[int, set[int]] = {}
    for row, (table, count) in enumerate(zip(tables, full, strict=True)):
        for page in table[:count].tolist():
            holders.setdefault(page, set()).add(row)
    for each in ranges:
        for column in range(each.first, each.last):
            assert holders[tables[each.rows[0], column]] == set(each.rows)
            assert len(set(tables[each.rows, column].tolist())) == 1
    for row, (table, count) in enumerate(zip(tables, full, strict=True)):
        shared = [len(holders[page]) > 1 for page in table[:count].tolist()]
        assert covered(ranges, row) == list(range(sum(shared)))
    assert sum(saved_keys(each, PAGE) for each in levels) == PAGE * sum(len(rows) - 1 for rows in holders.values())


@pytest.mark.parametrize("seed", range(60))
def test_prefixes_are_whole_blocks_from_the_first_key(seed: int) -> None:
    tables, full = random_tables(seed)
    levels = shared_ranges(tables, np.arange(len(full)), full)
    ranges = ranges_of(*levels)
    found = ranges_of(prefixes(levels, PAGE, 2 * PAGE, tile_rows=3))
    rows = [row for each in found for row in each.rows]
    assert len(set(rows)) == len(rows)
    for each in found:
        assert len(each.rows) > 1
        assert each.first == 0
        assert each.last > 0
        assert each.last % 2 == 0
        assert all(each.last <= len(covered(ranges, row)) for row in each.rows)
        assert len(np.unique(tables[each.rows, : each.last], axis=0)) == 1
    for root in ranges_of(*levels[:1]):
        alone = [row for row in root.rows if row not in rows]
        assert len(alone) <= (1 if root.last > 1 else len(root.rows))


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_a_root_is_shared_by_any_number_of_rows(rows: int) -> None:
    tables = np.array([[0, 1, 10 + row] for row in range(rows)], np.int32)
    levels = shared_ranges(tables, np.arange(rows), np.full(rows, 3))
    (found,) = ranges_of(prefixes(levels, PAGE, PAGE, tile_rows=2))
    assert sorted(found.rows) == list(range(rows))


def test_rows_leave_the_prefix_of_their_parents_where_that_pays() -> None:
    """The first three rows get a tile of their own; the next two would read 8 more pages to save 2."""
    columns = [[*range(10), 20 + row] for row in range(3)] + [[*range(8), 30, 31, 40 + row] for row in range(2)]
    tables = np.array([*columns, [*range(8), 50, 51, 52]], np.int32)
    levels = shared_ranges(tables, np.arange(6), np.full(6, 11))
    assert ranges_of(prefixes(levels, PAGE, PAGE, tile_rows=3)) == [Range([3, 4, 5], 0, 8), Range([0, 1, 2], 0, 10)]
    assert ranges_of(prefixes(levels, PAGE, 4 * PAGE, tile_rows=3)) == [Range([0, 1, 2, 3, 4, 5], 0, 8)]
    rest = np.arange(4)  # the last row shares with no other, and reads its keys by itself
    levels = shared_ranges(tables[:4], rest, np.full(4, 11))
    assert ranges_of(prefixes(levels, PAGE, PAGE, tile_rows=3)) == [Range([0, 1, 2], 0, 10)]


def test_nothing_shared() -> None:
    assert shared_ranges(np.arange(12, dtype=np.int32).reshape(3, 4), np.arange(3), np.array([4, 0, 2])) == []
    assert shared_ranges(np.zeros((3, 4), np.int32), np.arange(3), np.array([0, 0, 4])) == []
    assert shared_ranges(np.zeros((1, 4), np.int32), np.arange(1), np.array([4])) == []


@pytest.mark.parametrize("seed", range(60))
def test_tiles_cover_all_shared_pages(seed: int) -> None:
    tables, full = random_tables(seed)
    whole = prefixes(shared_ranges(tables, np.arange(len(full)), full), PAGE, 2 * PAGE, tile_rows=3)
    if whole is None:
        return
    found = shared_tiles(whole, np.arange(len(full)) + 100, PAGE, tile_rows=3)
    seen: dict[int, int] = {}
    for tile in found.tiles.tolist():
        members = found.members[tile[FIRST] : tile[FIRST] + tile[TOKENS]].tolist()
        assert 1 <= len(members) <= 3
        assert tile[LANE] - 100 in members
        assert tile[BEGIN] == 0
        assert not seen.keys() & members
        seen |= dict.fromkeys(members, tile[END])
    ends = {row: PAGE * each.last for each in ranges_of(whole) for row in each.rows}
    assert seen == ends
    assert found.ends.tolist() == [ends.get(row, 0) for row in range(len(full))]
    lengths = found.tiles[:, END].tolist()
    assert lengths == sorted(lengths, reverse=True)
