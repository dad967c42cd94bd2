"""Which states of recurrent layers are kept for prefixes, and when lanes and slots exchange them. No torch here.

A prompt whose pages are cached continues from its last page border that has a state. It shares cached pages after this
border as well: it computes their tokens again, and writes the same KV. Therefore hybrids ask for `deterministic`. A
state takes as much memory as dozens of pages, so only those likely to be asked for are kept:

- at the last border of a sequence that leaves its lane, for the next turn, or for itself if it was preempted;
- where a prompt leaves a cached prefix that has no state there: others will share this prefix as well;
- at the last border before the end of a long prompt, for other samples of it.

A sequence's lane has the state of its last border. So a prefill chunk ends where a state is to be kept, and the next
step begins by copying it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from fastgen.engine.admission import LaneTable
from fastgen.engine.interface import PlanFeature
from fastgen.engine.options import EngineConfig
from fastgen.engine.pages import NOT_INDEXED, Node, PageAllocator
from fastgen.request import Batch, Sequence

BLOCK = 64  # tokens from one state to the next
# A state is kept at the end of prompts with at least so many tokens to compute. The chunk after it costs a step.
LONG_PROMPT = 512


@dataclass(frozen=True, slots=True)
class StateMoves:
    """The payload of a Batch. Before the step: `saves`, (lane, slot); then `restores`, (slot, lane). After it: `forks`,
    (lane, lane)."""

    saves: tuple[tuple[int, int], ...]
    restores: tuple[tuple[int, int], ...]
    forks: tuple[tuple[int, int], ...]


class StateAllocator(PageAllocator):
    """A PageAllocator whose prefixes are continued where a state is kept. num_slots: number of states.

    slots: the slot of each node's state, the least recently used first. due: by lane, the nodes whose states the lanes
    have when the next step begins, which copies them to slots.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int) -> None:
        super().__init__(num_pages, page_size)
        self.slots: OrderedDict[Node, int] = OrderedDict()
        self.due: dict[int, Node] = {}
        self._free_slots = list(range(num_slots))[::-1]

    def start_of(self, nodes: list[Node]) -> int:
        """Return how many tokens of a match need not be computed again: up to its last state, which counts as used."""
        kept, count = self.slots.keys() | {*self.due.values()}, len(nodes)
        while count and nodes[count - 1] not in kept:
            count -= 1
        if count and nodes[count - 1] in self.slots:
            self.slots.move_to_end(nodes[count - 1])
        return count * self.page_size

    def node_at(self, tokens: list[int], end: int) -> Node | None:
        """Return the node of the page that ends the first `end` tokens, if it is in the prefix cache."""
        nodes = self.match(tokens, end)
        return nodes[-1] if nodes and len(nodes) * self.page_size == end else None

    def last_node(self, pages: list[int], tokens: int) -> Node:
        """Return the node of the page that ends the first `tokens` tokens of a table, which are in the prefix cache."""
        node = self._nodes[pages[tokens // self.page_size - 1]]
        assert node is not None
        return node

    def take_slot(self, node: Node, pinned: set[int]) -> int | None:
        """Return a slot for the state at a node: a free one, or the least recently used one that is not pinned. None if
        the node already has a state, if it has left the prefix cache, or if all slots are pinned."""
        if node in self.slots or node.page < 0 or self._nodes[node.page] is not node:
            return None
        if not self._free_slots:
            oldest = next((each for each, slot in self.slots.items() if slot not in pinned), None)
            if oldest is None:
                return None
            self._free_slots.append(self.slots.pop(oldest))
        self.slots[node] = self._free_slots.pop()
        return self.slots[node]

    def drop_index(self) -> None:
        super().drop_index()
        self.due.clear()
        self._free_slots.extend(self.slots.values())
        self.slots.clear()

    def _drop(self, node: Node) -> None:
        super()._drop(node)
        if node in self.slots:
            self._free_slots.append(self.slots.pop(node))

    def check(self) -> None:
        """Assert that each slot is free or of one indexed node."""
        assert len({*self._free_slots, *self.slots.values()}) == len(self._free_slots) + len(self.slots)
        assert all(self._nodes[node.page] is node for node in self.slots)


class StateKeeper(PlanFeature):
    """Plans the moves of states. slots: number of states that are kept for prefixes."""

    def __init__(self, slots: int) -> None:
        self._num_slots = slots

    def make_allocator(self, config: EngineConfig) -> PageAllocator:
        assert not self._num_slots or self._num_slots >= config.max_seqs, "each lane of a step may need a state"
        self._border = math.lcm(BLOCK, config.page_size)
        self._pages = StateAllocator(config.num_pages, config.page_size, self._num_slots)
        return self._pages

    def reset(self, lanes: LaneTable) -> None:
        self._lanes = lanes
        self._ends: dict[Sequence, list[int]] = {}  # of sequences in their prefill: where states are to be kept
        self._chunks: list[tuple[Sequence, int]] = []  # of the batch that is made: which end where a state is kept

    def cut(self, sequence: Sequence, count: int) -> int:
        if sequence not in self._ends:
            self._ends[sequence] = self._ends_of(sequence)
        start, ends = sequence.computed, self._ends[sequence]
        end = min((each for each in ends if start < each < start + count), default=start + count)
        if end in ends:
            self._chunks.append((sequence, end))
        return end - start

    def _ends_of(self, sequence: Sequence) -> list[int]:
        """Return where the chunks of a sequence's prefill have to end."""
        if not self._num_slots:
            return []
        tokens, start, ends = sequence.token_ids, sequence.computed, set[int]()
        cached = len(self._pages.match(tokens, min(sequence.cacheable_len, sequence.prefill_len - 1)))
        ends.add(cached * self._pages.page_size // self._border * self._border)
        if sequence.prefill_left >= LONG_PROMPT:
            ends.add((sequence.prefill_len - 1) // self._border * self._border)
        return [end for end in ends if end > start]

    def payload(self, batch: Batch) -> StateMoves | None:
        forks = tuple((chunk.lane, lane) for chunk in batch.prefills for lane in chunk.forks)
        begins = {chunk.lane: chunk.start for chunk in batch.prefills}
        wanted = dict[int, Node]()  # by lane: where sequences continue
        for lane in {start.lane for start in batch.starts} - {lane for _, lane in forks}:
            sequence = self._lanes.sequences[lane]
            start = 0 if sequence is None else begins.get(lane, sequence.computed)
            if sequence is not None and start:
                wanted[lane] = self._pages.last_node(sequence.pages, start)
        saves = self._save(set(wanted.values()))
        for sequence, end in self._chunks:
            kept = self._pages.node_at(sequence.token_ids, end)
            if sequence.lane >= 0 and kept is not None:
                self._pages.due[sequence.lane] = kept
        self._chunks = []
        restores = tuple((self._pages.slots[node], lane) for lane, node in wanted.items())
        return StateMoves(saves, restores, forks) if saves or restores or forks else None

    def _save(self, wanted: set[Node]) -> tuple[tuple[int, int], ...]:
        """Return (lane, slot) of the states that are due: first the wanted ones, for which there are always slots."""
        slots, due, saves = self._pages.slots, self._pages.due, list[tuple[int, int]]()
        self._pages.due = {}
        pinned = {slots[node] for node in wanted if node in slots}
        first = [pair for pair in due.items() if pair[1] in wanted]
        others = [pair for pair in due.items() if pair[1] not in wanted]
        for lane, node in (*first, *others):
            slot = self._pages.take_slot(node, pinned)
            if slot is not None:
                saves.append((lane, slot))
                pinned.add(slot)
        return tuple(saves)

    def leave(self, sequence: Sequence) -> None:
        """Keep the state of the lane, which is that of the last border of what is computed."""
        self._ends.pop(sequence, None)
        self._pages.due.pop(sequence.lane, None)
        border = sequence.computed // BLOCK * BLOCK
        # Pages that are not indexed may be of earlier weights.
        if self._num_slots and border and border % self._border == 0 and sequence.indexed != NOT_INDEXED:
            ended = self._pages.node_at(sequence.token_ids, border)
            if ended is not None:
                self._pages.due[sequence.lane] = ended
