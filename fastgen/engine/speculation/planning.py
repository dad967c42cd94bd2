"""Speculation: drafted tokens that a decode computes beside the last one, and keeps while they equal its draws.

A draw is a function of (seed, sample index, position) and the logits, and the logits of a row do not depend on the
other rows of a step. So a speculative decode draws the tokens that plain decodes would draw, to the bit. A draft only
decides how many of them one step finds.

**Drafts are made on the device**, so that the next step is launched before the tokens of this one are read. A lane has
a text there: outputs of earlier requests with its prompt, then its own tokens, to which each step appends. A draft
repeats what followed the longest earlier match of the last tokens (fastgen.kernels.drafts).

**The host plans with upper bounds.** It says how many rows each lane has at most, counts all of them as computed and
pending, and corrects this when it reads how many were kept. Lengths and drafts stay on the device, so that speculative
steps follow each other without a wait. Any other step behind one waits until it is read.

No torch here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fastgen.option import option, options_of
from fastgen.request import Batch, Sequence

HISTORY = 4096  # most tokens of earlier outputs in a lane's text
LEAD = 16  # tokens of the prompt before each earlier output, so that its first tokens can be drafted
LONGEST = 32768  # most tokens of a sequence that is sent as a lane's text
BESIDES = 16  # fixed cost of a speculative step with CUDA graphs, in rows
QUIET = 1 / 4  # factor for each result without a draft by which the next one is less likely
LEARNING = 1 / 8  # weight of a drafted token in the share of tokens that were right


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The options of speculation.

    max_draft: the most drafted tokens of a sequence in a step. max_rows: the most tokens of a speculative step, drafted
    ones included. row_cost: the time of one more token in a step, as a share of the time of a step. max_rows=0,
    row_cost=None: as they suit the device. history_tokens: tokens of earlier requests that are kept for drafts; 0:
    drafts come from a sequence's own tokens.
    """

    max_draft: int = option(15, low=1, high=63)
    max_rows: int = option(0, low=0, high=256)
    row_cost: float | None = option(None, low=0)
    history_tokens: int = option(2**22, low=0)

    @classmethod
    def of(cls, given: object) -> Speculation | None:
        """Return the options that `Generator(speculate=...)` stands for; None: no speculation. Raises TypeError or
        ValueError for other values."""
        named = {"auto": cls(), "ngram": cls(history_tokens=0), "off": None, False: None, None: None}
        if isinstance(given, str | bool | None) and given in named:
            return named[given]
        if not isinstance(given, Speculation):
            raise ValueError(f"speculate is {given!r}; it must be 'auto', 'ngram', 'off' (False) or a Speculation")
        for name, each in options_of(cls).items():
            each.check(getattr(given, name))
        return given

    @property
    def most_lanes(self) -> int:
        """The most lanes of a speculative step."""
        return self.max_rows // 2

    def rows(self, lanes: int) -> int:
        """Return the most rows of a step of so many lanes."""
        return min(self.max_rows, lanes * (self.max_draft + 1))


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The payload of a Batch.

    rows: of a speculative step, which has no prefills: the most rows of each decode, its last token and drafted ones;
    else empty. lengths: (lane, KV length), which speculative steps advanced on the device. texts: (lane, start, int32
    [n]) of lanes that draft from now on: tokens of earlier outputs, and from `start` on their own. drafts: the tokens
    that the step draws are appended to the texts, and the next ones are drafted.
    """

    rows: tuple[int, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    texts: tuple[tuple[int, int, np.ndarray], ...] = ()
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class Drafted:
    """The result of a step that drafts, for each lane that draws.

    kept: the number of its tokens, which can be more than one only in a speculative step. guesses: the first of the
    tokens that are drafted next, or -1. verified: the number of drafted tokens that the step computed.
    """

    kept: list[int]
    guesses: list[int]
    verified: list[int]


@dataclass(slots=True)
class _Learned:
    """The state of a lane's drafts. guess: the first drafted token as of the last result, -1 for none. quiet: number of
    results since one had a draft. rate: estimated share of drafted tokens that are right."""

    rate: float
    guess: int = -1
    quiet: int = 0


class History:
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
        """Return the outputs of a prompt, the oldest first, each behind the end of the prompt and before a -1: int32
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


class Speculator:
    """The host's side of drafts: which lanes have a text on the device, and how many rows they get.

    padded: a step computes all rows that its lanes may have, used or not, as in CUDA graphs. in_flight: speculative
    steps that are not read. moved: lanes whose lengths steps have advanced on the device alone.
    """

    def __init__(self, options: Speculation, history: History, padded: bool) -> None:
        self.options = options
        self.history = history
        self.padded = padded
        self.in_flight = 0
        self.rate = 0.5  # of all sequences together, with which a new one begins
        self.moved: set[int] = set()
        self._lanes: set[int] = set()  # with a text on the device
        self._learned: dict[int, _Learned] = {}  # of the lanes that had one
        self._texts: list[tuple[int, int, np.ndarray]] = []  # to send, see Batch

    def leave(self, lane: int) -> None:
        """Forget a lane whose sequence leaves it."""
        self._lanes.discard(lane)
        self._learned.pop(lane, None)
        self.moved.discard(lane)
        self._texts = [text for text in self._texts if text[0] != lane]

    def send(self, sequences: Iterable[Sequence]) -> None:
        """Put the texts of sequences that speculate into the next batch. All their tokens must be known."""
        for sequence in sequences:
            if speculates(sequence):
                earlier = self.history.outputs_of(sequence.token_ids[: sequence.prompt_len])
                tokens = np.concatenate([earlier, np.array(sequence.token_ids, dtype=np.int32)])
                self._texts.append((sequence.lane, len(earlier), tokens))
                self._lanes.add(sequence.lane)
                self._learned[sequence.lane] = _Learned(self.rate)

    def lacking(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences that speculate and have no text on the device."""
        return [s for s in sequences if s.lane not in self._lanes and speculates(s)]

    def take_plan(
        self, rows: tuple[int, ...], decodes: tuple[int, ...], on: Mapping[int, Sequence], sampling: int
    ) -> tuple[DraftPlan, ...]:
        """Return the payload, if there is one, of a step with these `rows` of its decodes, in which `sampling` lanes
        draw. on: the sequences of the decodes, by lane, if lanes have `moved`."""
        if sampling > self.options.most_lanes:
            self._lanes.clear()
            self._texts.clear()
        texts, self._texts = tuple(self._texts), []
        lengths: tuple[tuple[int, int], ...] = ()
        if rows:
            self.in_flight += 1
            self.moved.update(decodes)
        elif self.moved:
            lengths = tuple((lane, on[lane].computed - 1) for lane in decodes if lane in self.moved)
            self.moved.clear()
        drafts = bool(self._lanes)
        return (DraftPlan(rows, lengths, texts, drafts),) if rows or lengths or texts or drafts else ()

    def rows(self, sequences: Collection[Sequence]) -> list[int]:
        """Return the most rows of each sequence: the number that maximizes expected tokens per unit of time."""
        known = [self._learned[s.lane] for s in sequences if s.lane in self._lanes]
        rates = [(QUIET**each.quiet, each.rate) for each in known]
        drafting = sum(chance for chance, _ in rates)
        lanes, cost, most = len(sequences), self.options.row_cost or 0.0, self.options.max_draft + 1
        best, best_width, extra = float(lanes), 1, 0.0
        room = self.options.rows(lanes) - lanes
        for width in range(2, most + 1):
            drafted = (width - 1) * drafting
            if not 0 < drafted <= room:
                break
            extra += sum(chance * rate ** (width - 1) for chance, rate in rates)
            slower = 1 + cost * (BESIDES + room if self.padded else 1 + drafted) / (1 + cost * lanes)
            if (gain := (lanes + extra) / slower) > best:
                best, best_width = gain, width
        if self.padded and best_width > 1:  # the device shares the rows out
            best_width = min(most, 2 * self.options.rows(lanes) // lanes)
        return [best_width if s.lane in self._lanes else 1 for s in sequences]

    def learn(self, lane: int, drawn: list[int], verified: int, guess: int) -> None:
        """Learn from a lane's result. drawn: its tokens. verified: drafted tokens that it computed. guess: the first
        token that is drafted now, -1 for none."""
        known = self._learned.get(lane)
        if known is None:  # it does not speculate
            return
        right, tried = int(known.guess == drawn[0]), int(known.guess >= 0)
        if verified:
            right, tried = len(drawn) - 1, min(len(drawn), verified)
        if tried:
            weight, found = 1 - (1 - LEARNING) ** tried, right / tried
            known.rate += (found - known.rate) * weight
            self.rate += (found - self.rate) * weight / 4
        known.quiet = 0 if guess >= 0 else known.quiet + 1
        known.guess = guess


def speculates(sequence: Sequence) -> bool:
    """Return whether a sequence may draft: its draws must depend on nothing but position and tokens."""
    plain = sequence.mask is None and not sequence.params.penalized
    return plain and sequence.params.speculate and sequence.length <= LONGEST


def kept_lanes(batch: Batch, drafted: Drafted) -> list[int]:
    """Return the lane of each token of a speculative step's result."""
    return [lane for lane, kept in zip(batch.decodes, drafted.kept, strict=True) for _ in range(kept)]
