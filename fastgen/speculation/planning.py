"""Speculation: drafted tokens that a decode computes in addition to the last one, and keeps while they equal its draws.

A draw is a function of (seed, sample index, position) and the logits, and the logits of a row do not depend on the
other rows of a step. So a speculative decode draws the tokens that plain decodes would draw, to the bit. A draft only
decides how many of them one step finds.

**Drafts are made on the device**, so that the next step is launched before the tokens of this one are read. A lane has
a text there: outputs of earlier requests with its prompt, then its own tokens, to which each step appends. A draft
repeats what followed the longest earlier match of the last tokens (fastgen.kernels.drafts).

**The host plans with upper bounds.** It says how many rows each lane has at most, counts all of them as computed and
pending, and corrects this when it reads how many were kept. Lengths and drafts stay on the device, so that speculative
steps follow each other without a wait. A step of another kind is not scheduled before the speculative step ahead of it
has been read.

No torch here.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from fastgen.engine.admission import LaneTable
from fastgen.engine.interface import PlanFeature
from fastgen.engine.stats import Stats
from fastgen.request import Batch, Prefill, Sequence, StepResult
from fastgen.speculation.options import Speculation

HISTORY = 4096  # maximum number of tokens of earlier outputs in a lane's text
LEAD = 16  # number of prompt tokens before each earlier output, so that its first tokens can be drafted
LONGEST = 32768  # maximum length of a sequence that is sent as a lane's text
GRAPH_COST = 16  # fixed cost of a speculative step with CUDA graphs, in rows
QUIET = 1 / 4  # each result without a draft multiplies the expected chance of one by this
BARREN = 64  # a head that drafts no right token for so many tokens of a sequence drafts for it no more
LEARNING = 1 / 8  # weight of a drafted token in the share of tokens that were right


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The payload of a Batch.

    rows: in a speculative step, which has no prefills, the maximum number of rows of each decode (its last token and
    drafted ones); else empty. lengths: (lane, KV length), which the host's copy takes over, since speculative steps
    advanced only the device's. texts: (lane, start, int32 [n]) of lanes that draft from now on: tokens of earlier
    outputs, and from `start` on their own. drafts: the tokens that the step draws are appended to the texts, and the
    next ones are drafted. limits: of each lane that draws, the number of positions for which it has pages, if the head
    drafts too; else empty.
    """

    rows: tuple[int, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    texts: tuple[tuple[int, int, np.ndarray], ...] = ()
    drafts: bool = False
    limits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafted:
    """The result of a step that drafts, for each lane that draws.

    kept: the number of its tokens, which can be more than one only in a speculative step. guesses: the first of the
    tokens that are drafted next, or -1. verified: the number of drafted tokens that the step computed. drafters: the
    drafter that they came from.
    """

    kept: list[int]
    guesses: list[int]
    verified: list[int]
    drafters: list[int]


@dataclass(slots=True)
class _Learned:
    """The state of a lane's drafts. guess: the first drafted token as of the last result, -1 for none. quiet: number of
    results since one had a draft. rate: estimated share of drafted tokens that are right. barren: number of tokens
    since the head drafted a right one."""

    rate: float
    guess: int = -1
    quiet: int = 0
    barren: int = 0


class OutputHistory:
    """Outputs of earlier requests by their prompts: drafts for other samples, and for later epochs of a training.

    It cannot make an output wrong, whatever weights its tokens come from. limit: tokens, prompts included; the prompts
    whose last output is the oldest are dropped first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens = 0
        self._outputs: OrderedDict[bytes, deque[np.ndarray]] = OrderedDict()

    def add(self, prompt: list[int], output: list[int]) -> None:
        """Keep an output, and drop the oldest ones of its prompt beyond what a lane's text holds."""
        if not self.limit or not output:
            return
        key = _key(prompt)
        if key not in self._outputs:
            self._outputs[key] = deque()
            self.tokens += len(prompt)
        kept = self._outputs[key]
        self._outputs.move_to_end(key)
        new = np.array(output[:HISTORY], dtype=np.int32)
        if any(np.array_equal(new, old) for old in kept):
            return
        kept.append(new)
        self.tokens += len(new)
        while sum(map(len, kept)) > HISTORY:
            self.tokens -= len(kept.popleft())
        while self.tokens > self.limit:
            dropped, outputs = self._outputs.popitem(last=False)
            self.tokens -= len(dropped) // 4 + sum(map(len, outputs))

    def outputs_of(self, prompt: list[int]) -> np.ndarray:
        """Return the outputs of a prompt, the oldest first, each after the end of the prompt and before a -1: int32
        [n], the last HISTORY of them."""
        lead, end = np.array(prompt[-LEAD:], dtype=np.int32), np.array([-1], dtype=np.int32)
        parts = [part for output in self._outputs.get(_key(prompt), ()) for part in (lead, output, end)]
        return np.concatenate([end[:0], *parts])[-HISTORY:]

    def clear(self) -> None:
        """Forget all outputs."""
        self._outputs.clear()
        self.tokens = 0


def _key(prompt: list[int]) -> bytes:
    return np.array(prompt, dtype=np.int32).tobytes()


class Speculator(PlanFeature):
    """The host's side of drafts: which lanes have a text on the device, and how many rows they get.

    padded: a step computes all rows that its lanes may have, used or not, as in CUDA graphs.
    """

    plans_rows = True
    history: OutputHistory

    def __init__(self, options: Speculation, padded: bool, stats: Stats) -> None:
        self.options = options
        self.history = OutputHistory(options.history_tokens)
        self.padded = padded
        self._head = options.head_config
        self._ahead = self._head.ahead if self._head else 0
        self._stats = stats

    def reset(self, lanes: LaneTable) -> None:
        """Forget all but the history."""
        self.in_flight = 0
        self.rate = 0.5  # of all sequences together, with which a new one begins
        self._lanes = lanes
        self._drafting: set[int] = set()  # lanes with a text on the device
        self._moved: set[int] = set()  # lanes whose lengths speculative steps have advanced on the device
        self._learned: dict[int, _Learned] = {}  # by lane, of those that had a text
        self._rows: tuple[int, ...] = ()  # of the next batch; see DraftPlan
        self._texts: list[tuple[int, int, np.ndarray]] = []  # of the next batch; see DraftPlan

    def plan_rows(
        self, decoding: Collection[Sequence], prefills: bool, in_flight: int, room: Callable[[Sequence, int], int]
    ) -> tuple[int, ...] | None:
        self._rows = ()
        if not prefills and len(decoding) <= self.options.most_lanes:
            lacking = [s for s in decoding if s.lane not in self._drafting and speculates(s)]
            if lacking and in_flight:
                return None
            self._send(lacking)
            rows = tuple(
                min(room(sequence, best + self._ahead), best)
                for sequence, best in zip(decoding, self.best_rows(decoding), strict=True)
            )
            if max(rows, default=1) > 1:
                self._rows = rows
                return rows
        return None if self.in_flight else ()

    def chunk(self, chunk: Prefill, num_sequences: int) -> None:
        """Send the texts of the lanes that begin to decode, if steps are likely to be speculative."""
        if chunk.sample and num_sequences <= self.options.most_lanes:
            self._send(self._lanes[lane] for lane in (chunk.lane, *chunk.forks))

    def payload(self, batch: Batch) -> DraftPlan | None:
        if len(batch.sampling) > self.options.most_lanes:
            self._drafting.clear()
            self._texts.clear()
        rows, texts = self._rows, tuple(self._texts)
        self._rows, self._texts = (), []
        lengths: tuple[tuple[int, int], ...] = ()
        if rows:
            self.in_flight += 1
            self._moved.update(batch.decodes)
        elif self._moved:
            moved = [lane for lane in batch.decodes if lane in self._moved]
            lengths = tuple((lane, self._lanes[lane].computed - 1) for lane in moved)
            self._moved.clear()
        drafts = bool(self._drafting)
        limits = tuple(self._lanes[lane].limit for lane in batch.sampling) if self._head_drafts(batch.sampling) else ()
        return DraftPlan(rows, lengths, texts, drafts, limits) if rows or lengths or texts or drafts else None

    def _head_drafts(self, lanes: Collection[int]) -> bool:
        """Return whether the head drafts for one of these lanes."""
        learned = (self._learned[lane] for lane in lanes if lane in self._drafting)
        fits = self._head is not None and len(lanes) <= self._head.most_lanes
        return fits and any(each.barren < BARREN for each in learned)

    def update(self, batch: Batch, result: StepResult) -> None:
        """Correct the upper bounds by how many rows each lane has kept, and learn which drafts were right."""
        drafted, plan, first = result.find(Drafted), batch.find(DraftPlan), 0
        if drafted is None:
            return
        assert plan is not None
        self.in_flight -= bool(plan.rows)
        most = plan.rows or itertools.repeat(1)
        for lane, rows, kept, guess, verified, drafter in zip(
            batch.sampling, most, drafted.kept, drafted.guesses, drafted.verified, drafted.drafters, strict=False
        ):
            sequence = self._lanes[lane]
            sequence.pending -= rows - kept
            sequence.computed -= rows - kept
            self._stats.drafted += verified
            self._stats.accepted += kept - 1
            self.learn(lane, result.tokens[first : first + kept], verified, guess)
            if plan.limits:
                self._count_head(lane, kept, verified if drafter else 0)
            first += kept
        self._stats.saved_steps += first / len(drafted.kept) - 1 if plan.rows else 0

    def _count_head(self, lane: int, kept: int, verified: int) -> None:
        """Count a lane's result while the head drafts. verified: number of drafted tokens of the head."""
        right = kept - 1 if verified else 0
        self._stats.head_drafted += verified
        self._stats.head_accepted += right
        if learned := self._learned.get(lane):
            learned.barren = 0 if right else learned.barren + kept

    def leave(self, sequence: Sequence) -> None:
        self._drafting.discard(sequence.lane)
        self._learned.pop(sequence.lane, None)
        self._moved.discard(sequence.lane)

    def finish(self, sequence: Sequence) -> None:
        self.history.add(sequence.token_ids[: sequence.prompt_len], sequence.output_ids)

    def _send(self, sequences: Iterable[Sequence]) -> None:
        """Put the texts of sequences that speculate into the next batch. All their tokens must be known."""
        for sequence in sequences:
            if speculates(sequence):
                earlier = self.history.outputs_of(sequence.token_ids[: sequence.prompt_len])
                tokens = np.concatenate([earlier, np.array(sequence.token_ids, dtype=np.int32)])
                self._texts.append((sequence.lane, len(earlier), tokens))
                self._drafting.add(sequence.lane)
                self._learned[sequence.lane] = _Learned(self.rate)

    def best_rows(self, sequences: Collection[Sequence]) -> list[int]:
        """Return the maximum number of rows of each sequence, chosen to maximize expected tokens per unit of time."""
        learned = [self._learned[s.lane] for s in sequences if s.lane in self._drafting]
        rates = [(QUIET**each.quiet, each.rate) for each in learned]
        drafting = sum(chance for chance, _ in rates)
        lanes, cost, most = len(sequences), self.options.row_cost or 0.0, self.options.max_draft + 1
        best, best_width, extra = float(lanes), 1, 0.0
        room = self.options.row_limit(lanes) - lanes
        for width in range(2, most + 1):
            drafted = (width - 1) * drafting
            if not 0 < drafted <= room:
                break
            extra += sum(chance * rate ** (width - 1) for chance, rate in rates)
            slower = 1 + cost * (GRAPH_COST + room if self.padded else 1 + drafted) / (1 + cost * lanes)
            if (gain := (lanes + extra) / slower) > best:
                best, best_width = gain, width
        if self.padded and best_width > 1:  # the device shares the rows out
            best_width = min(most, 2 * self.options.row_limit(lanes) // lanes)
        return [best_width if s.lane in self._drafting else 1 for s in sequences]

    def learn(self, lane: int, drawn: list[int], verified: int, guess: int) -> None:
        """Learn from a lane's result. drawn: its tokens. verified: drafted tokens that it computed. guess: the first
        token that is drafted now, -1 for none."""
        learned = self._learned.get(lane)
        if learned is None:  # it does not speculate
            return
        right, tried = int(learned.guess == drawn[0]), int(learned.guess >= 0)
        if verified:
            right, tried = len(drawn) - 1, min(len(drawn), verified)
        if tried:
            weight, share = 1 - (1 - LEARNING) ** tried, right / tried
            learned.rate += (share - learned.rate) * weight
            self.rate += (share - self.rate) * weight / 4
        learned.quiet = 0 if guess >= 0 else learned.quiet + 1
        learned.guess = guess


def speculates(sequence: Sequence) -> bool:
    """Return whether a sequence may draft: its draws must depend on nothing but position and tokens."""
    plain = sequence.mask is None and sequence.thinking is None and not sequence.params.penalized
    return plain and sequence.params.speculate and sequence.length <= LONGEST
