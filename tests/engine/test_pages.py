"""The page allocator and its prefix cache, against brute-force oracles."""

from __future__ import annotations

import random
import sys
from collections import Counter

from invariants import check_pages

from fastgen.engine.host_pages import PageMoves, TieredPageAllocator
from fastgen.engine.pages import NOT_INDEXED, Node, PageAllocator


def test_a_table_grows_by_the_lowest_free_pages_or_not_at_all() -> None:
    allocator = PageAllocator(5, 3)
    first, second = list[int](), list[int]()
    for num_tokens, pages in ((0, []), (1, [0]), (3, [0]), (4, [0, 1]), (2, [0, 1])):
        assert allocator.grow(first, num_tokens)
        assert first == pages
    assert allocator.grow(second, 3)
    allocator.release(first)
    assert not allocator.grow(second, 16)
    assert (first, second, allocator.available) == ([], [2], 4)
    assert allocator.grow(second, 15)
    assert second == [2, 0, 1, 3, 4]
    check_pages(allocator, [second])


# ------------------------------------------------------------------------------------------ the prefix cache


class Pool:
    """Page tables of known tokens over an allocator, and memory to which its moves and copies are applied.

    The contents of a page are all tokens up to its end. A table that matches must find its own tokens in its pages.
    """

    def __init__(self, num_pages: int, page_size: int, host_pages: int = 0) -> None:
        tiered = TieredPageAllocator(num_pages, page_size, host_pages) if host_pages else None
        self.tier, self.allocator = tiered, tiered or PageAllocator(num_pages, page_size)
        self.fresh: tuple[int, ...] = ()  # pages of the last step
        self.page_size = page_size
        self.memory: dict[int, tuple[int, ...]] = {}
        self.host: dict[int, tuple[int, ...]] = {}
        self.tables: list[list[int]] = []
        self.seen: Counter[str] = Counter()

    def take(self, tokens: list[int]) -> list[int]:
        """Return a table for tokens, which must fit: the pages that match, and pages that the next step computes."""
        nodes = self.allocator.match(tokens, len(tokens))
        matched = len(nodes)
        table: list[int] = []
        self.allocator.adopt(table, nodes)
        self.tables.append(table)
        assert self.allocator.grow(table, len(tokens))
        self.allocator.index(matched, table, tokens, len(tokens))
        check_pages(self.allocator, self.tables)
        self.step()
        assert {*table[matched:]} <= {*self.fresh}
        for at, page in enumerate(table):
            kept = tuple(tokens[: (at + 1) * self.page_size])
            if at >= matched:
                self.memory[page] = kept
            assert self.memory[page] == kept
        self.seen["matched"] += matched
        return table

    def step(self) -> PageMoves:
        changes = (self.tier.take_moves() if self.tier else None) or PageMoves()
        copies, self.fresh = self.allocator.take_copies(), self.allocator.take_fresh()
        check_pages(self.allocator, self.tables)
        for page, slot in changes.saves:
            self.host[slot] = self.memory[page]
        for slot, page in changes.loads:
            self.memory[page] = self.host[slot]
        for source, page in copies:
            self.memory[page] = self.memory[source]
        for name, moved in (("saves", changes.saves), ("loads", changes.loads), ("copies", copies)):
            self.seen[name] += len(moved)
        return changes

    def release(self, table: list[int]) -> None:
        self.tables = [other for other in self.tables if other is not table]
        self.allocator.release(table)
        check_pages(self.allocator, self.tables)

    def cached(self, tokens: list[int]) -> int:
        """Return how many pages of these tokens match."""
        return len(self.allocator.match(tokens, len(tokens)))


def run_pool(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    size, longest = rng.choice((1, 2, 3)), rng.randint(1, 6)
    pool = Pool(rng.randint(longest, 3 * longest), size, rng.choice((0, 0, 1, 2, 5, 30)))
    for _ in range(120):
        kind = rng.random()
        tokens = [rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.randint(0, longest * size))]
        if kind < 0.5 and pool.allocator.available >= pool.allocator.count(len(tokens)):
            pool.take(tokens)
        elif kind < 0.85 and pool.tables:
            pool.release(rng.choice(pool.tables))
        elif kind < 0.9 and pool.allocator.available and pool.tables:
            source: list[int] = rng.choice(pool.tables)
            fork: list[int] = []
            copy = bool(source) and rng.random() < 0.5
            pool.allocator.fork(fork, source, copy)
            pool.tables.append(fork)
            check_pages(pool.allocator, pool.tables)
            pool.step()
            if rng.random() < 0.5:
                pool.release(fork)
            if rng.random() < 0.5:
                pool.release(source)
            pool.seen["forks"] += 1
        elif kind >= 0.98:
            pool.allocator.drop_index()
            assert not pool.cached(tokens)
            check_pages(pool.allocator, pool.tables)
    for table in list(pool.tables):
        pool.release(table)
    assert pool.allocator.available == pool.allocator.num_pages
    return pool.seen


def test_what_matches_is_what_was_computed_after_any_operations() -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        try:
            seen += run_pool(seed)
        except AssertionError as error:
            raise AssertionError(f"run_pool({seed}): {error}") from error
    assert min(seen[name] for name in ("matched", "saves", "loads", "copies", "forks")) > 100, seen


def test_a_match_is_the_longest_cached_prefix_of_full_pages_within_the_limit() -> None:
    pool = Pool(20, 3)
    tokens = list(range(100, 111))  # three pages and two tokens
    pool.take(tokens)
    assert [pool.cached(tokens[:length]) for length in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [len(pool.allocator.match(tokens, limit)) for limit in (0, 2, 3, 8, 9, 11)] == [0, 0, 1, 2, 3, 3]
    assert pool.cached([*tokens[:6], 0, 0, 0]) == 2
    assert pool.cached([0, *tokens[1:]]) == 0
    assert pool.cached(tokens[3:]) == 0


class Colliding(int):
    """A token whose hash equals the hash of all others."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return int(self) == int(other) if isinstance(other, int) else NotImplemented


def test_pages_with_equal_hashes_are_not_taken_for_each_other() -> None:
    prompts = [[Colliding(token) for token in tokens] for tokens in ((1, 2, 3, 4), (2, 1, 3, 4), (1, 2, 4, 3))]
    assert len({hash(tuple(prompt)) for prompt in prompts}) == 1
    pool = Pool(12, 2)
    first, second, third = (pool.take(list(prompt)) for prompt in prompts)
    assert not set(first) & set(second)
    assert third[0] == first[0]
    assert third[1] not in first
    assert [pool.cached(list(prompt)) for prompt in prompts] == [2, 2, 2]


def test_the_least_recently_used_pages_are_evicted_first_and_children_before_parents() -> None:
    pool = Pool(6, 1)
    old, new = [1, 2, 3], [1, 2, 4, 5]
    for tokens in (old, new):
        pool.release(pool.take(tokens))
    assert [pool.cached(old), pool.cached(new)] == [3, 4]  # five pages
    held: list[list[int]] = []
    found = []
    for _ in range(6):
        held.append([])
        assert pool.allocator.grow(held[-1], 1)
        check_pages(pool.allocator, held)
        found.append((pool.cached(old), pool.cached(new)))
    assert found == [(3, 4), (2, 4), (2, 3), (2, 2), (1, 1), (0, 0)]


def test_forks_hold_all_but_the_last_page_of_their_source_and_copies_of_that() -> None:
    allocator = PageAllocator(8, 4)
    source: list[int] = []
    forks: list[list[int]] = [[], []]
    allocator.grow(source, 6)
    for fork in forks:
        allocator.fork(fork, source, copy=True)
    check_pages(allocator, [source, *forks])
    assert [fork[0] for fork in forks] == [source[0]] * 2
    assert allocator.take_copies() == tuple((source[1], fork[1]) for fork in forks)
    assert allocator.take_copies() == ()
    allocator.release(source)
    check_pages(allocator, forks)
    assert allocator.available == 8 - 3


def test_forgotten_pages_are_free_and_held_ones_are_never_indexed_again() -> None:
    pool = Pool(8, 1, host_pages=2)
    pool.release(pool.take([1, 2, 3]))
    table = pool.take([4, 5])
    pool.allocator.drop_index()
    check_pages(pool.allocator, pool.tables)
    assert [pool.cached([1]), pool.cached([4])] == [0, 0]
    pool.release(table)
    assert [pool.cached([1]), pool.cached([4]), pool.allocator.available] == [0, 0, 8]


def test_a_page_whose_tokens_are_indexed_already_is_not_indexed_nor_are_later_pages() -> None:
    allocator = PageAllocator(8, 1)
    tables: list[list[int]] = [[], []]
    indexed = []
    for table in tables:
        allocator.grow(table, 3)
        indexed.append(allocator.index(0, table, [1, 2, 3], 2 if table is tables[0] else 3))
    check_pages(allocator, tables)
    assert indexed == [2, NOT_INDEXED]
    assert [node.page for node in allocator.match([1, 2, 3], 3)] == tables[0][:2]
    assert allocator.index(NOT_INDEXED, tables[1], [1, 2, 3], 3) == NOT_INDEXED


def test_a_node_is_small() -> None:
    assert sys.getsizeof(Node(None, (1,) * 64, 0)) <= 96
    assert not hasattr(Node(), "__dict__")
