"""The paged allocator: which sequence holds which page of the KV pool. Knows numbers only, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PageAllocator:
    """Hands out the pages 0 .. num_pages - 1 of `page_size` tokens each.

    The lowest free page goes first, so that what is in use lies close together: memory that was never touched stays so,
    and attention on the CPU may read a range of pages as a whole.

    A sequence's `pages` list is its page table: page i holds the KV of positions i * page_size onwards. The lists
    belong to the sequences; this class only knows which pages are free.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))  # a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, num_tokens: int) -> int:
        """How many pages so many tokens take."""
        return -(-num_tokens // self.page_size)

    def missing(self, pages: list[int], num_tokens: int) -> int:
        """How many more pages a page table needs to hold `num_tokens` tokens."""
        return max(0, self.count(num_tokens) - len(pages))

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Extend a page table to hold `num_tokens` tokens; False, and nothing changed, where too few are free."""
        count = self.missing(pages, num_tokens)
        if count > len(self._free):
            return False
        pages.extend(heapq.heappop(self._free) for _ in range(count))
        return True

    def release(self, pages: list[int]) -> None:
        """Take all pages of a page table back, and empty it."""
        for page in pages:
            heapq.heappush(self._free, page)
        pages.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Every page is either free or in exactly one of `tables`, which are all that exist."""
        held = [page for table in tables for page in table]
        assert sorted([*held, *self._free]) == list(range(self.num_pages)), "a page is lost, doubled or made up"
