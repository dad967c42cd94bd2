"""The process of an engine: it owns a Generator and handles the messages of `engine.Engine`.

    python -m fastgen.cli.serve.process FD

FD is the number of its end of a socket. The process ends with the socket, and with the process that started it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from fastgen.cli.serve.engine import Abort, EngineInfo, Refused, StepEnded, Submit, encode
from fastgen.cli.serve.grammar import Compiler
from fastgen.parallel.errors import portable
from fastgen.ranks.channel import Channel, Failed, Start
from fastgen.ranks.processes import end_with_parent
from fastgen.request import Event, TokenMask

if TYPE_CHECKING:
    from fastgen.generator import Generator

STATS_SECONDS = 0.25  # minimum interval between two messages with stats
INTAKE_SECONDS = 0.02  # maximum time between two steps for adding new requests to the Generator


@dataclass(frozen=True, slots=True)
class Compiled:
    """From the compiling thread: the mask of a request, or the error of its grammar."""

    number: int
    mask: TokenMask | Exception


class EngineLoop:
    """Steps of a Generator while it has work, and messages between them. incoming: of the other process."""

    def __init__(self, gen: Generator, channel: Channel, incoming: SimpleQueue[Any]) -> None:
        self._gen, self._channel, self._incoming = gen, channel, incoming
        self._arrived: dict[int, Submit] = {}  # requests to be added, in order
        self._compiling: dict[int, Submit] = {}  # requests whose grammar is being compiled
        self._thread = ThreadPoolExecutor(1, "fastgen-compile")
        self._stats_sent = 0.0

    @property
    def idle(self) -> bool:
        """True while only a message can bring work."""
        return not self._arrived and not self._gen.unfinished

    def turn(self) -> None:
        """Handle the messages that have arrived, run a step, send its events. An idle loop waits for a message first.
        Raises what a step raises, and the error of an unreadable message."""
        wait: float | None = 0
        if self.idle:
            self._channel.flush()
            wait = STATS_SECONDS if self._compiling else None  # stats during a compilation show that this process lives
        self._handle_messages(wait)
        self._report(self._gen.step())

    def _handle_messages(self, wait: float | None) -> None:
        aborted: list[str | int] = []
        message = self._next_message(wait)
        while message is not None:
            if isinstance(message, Abort):
                aborted += message.numbers
            self._handle(message)
            message = self._next_message()
        if aborted:
            self._gen.abort(aborted)
        deadline = time.monotonic() + INTAKE_SECONDS
        while self._arrived and time.monotonic() < deadline:
            self._add(self._arrived.pop(next(iter(self._arrived))))

    def _handle(self, message: object) -> None:
        match message:
            case Submit(grammar=None):
                self._arrived[message.number] = message
            case Submit():
                self._compiling[message.number] = message
                self._thread.submit(self._compile, message)
            case Compiled(number, mask):
                if submit := self._compiling.pop(number, None):  # else it was aborted
                    if isinstance(mask, Exception):
                        self._refuse(number, mask)
                    else:
                        self._arrived[number] = replace(submit, params=replace(submit.params, mask=mask))
            case Abort():
                for number in message.numbers:
                    self._arrived.pop(number, None)
                    self._compiling.pop(number, None)
            case Failed(error=Exception() as error):  # an unreadable message
                raise error
            case _:
                raise AssertionError(f"unexpected message to an engine: {message!r}")

    def _next_message(self, wait: float | None = 0) -> Any:
        """Return the next message, or None where none comes within `wait` seconds (None: no limit)."""
        try:
            return self._incoming.get(timeout=wait) if wait != 0 else self._incoming.get_nowait()
        except Empty:
            return None

    def _add(self, submit: Submit) -> None:
        try:
            self._gen.add(submit.prompt, submit.params, submit.number)
        except (ValueError, TypeError) as error:
            self._refuse(submit.number, error)

    def _refuse(self, number: int, error: Exception) -> None:
        self._send(Refused(number, portable(error)))

    def _send(self, message: object) -> None:
        self._channel.send(message, wait=False)  # a slow reader must not delay the steps

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler.of(self._gen)

    def _compile(self, submit: Submit) -> None:
        """Compile the grammar of a request, in the thread. Any error fails this request alone."""
        mask: TokenMask | Exception
        try:
            assert submit.grammar is not None
            mask = self._compiler.compile(submit.grammar)
        except Exception as error:
            mask = error
        self._incoming.put(Compiled(submit.number, mask))

    def _report(self, events: list[Event]) -> None:
        now = time.monotonic()
        stats = None
        if now - self._stats_sent >= STATS_SECONDS or self.idle:
            self._stats_sent, stats = now, self._gen.stats
        if events or stats is not None:
            self._send(StepEnded(encode(events), now, stats))


def _info(gen: Generator) -> EngineInfo:
    return EngineInfo(
        folder=str(gen.folder),
        tokenizer=None if gen.tokenizer is None else str(gen.tokenizer.hf.name_or_path),
        max_model_len=gen.max_model_len,
        vocab_size=gen.model_config.vocab_size,
    )


def serve(connection: socket.socket) -> None:
    """Run an engine until the other end of the socket closes; ends the process."""
    incoming: SimpleQueue[Any] = SimpleQueue()
    channel = Channel(connection, lambda message: os._exit(0) if message is None else incoming.put(message))
    try:
        start = incoming.get()
        assert isinstance(start, Start), start
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("fastgen").setLevel(start.log_level)
        from fastgen.generator import Generator  # imports torch, which takes seconds, after the channel has opened

        gen = Generator(**start.arguments)
        channel.send(_info(gen))
        loop = EngineLoop(gen, channel, incoming)
        while True:
            loop.turn()
    except BaseException as error:
        with suppress(OSError):  # the other process may be gone
            channel.send(Failed.of(error))
        os._exit(1)


def main() -> None:
    faulthandler.enable()
    end_with_parent()
    serve(socket.socket(fileno=int(sys.argv[-1])))


if __name__ == "__main__":
    main()
