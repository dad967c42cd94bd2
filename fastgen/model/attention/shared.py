"""The ranges of keys that rows of a decode step share, because several page tables name the same pages.

Page tables share only prefixes (see fastgen.engine.pages): two tables with the same page in a column have the same
pages in all columns before it. So the ranges form trees: a system prompt, then few-shot prompts, then the samples of
each.

Shape letters: S rows of the step, P page size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastgen.device.chip import Chip
from fastgen.kernels import attention as kernel
from fastgen.kernels import work_tiles
from fastgen.model.kv_pool import KVPool

SHARING_PAYS = 16e6
"""Minimum number of bytes of a layer's keys and values that sharing saves. Measured on an H200, which reads them in 4
us, about the time of the second launch; a GPU with less bandwidth would gain from fewer."""

FILLS = 0.5
"""Minimum number of tiles of shared keys, as a fraction of the programs that a chip holds. Measured on an H200."""

OWN_KEY = 0.5
"""Time of a key that a row reads by itself, relative to a tile's key, because its siblings find it in the L2 cache.
Measured on an H200, whose L2 cache has 50 MB; with a smaller one, more rows would be worth sharing."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    """The n ranges at one depth of the trees. In range i, columns first[i] .. last[i] - 1 hold the same pages for
    count[i] rows, two or more.

    count, first, last: int64 [n]; rows: int64 [count.sum()], the rows of one range after the other.
    """

    rows: Ints
    count: Ints
    first: Ints
    last: Ints


def shared_ranges(tables: NDArray[np.int32], lanes: Ints, full: Ints) -> list[Level]:
    """Return the ranges that rows share, level by level from the roots of the trees.

    tables: int32 [all lanes, columns], page tables; lanes: int64 [S], the table of each row; full: int64 [S], its
    number of full pages.
    """
    levels: list[Level] = []
    rows = np.arange(len(full))
    group, column = np.zeros_like(rows), np.zeros_like(rows)  # a row's range in the last level, and its end
    while True:
        more = full[rows] > column
        rows, group, column = rows[more], group[more], column[more]
        pages = tables[lanes[rows], column]
        order = np.lexsort((pages, group))
        rows, group, column, pages = rows[order], group[order], column[order], pages[order]
        cuts = np.flatnonzero(np.diff(group) | np.diff(pages)) + 1
        count = np.diff(cuts, prepend=0, append=len(rows))
        several = np.repeat(count > 1, count)
        rows, column, count = rows[several], column[several], count[count > 1]
        if not len(rows):
            return levels
        begin = np.cumsum(count) - count
        last = np.minimum.reduceat(_first_differences(tables, lanes, full, rows, np.repeat(rows[begin], count)), begin)
        levels.append(Level(rows, count, column[begin], last))
        group, column = np.repeat(np.arange(len(count)), count), np.repeat(last, count)


def _first_differences(tables: NDArray[np.int32], lanes: Ints, full: Ints, rows: Ints, others: Ints) -> Ints:
    """Return the first column in which each row's table differs from another row's, or that is not full."""
    width = int(full[rows].max())
    same = tables[lanes[rows], :width] == tables[lanes[others], :width]
    return np.minimum(np.where(same.all(1), width, same.argmin(1)), full[rows])


def prefixes(levels: list[Level], page_size: int, block: int, tile_rows: int) -> Level | None:
    """Return one level of ranges that begin at key 0 and end at multiples of `block` keys, with a row in at most one;
    None if there are none.

    A kernel goes through such a range in the order in which it would for a single row, and leaves one partial result.
    A row stays in the range of its parents, unless it takes less time that tiles of its own range's rows, of up to
    `tile_rows`, read the parents' keys as well.
    """
    if not levels:
        return None
    step = block // math.gcd(block, page_size)
    end = np.zeros(int(levels[0].rows.max()) + 1, np.int64)  # the last column of each row's range
    number = np.zeros_like(end)  # of each row's range, 0 for none
    for each in levels:
        last, tiles = each.last // step * step, -(-each.count // tile_rows)
        before = end[each.rows[np.cumsum(each.count) - each.count]]
        pays = tiles * last <= each.count * (before / tile_rows + (last - before) * OWN_KEY)
        pays |= (before == 0) & (tiles < each.count)
        chosen = np.repeat(pays & (last > before), each.count)
        rows = each.rows[chosen]
        end[rows] = np.repeat(last, each.count)[chosen]
        number[rows] = np.repeat(number.max() + 1 + np.arange(len(last)), each.count)[chosen]
    numbers, count = np.unique(number, return_counts=True)
    kept = (numbers > 0) & (count > 1)  # a row may be left alone in its parents' range
    rows = np.argsort(number, kind="stable")[np.repeat(kept, count)]
    count = count[kept]
    level = Level(rows, count, np.zeros_like(count), end[rows[np.cumsum(count) - count]])
    return level if kept.any() else None


def saved_keys(level: Level, page_size: int) -> int:
    """Return the number of keys, summed over the rows, that need not be read again."""
    return int(((level.count - 1) * (level.last - level.first)).sum()) * page_size


@dataclass(frozen=True)
class SharedTiles:
    """For fastgen.kernels.work_tiles.SharedRows, all int32: tiles [n, FIELDS], members [m], ends [S]."""

    tiles: NDArray[np.int32]
    members: NDArray[np.int32]
    ends: NDArray[np.int32]


def shared_tiles(prefixes: Level, lanes: Ints, page_size: int, tile_rows: int) -> SharedTiles:
    """Return the work tiles of shared ranges that begin at key 0, of up to `tile_rows` rows each, longest first.

    lanes: [S].
    """
    count, last = prefixes.count, prefixes.last * page_size
    ends = np.zeros(len(lanes), np.int32)
    ends[prefixes.rows] = np.repeat(last, count)
    tiles = -(-count // tile_rows)
    owner = np.repeat(np.arange(len(count)), tiles)
    offset = (np.arange(len(owner)) - (np.cumsum(tiles) - tiles)[owner]) * tile_rows
    member = (np.cumsum(count) - count)[owner] + offset
    tokens, end = np.minimum(count[owner] - offset, tile_rows), last[owner]
    work = work_tiles.tiles_of(member, tokens, lanes[prefixes.rows[member]], end, np.zeros_like(end), end)
    return SharedTiles(work[np.argsort(-end, kind="stable")], prefixes.rows.astype(np.int32), ends)


class SharedPrefixes:
    """The keys that the decodes of a step share, in a table at fixed addresses, so that CUDA graphs read them once.

    The table is one tensor, `rows` are its parts. group: number of query heads per KV head. wanted: False: nothing is
    shared from now on.
    """

    def __init__(self, pool: KVPool, group: int, config: kernel.AttentionConfig, max_seqs: int, windows: int) -> None:
        self.wanted = True
        self.chip = Chip.of(pool.keys.device)
        self._pool, self._group, self._config = pool, group, config
        self._decodes: tuple[int, ...] = ()  # for which `_found` was found
        self._found = False
        sizes = [-(-size // 4) * 4 for size in (max_seqs, max_seqs, work_tiles.HEADER + max_seqs * work_tiles.FIELDS)]
        self._table = torch.zeros(sum(sizes), dtype=torch.int32, device=pool.keys.device)
        ends, members, tiles = torch.split(self._table, sizes)
        bases = torch.zeros(windows, sizes[0], dtype=torch.int32, device=pool.keys.device)
        self.rows = work_tiles.SharedRows(tiles, members, ends, bases)

    @property
    def enabled(self) -> bool:
        """True if keys are shared when that pays; also False if the chip refuses the kernel."""
        return self.wanted and self._pool.keys.device not in kernel.sharing.refused

    def update(self, decodes: tuple[int, ...], kv_lens: Ints, tables: NDArray[np.int32]) -> bool:
        """Return True if these lanes, in order, read the keys that they share once. Found anew only if they change.

        kv_lens: of all lanes; tables: their page tables, [all lanes, columns].
        """
        if decodes is not self._decodes and decodes != self._decodes:
            lanes = np.array(decodes, dtype=np.int64)
            self._found = self.enabled and self.find(lanes, kv_lens[lanes] // self._pool.page_size, tables)
        self._decodes = decodes
        return self._found

    def find(self, lanes: Ints, full: Ints, tables: NDArray[np.int32]) -> bool:
        """Find the keys that the rows of the next steps share, write the table, and return whether reading them once
        pays.

        lanes: [S]; full: [S], the number of full pages of each sequence now; tables: [all lanes, columns], the page
        table on the host. The result holds for all steps with the same rows. The call does not wait for the device.
        """
        num_kv, page_size, head_size = self._pool.keys.shape[2:]
        config = self._config
        tile, tasks = config.rows // self._group, max(self.chip.processors * config.programs // num_kv, 1)
        level = prefixes(shared_ranges(tables, lanes, full), page_size, config.keys, tile)
        key_bytes = 2 * num_kv * head_size * self._pool.keys.element_size()
        if level is not None and saved_keys(level, page_size) * key_bytes >= SHARING_PAYS:
            made = shared_tiles(level, lanes, page_size, tile)
            if len(made.tiles) >= FILLS * tasks:  # with fewer it is slower than each row's own splits
                self._write(made)
                return True
        self._table.zero_()
        return False

    def forget(self) -> None:
        """Find anew what the next decodes share."""
        self._decodes, self._found = (), False

    def clear(self) -> None:
        """Share nothing until the decodes change."""
        self.forget()
        self._table.zero_()

    def _write(self, shared: SharedTiles) -> None:
        """Send what rows share, without waiting for the device. Rows after the last one share nothing."""
        rows = self.rows
        listed = work_tiles.list_of(shared.tiles)
        sizes = [len(rows.ends), len(rows.members), len(listed)]
        host = torch.zeros(sum(sizes), dtype=torch.int32, device="cpu")
        numbers = (shared.ends, shared.members, listed)
        for part, each in zip(torch.split(host, sizes), numbers, strict=True):
            part[: len(each)] = torch.from_numpy(each)
        if self._table.device.type == "cuda":
            host = host.pin_memory()
        self._table[: len(host)].copy_(host, non_blocking=True)
