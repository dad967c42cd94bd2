"""The KV of layers with windows in places of its own, which are reused when no query can see them any more.

A page of the KV pool holds the KV of the layers without windows only. The KV of the others is in a second pool, whose
pages are called places here: a page has a place from the step that writes it until no window of a running sequence
reaches it, and longer if it is in the prefix cache and its place is not needed. There are enough places for the windows
of all lanes and for the largest step, so that admission and preemption depend on pages alone. No torch here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fastgen.engine.feature_options import FeatureOptions
from fastgen.engine.options import EngineConfig
from fastgen.engine.pages import Node, PageAllocator

BLOCK = 64  # attention reads whole blocks of so many keys


@dataclass(frozen=True)
class FreeWindows(FeatureOptions):
    """The layers with windows, in ascending order, and the largest of their windows."""

    layers: tuple[int, ...]
    window: int

    @property
    def more_kv_layers(self) -> int:
        return -len(self.layers)  # they are not in the first pool

    def places(self, config: EngineConfig) -> int:
        """Return the number of places: for the window of each lane, and for the tokens of the largest step."""
        size, context = config.page_size, config.max_model_len
        lane = min((self.window + BLOCK - 2) // size + 2, -(-context // size))
        return config.max_seqs * (lane + 1) + -(-config.max_step_tokens // size)

    def first(self, position: int) -> int:
        """Return the first position that attention reads for a query at `position`."""
        return max(position - self.window + 1, 0) // BLOCK * BLOCK


@dataclass(frozen=True, slots=True)
class Places:
    """The payload of a Batch: the new places of pages, whose contents are undefined; for none, the spare place."""

    pages: tuple[int, ...]
    places: tuple[int, ...]


class WindowAllocator(PageAllocator):
    """A PageAllocator that also gives pages their places. first: see FreeWindows."""

    def __init__(self, num_pages: int, page_size: int, places: int, first: Callable[[int], int]) -> None:
        super().__init__(num_pages, page_size)
        self.nowhere = places
        self._first = first
        self._place = [places] * num_pages
        self._windows = [0] * num_pages  # by page: the number of lanes whose window reaches it
        self._free_places = list(range(places))[::-1]
        self._unseen: OrderedDict[int, None] = OrderedDict()  # pages with places that no window reaches, as reused
        self._moved: dict[int, None] = {}  # the pages whose places have changed since the last batch

    def match(self, tokens: list[int], limit: int) -> list[Node]:
        """Return the nodes of the longest cached prefix whose last window still has places."""
        nodes = super().match(tokens, limit)
        missing = [at for at, node in enumerate(nodes) if self._place[node.page] == self.nowhere]
        count = len(nodes)
        while missing and count:
            first = self._first(count * self.page_size) // self.page_size
            if missing[-1] < first:
                break
            count = missing.pop()
        return nodes[:count]

    def hold(self, page: int) -> None:
        """Keep the place of a page for a lane whose window reaches it, or give it one."""
        self._windows[page] += 1
        self._unseen.pop(page, None)
        if self._place[page] == self.nowhere:
            if not self._free_places:
                self._vacate(self._unseen.popitem(last=False)[0])
            self._place[page] = self._free_places.pop()
            self._moved[page] = None

    def let_go(self, page: int) -> None:
        """Note that a lane's window has left a page; its place stays as long as the prefix cache may need it."""
        self._windows[page] -= 1
        if not self._windows[page]:
            if self._nodes[page] is None:
                self._vacate(page)
            else:
                self._unseen[page] = None

    def _vacate(self, page: int) -> None:
        self._free_places.append(self._place[page])
        self._place[page] = self.nowhere
        self._moved[page] = None

    def _allocate(self) -> int:
        page = super()._allocate()
        if page in self._unseen:
            del self._unseen[page]
            self._vacate(page)
        return page

    def take_places(self) -> Places | None:
        """Return the changes of the batch that is now complete, if there are any."""
        if not self._moved:
            return None
        pages = tuple(self._moved)
        self._moved.clear()
        return Places(pages, tuple(self._place[page] for page in pages))

    def check(self) -> None:
        """Assert that each place belongs to one page or is free."""
        taken = [place for place in self._place if place != self.nowhere]
        assert sorted(taken + self._free_places) == list(range(self.nowhere))
        for page, place in enumerate(self._place):
            assert (place != self.nowhere) == (self._windows[page] > 0 or page in self._unseen)
