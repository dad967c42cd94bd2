"""The page allocator with its prefix cache: which sequences hold which pages of the KV pool, and the tokens in them.

It handles page numbers only, no tensors. `take_fresh` and `take_copies` return the work that a step must do on pages.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

NOT_INDEXED = -1
"""The value of `Sequence.indexed` from which on no pages of a sequence are added to the prefix cache."""


class Node:
    """A full page of the prefix cache: its tokens, which follow the tokens of its parent.

    Its KV is on the device in `page`, in a host tier in `host_page`, or in both; -1: not there. The key of a child is
    the tuple of its tokens itself, which the dict compares, so that no two prefixes can be mistaken for each other.
    """

    __slots__ = ("children", "host_page", "page", "parent", "tokens")

    def __init__(self, parent: Node | None = None, tokens: tuple[int, ...] = (), page: int = -1) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[tuple[int, ...], Node] = {}
        self.page = page
        self.host_page = -1


class PageAllocator:
    """Allocates the pages 0 .. num_pages - 1 of `page_size` tokens each, to one sequence or to several that share them.

    A sequence's `pages` list is its page table: page i holds the KV of positions i * page_size onwards. The sequences
    own the lists; this class counts the references to each page. A page without references is either free or, if it is
    indexed, idle. The lowest free page is allocated first, so that untouched memory stays untouched: on the CPU it
    takes no space.

    **Prefix cache.** Full pages are indexed in a tree of Nodes, whose root stands for the version of the weights. A
    page is indexed only below the page before it in its table, so that a sequence which holds an indexed page holds all
    its ancestors. Idle pages stay until their memory is needed, and are evicted by least recent use. Since a table is
    released from its end, this order has children before their parents, and the parent of a page on the device is on
    the device.

    **Steps in flight.** A page that a step in flight reads or writes is not allocated again before this step was read,
    because sequences hold their pages until then.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self.root = Node()
        self.references = 0  # the sum of the lengths of all tables
        self._free = list(range(num_pages))  # a heap
        self._refs = [0] * num_pages
        self._nodes: list[Node | None] = [None] * num_pages  # by page, if it is indexed
        self._idle: OrderedDict[Node, None] = OrderedDict()  # on the device without references, in order of eviction
        # The changes of the next batch.
        self._fresh: dict[int, None] = {}
        self._copies: list[tuple[int, int]] = []

    @property
    def available(self) -> int:
        """The number of pages that can be allocated: free and idle ones."""
        return len(self._free) + len(self._idle)

    # ------------------------------------------------------------------------------------------ page tables

    def count(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Extend a page table to hold `num_tokens` tokens. If too few pages are available, return False and change
        nothing."""
        count = max(0, self.count(num_tokens) - len(pages))
        if count > self.available:
            return False
        for _ in range(count):
            page = self._allocate()
            self._fresh[page] = None
            pages.append(page)
        self.references += count
        return True

    def adopt(self, pages: list[int], nodes: list[Node]) -> None:
        """Fill an empty page table with the pages of a match. Pages for the nodes on the host must be available."""
        for node in reversed(nodes):  # hold all pages before a load, which may evict idle pages
            if node.page >= 0:
                if not self._refs[node.page]:
                    del self._idle[node]
                self._refs[node.page] += 1
        for node in nodes:
            if node.page < 0:
                self._load(node)
            pages.append(node.page)
        self.references += len(nodes)

    def _load(self, node: Node) -> None:
        """Bring a node back to the device, in a new page."""
        raise AssertionError("all nodes are on the device")

    def fork(self, pages: list[int], source: list[int], copy: bool) -> None:
        """Fill an empty page table with the pages of another. copy: replace the last page by a copy, which the end of
        the next step makes; a page for it must be available, and the source must be held until that step is read."""
        shared = source[:-1] if copy else source
        for page in shared:
            self._refs[page] += 1
        pages.extend(shared)
        if copy:
            page = self._allocate()
            self._copies.append((source[-1], page))
            pages.append(page)
        self.references += len(pages)

    def release(self, pages: list[int]) -> None:
        """Drop the references of a page table, and empty it."""
        for page in reversed(pages):
            self._drop_reference(page)
        self.references -= len(pages)
        pages.clear()

    def _allocate(self) -> int:
        page = heapq.heappop(self._free) if self._free else self._evict()
        self._refs[page] = 1
        return page

    def _drop_reference(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page]:
            return
        node = self._nodes[page]
        if node is not None:
            self._idle[node] = None
            return
        self._fresh.pop(page, None)
        heapq.heappush(self._free, page)

    # ------------------------------------------------------------------------------------------ the prefix cache

    def match(self, tokens: list[int], limit: int) -> list[Node]:
        """Return the nodes of the longest cached prefix of full pages within the first `limit` tokens."""
        nodes: list[Node] = []
        children, size = self.root.children, self.page_size
        for end in range(size, limit + 1, size):
            node = children.get(tuple(tokens[end - size : end]))
            if node is None:
                break
            nodes.append(node)
            children = node.children
        return nodes

    def start_of(self, nodes: list[Node]) -> int:
        """Return how many tokens of a match need not be computed again."""
        return len(nodes) * self.page_size

    def held(self, nodes: list[Node]) -> int:
        """Return how many of these nodes have pages that sequences hold."""
        return sum(node.page >= 0 and self._refs[node.page] > 0 for node in nodes)

    def index(self, indexed: int, pages: list[int], tokens: list[int], num_tokens: int) -> int:
        """Add the pages of a table that are full of its first `num_tokens` tokens to the prefix cache.

        indexed: the number of its first pages that are in the prefix cache already, or NOT_INDEXED. Returns this number
        as it is now. If other pages hold the same tokens, it becomes NOT_INDEXED, and no page of this table is added
        from then on.
        """
        if indexed == NOT_INDEXED:
            return NOT_INDEXED
        node = self._nodes[pages[indexed - 1]] if indexed else self.root
        for at in range(indexed, min(min(num_tokens, len(tokens)) // self.page_size, len(pages))):
            key = tuple(tokens[at * self.page_size : (at + 1) * self.page_size])
            assert node is not None, "the page before is indexed"
            if key in node.children:
                return NOT_INDEXED
            parent, node = node, Node(node, key, pages[at])
            self._nodes[node.page] = parent.children[key] = node
            indexed = at + 1
        return indexed

    def drop_index(self) -> None:
        """Empty the prefix cache, between two steps. Sequences keep their pages, which are not indexed."""
        self.root = Node()
        for node in self._idle:
            heapq.heappush(self._free, node.page)
        self._idle.clear()
        self._nodes = [None] * self.num_pages

    def _evict(self) -> int:
        """Return the page of the least recently used idle node."""
        node = next(iter(self._idle))
        page = node.page
        self._drop(node)
        node.page = -1
        self._nodes[page] = None
        del self._idle[node]
        return page

    def _drop(self, node: Node) -> None:
        """Take a node out of the prefix cache, since its page is evicted."""
        assert not node.children, "children are evicted first"
        assert node.parent is not None, "the root stays"
        del node.parent.children[node.tokens]

    # ------------------------------------------------------------------------------------------ once per step

    def take_fresh(self) -> tuple[int, ...]:
        """Return the pages that the batch which is now complete takes into use."""
        fresh = tuple(self._fresh)
        self._fresh.clear()
        return fresh

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the copies that the end of the batch makes: (page, page)."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies
