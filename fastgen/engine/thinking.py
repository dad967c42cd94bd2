"""The plan of thinking budgets: it decides in which steps a sequence ends its reasoning. No torch here.

When a budget is used up, the closing mark is drawn as soon as it is among the LIKELY most likely tokens of the
untouched logits, which is usually at the end of a sentence. At the latest, it is drawn a quarter of the budget later,
but no more than LATEST tokens later. A mark of several tokens is drawn when the budget is used up, unless the model may
just have begun one itself.

So a draw depends only on the tokens before it and on its logits. When the host plans a step, it may not have read the
last of these tokens yet. A `Closing` then names the value that this token must have, or must not have, and the device
decides (`ThinkingCloser`). No step waits for the host, and the device does nothing before the budget is used up.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.engine.admission import LaneTable
from fastgen.engine.interface import PlanFeature
from fastgen.limits import ThinkingBudget
from fastgen.request import Batch, Prefill, Sequence

LIKELY = 5
LATEST = 64


@dataclass(frozen=True, slots=True)
class Closing:
    """A lane that draws `token`, if `always` is set or it is among the LIKELY most likely tokens.

    last: what the lane's last token must not be or, if `unless` is False, must be; -1: no token.
    """

    lane: int
    token: int
    always: bool
    last: int = -1
    unless: bool = True


@dataclass(frozen=True, slots=True)
class ClosingPlan:
    """The payload of a Batch: the lanes whose reasoning a step may close."""

    closings: tuple[Closing, ...]


class _Watch:
    """The reasoning of a sequence whose marks are single tokens. A place is the index of a token in the output.

    due: the first place for which `closing` must be called; None if the reasoning is over.
    """

    def __init__(self, sequence: Sequence, budget: ThinkingBudget) -> None:
        self._sequence, self._budget, self._reader = sequence, budget, budget.reader()
        self._read = 0  # number of output tokens that were checked for marks
        self._begin: int | None = None  # the place of the first token of the reasoning
        self._close = budget.closes[0]
        self.due: int | None = 0

    def closing(self, place: int) -> Closing | None:
        """Return the Closing for the step that draws the token at a place, if it needs one, and set `due`."""
        sequence, budget = self._sequence, self._budget.tokens
        unread = place > sequence.output_len
        self._read_to(sequence.output_len)
        if self._begin is None:
            self.due = None if self._reader.state == "over" else place + max(budget, 1)
            if self.due is None or budget or not unread:
                return None
            assert self._budget.opens is not None
            return Closing(sequence.lane, self._close, True, last=self._budget.opens, unless=False)
        if self.due is None:
            return None
        late = place - self._begin - budget
        if self._close in sequence.stop_ids:  # min_tokens forbids it before
            late = min(late, place - sequence.params.min_tokens)
        self.due = place + max(-late, 1)
        if late < 0:
            return None
        always = late >= min(budget // 4, LATEST)
        return Closing(sequence.lane, self._close, always, last=self._close if unread else -1)

    def _read_to(self, end: int) -> None:
        """Look for marks in the tokens before a place."""
        ids, start = self._sequence.token_ids, self._sequence.prompt_len
        while self._begin is None and self._reader.state != "over":
            if self._reader.state == "inside":
                self._begin = self._read
            elif self._read == end:
                return
            else:
                self._reader.push((ids[start + self._read],))
                self._read += 1
        if self._close in ids[start + self._read : start + end]:
            self.due = None
        self._read = end


class _WatchText(_Watch):
    """The reasoning of a sequence whose marks are text. Every decision ignores the last token, so that it does not
    depend on whether that token was read. The model's own mark is seen in time, since it begins in earlier tokens."""

    def __init__(self, sequence: Sequence, budget: ThinkingBudget) -> None:
        super().__init__(sequence, budget)
        self._next = 0  # the first place without a decision
        self._mark: int | None = None  # the place of the first token of the mark

    def closing(self, place: int) -> Closing | None:
        while self._next <= place and self._mark is None and self.due is not None:
            self._read_to(self._next - 1)
            used = self._begin is not None and self._next - self._begin >= max(self._budget.tokens, 1)
            if self._reader.state == "over":
                self.due = None
            elif used and not self._reader.closing:
                self._mark = self._next
            self._next += 1
        if self.due is None:
            return None
        self.due = place + 1
        if self._mark is None:
            return None
        at, mark = place - self._mark, self._budget.closes
        if at == len(mark) - 1:
            self.due = None
        return Closing(self._sequence.lane, mark[at], always=True)

    def _read_to(self, end: int) -> None:
        ids, start = self._sequence.token_ids, self._sequence.prompt_len
        if self._begin is None and self._reader.state == "inside":
            self._begin = 0
        for at in range(self._read, end):
            self._reader.push((ids[start + at],))
            self._read = at + 1
            if self._begin is None and self._reader.state == "inside":
                self._begin = self._read


class ThinkingBudgets(PlanFeature):
    """Plans the steps that close the reasoning of sequences with a ThinkingBudget."""

    def reset(self, lanes: LaneTable) -> None:
        self._lanes = lanes
        self._watched: dict[int, _Watch] = {}  # by lane
        self._pause = 0  # number of steps until something is due: a step draws at most one token of a lane

    def chunk(self, chunk: Prefill, num_sequences: int) -> None:
        """Watch the lanes that begin to draw."""
        for lane in (chunk.lane, *chunk.forks) if chunk.sample else ():
            sequence = self._lanes[lane]
            if (budget := sequence.thinking) is not None:
                kind = _WatchText if budget.opens is None else _Watch
                self._watched[lane] = kind(sequence, budget)
                self._pause = 0

    def payload(self, batch: Batch) -> ClosingPlan | None:
        if self._pause:
            self._pause -= 1
            return None
        if not self._watched:
            return None
        closings, drawing, nexts = [], set(batch.sampling), []
        for lane, watch in list(self._watched.items()):
            place = self._lanes[lane].length - 1 - self._lanes[lane].prompt_len
            if watch.due is not None and place >= watch.due and lane in drawing:
                closings.append(watch.closing(place))
            if watch.due is None:
                del self._watched[lane]
            else:
                nexts.append(watch.due - place - 1)
        self._pause = max(min(nexts, default=0), 0)
        plan = tuple(closing for closing in closings if closing is not None)
        return ClosingPlan(plan) if plan else None

    def leave(self, sequence: Sequence) -> None:
        self._watched.pop(sequence.lane, None)
