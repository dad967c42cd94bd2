"""The host tier's side of page allocation: evicted pages of the prefix cache move to the host, and come back."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from fastgen.engine.pages import Node, PageAllocator


@dataclass(frozen=True, slots=True)
class PageMoves:
    """The payload of a Batch: page moves before a step computes.

    saves: (page, host page), pages to copy to the host tier first. loads: (host page, page), pages to copy from the
    host tier after the saves. A page that is loaded is not in `Batch.fresh`.
    """

    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()


class TieredPageAllocator(PageAllocator):
    """A PageAllocator with a host tier of `host_pages` pages.

    Evicted pages are saved there, and loaded when they match again. A loaded page keeps its host page as long as the
    tier has free pages. When the tier is full, the host page is reused whose last save, match or eviction was longest
    ago. Its node stays if it is on the device too; else it is a leaf, and is dropped. A step does not save to a host
    page that it loads from, since saves come before loads.
    """

    def __init__(self, num_pages: int, page_size: int, host_pages: int) -> None:
        assert host_pages >= 0
        super().__init__(num_pages, page_size)
        self.host_pages = host_pages
        self._host: OrderedDict[Node, None] = OrderedDict()  # in the host tier, in the order of reuse
        self._free_host_pages = list(range(host_pages))[::-1]
        # The changes of the next batch.
        self._saves: dict[int, int] = {}  # host page -> page
        self._loads: dict[int, int] = {}  # host page -> page

    def adopt(self, pages: list[int], nodes: list[Node]) -> None:
        for node in reversed(nodes):  # hold all host pages before a load, which may evict idle pages
            if node.host_page >= 0:
                self._host.move_to_end(node)
            if node.page < 0:
                self._loads[node.host_page] = -1
        super().adopt(pages, nodes)

    def _load(self, node: Node) -> None:
        node.page = self._loads[node.host_page] = self._allocate()
        self._nodes[node.page] = node

    def _drop(self, node: Node) -> None:
        if node.host_page >= 0:
            self._host.move_to_end(node)  # after its children, which were evicted first
        elif (host_page := self._take_host_page()) >= 0:
            self._saves[host_page] = node.page
            node.host_page = host_page
            self._host[node] = None
        else:
            super()._drop(node)

    def _take_host_page(self) -> int:
        """Return a free host page, or the host page of the oldest node that no load needs; -1 if there is none."""
        if self._free_host_pages:
            return self._free_host_pages.pop()
        node = next((node for node in self._host if node.host_page not in self._loads), None)
        if node is None:
            return -1
        if node.page < 0:
            super()._drop(node)
        host_page, node.host_page = node.host_page, -1
        del self._host[node]
        return host_page

    def drop_index(self) -> None:
        """Empty the prefix cache and the host tier, between two steps."""
        assert not self._loads
        super().drop_index()
        self._host.clear()
        self._saves.clear()
        self._free_host_pages = list(range(self.host_pages))[::-1]

    def take_moves(self) -> PageMoves | None:
        """Return the moves of the batch that is now complete, if there are any."""
        if not (self._saves or self._loads):
            return None
        saves = tuple((page, host_page) for host_page, page in self._saves.items())
        moves = PageMoves(saves, tuple(self._loads.items()))
        self._saves.clear()
        self._loads.clear()
        return moves
