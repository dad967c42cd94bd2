"""An asyncio client of a Generator that runs in a process of its own.

    async with AsyncGenerator("Qwen/Qwen3-8B", max_seqs=128) as engine:
        with engine.submit([prompt_ids], SamplingParams(max_tokens=100)) as stream:
            async for events in stream: ...

This module does not import torch. No method blocks the event loop on the engine.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import pickle
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from fastgen.engine.outputs import Stats
from fastgen.grammar import params_rule
from fastgen.ranks import processes
from fastgen.ranks.channel import HEAD, Failed, Start, frame
from fastgen.request import Event, Prompt, SamplingParams

log = logging.getLogger(__name__)

POLL_SECONDS = 0.01  # interval of checks whether the process has ended


# ------------------------------------------------------------------------------------------------- messages

# The constructor of Event takes the fields of its base class, Drawn, by keyword alone.
_POSITIONAL = tuple(field.name for field in fields(Event) if not field.kw_only)
_KEYWORDS = tuple(field.name for field in fields(Event) if field.kw_only)
_row: Callable[[Event], tuple[Any, ...]] = attrgetter(*_POSITIONAL, *_KEYWORDS)


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: a request. grammar: of its answers (see `fastgen.grammar.Compiler`), or None for any answer."""

    number: int
    prompt: Prompt
    params: SamplingParams
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: end these requests. Nothing more is reported of them."""

    numbers: range


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """From the engine when its Generator is ready: the facts that a server needs.

    folder: the model's. tokenizer: folder or hub id of the tokenizer, None without one. max_model_len: maximum tokens
    of prompt and answer together.
    """

    folder: str
    tokenizer: str | None
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Refused:
    """From the engine: a request is not accepted."""

    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class StepEnded:
    """From the engine after a step. events: as `encode` writes them. time: time.monotonic() at the end of the step, a
    clock that all processes of a machine share. stats: sent a few times a second, and when the engine becomes idle."""

    events: bytes
    time: float
    stats: Stats | None


def encode(events: Iterable[Event]) -> bytes:
    """Serialize events, many times faster than pickle does. Both processes run the same Python, as marshal requires."""
    return marshal.dumps(list(map(_row, events)), 2)


def decode(data: bytes) -> list[Event]:
    """Return the events that `encode` has serialized."""
    size = len(_POSITIONAL)
    return [Event(*row[:size], **dict(zip(_KEYWORDS, row[size:], strict=True))) for row in marshal.loads(data)]


def joined(events: list[Event]) -> list[Event]:
    """Merge the events of each sample into one; return them in the order of prompts (`id`) and samples."""
    if len(events) == 1:
        return events
    samples: dict[tuple[Any, int], list[Event]] = {}
    for event in events:
        samples.setdefault((event.id, event.index), []).append(event)
    return [own[0] if len(own) == 1 else _merge(own) for _, own in sorted(samples.items())]


def _merge(events: list[Event]) -> Event:
    first, last = events[0], events[-1]
    names = ["token_ids", *last.lists()]
    lists: dict[str, Any] = {name: [item for event in events for item in getattr(event, name) or ()] for name in names}
    return replace(last, **lists, text="".join(event.text for event in events), started=first.started)


# ------------------------------------------------------------------------------------------------- client


class EngineError(RuntimeError):
    """The process of an engine has ended."""


class EventStream:
    """The events of a request: an asynchronous iterator of non-empty lists, to be used in a `with` block.

    The `id` of an event is the index of its prompt in the request. A list has one event a sample, which merges all that
    has arrived since the last list was taken: a slow reader gets fewer and longer events. The iterator ends after the
    last event of every sample. Leaving the block before that aborts the request.

    Raises ValueError or TypeError where the engine does not accept the request, and EngineError where its process ends.
    """

    def __init__(self, engine: AsyncGenerator, numbers: range, samples: int, every_step: bool) -> None:
        self._engine, self._numbers, self._every_step = engine, numbers, every_step
        self._unfinished = len(numbers) * samples
        self._begun: set[int] = set()  # prompts with at least one event
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> list[Event]:
        if not self._events and not self._ended:
            self._news.clear()
            await self._news.wait()
        if self._events:
            events, self._events = self._events, []
            return joined(events)
        raise self._error or StopAsyncIteration

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self._engine._abort(self._numbers)
            self._end()
        self._events = []

    def _put(self, event: Event) -> None:
        assert isinstance(event.id, int)
        event.id = prompt = event.id - self._numbers.start
        self._events.append(event)
        if event.finish_reason is not None:
            self._unfinished -= 1
        if self._unfinished == 0:
            self._end()
        elif self._every_step or prompt not in self._begun:
            self._begun.add(prompt)
            self._news.set()

    def _end(self, error: Exception | None = None) -> None:
        self._ended, self._error = True, error
        self._engine._forget(self._numbers)
        self._news.set()


class AsyncGenerator:
    """A Generator in a process of its own, for use from one event loop.

    model, options: arguments of the Generator. name: the model's name in messages; default: `model`.

    dead: how the process ended; None while it runs. info: facts of the model, set by `start`. stats: the Generator's,
    at most a quarter of a second old while it works.
    """

    info: EngineInfo

    def __init__(self, model: str | Path | None = None, *, name: str | None = None, **options: Any) -> None:
        self.name = name or ("the bundled model" if model is None else str(model))
        self.dead: str | None = None
        self.stats = Stats()
        self._options = {"model": model, **options}
        self._next_number = 0
        self._streams: dict[str | int, EventStream] = {}
        self._progress = 0.0  # time.monotonic() of the last step, or of the request that ended an idle time
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded = self._closing = False
        self._failure: Exception | None = None

    # ------------------------------------------------------------------------------------ process

    async def start(self) -> None:
        """Start the process and wait until its model is loaded.

        Raises what the Generator raises (ValueError or TypeError for wrong arguments), and EngineError where the
        process dies.
        """
        if self._process is not None:
            raise RuntimeError(f"the engine of {self.name} has been started; use restart")
        self._loaded, self._closing, self._failure, self.dead = False, False, None, None
        self.stats = Stats()
        started: list[subprocess.Popen[bytes]] = []
        connection = processes.spawn(("-m", "fastgen.async_loop"), started)
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        (self._process,) = started
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listener = asyncio.create_task(self._listen(reader, self._process))
        try:
            self._send(Start(self._options, logging.getLogger("fastgen").getEffectiveLevel()))
            await self._ready
        except BaseException:
            await self.close()
            raise

    async def restart(self, **changes: Any) -> None:
        """End the process, if it runs, and start another one; running requests fail. changes: new values of options."""
        await self.close()
        self._options.update(changes)
        await self.start()

    async def died(self) -> str:
        """Wait until the process has ended; return `dead`."""
        await asyncio.wait([self._listener])
        assert self.dead is not None
        return self.dead

    async def close(self) -> None:
        """End the process and wait for its end; running requests fail. Further calls have no effect."""
        if self._process is None:
            return
        self._closing = True
        self._writer.close()  # the process ends with its connection
        if not await _has_ended(self._process, processes.GRACE):
            self._process.kill()
        await asyncio.wait([self._listener])
        self._process = None

    async def __aenter__(self) -> AsyncGenerator:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def ready(self) -> bool:
        """True while the engine accepts requests."""
        return self._loaded and self.dead is None and not self._closing

    @property
    def stalled(self) -> float:
        """Seconds since the last step, or since the first request after an idle time; 0 while the engine is idle."""
        return max(time.monotonic() - self._progress, 0.0) if self._streams else 0.0

    # ------------------------------------------------------------------------------------ requests

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, grammar: str | None = None, *, every_step: bool = True
    ) -> EventStream:
        """Begin a request of one or more prompts; return the stream of its events.

        prompts: preferably lists of ids; the engine tokenizes other prompts between two steps. params: without a mask.
        grammar: see `fastgen.grammar`; each answer follows it. every_step: False for a reader that needs the complete
        answer only; then the stream has one list for the first event of each prompt and one for all other events.

        Raises ValueError or TypeError for wrong params, and RuntimeError where the engine is not ready.
        """
        if not self.ready:
            raise EngineError(self.dead or f"the engine of {self.name} is not ready")
        params.validate(self.info.vocab_size)
        if params.mask is not None:
            raise ValueError("a mask can not be sent to an engine; give a grammar instead")
        rule = params_rule(params)
        if rule is not None:
            params = replace(params, json_schema=None, regex=None, choice=None, grammar=None)
            grammar = f"start: {rule}"
        if not self._streams:
            self._progress = time.monotonic()
        numbers = range(self._next_number, self._next_number + len(prompts))
        self._next_number = numbers.stop
        stream = EventStream(self, numbers, int(params.n), every_step)
        for number, prompt in zip(numbers, prompts, strict=True):
            self._streams[number] = stream
            self._send(Submit(number, prompt, params, grammar))
        return stream

    def _abort(self, numbers: range) -> None:
        if self.dead is None:
            self._send(Abort(numbers))

    def _forget(self, numbers: range) -> None:
        for number in numbers:
            self._streams.pop(number, None)

    # ------------------------------------------------------------------------------------ messages

    def _send(self, message: object) -> None:
        self._writer.write(frame(message))  # the event loop sends later what the socket does not take now

    async def _listen(self, reader: asyncio.StreamReader, process: subprocess.Popen[bytes]) -> None:
        """Handle messages until the connection ends, then the end of the process."""
        try:
            while True:
                (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                self._receive(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception:  # an unreadable message must not leave requests waiting
            log.exception("a message of the engine of %s", self.name)
        self._writer.close()
        await _has_ended(process, 0.5)
        self._die(process.returncode)

    def _receive(self, message: object) -> None:
        match message:
            case StepEnded():
                self._progress = max(self._progress, message.time)
                if message.stats is not None:
                    self.stats = message.stats
                for event in decode(message.events):
                    if stream := self._streams.get(event.id):  # else it was aborted
                        stream._put(event)
            case Refused():
                if stream := self._streams.get(message.number):
                    self._abort(stream._numbers)
                    stream._end(message.error)
            case EngineInfo():
                self.info, self._loaded = message, True
                self._ready.set_result(None)
            case Failed():
                self._failure = message.error
                log.log(logging.ERROR if self._loaded else logging.INFO, "%s", message.trace)
            case _:
                raise AssertionError(f"unexpected message from an engine: {message!r}")

    def _die(self, status: int | None) -> None:
        how = processes.describe_exit(status)
        if self._closing:
            how = "was closed"
        elif self._failure is not None:
            how = f"failed with {type(self._failure).__name__}: {self._failure}"
        self.dead = f"the engine of {self.name} {how}"
        if not self._ready.done():
            self._ready.set_exception(self._failure or EngineError(self.dead))
        self.stats = replace(self.stats, running=0, waiting=0, pages_used=0)
        for stream in set(self._streams.values()):
            stream._end(EngineError(self.dead))


async def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait at most `seconds` for the end of a process; return whether it has ended."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True
