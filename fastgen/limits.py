"""Limits that depend on the tokens of an answer: reasoning budgets and repetition detection. No torch here."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

ReasoningState = Literal["before", "inside", "over"]


class ReasoningReader(Protocol):
    """Protocol of an object that reads the tokens of an answer and finds its reasoning.

    state: where in the answer the next token is. closing: the text ends with the beginning of a closing mark.
    """

    state: ReasoningState

    @property
    def closing(self) -> bool: ...

    def push(self, ids: Iterable[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A limit on the reasoning in an answer.

    tokens: number of reasoning tokens after which the closing mark is drawn. opens: id of the opening mark; None if
    marks are text, whose tokens may vary. closes: ids to draw for the closing mark. reader: makes the reader of an
    answer.
    """

    tokens: int
    opens: int | None
    closes: tuple[int, ...]
    reader: Callable[[], ReasoningReader]


class RepetitionDetector:
    """Detects outputs whose last tokens repeat a pattern; see `SamplingParams.repetition_detection`.

    A pattern of p tokens occurs `count` times if each of the last p * (count - 1) tokens equals the token p places
    before it. So for each period p there is a run: the number of last tokens with this property. A new token can only
    continue or begin the runs whose period is its distance to an equal token among the last `longest` ones. In most
    texts these are few, however large `longest` is.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._longest, self._count = limits["max_pattern_size"], limits["min_count"]
        self._shortest = limits.get("min_pattern_size") or 1
        self._read = 0  # number of tokens
        self._places: defaultdict[int, deque[int]] = defaultdict(deque)  # recent places of each token
        self._runs: dict[int, int] = {}  # period -> length of its run
        self._repeats = False

    def repeats(self, token_ids: Sequence[int], start: int) -> bool:
        """Return whether the output, token_ids[start:], ends with a repetition. Each token is read once."""
        for at in range(start + self._read, len(token_ids)):
            self._push(token_ids[at])
        return self._repeats

    def _push(self, token: int) -> None:
        at, places, runs = self._read, self._places[token], dict[int, int]()
        self._repeats = False
        while places and at - places[0] > self._longest:
            places.popleft()
        for place in places:
            period = at - place
            if period >= self._shortest:
                runs[period] = run = self._runs.get(period, 0) + 1
                if run >= period * (self._count - 1):
                    self._repeats = True
        places.append(at)
        self._runs, self._read = runs, at + 1
