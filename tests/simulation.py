"""A simulation that drives the scheduler over the hash model as Generator does, and checks all results."""

from __future__ import annotations

import random
from collections import Counter, deque
from operator import attrgetter, itemgetter
from typing import Any

from hash_model import (
    VOCAB,
    HashMask,
    HashRunner,
    Launched,
    Outcome,
    TroubleError,
    draft_plan,
    drawn_first,
    expected,
    make_sequence,
    num_tokens,
    page_moves,
    text_stop,
)
from invariants import check_scheduler

from fastgen.engine.options import EngineConfig
from fastgen.engine.scheduler import MAX_PREFILLS, RETRY_STEPS, Scheduler
from fastgen.request import Batch, SamplingParams, Sequence, Status

BY_PRIORITY = attrgetter("priority")  # of sequences; sorted and min keep the order of arrival within one
TURNS_TO_LEAVE = 6  # from the step that computes the last token of a sequence until its pages are free


class Simulation:
    """The loop of Generator over the hash model: schedule, launch, collect the previous step, update.

    Every step asserts the invariants of any schedule; `seen` counts events. trouble: the probability of an exception at
    each place where one may be raised. aborts, updates, sleeps: the probabilities of these at each turn. waves: the
    scheduler is told when all have arrived.

    **Waiting.** The oldest sequence of the most urgent ones that run is never preempted, so that the steps to its end
    are bounded by its own tokens (`_check_progress`). So, with equal priorities, each sequence waits no longer than all
    before it take one after the other. And the first in the queue waits only for the next attempt to admit it if it and
    all running sequences fit at their max_len.
    """

    def __init__(
        self,
        config: EngineConfig,
        arrivals: list[tuple[int, Sequence]],
        *,
        rng: random.Random | None = None,
        aborts: float = 0.0,
        trouble: float = 0.0,
        updates: float = 0.0,
        sleeps: float = 0.0,
        waves: bool = False,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.config = config
        self.scheduler = scheduler or Scheduler(config)
        self.runner = HashRunner(config, rng)
        self.arrivals = deque(sorted(arrivals, key=lambda pair: pair[0]))
        self.rng = rng or random.Random(0)
        self.aborts, self.trouble, self.updates, self.sleeps = aborts, trouble, updates, sleeps
        self.waves = waves
        self.expected = {sequence: expected(sequence) for _, sequence in arrivals}
        self.order: dict[Sequence, int] = {}  # of arrival
        self.open: dict[Sequence, int] = {}  # unfinished sequences -> number of tokens processed
        self.in_flight: Launched | None = None
        self.batches: list[Batch] = []
        self.seen: Counter[str] = Counter()
        self.runner.trip = self._trip
        self.mixed: set[Sequence] = set()  # with KV of several weight versions: not known to the oracle
        self.oldest: Sequence | None = None  # of the open ones
        self.turns_left = 0  # in which the oldest must end
        self.passed = 0  # steps in which the first in the queue waited without a reason

    def run(self) -> Simulation:
        turn = 0
        while self.arrivals or self.scheduler.busy:
            while self.arrivals and self.arrivals[0][0] <= turn:
                self.add(self.arrivals.popleft()[1])
            if self.waves:
                self.scheduler.complete = not self.arrivals
            if self.open and self.rng.random() < self.aborts:
                self.abort(self.rng.choice(list(self.open)))
            if self.rng.random() < self.updates:
                self.update_weights()
            if self.rng.random() < self.sleeps:
                self.sleep()
            if self.scheduler.busy:
                self.advance()
                self._check_progress()
            turn += 1
        assert not self.open, "sequences without an end"
        assert self.scheduler.pages.available == self.config.num_pages, "pages are held at the end"
        assert not self.scheduler.pages.references
        assert not any(self.scheduler.lanes.sequences), "lanes are held at the end"
        assert self.scheduler.wants_more
        assert self.scheduler.schedule() is None
        assert not self.seen["asked a mask after the end"]
        self.seen["preempted"] += self.scheduler.stats.preemptions
        self.seen["cached"] += self.scheduler.stats.cached_tokens
        self.scheduler.drop_prefixes()
        self._check()
        assert not self.scheduler.pages.root.children, "pages are cached after all is forgotten"
        return self

    def add(self, sequence: Sequence) -> None:
        if sequence not in self.expected:
            self.expected[sequence] = expected(sequence, self.runner.version, sequence.output_len)
        self.order[sequence] = len(self.order)
        self.seen["resumed"] += sequence.output_len > 0
        self.open[sequence] = sequence.output_len
        if isinstance(sequence.mask, HashMask):
            sequence.mask.trip = self._trip
        self.scheduler.add(sequence)
        self._check()

    def advance(self) -> None:
        """Do what Loop.advance does."""
        try:
            batch = self._schedule()
            self._trip()
            launched = self.runner.launch(batch) if batch else None
            self._trip()
            self._collect()
            if launched and batch and batch.masked:
                masks = self.scheduler.token_masks(batch, VOCAB)
                self._check()
                self.runner.sample(launched, masks)
            self.in_flight = launched
        except TroubleError:
            self._reset()

    def drain(self) -> None:
        try:
            self._collect()
        except TroubleError:
            self._reset()

    def abort(self, sequence: Sequence) -> None:
        self.drain()
        if sequence in self.open:
            self.scheduler.finish(sequence, "abort")
            self._check()
            self._close(sequence)

    def update_weights(self) -> None:
        """Update the weights between two steps. Running sequences keep their KV, or compute it again."""
        self.drain()
        self.oldest = None  # it may have to compute everything again
        recompute, running = self.rng.random() < 0.5, len(self.scheduler.running)
        try:
            self.scheduler.drop_prefixes()
            self._trip()
            if recompute:
                self.scheduler.preempt_all()
                self._trip()
        except TroubleError:  # the weights are torn, until another update is complete
            self._reset()
        self.seen["computed again"] += running - len(self.scheduler.running)
        self._check()
        self.runner.version += 1
        self.seen["updates"] += 1
        self.mixed = set() if recompute else {sequence for sequence in self.open if sequence.lane >= 0}
        for sequence in [*self.open, *(sequence for _, sequence in self.arrivals)]:
            self.expected[sequence] = expected(sequence, self.runner.version, sequence.output_len)

    def sleep(self) -> None:
        """Drop the memory of the KV pool and of the host tier, if no sequence is open."""
        self.drain()
        if self.open:
            return
        self.runner.forget()
        self.scheduler.drop_prefixes()
        self._check()
        self.seen["sleeps"] += 1

    # Below: the parts of the loop, with their invariants.

    def _schedule(self) -> Batch | None:
        scheduler = self.scheduler
        before = list(scheduler.running)
        counts = {sequence: sequence.preemptions for sequence in before}
        drained, ready = not scheduler.in_flight, [s for s in before if _can_decode(s)]
        covered = scheduler.reservations.growth <= scheduler.pages.available
        batch = scheduler.schedule()
        self._check()
        preempted = [s for s in before if s.preemptions > counts[s]]
        assert drained or not preempted, "preempted while a step is in flight"
        assert not covered or not preempted, "preempted though the growth of all that run had room"
        last = sorted(before, key=BY_PRIORITY)[len(before) - len(preempted) :]
        assert {*preempted} == {*last}, "somebody older than the youngest, or more urgent, was preempted"
        if batch is None:
            assert not drained or not scheduler.busy, "nothing to run and nothing to wait for"
            return None
        self._check_queue(batch)
        self._check_oldest(batch, before)
        kept = [s for s in before if s not in preempted]
        self._check_batch(batch, kept, [s for s in kept if s in ready])
        self.batches.append(batch)
        self.seen["steps"] += 1
        self.seen["masked"] += batch.masked
        self.seen["speculative"] += bool(draft_plan(batch).rows)
        self.seen["mixed"] += bool(batch.decodes and batch.prefills)
        self.seen["chunked"] += any(chunk.start for chunk in batch.prefills)
        self.seen["forks"] += sum(len(chunk.forks) for chunk in batch.prefills)
        moves = page_moves(batch)
        for name, moved in (("saves", moves.saves), ("loads", moves.loads), ("copies", batch.copies)):
            self.seen[name] += len(moved)
        return batch

    def _check_batch(self, batch: Batch, kept: list[Sequence], ready: list[Sequence]) -> None:
        """Check a batch. kept: sequences that ran before it and were not preempted; ready: those of them that could
        decode."""
        on = {lane: s for lane, s in enumerate(self.scheduler.lanes.sequences) if s is not None}
        lanes = [*batch.decodes, *(lane for chunk in batch.prefills for lane in (chunk.lane, *chunk.forks))]
        assert 0 < num_tokens(batch) <= self.config.max_step_tokens, "over the token budget"
        prefilled = sum(len(chunk.tokens) for chunk in batch.prefills)
        assert not batch.decodes or prefilled <= self.config.max_prefill_tokens, "a step of decodes has too long chunks"
        assert {on[lane] for lane in batch.decodes} == {*ready}, "a decode waits"
        assert len(set(lanes)) == len(lanes), "a lane is twice in a step"
        assert all(on[lane].status is Status.RUNNING for lane in lanes), "an ended sequence goes on"
        assert all(on[lane].computed < on[lane].max_len for lane in batch.sampling), "a known end is overrun"
        assert all(len(chunk.tokens) for chunk in batch.prefills)
        assert not (draft_plan(batch).rows and batch.prefills)
        assert len(draft_plan(batch).rows) in (0, len(batch.decodes))
        assert all(on[lane].computed <= on[lane].limit for lane in batch.decodes)
        assert batch.masked == any(on[lane].mask is not None for lane in batch.sampling)
        for lane, first, pages in batch.page_updates:
            assert on[lane].pages[first : first + len(pages)] == list(pages), "a page of somebody else"
        if self.batches and batch.decodes == self.batches[-1].decodes:
            assert batch.decodes is self.batches[-1].decodes, "the same lanes in another object"
        for chunk in batch.prefills:
            assert all(on[lane].token_ids == on[chunk.lane].token_ids for lane in chunk.forks), "a fork of another"
            assert chunk.sample or not chunk.forks
        self._check_pages(batch)
        assert sorted(start.lane for start in batch.starts) == sorted(s.lane for s in on.values() if s not in kept)

    def _check_queue(self, batch: Batch) -> None:
        """Check that the first in the queue does not wait if it and all running sequences fit at their max_len."""
        scheduler, config = self.scheduler, self.config
        prefills = num_tokens(batch) - len(batch.decodes)
        full = (
            not scheduler.waiting or not scheduler.lanes.free or prefills == config.prefill_tokens(len(batch.decodes))
        )
        first = next(iter(scheduler.waiting), None)
        if full or first is None or scheduler.complete:
            self.passed = 0
            return
        if sum(s.priority <= first.priority for s in scheduler.prefilling) == MAX_PREFILLS:
            self.passed = 0
            return
        every = (first, *scheduler.running)
        fits = sum(scheduler.pages.count(sequence.max_len) for sequence in every) <= config.num_pages
        self.passed = self.passed + 1 if fits else 0
        assert self.passed <= RETRY_STEPS, "a sequence waits though there is room for it"

    def _check_oldest(self, batch: Batch, before: list[Sequence]) -> None:
        """Check that the oldest of the most urgent sequences in their prefill gets half of a step's prefill tokens,
        without those of more urgent ones that begin in this step, or all that it lacks."""
        counts = {self.scheduler.lanes[chunk.lane]: len(chunk.tokens) for chunk in batch.prefills}
        in_prefill = [s for s in before if s.lane >= 0 and (s in counts or s.prefill_left > 0)]
        if in_prefill:
            oldest = min(in_prefill, key=BY_PRIORITY)
            others = sum(count for s, count in counts.items() if s.priority >= oldest.priority)
            assert 2 * counts.get(oldest, 0) >= others or oldest.prefill_left <= 0, "a prompt starves"

    def _check_progress(self) -> None:
        """Check that the oldest of the most urgent sequences that run ends in time."""
        oldest = min([s for s in self.open if s.lane >= 0] or self.open, key=BY_PRIORITY, default=None)
        if oldest is not self.oldest:
            self.oldest = oldest
            if oldest is not None:
                known = len(oldest.token_ids)
                # It gets at least half of what the decodes of all other lanes leave of a step.
                prefills = -(-2 * known // self.config.prefill_tokens(self.config.max_seqs - 1))
                decodes = 2 * (oldest.max_len - known)  # twice, since each may wait for a page
                self.turns_left = RETRY_STEPS + prefills + decodes + TURNS_TO_LEAVE
        self.turns_left -= 1
        assert self.oldest is None or self.turns_left >= 0, "the oldest sequence waits for something"

    def _check_pages(self, batch: Batch) -> None:
        """Check that each page written before the step computes is written once, and not read after that."""
        moves = page_moves(batch)
        slots = [slot for _, slot in moves.saves]
        written = [*batch.fresh, *(page for _, page in moves.loads), *(page for _, page in batch.copies)]
        assert len(set(slots)) == len(slots)
        assert len(set(written)) == len(written)
        copied = {source for source, _ in batch.copies}
        assert not copied & {page for pairs in (moves.loads, batch.copies) for _, page in pairs}
        held = {page for sequence in self.scheduler.running for page in sequence.pages}
        assert held >= copied | set(written), "a page that nobody holds"
        self.seen["saved and loaded at once"] += not {slot for slot, _ in moves.loads}.isdisjoint(slots)

    def _collect(self) -> None:
        if self.in_flight is None:
            return
        self._trip()  # the result is lost
        launched, self.in_flight = self.in_flight, None
        lanes = [self.scheduler.lanes[lane] for lane in launched.result.lanes]
        self.seen["dropped"] += sum(s.status is Status.FINISHED for s in lanes)
        changed = self.scheduler.update(launched.batch, launched.result)
        assert len({id(sequence) for sequence in changed}) == len(changed)
        self._check()
        self._trip()  # after the tokens were read, before they are processed
        for sequence in changed:
            self._update_output(sequence)

    def _update_output(self, sequence: Sequence) -> None:
        """Do what Loop.update_output does: find stop strings, and close finished sequences."""
        string, output = None, sequence.output_ids
        for count in range(self.open[sequence] + 1, len(output) + 1):
            string = text_stop(sequence, output[:count])
            if string is not None:
                self.seen["cut"] += count < len(output)
                sequence.cut(count)
                break
        if string is not None and sequence.status is not Status.FINISHED:
            self.scheduler.finish(sequence, "stop", string)
            self.seen["stopped late"] += 1
            self._check()
        elif string is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", string
        self.open[sequence] = sequence.output_len
        if sequence.status is Status.FINISHED:
            self._close(sequence)
        elif sequence not in self.mixed:
            known, right = len(sequence.token_ids), self.expected[sequence].token_ids
            assert sequence.token_ids == right[:known], f"request {self.order[sequence]} has wrong tokens"

    def _close(self, sequence: Sequence) -> None:
        del self.open[sequence]
        if isinstance(sequence.mask, HashMask):
            sequence.mask.trip = lambda: self.seen.update(["asked a mask after the end"])
        self.seen[str(sequence.finish_reason)] += 1
        if sequence.error is not None:
            self.seen[sequence.error.partition("(")[2] or sequence.error] += 1
        if sequence in self.mixed:
            assert {*map(len, sequence.drawn.lists().values())} == {sequence.output_len}
            return
        got, right = Outcome.of(sequence), self.expected[sequence]
        if got.finish_reason == "abort":  # the oracle's output up to the abort
            length, known = len(got.token_ids), len(got.token_ids) - sequence.prompt_len
            right = Outcome(right.token_ids[:length], drawn_first(right.drawn, known), finish_reason="abort")
            got.prompt_logprobs = []
        assert got == right, f"request {self.order[sequence]} has a wrong outcome"

    def _trip(self) -> None:
        if self.trouble and self.rng.random() < self.trouble:
            raise TroubleError

    def _reset(self) -> None:
        """Do what Loop.reset does."""
        self.in_flight = self.oldest = None
        self.scheduler.reset(self.open)
        self._check()
        assert not self.scheduler.running
        self.seen["reset"] += 1
        for sequence, processed in list(self.open.items()):  # read, but not processed
            if sequence.status is Status.FINISHED or sequence.output_len > processed:
                self._update_output(sequence)

    def _check(self) -> None:
        check_scheduler(self.scheduler)
        line = [(s.priority, self.order[s]) for s in (*self.scheduler.running, *self.scheduler.waiting)]
        assert sorted(line, key=itemgetter(0)) == sorted(line), "the order of arrival is lost"


def _can_decode(sequence: Sequence) -> bool:
    known = sequence.computed >= sequence.prefill_len
    return known and sequence.length < sequence.max_len and sequence.status is Status.RUNNING


def request(config: EngineConfig, prompt_len: int, max_tokens: int | None, seed: int = 0, **other: Any) -> Sequence:
    """Return a sequence whose prompt depends on the seed. other: fields of SamplingParams."""
    prompt = [(7 * seed + 3 * at) % VOCAB for at in range(prompt_len)]
    score = (0, 1.0) if other.get("prompt_logprobs") is not None else None
    return make_sequence(prompt, SamplingParams(max_tokens=max_tokens, **other), config, seed=seed, score=score)


def begin(config: EngineConfig, *sequences: Sequence, **other: Any) -> Simulation:
    """Return a simulation to which sequences are added, and which has not run."""
    simulation = Simulation(config, [], **other)
    for sequence in sequences:
        simulation.add(sequence)
    return simulation


def run(config: EngineConfig, *sequences: Sequence, **other: Any) -> Simulation:
    """Run sequences that all arrive at the first turn, and check their outcomes."""
    return begin(config, *sequences, **other).run()
