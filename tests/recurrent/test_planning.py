"""recurrent/planning.py over the hash model: a lane continues from the state of its own tokens under any schedule."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hash_model import JUNK, VOCAB, HashRunner, Launched, kv_values, make_config, make_sequence
from random_requests import random_estimate, random_request
from simulation import BY_PRIORITY, Simulation, request

from fastgen.engine.options import EngineConfig
from fastgen.engine.pages import Node
from fastgen.engine.scheduler import Scheduler
from fastgen.model.recurrent_layers import Recurrent
from fastgen.recurrent import feature, planning
from fastgen.recurrent.planning import StateAllocator, StateMoves
from fastgen.request import Batch, SamplingParams, Sequence

BLOCK = 4  # tokens from one state to the next in these tests


@dataclass(frozen=True)
class Shape(Recurrent):
    """Recurrent layers, and the number of states that are kept for prefixes."""

    slots: int = 0


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "BLOCK", BLOCK)
    monkeypatch.setattr(planning, "LONG_PROMPT", 9)
    monkeypatch.setattr(feature, "num_slots", slots_of)


def slots_of(config: EngineConfig) -> int:
    assert isinstance(config.recurrent, Shape)
    return config.recurrent.slots


class StateSimulation(Simulation):
    """A simulation in which the oldest sequence's chunk may end early, where its state is kept. Others go on then."""

    def _check_oldest(self, batch: Batch, before: list[Sequence]) -> None:
        keeper = next(each for each in self.scheduler._features if isinstance(each, planning.StateKeeper))
        ends = {chunk.lane: chunk.start + len(chunk.tokens) for chunk in batch.prefills}
        kept = {lane for lane, end in ends.items() if end in keeper._ends.get(self.scheduler.lanes[lane], ())}
        in_prefill = [s for s in before if s.lane >= 0 and (s.lane in ends or s.prefill_left > 0)]
        if in_prefill and min(in_prefill, key=BY_PRIORITY).lane not in kept:
            super()._check_oldest(batch, before)


class StateRunner(HashRunner):
    """A runner whose lanes have states as well: the KV values of all tokens that a lane has read, in order.

    A value is a hash of all tokens up to its own, their positions and the versions of the weights. So a state is right
    if its last value is the one in the lane's page.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, rng: random.Random) -> None:
        super().__init__(config, rng)
        self.scheduler = scheduler
        self.states: list[list[int]] = [[JUNK] for _ in range(config.max_seqs)]
        self.slots: list[list[int]] = [[JUNK] for _ in range(slots_of(config))]
        self.seen: Counter[str] = Counter()

    def launch(self, batch: Batch) -> Launched:
        moves = batch.find(StateMoves) or StateMoves((), (), ())
        self._check_moves(batch, moves)
        for lane, slot in moves.saves:
            self.slots[slot] = self.states[lane][: len(self.states[lane]) // BLOCK * BLOCK]
        for slot, lane in moves.restores:
            self.states[lane] = self.slots[slot].copy()
        launched = super().launch(batch)
        for source, lane in moves.forks:
            self.states[lane] = self.states[source].copy()
        self._check_slots()
        self.seen += Counter(saves=len(moves.saves), restores=len(moves.restores), forks=len(moves.forks))
        return launched

    def _check_moves(self, batch: Batch, moves: StateMoves) -> None:
        started = {start.lane for start in batch.starts}
        restored, forked = {lane for _, lane in moves.restores}, {lane for _, lane in moves.forks}
        assert len(restored) == len(moves.restores)
        assert len({slot for _, slot in moves.saves}) == len(moves.saves), "a slot is written twice"
        assert restored | forked <= started
        assert not restored & forked

    def _check_slots(self) -> None:
        """Check that each slot has the state of the tokens up to the node that it belongs to."""
        pages = self.scheduler.pages
        assert isinstance(pages, StateAllocator)
        pages.check()
        for node, slot in pages.slots.items():
            tokens = tokens_of(node)
            assert len(self.slots[slot]) == len(tokens)
            assert len(tokens) % BLOCK == 0
            assert self.slots[slot][-1] == self.memory[self._page(node.page)][-1], "the state of other tokens"
            if not self.version:
                assert self.slots[slot] == kv_values(tokens)

    def _write(self, lane: int, start: int, tokens: Any) -> None:
        if start == 0:
            self.states[lane] = []
        assert len(self.states[lane]) == start, "a lane begins without its state"
        assert not start or self.states[lane][-1] == self.memory[self._row(lane, start - 1)], "the state of another"
        super()._write(lane, start, tokens)
        self.states[lane] += self._read(lane, start + len(tokens))[start:]

    def forget(self) -> None:
        super().forget()
        self.slots = [[JUNK] for _ in self.slots]


def tokens_of(node: Node) -> list[int]:
    """Return all tokens of a prefix."""
    return [*(tokens_of(node.parent) if node.parent is not None else ()), *node.tokens]


def small_config(slots: int, **changed: Any) -> EngineConfig:
    return make_config(recurrent=Shape((0,), 1, 2, slots), **changed)


def with_states(simulation: Simulation) -> StateRunner:
    """Give the lanes of a simulation states, before it runs."""
    simulation.runner = runner = StateRunner(simulation.config, simulation.scheduler, simulation.rng)
    runner.trip = simulation._trip
    return runner


# ------------------------------------------------------------------------------------------ random schedules


def random_config(rng: random.Random) -> EngineConfig:
    page_size, lanes, context = rng.choice((1, 2, 3, 4, 6, 8)), rng.randint(1, 6), rng.randint(8, 44)
    budget = lanes + rng.choice((0, 1, 3, 8, 40))
    slots = rng.choice((0, lanes, lanes, lanes, lanes + 1, 20))
    return small_config(
        slots,
        prefix_cache=slots > 0,
        max_model_len=context,
        max_seqs=lanes,
        max_step_tokens=budget,
        page_size=page_size,
        num_pages=-(-context // page_size) + 1 + rng.choice((0, 1, 3, 10, 40)),
        max_prefill_tokens=rng.choice((budget, rng.randint(1, budget))),
    )


def run_seeds(seeds: range) -> Counter[str]:
    """Run random requests that share prefixes, and count what was seen. Raises AssertionError with the seed."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        config, span = random_config(rng), rng.choice((1, 20, 60))
        arrivals: list[tuple[int, Sequence]] = []
        for _ in range(rng.randint(4, 14)):
            turn, before = rng.randrange(span), [sequence for _, sequence in arrivals]
            arrivals += [(turn, sequence) for sequence in random_request(rng, config, before)]
        simulation = StateSimulation(
            config, arrivals, rng=rng, aborts=rng.choice((0.0, 0.1)), trouble=rng.choice((0.0, 0.0, 0.02)),
            updates=rng.choice((0.0, 0.0, 0.1)), sleeps=rng.choice((0.0, 0.1)), waves=rng.random() < 0.5,
            scheduler=Scheduler(config, random_estimate(rng, rng.random() < 0.5)),
        )  # fmt: skip
        runner = with_states(simulation)
        try:
            simulation.run()
        except BaseException as error:
            error.add_note(f"seed {seed}: {config}")
            raise
        pages = simulation.scheduler.pages
        assert isinstance(pages, StateAllocator)
        assert not pages.slots, "states are kept after all is forgotten"
        seen += simulation.seen + runner.seen
    return seen


def check_seen(seen: Counter[str], least: int) -> None:
    names = "saves", "restores", "forks", "preempted", "cached", "abort", "updates", "computed again", "sleeps", "reset"
    assert min(seen[name] for name in names) > least, seen


def test_lanes_continue_from_the_state_of_their_tokens() -> None:
    check_seen(run_seeds(range(150)), 20)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_lanes_continue_from_the_state_of_their_tokens_in_many_schedules() -> None:
    check_seen(run_seeds(range(150, 10_000)), 1000)


# ------------------------------------------------------------------------------------------------ single cases


def test_a_sequence_with_old_weights_does_not_leave_its_state_to_new_ones() -> None:
    """It runs through an update, and another one computes the same tokens again meanwhile."""
    config = small_config(4, num_pages=40)
    simulation = StateSimulation(config, [])
    runner = with_states(simulation)
    old = request(config, 16, 4)  # it leaves with the state of its prompt
    simulation.add(old)
    while old.output_len < 1:
        simulation.advance()
    simulation.drain()
    simulation.scheduler.drop_prefixes()
    assert old in simulation.open
    runner.version, simulation.mixed = 1, {old}
    prompt = old.token_ids[:16]
    for tokens, seed in ((prompt, 1), (prompt + [5, 6], 2)):
        simulation.add(make_sequence(tokens, SamplingParams(max_tokens=12 * seed), config, seed=seed))
        while old in simulation.open or (seed == 2 and simulation.open):
            simulation.advance()
    assert runner.seen["saves"] > 0
    assert runner.seen["restores"] > 0


def test_a_long_prompt_goes_on_next_to_a_stream_of_others_whose_chunks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # blocks of 64
    sizes = {"max_step_tokens": 2048, "page_size": 64, "num_pages": 600, "max_model_len": 20_000, "max_seqs": 8}
    steps = []
    for config in (make_config(**sizes), small_config(8, **sizes)):
        scheduler, runner, rng = Scheduler(config), HashRunner(config), random.Random(0)

        def add(tokens: int) -> Sequence:
            prompt = [rng.randrange(VOCAB) for _ in range(tokens)]  # noqa: B023
            sequence = make_sequence(prompt, SamplingParams(max_tokens=1), config)  # noqa: B023
            scheduler.add(sequence)  # noqa: B023
            return sequence

        oldest, count = add(18_000), 0
        while oldest.computed < 18_000:
            while len(scheduler.waiting) < 4:
                add(1300)
            batch = scheduler.schedule()
            assert batch is not None
            scheduler.update(batch, runner.launch(batch).result)
            count += 1
        steps.append(count)
    assert steps[1] <= steps[0] + 2, steps


def indexed_prefix(pages: StateAllocator, tokens: list[int]) -> list[Node]:
    """Put tokens into the prefix cache, and return the nodes of their pages, which no sequence holds."""
    table: list[int] = []
    assert pages.grow(table, len(tokens))
    pages.index(0, table, tokens, len(tokens))
    nodes = [pages._nodes[page] for page in table]
    pages.release(table)
    return [node for node in nodes if node is not None]


def test_a_prompt_continues_where_a_state_is_kept_or_about_to_be() -> None:
    pages, tokens = StateAllocator(8, 4, 2), list(range(16))
    nodes = indexed_prefix(pages, tokens)
    assert pages.match(tokens, 16) == nodes
    assert pages.start_of(nodes) == 0
    assert pages.take_slot(nodes[1], set()) is not None
    assert pages.start_of(nodes) == 8
    assert pages.start_of(nodes[:1]) == 0
    assert pages.take_slot(nodes[1], set()) is None, "it has one"
    pages.due[3] = nodes[2]
    assert pages.start_of(nodes) == 12
    assert pages.take_slot(nodes[3], set()) is not None
    assert pages.start_of(nodes) == 16
    pages.check()


def test_the_least_recently_matched_state_goes_first_unless_it_is_pinned() -> None:
    pages, tokens = StateAllocator(8, 4, 2), list(range(16))
    nodes = indexed_prefix(pages, tokens)
    first, second = (pages.take_slot(node, set()) for node in nodes[:2])
    assert first is not None
    assert second is not None
    assert pages.take_slot(nodes[2], {first, second}) is None, "both are read in this step"
    assert pages.start_of(nodes[:1]) == 4  # used after the second
    assert pages.take_slot(nodes[2], set()) == second
    assert pages.take_slot(nodes[3], {first}) == second
    assert pages.start_of(nodes[:3]) == 4
    pages.check()


def test_evicted_and_forgotten_prefixes_give_their_slots_back() -> None:
    pages, tokens = StateAllocator(4, 4, 2), list(range(16))
    nodes = indexed_prefix(pages, tokens)
    slots = {pages.take_slot(nodes[at], set()) for at in (1, 3)}
    other: list[int] = []
    assert pages.grow(other, 4)  # evicts the last page
    pages.check()
    assert pages.start_of(pages.match(tokens, 16)) == 8
    assert pages.take_slot(nodes[3], set()) is None, "it is not cached any more"
    assert pages.take_slot(nodes[2], set()) in slots
    pages.release(other)
    pages.drop_index()
    pages.check()
    assert pages.start_of(pages.match(tokens, 16)) == 0
    assert pages.take_slot(nodes[0], set()) is None, "of earlier weights"
    assert {pages.take_slot(node, set()) for node in indexed_prefix(pages, tokens)[:2]} == slots


def test_states_that_a_step_continues_from_are_saved_first() -> None:
    keeper = planning.StateKeeper(2)
    pages = keeper.make_allocator(small_config(2, num_pages=8, page_size=4, max_seqs=2))
    assert isinstance(pages, StateAllocator)
    read, unread, due, wanted = indexed_prefix(pages, list(range(16)))
    slots = [pages.take_slot(node, set()) for node in (read, unread)]
    pages.due.update({0: due, 1: wanted})
    assert keeper._save({read, wanted}) == ((1, slots[1]),), "there is no slot for the other one"
