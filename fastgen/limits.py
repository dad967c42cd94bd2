"""Limits of an answer that its own tokens reach: a budget of reasoning, and a pattern that repeats. No torch here."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

ReasoningState = Literal["before", "inside", "over"]


class ReasoningReader(Protocol):
    """Protocol of an object that reads the tokens of an answer, and knows whether they are inside the reasoning.

    closing: the text ends with the beginning of a closing mark.
    """

    state: ReasoningState

    @property
    def closing(self) -> bool: ...

    def push(self, ids: Iterable[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The number of reasoning tokens after which an answer is to go on with the closing mark.

    opens: id of the opening mark; None: a mark is text, whose tokens are not known beforehand. closes: ids to draw for
    the closing mark. reader: makes the reader of an answer.
    """

    tokens: int
    opens: int | None
    closes: tuple[int, ...]
    reader: Callable[[], ReasoningReader]


class RepetitionDetector:
    """Finds out whether the last tokens of an output repeat a pattern, as `SamplingParams.repetition_detection` says.

    A pattern of p tokens is repeated `count` times if each of the last p (count - 1) tokens equals the token p places
    before it. So a token continues or begins only the runs of the periods at which it occurred before, among the last
    `longest` tokens. These are few in most texts, whatever `longest` is.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._longest, self._count = limits["max_pattern_size"], limits["min_count"]
        self._shortest = limits.get("min_pattern_size") or 1
        self._read = 0  # number of tokens
        self._places: defaultdict[int, deque[int]] = defaultdict(deque)  # recent places of each token
        self._runs: dict[int, int] = {}  # period -> number of last tokens that equal the token one period before
        self._repeats = False

    def repeats(self, token_ids: Sequence[int], start: int) -> bool:
        """Return whether the output token_ids[start:] ends with a repetition. Each token is read once."""
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
