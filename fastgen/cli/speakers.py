"""Who answers in fgchat: a model in this process. remote.py has one behind a server."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

from fastgen.request import Message, SamplingParams

if TYPE_CHECKING:
    from fastgen.generator import Generator

Result = TypeVar("Result")


class RefusedError(ValueError):
    """These messages can not be answered; others may be."""


class Interrupt:
    """Context manager in which Ctrl-C sets `asked`, and raises KeyboardInterrupt only in a function that `call` runs.

    It does that once: impatience must not break what follows, nor the conversation.
    """

    asked = False

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True

    def call(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns, with Python's own handler, which the engine defers to the end of a step."""
        if self.asked:
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return function()
        except KeyboardInterrupt:
            self.asked = True
            raise
        finally:
            signal.signal(signal.SIGINT, self._on_sigint)


@dataclass
class Reply:
    """An answer. finish_reason: as in Completion; error: why it ends where it does, if that is an error."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


class Speaker(Protocol):
    """max_tokens: of an answer, None for no limit; max_model_len: the context, None where it is not known."""

    max_tokens: int | None
    max_model_len: int | None

    def check(self, messages: Sequence[Message]) -> None:
        """Raises ValueError or OSError where no message can be answered, as far as these ones show it."""

    def answer(self, messages: Sequence[Message], say: Callable[[str], None], interrupt: Interrupt) -> Reply:
        """Answer the last message; `say` shows pieces of the text as they come. Raises RefusedError."""


class Local:
    """A Generator in this process. Ctrl-C stops an answer when the engine has finished its step."""

    def __init__(self, gen: Generator, params: SamplingParams) -> None:
        self.max_tokens: int | None = params.max_tokens
        self.max_model_len: int | None = gen.max_model_len
        self._gen, self._params = gen, params

    def check(self, messages: Sequence[Message]) -> None:
        self._gen.abort([self._gen.add(messages, self._params)])

    def answer(self, messages: Sequence[Message], say: Callable[[str], None], interrupt: Interrupt) -> Reply:
        try:
            rid = self._gen.add(messages, self._params)
        except ValueError as error:
            raise RefusedError(str(error).split(";")[0]) from error  # then comes a remedy for programmers
        reply = Reply()
        while reply.finish_reason is None and not interrupt.asked:
            for event in self._gen.step():
                reply.text += event.text
                reply.num_tokens += len(event.token_ids)
                reply.finish_reason, reply.error = event.finish_reason, event.error
                say(event.text)
        if reply.finish_reason is None:
            self._stop(rid, reply, say)
        return reply

    def _stop(self, rid: str | int, reply: Reply, say: Callable[[str], None]) -> None:
        """Abort, and show what the engine had and had not yet told."""
        outputs = self._gen.abort([rid])
        for output in outputs:
            completion = output.completions[0]
            say(completion.text[len(reply.text) :])
            reply.text, reply.num_tokens = completion.text, len(completion.token_ids)
        if not outputs:  # it ended by itself just before; the end is still to be told
            for event in self._gen.step():
                if event.id == rid:
                    say(event.text)
                    reply.text += event.text
                    reply.num_tokens += len(event.token_ids)
        reply.finish_reason = "abort"
