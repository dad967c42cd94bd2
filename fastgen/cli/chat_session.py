"""A conversation of fgchat while it goes on: messages are answered by a backend, and answers shown on the console."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass, field

from fastgen.cli.chat_backends import Backend, RefusedError, Reply, ServerError
from fastgen.cli.chat_console import Console
from fastgen.cli.chat_files import Conversation, Round, message
from fastgen.cli.command import one_line
from fastgen.engine.interrupts import DeferredInterrupt


@dataclass
class Chat:
    """A conversation that goes on. refused: True once a command or message was refused."""

    backend: Backend
    console: Console
    conversation: Conversation = field(default_factory=Conversation)
    refused: bool = False

    @property
    def rounds(self) -> list[Round]:
        return self.conversation.rounds

    def ask(self, text: str) -> None:
        """Run one round. It is added to the conversation if there is any text of an answer.

        The first Ctrl-C ends the answer, and later ones do nothing. Without a terminal, KeyboardInterrupt is raised
        after the answer has been reported.
        """
        if not text:
            return
        interrupt, reply, stopped, started = DeferredInterrupt(), Reply(), False, time.perf_counter()
        try:
            with interrupt, closing(self.backend.stream(self.messages(text), reply)) as pieces:
                for piece, thinking in interrupt.reading(pieces):
                    if thinking:
                        reply.reasoning += piece
                    else:
                        reply.text += piece
                    self.console.say(piece, thinking)
        except RefusedError as error:
            wrong = one_line(error).rstrip(".")
            self.refuse(wrong + ("; /r N goes back before round N" if self.rounds else ""))
            return
        except ServerError as error:
            reply.error = str(error)
        except KeyboardInterrupt:
            stopped = True
        if reply.text:
            self.rounds.append(Round(text, reply.text, reply.reasoning))
        self.report(reply, time.perf_counter() - started)
        if stopped and not self.console.interactive:
            raise KeyboardInterrupt

    def messages(self, text: str) -> list[dict[str, str]]:
        """Return the messages of the conversation, followed by a new one."""
        return [*self.conversation.messages(), message("user", text)]

    def report(self, reply: Reply, seconds: float) -> None:
        """Show the end of an answer: its error or its speed, and the limit that cut it."""
        self.console.end_answer(line=reply.error is None)
        if reply.error is not None:
            self.refuse(f"error: {one_line(reply.error)}")
            if not reply.text and not reply.reasoning:
                return
        rate = reply.num_tokens / max(seconds, 1e-9)
        if not sys.stdout.isatty():
            self.console.note("")  # starts a new line, since with `| tee` the answer may not have been shown yet
        self.console.note(f"--- [{reply.num_tokens} tokens, {rate:.1f} tok/s]")
        if reply.finish_reason == "length" and reply.num_tokens == self.backend.max_tokens:
            self.console.note(f"(cut at max_tokens {self.backend.max_tokens})")
        elif reply.finish_reason == "length":
            context = self.backend.max_model_len
            full = "the server's limit" if context is None else f"the context of {context} tokens is full"
            self.console.note(f"(cut: {full}; /r N goes back)")
        if reply.reasoning and not reply.text:
            self.console.note("(ended while the model was thinking; without an answer, this round is dropped)")

    def refuse(self, why: str) -> None:
        self.refused = True
        self.console.note(why)
