"""A model that hashes all it reads, with a runner over it, and an oracle of its outputs.

The "KV" of a token is a hash of the KV before it, its id and its position; the next token is a hash of the lane's seed
and of every KV value that is read back through the page table. So a wrong page, a stale page, a wrong position, a lost
token or a lane that was not started changes the output, and `expected` computes the right output without a schedule.
The hash of a token's KV depends on the version of the weights too, so that a page that outlived an update is noticed.
The KV of the token POISON, and of all that follow it, is POISONED, and no token can be drawn from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import numpy as np

from fastgen.drawn import Drawn
from fastgen.engine.admission import LengthEstimate
from fastgen.engine.host_pages import PageMoves
from fastgen.engine.options import EngineConfig
from fastgen.engine.prompt_scores import Scored, ScorePlan
from fastgen.engine.scheduler import Scheduler
from fastgen.prompt_score import PromptScore
from fastgen.request import Batch, LaneStart, SamplingParams, Sequence, StepResult
from fastgen.speculation.planning import Drafted, DraftPlan

VOCAB = 40  # a mask has two words
POISON = VOCAB  # a token whose KV is not finite; it is never drawn
POISONED = -2
JUNK = -1  # the contents of memory before anything is written


class TroubleError(BaseException):
    """An error that is not an Exception, as signal handlers may raise."""


# ------------------------------------------------------------------------------------------------ the model


def kv_value(before: int, token: int, position: int, version: int = 0) -> int:
    poisoned = before == POISONED or token == POISON
    return POISONED if poisoned else hash((before, token, position, version))


def kv_values(tokens: list[int], version: int = 0) -> list[int]:
    values: list[int] = []
    for position, token in enumerate(tokens):
        values.append(kv_value(values[-1] if values else 0, token, position, version))
    return values


def state_of(seed: int, index: int, values: list[int], counted: SequenceOf[int]) -> int:
    """Return the state from which a token is drawn. values: the KV of the context. counted: tokens of penalties."""
    return POISONED if POISONED in values else hash((seed, index, *values, *counted))


def draw(state: int, allowed: list[int]) -> tuple[int, float, float, float]:
    """Return a token, its logprob, its untruncated logprob and its raw logprob."""
    if state == POISONED:
        allowed = []
    logprobs = -(state % 997) / 997, -(state % 977) / 977, -(state % 991) / 991
    return allowed[state % len(allowed)] if allowed else -1, *logprobs


def prompt_logprob(values: list[int], target: int, temperature: float) -> float:
    return -(hash((*values, target, temperature)) % 983) / 983


def text(tokens: list[int]) -> str:
    return "".join("abcd"[token % 4] for token in tokens)


def text_stop(sequence: Sequence, output: list[int]) -> str | None:
    """Return the stop string at the end of an output, if any."""
    if len(output) <= sequence.params.min_tokens:
        return None
    return next((stop for stop in sequence.params.stop_strings if text(output[-len(stop) :]) == stop), None)


@dataclass
class HashMask:
    """A mask that allows half of the tokens, depending on those before; after some tokens it allows none or raises."""

    seed: int
    forbids: int | None = None
    fill_raises: int | None = None
    accept_raises: int | None = None
    said: list[int] = field(default_factory=list)
    trip: Callable[[], None] = lambda: None  # may raise a TroubleError

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
    """The state in which a Sequence must end."""

    token_ids: list[int]
    drawn: Drawn = field(default_factory=Drawn)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @classmethod
    def of(cls, sequence: Sequence) -> Outcome:
        scores = [] if sequence.score is None else sequence.score.logprobs
        names = cls.__dataclass_fields__.keys() - {"prompt_logprobs"}
        return cls(**{name: getattr(sequence, name) for name in names}, prompt_logprobs=scores)


def drawn_first(drawn: Drawn, count: int) -> Drawn:
    """Return a copy of the values of the first `count` tokens."""
    return Drawn(**{name: values[:count] for name, values in drawn.lists().items()})


def expected(sequence: Sequence, version: int = 0, known: int = 0) -> Outcome:
    """Return the outcome of a sequence that is not aborted, computed one token after the other from the whole context.

    version: of the weights. known: the number of output tokens that exist already, drawn with any weights.
    """
    prompt_len, tokens = sequence.prompt_len, sequence.token_ids[: sequence.prompt_len + known]
    said = tokens[prompt_len:]
    mask = replace(sequence.mask, said=said, trip=lambda: None) if isinstance(sequence.mask, HashMask) else None
    out = Outcome(tokens, drawn_first(sequence.drawn, known), finish_reason="length")
    values = kv_values(tokens, version)
    if (score := sequence.score) is not None:
        out.prompt_logprobs = [
            prompt_logprob(values[:at], tokens[at], score.temperature) if at >= max(1, score.start) else nan
            for at in range(prompt_len)
        ]
    while len(tokens) < sequence.max_len:
        counted = tokens if sequence.params.penalized else ()
        state = state_of(sequence.seed, sequence.index, values, counted)
        try:
            allowed = list(range(VOCAB)) if mask is None else mask.allowed()
            token, logprob, untruncated, raw = draw(state, allowed)
            if mask is not None and token >= 0:
                mask.accept(token)
        except RuntimeError as error:
            out.finish_reason, out.error = "error", f"the mask raised {error!r}"
            break
        if token < 0:
            reason = "the logits are not finite" if mask is None else "the mask allowed no token"
            out.finish_reason, out.error = "error", reason
            break
        values.append(kv_value(values[-1], token, len(tokens), version))
        tokens.append(token)
        out.drawn.append((logprob, untruncated, raw))
        output = tokens[prompt_len:]
        stopped = token in sequence.stop_ids and len(output) > sequence.params.min_tokens
        string = text_stop(sequence, output)
        if stopped or string is not None:
            out.finish_reason, out.stop_reason = "stop", token if string is None else string
            break
    return out


# ----------------------------------------------------------------------------------------------- the runner


def num_tokens(batch: Batch) -> int:
    """Return the number of tokens that a step computes, without drafted ones."""
    return len(batch.decodes) + sum(len(chunk.tokens) for chunk in batch.prefills)


def draft_plan(batch: Batch) -> DraftPlan:
    return batch.find(DraftPlan) or DraftPlan()


def page_moves(batch: Batch) -> PageMoves:
    return batch.find(PageMoves) or PageMoves()


@dataclass
class Launched:
    batch: Batch
    rows: list[tuple[int, ...]]  # tokens of each decode: its last one and drafted ones
    states: list[list[int]]  # results of the forward pass for the rows of each lane that draws
    result: StepResult


class HashRunner:
    """A runner that keeps the state of lanes as the real runner does, and knows only Batches.

    Its drafts are right, wrong, or right up to some token, at random.
    """

    def __init__(self, config: EngineConfig, rng: random.Random | None = None) -> None:
        self.config = config
        self.rng = rng or random.Random(0)
        self.texts: dict[int, list[int]] = {}
        self.drafts: list[tuple[int, ...]] = [()] * config.max_seqs
        self.version = 0  # of the weights
        self.memory = [JUNK] * (config.num_pages * config.page_size)
        self.host = [[JUNK] * config.page_size for _ in range(config.host_pages)]
        slots = -(-config.max_model_len // config.page_size) + 1
        self.table = [[0] * slots for _ in range(config.max_seqs)]
        self.kv_len = [0] * config.max_seqs
        self.last_token = [JUNK] * config.max_seqs
        self.started: list[LaneStart | None] = [None] * config.max_seqs
        self.counted: list[list[int]] = [[] for _ in range(config.max_seqs)]
        self.trip: Callable[[], None] = lambda: None  # may raise a TroubleError

    def launch(self, batch: Batch) -> Launched:
        plan = draft_plan(batch)
        self._move_pages(page_moves(batch), batch.fresh)
        for start in batch.starts:
            self.started[start.lane], self.counted[start.lane] = start, list(start.token_ids)
            self.texts.pop(start.lane, None)
        for lane, first, pages in batch.page_updates:
            self.table[lane][first : first + len(pages)] = pages
        if not plan.drafts:
            self.texts.clear()
        for lane, start, tokens in plan.texts:
            self.texts[lane], self.drafts[lane] = tokens[start:].tolist(), ()
        for lane, length in plan.lengths:
            self.kv_len[lane] = length
        self.trip()
        most = plan.rows or [1] * len(batch.decodes)
        rows = [
            (self.last_token[lane], *self.drafts[lane][: count - 1])
            for lane, count in zip(batch.decodes, most, strict=True)
        ]
        while self.config.speculate and sum(map(len, rows)) > self.config.speculate.max_rows and plan.rows:
            longest = max(range(len(rows)), key=lambda row: len(rows[row]))
            rows[longest] = rows[longest][:-1]
        for lane, tokens in zip(batch.decodes, rows, strict=True):
            self._write(lane, self.kv_len[lane], tokens)
        for chunk in batch.prefills:
            self._write(chunk.lane, chunk.start, chunk.tokens.tolist())
            for lane in chunk.forks:
                self.kv_len[lane] = self.kv_len[chunk.lane]
        for source, page in batch.copies:
            self.memory[self._page(page)] = self.memory[self._page(source)]
        states = [
            [self._state(lane, lane, end) for end in range(1 - len(tokens), 1)]
            for lane, tokens in zip(batch.decodes, rows, strict=True)
        ]
        for chunk in batch.prefills:
            if chunk.sample:
                states += [[self._state(lane, chunk.lane)] for lane in (chunk.lane, *chunk.forks)]
        launched = Launched(batch, rows, states, StepResult())
        self._score(launched)
        if not batch.masked:
            self.sample(launched)
        return launched

    def forget(self) -> None:
        """Drop all contents of the pool and of the host tier."""
        self.memory = [JUNK] * len(self.memory)
        self.host = [[JUNK] * self.config.page_size for _ in self.host]

    def _move_pages(self, moves: PageMoves, fresh: tuple[int, ...]) -> None:
        for page, slot in moves.saves:
            self.host[slot] = self.memory[self._page(page)]
            self.trip()
        for slot, page in moves.loads:
            self.memory[self._page(page)] = self.host[slot]
            self.trip()
        for page in fresh:
            self.memory[self._page(page)] = [JUNK] * self.config.page_size

    def _page(self, page: int) -> slice:
        return slice(page * self.config.page_size, (page + 1) * self.config.page_size)

    def sample(self, launched: Launched, masks: np.ndarray | None = None) -> None:
        result, every, plan = launched.result, list(range(VOCAB)), launched.batch.find(DraftPlan)
        drafted = Drafted([], [], [], [])
        if plan is not None and plan.drafts and launched.batch.sampling:
            result.features.append(drafted)
        for row, (lane, states) in enumerate(zip(launched.batch.sampling, launched.states, strict=True)):
            words = [] if masks is None else masks[row].view(np.uint32).tolist()
            allowed = [t for t in every if words[t // 32] >> t % 32 & 1] if words else every
            drafts = launched.rows[row][1:] if row < len(launched.rows) else ()
            for kept, state in enumerate(states, 1):
                token, *logprobs = draw(state, allowed)
                self.last_token[lane] = token
                self.counted[lane].append(token)
                result.tokens.append(token)
                result.lanes += (lane,)
                result.append(tuple(logprobs))
                if token not in drafts[kept - 1 : kept]:
                    break
            self.kv_len[lane] -= len(states) - kept
            if drafted in result.features:
                drafted.verified.append(len(drafts))
                self._draft(lane, result.tokens[-kept:], drafted)

    def _draft(self, lane: int, tokens: list[int], drafted: Drafted) -> None:
        """Append to a lane's text, and draft its next tokens."""
        if lane in self.texts:
            self.texts[lane] += tokens
            if -1 not in self.texts[lane]:
                values = self._read(lane, self.kv_len[lane])
                assert values == kv_values(self.texts[lane][:-1], self.version) or self.version, "another text"
        self.drafts[lane] = self._foresee(lane) if lane in self.texts else ()
        drafted.kept.append(len(tokens))
        drafted.drafters.append(0)
        drafted.guesses.append(self.drafts[lane][0] if self.drafts[lane] else -1)

    def _foresee(self, lane: int) -> tuple[int, ...]:
        """Return the next tokens, of which some may be wrong."""
        start, last = self.started[lane], self.last_token[lane]
        assert start is not None
        values = self._read(lane, self.kv_len[lane])
        found: list[int] = []
        for _ in range(self.rng.choice((0, 1, 3, 7))):
            values.append(kv_value(values[-1] if values else 0, last, len(values), self.version))
            last = draw(state_of(start.seed, start.index, values, ()), list(range(VOCAB)))[0]
            if last < 0:
                break
            found.append(last)
        if found and self.rng.random() < 0.5:
            found[self.rng.randrange(len(found))] = self.rng.randrange(VOCAB)
        return tuple(found)

    def _row(self, lane: int, position: int) -> int:
        page_size = self.config.page_size
        return self.table[lane][position // page_size] * page_size + position % page_size

    def _write(self, lane: int, start: int, tokens: SequenceOf[int]) -> None:
        before = self.memory[self._row(lane, start - 1)] if start else 0
        for position, token in enumerate(tokens, start):
            before = self.memory[self._row(lane, position)] = kv_value(before, token, position, self.version)
        self.kv_len[lane] = start + len(tokens)

    def _read(self, lane: int, length: int) -> list[int]:
        return [self.memory[self._row(lane, position)] for position in range(length)]

    def _state(self, lane: int, row_of: int, end: int = 0) -> int:
        """Return the state that a lane draws from: of its own row, or of the lane that it is a fork of. end: minus
        the number of tokens after the row."""
        start = self.started[lane]
        assert start is not None
        counted = self.counted[lane] if start.params.penalized else ()
        return state_of(start.seed, start.index, self._read(row_of, self.kv_len[row_of] + end), counted)

    def _score(self, launched: Launched) -> None:
        plan = launched.batch.find(ScorePlan) or ScorePlan(())
        scored = {chunk.lane: chunk for chunk in plan.chunks}
        for chunk in launched.batch.prefills:
            if (wanted := scored.get(chunk.lane)) is not None:
                first = chunk.start + wanted.row + 1
                assert first + len(wanted.targets) <= chunk.start + len(chunk.tokens) + 1, "a row that is not there"
                logprobs = [
                    prompt_logprob(self._read(chunk.lane, at), target, wanted.temperature)
                    for at, target in enumerate(wanted.targets.tolist(), first)
                ]
                launched.result.features.append(Scored(chunk.lane, first, logprobs))


# --------------------------------------------------------------------------------------------------- set-up


CONFIG: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention": "cpu", "memory_fraction": 0.9, "prefix_cache": True,
    "host_pages": 0, "tensor_parallel": 1, "deterministic": False, "kernels": "torch", "context_given": False,
    "kv_cache_dtype": "float32",
}  # fmt: skip


def make_config(**changed: Any) -> EngineConfig:
    """Return the config of a small engine. max_model_len is at most the pool less a page, as in EngineConfig.make."""
    given = {"max_seqs": 4, "max_step_tokens": 16, "page_size": 4, "num_pages": 64, "max_model_len": 64} | changed
    given["max_model_len"] = min(given["max_model_len"], (given["num_pages"] - 1) * given["page_size"])
    return EngineConfig(**CONFIG | {"max_prefill_tokens": given["max_step_tokens"]} | given)


class InexactEstimate(LengthEstimate):
    """An estimate that predicts the average for sequences that run to max_len too, so that pages may run out."""

    def predict(self, sequence: Sequence) -> int:
        return round(self.average)


def hopeful(config: EngineConfig) -> Scheduler:
    """Return a scheduler that predicts empty outputs, so that pages run out."""
    return Scheduler(config, InexactEstimate(average=0, weight=0))


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
    """Return a Sequence as Generator makes it. score: (first position, temperature)."""
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
        sequence.score = PromptScore(*score, [nan] * len(prompt))
    return sequence
