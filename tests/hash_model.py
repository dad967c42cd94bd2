"""A model that is a hash of all it reads, and a simulation that drives the scheduler over it as Generator does.

The "KV" of a token is a hash of the KV before it, its id and its position; the next token is a hash of the lane's seed
and of every KV value that is read back through the page table. So a wrong page, a stale page, a wrong position, a lost
token or a lane that was not started changes the answer, and `expected` knows the right one without any schedule.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np

from fastgen.config import EngineConfig
from fastgen.request import Batch, LaneStart, SamplingParams, Scored, Sequence, Status, StepResult
from fastgen.scheduler import Expectation, Scheduler

VOCAB = 40  # two words of mask
JUNK = -1  # what memory holds before anything is written


class InterruptError(BaseException):
    """Something like Ctrl-C: not an Exception."""


# ------------------------------------------------------------------------------------------------ the model


def kv_value(before: int, token: int, position: int) -> int:
    return hash((before, token, position))


def kv_values(tokens: list[int]) -> list[int]:
    values: list[int] = []
    for position, token in enumerate(tokens):
        values.append(kv_value(values[-1] if values else 0, token, position))
    return values


def draw(state: int, allowed: list[int]) -> tuple[int, float, float]:
    """The token, its logprob and its raw logprob."""
    return allowed[state % len(allowed)] if allowed else -1, -(state % 997) / 997, -(state % 991) / 991


def prompt_logprob(values: list[int], target: int, temperature: float) -> float:
    return -(hash((*values, target, temperature)) % 983) / 983


def text(tokens: list[int]) -> str:
    return "".join("abcd"[token % 4] for token in tokens)


def text_stop(sequence: Sequence, output: list[int]) -> str | None:
    """The stop string that an answer ends in."""
    if len(output) <= sequence.params.min_tokens:
        return None
    return next((stop for stop in sequence.params.stop_strings if text(output[-len(stop) :]) == stop), None)


@dataclass
class HashMask:
    """Allows half of the tokens, depending on what was said; after so many tokens it allows none or raises."""

    seed: int
    forbids: int | None = None
    fill_raises: int | None = None
    accept_raises: int | None = None
    said: list[int] = field(default_factory=list)
    trip: Callable[[], None] = lambda: None  # may raise an InterruptError

    def allowed(self) -> list[int]:
        self.trip()
        if len(self.said) == self.fill_raises:
            raise RuntimeError("no rows today")
        state = hash((self.seed, *self.said))
        return [] if len(self.said) == self.forbids else [token for token in range(VOCAB) if state >> token & 1]

    def fill(self, row: np.ndarray) -> None:
        assert row.tolist() == [-1, -1], "the row arrives with all bits set"
        bits = sum(1 << token for token in self.allowed())
        row.view(np.uint32)[:] = bits & 0xFFFFFFFF, bits >> 32

    def accept(self, token: int) -> None:
        self.trip()
        if len(self.said) == self.accept_raises:
            raise RuntimeError("not that token")
        self.said.append(token)


# ----------------------------------------------------------------------------------------------- the oracle


@dataclass
class Outcome:
    """What a Sequence has to be when it has ended."""

    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @classmethod
    def of(cls, sequence: Sequence) -> Outcome:
        return cls(**{name: getattr(sequence, name) for name in cls.__dataclass_fields__})


def expected(sequence: Sequence) -> Outcome:
    """What must become of a sequence that nobody aborts: tokens one after the other, with the whole context at hand."""
    prompt_len, mask, tokens = sequence.prompt_len, deepcopy(sequence.mask), sequence.token_ids[: sequence.prompt_len]
    out, values = Outcome(tokens, finish_reason="length"), kv_values(tokens)
    if sequence.score_start is not None:
        out.prompt_logprobs = [
            prompt_logprob(values[:at], tokens[at], sequence.score_temperature)
            if at >= max(1, sequence.score_start)
            else nan
            for at in range(prompt_len)
        ]
    while len(tokens) < sequence.max_len:
        counted = tokens if sequence.params.penalized else ()
        state = hash((sequence.seed, sequence.index, *values, *counted))
        try:
            allowed = list(range(VOCAB)) if mask is None else mask.allowed()  # type: ignore[attr-defined]
            token, logprob, raw = draw(state, allowed)
            if mask is not None and token >= 0:
                mask.accept(token)
        except RuntimeError as error:
            out.finish_reason, out.error = "error", f"the mask raised {error!r}"
            break
        if token < 0:
            out.finish_reason, out.error = "error", "the mask allowed no token"
            break
        values.append(kv_value(values[-1], token, len(tokens)))
        tokens.append(token)
        out.logprobs.append(logprob)
        out.raw_logprobs.append(raw)
        output = tokens[prompt_len:]
        stopped = token in sequence.stop_ids and len(output) > sequence.params.min_tokens
        string = text_stop(sequence, output)
        if stopped or string is not None:
            out.finish_reason, out.stop_reason = "stop", token if string is None else string
            break
    return out


# ----------------------------------------------------------------------------------------------- the runner


@dataclass
class Launched:
    batch: Batch
    states: list[int]  # what the forward pass came to, of each lane that draws
    result: StepResult


class HashRunner:
    """Keeps what the real runner keeps of a lane and hears what it hears: nothing but Batches."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.memory = [JUNK] * (config.num_pages * config.page_size)
        slots = -(-config.max_model_len // config.page_size) + 1
        self.table = [[0] * slots for _ in range(config.max_seqs)]
        self.kv_len = [0] * config.max_seqs
        self.last_token = [JUNK] * config.max_seqs
        self.started: list[LaneStart | None] = [None] * config.max_seqs
        self.counted: list[list[int]] = [[] for _ in range(config.max_seqs)]

    def launch(self, batch: Batch) -> Launched:
        for start in batch.starts:
            self.started[start.lane], self.counted[start.lane] = start, list(start.token_ids)
        for lane, slot, page in batch.pages:
            self.table[lane][slot] = page
        for lane in batch.decodes:
            self._write(lane, self.kv_len[lane], (self.last_token[lane],))
        for chunk in batch.prefills:
            self._write(chunk.lane, chunk.start, chunk.tokens)
        launched = Launched(batch, [self._state(lane) for lane in batch.sampling], StepResult([], [], []))
        self._score(launched)
        if not batch.masked:
            self.sample(launched)
        return launched

    def sample(self, launched: Launched, masks: np.ndarray | None = None) -> None:
        result, every = launched.result, list(range(VOCAB))
        for row, (lane, state) in enumerate(zip(launched.batch.sampling, launched.states, strict=True)):
            words = [] if masks is None else masks[row].view(np.uint32).tolist()
            allowed = [t for t in every if words[t // 32] >> t % 32 & 1] if words else every
            token, logprob, raw = draw(state, allowed)
            self.last_token[lane] = token
            self.counted[lane].append(token)
            result.tokens.append(token)
            result.logprobs.append(logprob)
            result.raw_logprobs.append(raw)

    def _row(self, lane: int, position: int) -> int:
        page_size = self.config.page_size
        return self.table[lane][position // page_size] * page_size + position % page_size

    def _write(self, lane: int, start: int, tokens: tuple[int, ...]) -> None:
        before = self.memory[self._row(lane, start - 1)] if start else 0
        for position, token in enumerate(tokens, start):
            before = self.memory[self._row(lane, position)] = kv_value(before, token, position)
        self.kv_len[lane] = start + len(tokens)

    def _read(self, lane: int, length: int) -> list[int]:
        return [self.memory[self._row(lane, position)] for position in range(length)]

    def _state(self, lane: int) -> int:
        start = self.started[lane]
        assert start is not None
        counted = self.counted[lane] if start.params.penalized else ()
        return hash((start.seed, start.index, *self._read(lane, self.kv_len[lane]), *counted))

    def _score(self, launched: Launched) -> None:
        for chunk in launched.batch.prefills:
            if (wanted := chunk.score) is not None:
                first = chunk.start + wanted.row + 1
                assert first + len(wanted.targets) <= chunk.start + len(chunk.tokens) + 1, "a row that is not there"
                logprobs = [
                    prompt_logprob(self._read(chunk.lane, at), target, wanted.temperature)
                    for at, target in enumerate(wanted.targets, first)
                ]
                launched.result.scored.append(Scored(chunk.lane, first, logprobs))


# ------------------------------------------------------------------------------------------- the simulation


class WrongAnswerError(AssertionError):
    """A sequence has come to something else than it has to."""


class Simulation:
    """The loop of Generator over the hash model: schedule, launch, read the step before.

    Every step of it asserts what holds of any schedule; `seen` counts what happened. trouble: the probability, at each
    place where one may come, of an interrupt. check: also look into every batch, and have the scheduler check itself
    after every operation.
    """

    def __init__(
        self,
        config: EngineConfig,
        arrivals: list[tuple[int, Sequence]],
        *,
        rng: random.Random | None = None,
        aborts: float = 0.0,
        trouble: float = 0.0,
        scheduler: Scheduler | None = None,
        check: bool = True,
    ) -> None:
        self.config = config
        self.scheduler = scheduler or Scheduler(config)
        self.runner = HashRunner(config)
        self.arrivals = deque(sorted(arrivals, key=lambda pair: pair[0]))
        self.rng = rng or random.Random(0)
        self.aborts, self.trouble, self.checks = aborts, trouble, check
        self.expected = {sequence: expected(sequence) for _, sequence in arrivals}
        self.order: dict[Sequence, int] = {}  # of arrival
        self.open: dict[Sequence, int] = {}  # sequences whose end is not seen yet -> tokens seen of them
        self.in_flight: Launched | None = None
        self.batches: list[Batch] = []
        self.seen: Counter[str] = Counter()

    def run(self) -> Simulation:
        work = sum(sequence.max_len for _, sequence in self.arrivals)
        limit = 1000 + 20 * work * max(1, len(self.arrivals))  # turns; preempted sequences compute everything again
        turn = 0
        while self.arrivals or self.scheduler.busy:
            assert turn < limit, "it goes on forever"
            while self.arrivals and self.arrivals[0][0] <= turn:
                self.add(self.arrivals.popleft()[1])
            if self.open and self.rng.random() < self.aborts:
                self.abort(self.rng.choice(list(self.open)))
            if self.scheduler.busy:
                self.advance()
            turn += 1
        assert not self.open, "sequences without an end"
        assert self.scheduler.pages.num_free == self.config.num_pages, "pages are held at the end"
        assert not any(self.scheduler.lanes), "lanes are held at the end"
        assert self.scheduler.wants_more
        assert self.scheduler.schedule() is None
        assert not self.seen["asked a mask after the end"]
        self.seen["preempted"] += self.scheduler.preemptions
        return self

    def add(self, sequence: Sequence) -> None:
        self.order[sequence] = len(self.order)
        self.open[sequence] = 0
        if isinstance(sequence.mask, HashMask):
            sequence.mask.trip = self._trip
        self.scheduler.add(sequence)
        self._check()

    def advance(self) -> None:
        """Generator._advance."""
        try:
            batch = self._schedule()
            self._trip()
            launched = self.runner.launch(batch) if batch else None
            self._trip()
            self._read()
            if launched and batch and batch.masked:
                masks = self.scheduler.fill_masks(batch, VOCAB)
                self._check()
                self.runner.sample(launched, masks)
            self.in_flight = launched
        except InterruptError:
            self._recover()

    def settle(self) -> None:
        try:
            self._read()
        except InterruptError:
            self._recover()

    def abort(self, sequence: Sequence) -> None:
        self.settle()
        self.scheduler.abort(sequence)
        self._check()
        if sequence in self.open:
            self._close(sequence)

    # Below: the parts of the loop, and what must hold of each.

    def _schedule(self) -> Batch | None:
        scheduler = self.scheduler
        before = list(scheduler.running)
        counts = {sequence: sequence.preemptions for sequence in before}
        settled, ready = not scheduler.in_flight, [s for s in before if _can_decode(s)]
        batch = scheduler.schedule()
        self._check()
        preempted = [s for s in before if s.preemptions > counts[s]]
        assert settled or not preempted, "preempted while a step is in flight"
        assert not preempted or preempted == before[-len(preempted) :], "somebody older than the youngest was preempted"
        if batch is None:
            assert not settled or not scheduler.busy, "nothing to run and nothing to wait for"
            return None
        if self.checks:
            kept = [s for s in before if s not in preempted]
            self._check_batch(batch, kept, [s for s in kept if s in ready])
        self.batches.append(batch)
        self.seen["steps"] += 1
        self.seen["masked"] += batch.masked
        self.seen["mixed"] += bool(batch.decodes and batch.prefills)
        self.seen["chunked"] += any(chunk.start for chunk in batch.prefills)
        return batch

    def _check_batch(self, batch: Batch, kept: list[Sequence], ready: list[Sequence]) -> None:
        """kept: what ran before the batch was scheduled and was not preempted; ready: what of it could decode."""
        on = {lane: s for lane, s in enumerate(self.scheduler.lanes) if s is not None}
        lanes = [*batch.decodes, *(chunk.lane for chunk in batch.prefills)]
        assert 0 < batch.num_tokens <= self.config.max_step_tokens, "over the token budget"
        assert [on[lane] for lane in batch.decodes] == ready, "a decode waits"
        assert len(set(lanes)) == len(lanes), "a lane is twice in a step"
        assert all(on[lane].status is Status.RUNNING for lane in lanes), "an ended sequence goes on"
        assert all(on[lane].computed < on[lane].max_len for lane in batch.sampling), "a known end is overrun"
        assert all(chunk.tokens for chunk in batch.prefills)
        assert batch.masked == any(on[lane].mask is not None for lane in batch.sampling)
        assert all(on[lane].pages[slot] == page for lane, slot, page in batch.pages), "a page of somebody else"
        if self.batches and batch.decodes == self.batches[-1].decodes:
            assert batch.decodes is self.batches[-1].decodes, "the same lanes in another object"
        assert sorted(start.lane for start in batch.starts) == sorted(s.lane for s in on.values() if s not in kept)

    def _read(self) -> None:
        if self.in_flight is None:
            return
        self._trip()  # lost on the way
        launched, self.in_flight = self.in_flight, None
        lanes = [self.scheduler.lanes[lane] for lane in launched.batch.sampling]
        self.seen["dropped"] += sum(s is not None and s.status is Status.FINISHED for s in lanes)
        changed = self.scheduler.update(launched.batch, launched.result)
        assert len({id(sequence) for sequence in changed}) == len(changed)
        self._check()
        for sequence in changed:
            self._see(sequence)

    def _see(self, sequence: Sequence) -> None:
        """Generator._see: the end of a sequence, or a stop string that only its reader finds."""
        self.open[sequence] = sequence.output_len
        string = text_stop(sequence, sequence.output_ids) if sequence.error is None else None
        if string is not None and sequence.status is Status.RUNNING:
            self.scheduler.finish(sequence, "stop", string)
            self.seen["stopped late"] += 1
            self._check()
        elif string is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", string
        if sequence.status is Status.FINISHED:
            self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        del self.open[sequence]
        if isinstance(sequence.mask, HashMask):
            sequence.mask.trip = lambda: self.seen.update(["asked a mask after the end"])
        self.seen[str(sequence.finish_reason)] += 1
        if sequence.error is not None:
            self.seen[sequence.error.partition("(")[2] or sequence.error] += 1
        got, right = Outcome.of(sequence), self.expected[sequence]
        if got.finish_reason == "abort":  # an answer that was cut short: as far as it has come, it is right
            length, known = len(got.token_ids), len(got.token_ids) - sequence.prompt_len
            right = Outcome(
                right.token_ids[:length], right.logprobs[:known], right.raw_logprobs[:known], finish_reason="abort"
            )
            got.prompt_logprobs = []
        if got != right:
            raise WrongAnswerError(f"request {self.order[sequence]}: {got} instead of {right}")

    def _trip(self) -> None:
        if self.trouble and self.rng.random() < self.trouble:
            raise InterruptError

    def _recover(self) -> None:
        self.in_flight = None
        self.scheduler.rewind()
        self._check()
        assert not self.scheduler.running
        self.seen["interrupted"] += 1
        for sequence, told in list(self.open.items()):  # read, but not seen
            if sequence.status is Status.FINISHED or sequence.output_len > told:
                self._see_later(sequence)

    def _see_later(self, sequence: Sequence) -> None:
        """See a sequence that rewind has made wait: a stop string then ends it like an abort does."""
        if sequence.status is Status.WAITING and text_stop(sequence, sequence.output_ids) is not None:
            self.scheduler.abort(sequence)
        self._see(sequence)

    def _check(self) -> None:
        if self.checks:
            self.scheduler.check()
            line = [self.order[s] for s in (*self.scheduler.running, *self.scheduler.waiting)]
            assert line == sorted(line), "the order of arrival is lost"


def _can_decode(sequence: Sequence) -> bool:
    known = sequence.computed >= sequence.prefill_len
    return known and sequence.length < sequence.max_len and sequence.status is Status.RUNNING


# --------------------------------------------------------------------------------------------------- set-up


def make_config(**changed: Any) -> EngineConfig:
    """A small engine; max_model_len is lowered to what the pool holds less a page, as EngineConfig.make does."""
    given = {"max_model_len": 64, "max_seqs": 4, "max_step_tokens": 16, "page_size": 4, "num_pages": 64} | changed
    given["max_model_len"] = min(given["max_model_len"], (given["num_pages"] - 1) * given["page_size"])
    return EngineConfig(device="cpu", dtype="float32", attention="reference", **given)


def hopeful(config: EngineConfig) -> Scheduler:
    """A scheduler that expects no answer to get long, so that pages run out."""
    return Scheduler(config, Expectation(average=0, least=0, weight=0, exact=False))


def make_sequence(
    prompt: list[int],
    params: SamplingParams,
    config: EngineConfig,
    *,
    index: int = 0,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    score: tuple[int, float] | None = None,
) -> Sequence:
    """A Sequence as Generator makes it. score: (first position, temperature)."""
    tokens = config.max_model_len if params.max_tokens is None else params.max_tokens
    sequence = Sequence(
        request_id=0,
        index=index,
        params=params,
        token_ids=list(prompt),
        prompt_len=len(prompt),
        max_len=min(len(prompt) + tokens, config.max_model_len),
        seed=seed,
        stop_ids=stop_ids,
        mask=deepcopy(params.mask),
    )
    if score is not None and index == 0:
        sequence.score_start, sequence.score_temperature = score
        sequence.prompt_logprobs = [nan] * len(prompt)
    return sequence
