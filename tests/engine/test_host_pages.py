"""The page allocator with a host tier: which pages are saved, loaded and dropped."""

from __future__ import annotations

import random

from invariants import check_pages
from test_pages import Pool

from fastgen.engine.host_pages import TieredPageAllocator


def test_the_host_tier_keeps_what_is_evicted_and_drops_its_oldest() -> None:
    pool = Pool(4, 1, host_pages=3)
    first, second = [1, 2, 3], [4, 5, 6]
    for tokens in (first, second):
        pool.release(pool.take(tokens))
    assert pool.seen["saves"] == 2  # of the first one's pages, 3 and 2; 1 is still on the device
    assert [pool.cached(first), pool.cached(second)] == [3, 3]
    pool.release(pool.take([7, 8, 9]))  # 1, 6 and 5 are saved, and 3, the oldest on the host, is dropped
    assert [pool.cached(first), pool.cached(second)] == [1, 3]
    assert pool.seen["saves"] == 5
    table = pool.take(second)
    assert pool.seen["loads"] == 2
    assert [pool.memory[page] for page in table] == [(4,), (4, 5), (4, 5, 6)]


def test_host_pages_are_taken_from_nodes_on_the_device_too() -> None:
    pool = Pool(4, 1, host_pages=2)
    for tokens in ([1, 2], [3, 4, 5, 6], [1, 2]):  # 1 and 2 are loaded, and keep their host pages
        pool.release(pool.take(tokens))
    pool.release(pool.take([7]))  # 4 takes one of them
    assert [pool.cached([1, 2]), pool.cached([3, 4])] == [2, 2]


def test_a_parent_is_not_dropped_before_its_children() -> None:
    """The parent was saved earlier, but was used when its children were computed."""
    pool = Pool(2, 1, host_pages=3)
    pool.release(pool.take([1]))
    pool.release(pool.take([8, 9]))
    pool.release(pool.take([1, 2]))  # loads 1
    pool.release(pool.take([5, 6]))  # saves 2, and 1 has kept its host page
    assert pool.cached([1, 2]) == 2
    pool.release(pool.take([7]))
    assert pool.cached([1, 2]) in (1, 2)
    check_pages(pool.allocator, [])


def test_conversations_are_dropped_by_the_age_of_their_last_turn() -> None:
    """The first pages of a conversation were saved long ago, but its last turn used them too."""
    rng = random.Random(0)
    pool = Pool(8, 1, host_pages=24)
    conversations: dict[int, list[int]] = {}  # by first token, in order of their last turn
    for turn in range(600):
        going = [name for name, tokens in conversations.items() if len(tokens) < 6 and pool.cached(tokens)]
        name = rng.choice(going[-4:]) if going and rng.random() < 0.8 else 1000 + turn
        tokens = conversations[name] = [*conversations.pop(name, [name]), rng.randrange(100)]
        pool.release(pool.take(tokens))
        room = 24
        for tokens in reversed(conversations.values()):
            room -= len(tokens)
            if room >= 0:
                assert pool.cached(tokens) == len(tokens)
    assert pool.seen["loads"] > 100


def test_a_host_page_that_is_loaded_from_is_not_saved_to_in_the_same_step() -> None:
    pool = Pool(2, 1, host_pages=2)
    pool.release(pool.take([1, 2]))
    pool.release(pool.take([3, 4]))
    assert [pool.cached([1, 2]), pool.cached([3, 4])] == [2, 2]
    table: list[int] = []
    pool.allocator.adopt(table, pool.allocator.match([1, 2], 2))  # no host page is left for 3 and 4
    check_pages(pool.allocator, [table])
    pool.tables.append(table)
    changes = pool.step()
    assert (len(changes.loads), changes.saves) == (2, ())
    assert [pool.cached([1, 2]), pool.cached([3, 4])] == [2, 0]
    assert [pool.memory[page] for page in table] == [(1,), (1, 2)]


def test_a_page_that_is_saved_may_be_loaded_in_the_same_step() -> None:
    pool = Pool(3, 1, host_pages=4)
    pool.release(pool.take([1, 2, 3]))
    other: list[int] = []
    assert pool.allocator.grow(other, 2)  # 3 and 2 go to the host
    pool.allocator.release(other)
    table: list[int] = []
    pool.allocator.adopt(table, pool.allocator.match([1, 2, 3], 3))
    pool.tables.append(table)
    changes = pool.step()
    assert {host_page for _, host_page in changes.saves} == {host_page for host_page, _ in changes.loads}
    assert not pool.fresh
    assert [pool.memory[page] for page in table] == [(1,), (1, 2), (1, 2, 3)]


def test_pending_saves_are_forgotten_too() -> None:
    """A schedule may evict pages and then wait for the step in flight, without a batch."""
    allocator, table = TieredPageAllocator(2, 1, host_pages=2), list[int]()
    assert allocator.grow(table, 2)
    allocator.index(0, table, [1, 2], 2)
    allocator.release(table)
    allocator.take_moves()
    allocator.take_fresh()
    assert allocator.grow(table, 1)
    allocator.drop_index()
    check_pages(allocator, [table])
    moves = allocator.take_moves()
    assert moves is None or not moves.saves
