"""Invariants of the scheduler and the page allocator, which hold between any two calls of their methods."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from fastgen.engine.host_pages import TieredPageAllocator
from fastgen.engine.pages import Node, PageAllocator
from fastgen.engine.scheduler import MAX_PREFILLS, Scheduler
from fastgen.request import Status


def check_scheduler(scheduler: Scheduler) -> None:
    config, running = scheduler.config, scheduler.running
    check_pages(scheduler.pages, [sequence.pages for sequence in running])
    assert {s.lane: s for s in running} == {
        lane: s for lane, s in enumerate(scheduler.lanes.sequences) if s is not None
    }
    assert sorted([*scheduler.lanes.free, *(s.lane for s in running)]) == list(range(config.max_seqs))
    for sequence in scheduler.waiting:
        assert sequence.status is Status.WAITING
        assert not sequence.pages
        assert sequence.lane < 0
    for sequence in running:
        # A stop string may cut tokens that a speculative step has computed.
        assert sequence.computed <= sequence.length or sequence.status is Status.FINISHED
        assert len(sequence.pages) * config.page_size >= sequence.computed
        assert len(sequence.token_ids) <= sequence.max_len
        assert len(sequence.pages) <= sequence.reserved
    _check_derived(scheduler)


def _check_derived(scheduler: Scheduler) -> None:
    """Check that the state which is updated step by step equals what follows from the sequences."""
    running, pages = scheduler.running, scheduler.pages
    alive = [s for s in running if s.status is Status.RUNNING]
    assert scheduler.prefilling == [s for s in running if s.computed < s.prefill_len]
    assert all(count <= MAX_PREFILLS for count in Counter(s.priority for s in scheduler.prefilling).values())
    ranks = [s.priority for s in scheduler.waiting]
    assert ranks == sorted(ranks), "a sequence waits behind less urgent ones"
    # A sequence whose last token is in flight leaves `_decoding` when the next step is scheduled.
    decoding = [s for s in scheduler._decoding.values() if s.length < s.max_len]
    assert len(set(decoding)) == len(decoding)
    assert {*decoding} == {s for s in alive if s.computed >= s.prefill_len and s.length < s.max_len}
    for sequence in scheduler._decoding.values():
        limit = min(len(sequence.pages) * scheduler.config.page_size, sequence.max_len - 1)
        assert sequence.computed <= sequence.limit == limit
    assert scheduler.lanes.masked == {s.lane for s in running if s.mask is not None}
    for sequence in running:
        assert sequence.indexed <= len(sequence.pages)
        assert all(pages._nodes[page] is not None for page in sequence.pages[: max(0, sequence.indexed)])
    assert scheduler.reservations.reserved_pages == sum(s.reserved for s in running)
    assert scheduler.reservations.waiting_pages == sum(scheduler.waiting.values())


def check_pages(pages: PageAllocator, tables: Iterable[list[int]]) -> None:
    """Check a page allocator. tables: all page tables."""
    tables = list(tables)
    held = Counter(page for table in tables for page in table)
    assert pages.references == sum(held.values())
    idle = [node.page for node in pages._idle]
    assert sorted([*held, *idle, *pages._free]) == list(range(pages.num_pages)), "a page is lost, doubled or made up"
    assert pages._refs == [held[page] for page in range(pages.num_pages)], "a page is lost, doubled or made up"
    assert all(len(set(table)) == len(table) for table in tables), "a page is twice in a table"
    _check_tree(pages, tables)
    _check_order(pages._idle)
    loaded: list[int] = []
    if isinstance(pages, TieredPageAllocator):
        _check_order(OrderedDict.fromkeys(node for node in pages._host if node.page < 0))
        _check_tier(pages)
        loaded += pages._loads.values()
    targets = [*pages._fresh, *loaded, *(page for _, page in pages._copies)]
    assert len(set(targets)) == len(targets)
    assert all(held[page] for page in (*targets, *(source for source, _ in pages._copies)))


def _check_tree(pages: PageAllocator, tables: list[list[int]]) -> None:
    nodes = [*pages.root.children.values()]
    for node in nodes:
        nodes += node.children.values()
    assert {node.page: node for node in nodes if node.page >= 0} == {
        page: node for page, node in enumerate(pages._nodes) if node is not None
    }
    on_host = pages._host.keys() if isinstance(pages, TieredPageAllocator) else set()
    assert {node for node in nodes if node.host_page >= 0} == on_host
    for node in nodes:
        assert node.parent is not None
        assert node.parent.children[node.tokens] is node
        assert len(node.tokens) == pages.page_size
        assert node.page >= 0 or node.host_page >= 0, "a node is nowhere"
        assert node.page < 0 or node.parent is pages.root or node.parent.page >= 0, "its parent is not there"
    for table in tables:
        for at, page in enumerate(table):
            indexed = pages._nodes[page]
            if indexed is not None:
                assert indexed.parent is not pages.root or at == 0
                assert indexed.parent is pages.root or table[at - 1] == getattr(indexed.parent, "page", None)


def _check_order(nodes: OrderedDict[Node, None]) -> None:
    place = {node: at for at, node in enumerate(nodes)}
    for node, at in place.items():
        assert node.parent not in place or place[node.parent] > at, "a parent would go before its child"


def _check_tier(pages: TieredPageAllocator) -> None:
    saved = [node.host_page for node in pages._host]
    slots = [*pages._free_host_pages, *saved]
    assert sorted(slots) == list(range(pages.host_pages)), "a slot is lost, doubled or made up"
    assert {*pages._saves, *pages._loads} <= {*saved}
