"""The paged allocator against a brute-force oracle, and its own check against damage."""

from __future__ import annotations

import random

import pytest

from fastgen.cache.pages import PageAllocator


def brute_missing(pages: list[int], num_tokens: int, page_size: int) -> int:
    """One page after the other, until the tokens have room."""
    count = 0
    while (len(pages) + count) * page_size < num_tokens:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(50))
def test_every_page_has_one_owner_after_any_operations(seed: int) -> None:
    rng = random.Random(seed)
    num_pages, page_size = rng.randint(1, 30), rng.choice((1, 2, 3, 7, 16))
    allocator = PageAllocator(num_pages, page_size)
    tables: list[list[int]] = [[] for _ in range(rng.randint(1, 6))]
    owner: dict[int, int] = {}  # page -> its table
    for _ in range(200):
        index = rng.randrange(len(tables))
        table, before = tables[index], list(tables[index])
        if rng.random() < 0.3:
            allocator.release(table)
            assert table == []
            owner = {page: other for page, other in owner.items() if other != index}
        else:
            num_tokens = rng.randint(0, 12 * page_size)
            wanted = brute_missing(table, num_tokens, page_size)
            assert allocator.missing(table, num_tokens) == wanted
            enough = wanted <= num_pages - len(owner)
            assert allocator.grow(table, num_tokens) is enough
            assert table[: len(before)] == before, "a page that is held never moves"
            new = table[len(before) :]
            assert len(new) == (wanted if enough else 0)
            assert not owner.keys() & set(new), f"seed {seed}: a page has two owners"
            assert new == sorted(set(range(num_pages)) - owner.keys())[: len(new)], "the lowest free pages go first"
            owner |= dict.fromkeys(new, index)
        allocator.check(tables)
        assert allocator.num_free == num_pages - len(owner)
    for table in tables:
        allocator.release(table)
    allocator.check([])
    assert allocator.num_free == num_pages


def test_a_table_that_can_not_grow_stays_as_it_is() -> None:
    allocator = PageAllocator(4, 8)
    table: list[int] = []
    other: list[int] = []
    assert allocator.grow(table, 17)
    held = list(table)
    assert not allocator.grow(other, 9)
    assert not allocator.grow(table, 33)
    assert (table, other, allocator.num_free) == (held, [], 1)
    assert allocator.grow(table, 32)
    assert allocator.num_free == 0


def test_a_table_grows_only_at_the_edge_of_a_page() -> None:
    allocator = PageAllocator(4, 3)
    table: list[int] = []
    lengths = []
    for num_tokens in range(10):
        assert allocator.grow(table, num_tokens)
        lengths.append(len(table))
    assert lengths == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("damage", ["lost", "doubled in one", "in two tables", "held and free", "made up"])
def test_check_notices_a_page_that_is(damage: str) -> None:
    allocator = PageAllocator(6, 2)
    first: list[int] = []
    second: list[int] = []
    allocator.grow(first, 4)
    allocator.grow(second, 4)
    allocator.check([first, second])
    if damage == "lost":
        first.pop()
    elif damage == "doubled in one":
        first.append(first[0])
    elif damage == "in two tables":
        first[0] = second[0]
    elif damage == "held and free":
        allocator.release(list(first))
    else:
        first[0] = 6
    with pytest.raises(AssertionError, match="lost, doubled or made up"):
        allocator.check([first, second])
