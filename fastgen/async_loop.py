"""The process of an AsyncGenerator: it owns a Generator, and handles the messages of the other process.

    python -m fastgen.async_loop FD

FD is the number of its end of a socket. The process ends with the socket, and with the process that started it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from fastgen.async_generator import Abort, EngineInfo, Refused, StepEnded, Submit, encode
from fastgen.grammar import Compiler
from fastgen.parallel.errors import portable
from fastgen.ranks.channel import Channel, Failed, Start
from fastgen.ranks.processes import end_with_parent
from fastgen.request import Event, TokenMask

if TYPE_CHECKING:
    from fastgen.generator import Generator

STATS_SECONDS = 0.25  # minimum interval between two messages with stats
INTAKE_SECONDS = 0.02  # maximum time between two steps for adding new requests to the Generator


class EngineLoop:
    """Steps of a Generator while it has work, and messages between them. incoming: of the other process."""

    def __init__(self, gen: Generator, channel: Channel, incoming: SimpleQueue[Any]) -> None:
        self._gen, self._channel, self._incoming = gen, channel, incoming
        self._arrived: dict[int, Submit] = {}  # requests to be added, in order
        self._compiling: dict[int, tuple[Submit, Future[TokenMask]]] = {}  # requests whose grammar is being compiled
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
        self._take_compiled()
        deadline = time.monotonic() + INTAKE_SECONDS
        while self._arrived and time.monotonic() < deadline:
            self._add(self._arrived.pop(next(iter(self._arrived))))
        self._report(self._gen.step())

    def _handle_messages(self, wait: float | None) -> None:
        """Handle all messages. wait: seconds to wait for the first one (None: no limit)."""
        aborted: list[str | int] = []
        with suppress(Empty):
            message = self._incoming.get(block=wait != 0, timeout=wait)
            while True:
                if isinstance(message, Abort):
                    aborted += message.numbers
                self._handle(message)
                message = self._incoming.get_nowait()
        if aborted:
            self._gen.abort(aborted)

    def _handle(self, message: object) -> None:
        match message:
            case Submit(grammar=None):
                self._arrived[message.number] = message
            case Submit(grammar=str() as grammar):
                compiled = self._thread.submit(self._compile, grammar)
                self._compiling[message.number] = message, compiled
                compiled.add_done_callback(self._incoming.put)  # wakes an idle loop
            case Abort():
                for number in message.numbers:
                    self._arrived.pop(number, None)
                    self._compiling.pop(number, None)
            case Failed(error=Exception() as error):  # an unreadable message
                raise error
            case Future():
                pass
            case _:
                raise AssertionError(f"unexpected message to an engine: {message!r}")

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler.of(self._gen.tokenizer, self._gen.model_config)

    def _compile(self, grammar: str) -> TokenMask:
        return self._compiler.compile(grammar)

    def _take_compiled(self) -> None:
        for number, (submit, compiled) in list(self._compiling.items()):
            if compiled.done():
                del self._compiling[number]
                if error := compiled.exception():  # any error fails this request alone
                    self._send(Refused(number, portable(error)))
                else:
                    self._arrived[number] = replace(submit, params=replace(submit.params, mask=compiled.result()))

    def _add(self, submit: Submit) -> None:
        try:
            self._gen.add(submit.prompt, submit.params, submit.number)
        except (ValueError, TypeError) as error:
            self._send(Refused(submit.number, portable(error)))

    def _send(self, message: object) -> None:
        self._channel.send(message, wait=False)  # a slow reader must not delay the steps

    def _report(self, events: list[Event]) -> None:
        now = time.monotonic()
        stats = None
        if now - self._stats_sent >= STATS_SECONDS or self.idle:
            self._stats_sent, stats = now, self._gen.stats
        if events or stats is not None:
            self._send(StepEnded(encode(events), now, stats))


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
        info = EngineInfo(
            folder=str(gen.folder),
            tokenizer=None if gen.tokenizer is None else str(gen.tokenizer.hf.name_or_path),
            max_model_len=gen.max_model_len,
            vocab_size=gen.model_config.vocab_size,
        )
        channel.send(info)
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
