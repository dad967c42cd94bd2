"""Which states of a hybrid model are kept for prefix reuse: a policy, without tensors.

A prompt whose KV pages are cached continues from its last page border that has a state. A page has 64 tokens, like a
block. A state takes as much memory as 25 pages (Qwen3.5-9B), so only those likely to be asked for are kept:

- at the last page border before a prompt's last token, for other samples of it;
- at the last page border of a finished sequence, for the next turn;
- where a prompt leaves a cached prefix that has no state there: others will share this prefix as well.

The second is the lane's state at that moment, and so is the first unless the prompt fills its block; otherwise a chunk
of the prefill ends there. Pages and states share one budget, least recently used first. What runs is not counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

PAGE = 64


class Node:
    """A cached page, of the tokens after its parent's; `state`: the state after it is kept."""

    __slots__ = ("children", "key", "parent", "state")

    def __init__(self, parent: Node | None, key: Hashable) -> None:
        self.parent, self.key, self.state = parent, key, False
        self.children: dict[Hashable, Node] = {}


class StateCache:
    """The prefix cache of pages and states, of at most `budget` bytes."""

    def __init__(self, budget: int, page_bytes: int, state_bytes: int) -> None:
        self.budget, self.page_bytes, self.state_bytes = budget, page_bytes, state_bytes
        self.root, self.used = Node(None, None), 0
        self._order: OrderedDict[tuple[Node, bool], None] = OrderedDict()  # a page or a state (True), oldest first

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many tokens of a prompt have pages, and how many of these a state; at least one token is left."""
        node, path = self.root, []
        for start in range(0, (len(tokens) - 1) // PAGE * PAGE, PAGE):
            child = node.children.get(tuple(tokens[start : start + PAGE]))
            if child is None:
                break
            path.append(child)
            node = child
        last = max((place for place, each in enumerate(path, 1) if each.state), default=0)
        for each in reversed(path):  # parents are evicted after their children
            self._order.move_to_end((each, False))
        if last:
            self._order.move_to_end((path[last - 1], True))
        return len(path) * PAGE, last * PAGE

    def borders_of_prompt(self, length: int, pages: int, state: int) -> list[int]:
        """Return where the prefill of a prompt keeps states, given its `match`."""
        return sorted({(length - 1) // PAGE * PAGE, *([pages] if pages > state else [])} - {0})

    def add(self, tokens: Sequence[int], states: Sequence[int]) -> None:
        """Keep the full pages of a sequence, and the states after `states` tokens, multiples of 64."""
        node = self.root
        for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
            key = tuple(tokens[start : start + PAGE])
            if key not in node.children:
                node.children[key] = Node(node, key)
                self._keep(node.children[key], False)
            node = node.children[key]
            if start + PAGE in states and not node.state:
                node.state = True
                self._keep(node, True)
        while self.used > self.budget:
            self._evict()

    def drop(self) -> None:
        """Forget everything, because the weights have changed."""
        self.root, self.used = Node(None, None), 0
        self._order.clear()

    def check(self) -> None:
        """Assert the invariants."""
        pages, states = ([node for node, state in self._order if state is kind] for kind in (False, True))
        assert self.used == len(pages) * self.page_bytes + len(states) * self.state_bytes <= self.budget
        assert all(node.state for node in states)
        assert all(node.parent is not None and node.parent.children.get(node.key) is node for node in pages + states)
        assert all(node.parent is self.root or (node.parent, False) in self._order for node in pages)

    def _keep(self, node: Node, state: bool) -> None:
        self._order[node, state] = None
        self.used += self.state_bytes if state else self.page_bytes

    def _evict(self) -> None:
        """Evict the oldest state, or page without children; a page's state goes with it."""
        node, state = next((node, state) for node, state in self._order if state or not node.children)
        if node.state:
            node.state = False
            del self._order[node, True]
            self.used -= self.state_bytes
        if not state:
            assert node.parent is not None
            del self._order[node, False]
            del node.parent.children[node.key]
            self.used -= self.page_bytes
