"""The process of an engine: it owns a Generator, and does what the messages say.

`python -m fastgen.cli.serve.process FD` is one; FD is its end of a socket. It ends with the socket, and with the
process that started it. Messages come in by a thread, so that the end of the socket is seen at once; between two steps
everything that has come is looked at.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from fastgen.cli.serve.messages import Abort, EngineInfo, Message, Refused, Submit, Turn, encode, messages_of
from fastgen.parallel.errors import portable
from fastgen.ranks.channel import Channel, Failed, Start
from fastgen.ranks.processes import end_with_caller
from fastgen.request import Event, TokenMask

if TYPE_CHECKING:
    from fastgen.generator import Generator

STATS_SECONDS = 0.25  # between two messages with stats, at least

INTAKE_SECONDS = 0.02  # that running requests wait, between two steps, for new ones to be taken in


class Compiled:
    """A request whose mask is made, or the error that came of it."""

    def __init__(self, submit: Submit, mask: TokenMask | Exception) -> None:
        self.submit, self.mask = submit, mask


Incoming = Message | Compiled


class Loop:
    """Steps of a Generator, as long as there is something to do, and messages between them. incoming: the messages."""

    def __init__(self, gen: Generator, channel: Channel, incoming: SimpleQueue[Incoming]) -> None:
        self._gen = gen
        self._channel = channel
        self._incoming = incoming
        self._arrived: dict[int, Submit] = {}  # to be added, in their order
        self._compiling: set[int] = set()
        self._kept: dict[Any, Any] = {}
        self._compiler = ThreadPoolExecutor(1, "fastgen-compile")
        self._told = 0.0  # when stats were sent last

    @property
    def idle(self) -> bool:
        """Whether only a message can give it something to do."""
        return not self._arrived and not self._gen.unfinished

    def run(self) -> None:
        """Turn after turn; ends with an exception, which only a step or an unreadable message can raise."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what has come, run a step, tell what is new. Where it is idle, wait for a message first."""
        wait: float | None = 0
        if self.idle:
            self._channel.flush()
            wait = STATS_SECONDS if self._compiling else None  # a compilation is a sign of life as well
        self._take(wait)
        self._tell(self._gen.step())

    def _take(self, wait: float | None) -> None:
        aborted: list[str | int] = []
        message = self._receive(wait)
        while message is not None:
            match message:
                case Submit(mask=None):
                    self._arrived[message.number] = message
                case Submit():
                    self._compiling.add(message.number)
                    self._compiler.submit(self._compile, message)
                case Compiled():
                    self._arrive(message)
                case Abort():
                    self._arrived.pop(message.number, None)
                    self._compiling.discard(message.number)
                    aborted.append(message.number)
                case Failed(error=Exception() as error):  # a message that can not be read
                    raise error
                case _:
                    raise AssertionError(f"no message for an engine: {message!r}")
            message = self._receive()
        if aborted:
            self._gen.abort(aborted)
        deadline = time.monotonic() + INTAKE_SECONDS
        while self._arrived and time.monotonic() < deadline:
            self._add(self._arrived.pop(next(iter(self._arrived))))

    def _receive(self, wait: float | None = 0) -> Incoming | None:
        """Return the next message; None where none comes within `wait` seconds (None: without end)."""
        try:
            return self._incoming.get(timeout=wait) if wait != 0 else self._incoming.get_nowait()
        except Empty:
            return None

    def _add(self, submit: Submit) -> None:
        try:
            self._gen.add(submit.prompt, submit.params, submit.number)
        except (ValueError, TypeError) as error:
            self._refuse(submit, error)

    def _refuse(self, submit: Submit, error: Exception) -> None:
        self._send(Refused(submit.number, portable(error)))

    def _send(self, message: Message) -> None:
        self._channel.send(message, wait=False)  # a slow reader must not hold up the steps

    def _compile(self, submit: Submit) -> None:
        """Make a request's mask, in a thread. Whatever is raised, that request alone fails with it."""
        mask: TokenMask | Exception
        try:
            assert submit.mask is not None
            mask = pickle.loads(submit.mask)
            if hasattr(mask, "compile"):
                mask = mask.compile(self._gen, self._kept)
        except Exception as error:
            mask = error
        self._incoming.put(Compiled(submit, mask))

    def _arrive(self, compiled: Compiled) -> None:
        submit = compiled.submit
        if submit.number not in self._compiling:
            return  # it was aborted meanwhile
        self._compiling.remove(submit.number)
        if isinstance(compiled.mask, Exception):
            self._refuse(submit, compiled.mask)
        else:
            self._arrived[submit.number] = replace(submit, params=replace(submit.params, mask=compiled.mask))

    def _tell(self, events: list[Event]) -> None:
        now = time.monotonic()
        stats = None
        if now - self._told >= STATS_SECONDS or self.idle:
            self._told, stats = now, self._gen.stats
        if not events and stats is None:
            return
        *pieces, rest = messages_of(events)
        for piece in pieces:
            self._send(Turn(encode(piece), now, None))
        self._send(Turn(encode(rest), now, stats))


def _info(gen: Generator) -> EngineInfo:
    return EngineInfo(
        folder=str(gen.folder),
        tokenizer=None if gen.tokenizer is None else str(gen.tokenizer.hf.name_or_path),
        max_model_len=gen.max_model_len,
        vocab_size=gen.model_config.vocab_size,
    )


def serve(connection: socket.socket) -> None:
    """Be an engine, until the other end of the socket is gone; ends the process."""
    incoming: SimpleQueue[Any] = SimpleQueue()
    channel = Channel(connection, lambda message: os._exit(0) if message is None else incoming.put(message))
    try:
        start = incoming.get()
        assert isinstance(start, Start), start
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("fastgen").setLevel(start.log_level)
        from fastgen.generator import Generator  # seconds of importing torch, which the other end can do without

        gen = Generator(**start.arguments)
        channel.send(_info(gen))
        Loop(gen, channel, incoming).run()
    except BaseException as error:
        with suppress(OSError):  # the caller may be gone
            channel.send(Failed.of(error))
        os._exit(1)


def main() -> None:
    faulthandler.enable()
    end_with_caller()
    serve(socket.socket(fileno=int(sys.argv[-1])))


if __name__ == "__main__":
    main()
