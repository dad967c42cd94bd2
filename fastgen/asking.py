"""What ranks are asked to do between steps, and how the answers of all are waited for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fastgen.links import Answer, Message
from fastgen.processes import portable, raise_first

AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True, slots=True)
class Do(Message):
    """To ranks: call this method of what a rank has, its runner or its tracer."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Done(Answer):
    """To a Do: what came of it."""

    value: Any = None
    error: Exception | None = None


def do(asked: Do, whose: object) -> Done:
    """Do on a rank what is asked. Where there is too little memory, or a file can not be written, all ranks go on, and
    the error is sent; others are raised."""
    try:
        return Done(asked.number, getattr(whose, asked.method)(*asked.arguments))
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        return Done(asked.number, error=portable(error))


class Asker(ABC):
    """Has ranks do things by numbered messages, and waits for their answers."""

    _numbers: Iterator[int]
    _asked: int
    """How many ranks answer."""

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int:
        """See Runner; the bytes of all ranks."""
        return sum(self._all_do("sleep", tuple(tags), keep_weights))

    def wake(self, tags: Collection[str]) -> None:
        """See Runner."""
        self._all_do("wake", tuple(tags))

    def _all_do(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of the runner returned on each rank; raises what the first of them has raised."""
        outcomes = self._do(Do(next(self._numbers), method, arguments))
        raise_first({rank: done.error for rank, done in outcomes.items()})
        return [done.value for done in outcomes.values()]

    def _answers(self, kind: type[AnswerT], number: int) -> dict[int, AnswerT]:
        """Each rank's answer to the message of a number."""
        answers: dict[int, AnswerT] = {}
        while len(answers) < self._asked:
            rank, message = self._receive()
            if isinstance(message, kind) and message.number == number:
                answers[rank] = message
        return answers

    @abstractmethod
    def _do(self, asked: Do) -> Mapping[int, Done]:
        """What comes of it on each rank."""

    @abstractmethod
    def _receive(self) -> tuple[int, Message]:
        """The next message of a rank; raises where one has failed."""
