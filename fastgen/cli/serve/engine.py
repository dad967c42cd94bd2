"""An engine as asyncio sees it: a Generator in a process of its own, whose events come as asynchronous iterators.

    async with Engine("Qwen/Qwen3-8B", max_seqs=128) as engine:
        with engine.submit("a name", prompt_ids, SamplingParams(max_tokens=100)) as stream:
            async for events in stream: ...

Nothing here imports torch, and nothing waits for the engine but what is awaited.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from fastgen.cli.serve.messages import Abort, EngineInfo, Message, Refused, Submit, Turn, decode, joined
from fastgen.engine.outputs import Stats
from fastgen.ranks import processes
from fastgen.ranks.channel import HEAD, Failed, Start, frame
from fastgen.request import Event, Prompt, SamplingParams

log = logging.getLogger(__name__)

POLL_SECONDS = 0.01  # between two looks at whether a process has ended


class Stream:
    """The events of one request: an asynchronous iterator of lists of them, each of at least one event.

    A list has one event a sample, which joins what has come since the last list was taken: a reader that falls behind
    gets fewer and longer ones.

    It ends after the last event of every sample. For a request that the engine does not take, it raises what
    `Generator.add` or the mask's compilation raised: ValueError or TypeError where the request is wrong. A consumer
    that is cancelled while it waits, leaves the `with` block, or lets go of the stream, aborts the request.
    """

    def __init__(self, engine: Engine, number: int, request_id: str, samples: int, every_step: bool = True) -> None:
        self.request_id = request_id
        self._engine = engine
        self._number = number
        self._samples = samples
        self._every_step = every_step
        self._finished: set[int] = set()
        self._events: list[Event] = []
        self._pieces: list[Event] = []  # of the prompt's logprobs
        self._error: Exception | None = None
        self._begun = False  # whether something was taken
        self._ended = False
        self._news = asyncio.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Event]:
        if not self._events and not self._ended:
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        if self._error is not None:
            raise self._error
        if not self._events:
            raise StopAsyncIteration
        events, self._events = self._events, []
        self._begun = True
        return joined(events)

    def close(self) -> None:
        """Abort the request, unless it has ended; what has come and was not read is lost."""
        if not self._ended:
            self._engine._forget(self._number, self.request_id)
            self._end()
        self._events = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended and not self._engine._loop.is_closed():  # garbage may be collected in any thread
            self._engine._loop.call_soon_threadsafe(self._engine._forget, self._number, self.request_id)

    def _take(self, row: tuple[Any, ...]) -> None:
        """An event has come."""
        event = Event(self.request_id, *row[1:])
        if event.index < 0:
            self._pieces.append(event)
            return
        if event.prompt_logprobs is not None and self._pieces:
            _join(self._pieces, event)
        if event.finish_reason is not None:
            self._finished.add(event.index)
            self._ended = len(self._finished) == self._samples
        self._events.append(event)
        if self._every_step or self._ended or not self._begun:
            self._news.set()

    def _end(self, error: str | None = None) -> None:
        """End it here, and its unfinished samples with an event for this error, where there is one."""
        if error is not None:
            unfinished = (index for index in range(self._samples) if index not in self._finished)
            self._events += [
                Event(self.request_id, index, [], [], [], "", "error", None, error) for index in unfinished
            ]
        self._ended = True
        self._news.set()

    def _refuse(self, error: Exception) -> None:
        self._error = error
        self._end()


def _join(pieces: list[Event], event: Event) -> None:
    """Put the pieces of a prompt's logprobs before those in the last event."""
    events = [*pieces, event]
    event.prompt_logprobs = list(itertools.chain.from_iterable(piece.prompt_logprobs or () for piece in events))
    if event.prompt_top_logprobs is not None:
        top = (piece.prompt_top_logprobs or () for piece in events)
        event.prompt_top_logprobs = list(itertools.chain.from_iterable(top))


class Engine:
    """A Generator in a process of its own.

    model, options: its arguments. name: what it is called in messages to people; None: as `model`. All is to be used
    from one event loop.

    dead: how the process ended, None while it has not. stats: those of the Generator, at most a quarter of a second
    old while it works.
    """

    def __init__(self, model: str | Path | None = None, *, name: str | None = None, **options: Any) -> None:
        self.name = name or ("the bundled model" if model is None else str(model))
        self.dead: str | None = None
        self.stats = Stats()
        self._options = {"model": model, **options}
        self._info: EngineInfo | None = None
        self._numbers = itertools.count()
        self._running: dict[str, int] = {}  # the numbers of requests, by their ids
        self._streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self._progress = 0.0  # time.monotonic() of the last step, or when there came something to do
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded = False
        self._closing = False
        self._failure: Exception | None = None

    # ------------------------------------------------------------------------------------ its life

    async def start(self) -> None:
        """Start the process, and wait until its model is loaded.

        Raises what the Generator raises, so ValueError or TypeError for wrong arguments, and RuntimeError where the
        process dies.
        """
        if self._process is not None:
            raise RuntimeError(f"the engine of {self.name} has been started; use restart")
        self._loaded, self._closing, self._failure, self.dead = False, False, None, None
        self.stats = Stats()
        self._loop = asyncio.get_running_loop()
        started: list[subprocess.Popen[bytes]] = []
        connection = processes.spawn(("-m", "fastgen.cli.serve.process"), started)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        except BaseException:
            connection.close()
            started[0].kill()
            started[0].wait()
            raise
        self._process = started[0]
        self._listener = asyncio.create_task(self._listen(reader, self._process))
        try:
            self._send(Start(self._options, logging.getLogger("fastgen").getEffectiveLevel()))
            await self._ready
        except BaseException:
            await self.close()
            raise

    async def restart(self, **changes: Any) -> None:
        """End the process, if it lives, and start another; requests that run end with an error. changes: of options."""
        await self.close()
        self._options.update(changes)
        await self.start()

    async def died(self) -> str:
        """Wait until the process has ended; returns `dead`. Raises RuntimeError where it was not started."""
        if self._process is not None:
            await asyncio.wait([self._listener])
        if self.dead is None:
            raise RuntimeError(f"the engine of {self.name} has not been started")
        return self.dead

    async def close(self) -> None:
        """End the process and wait for its end; requests that run end with an error. More calls do nothing."""
        process = self._process
        if process is None:
            return
        self._closing = True
        self._writer.close()  # it ends with its connection
        if not await _ended(process, processes.GRACE):
            process.kill()
        await asyncio.wait([self._listener])
        self._process = None

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self._loaded and self.dead is None and not self._closing

    @property
    def info(self) -> EngineInfo:
        """What it serves. Raises RuntimeError before it has been ready once."""
        if self._info is None:
            raise RuntimeError(f"the engine of {self.name} is not ready")
        return self._info

    @property
    def idle(self) -> bool:
        """Whether no request is running."""
        return not self._running

    @property
    def stalled(self) -> float:
        """Seconds since the last step ended, or since there came something to do; 0 where it is idle."""
        return 0.0 if self.idle else max(time.monotonic() - self._progress, 0.0)

    # ------------------------------------------------------------------------------------ requests

    def submit(self, request_id: str, prompt: Prompt, params: SamplingParams, *, every_step: bool = True) -> Stream:
        """Begin a request; returns the stream of its events.

        prompt: best a list of ids, as the engine turns others into ids between two steps. params: its mask may be a
        TokenMask or what makes one (see Submit), and is pickled. every_step: False where only the whole answer is of
        use; then the stream has two lists, the first events and all others.

        Raises ValueError or TypeError for wrong params and for an id that is running, RuntimeError where the engine
        is not ready.
        """
        if not self.ready:
            raise RuntimeError(self.dead or f"the engine of {self.name} is not ready")
        if request_id in self._running:
            raise ValueError(f"a request with the id {request_id!r} is running; give another id")
        params.validate(self.info.vocab_size)
        number = next(self._numbers)
        mask = None if params.mask is None else pickle.dumps(params.mask, protocol=5)
        message = frame(Submit(number, prompt, replace(params, mask=None), mask))
        if self.idle:
            self._progress = time.monotonic()
        stream = self._streams[number] = Stream(self, number, request_id, int(params.n), every_step)
        self._running[request_id] = number
        self._writer.write(message)
        return stream

    def _forget(self, number: int, request_id: str) -> None:
        """Tell the engine to abort a request, if it runs."""
        if self._running.get(request_id) == number:
            del self._running[request_id]
            self._streams.pop(number, None)
            if self.dead is None:
                self._send(Abort(number))

    # ------------------------------------------------------------------------------------ messages

    def _send(self, message: Message) -> None:
        self._writer.write(frame(message))  # what the socket does not take, the loop sends later

    async def _listen(self, reader: asyncio.StreamReader, process: subprocess.Popen[bytes]) -> None:
        """Take messages until the connection ends; then end all requests."""
        try:
            while True:
                (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                self._take(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception:  # a message that can not be read, which must not leave requests waiting
            log.exception("a message of the engine of %s", self.name)
        self._writer.close()
        await _ended(process, 0.5)
        self._die(process.returncode)

    def _take(self, message: Message) -> None:
        match message:
            case Turn():
                self._progress = max(self._progress, message.time)
                if message.stats is not None:
                    self.stats = message.stats
                for row in decode(message.events):
                    stream = self._streams.get(row[0])
                    if stream is not None:  # else it was aborted
                        stream._take(row)
                        if stream._ended:
                            self._finish(row[0], stream)
            case Refused():
                stream = self._streams.get(message.number)
                if stream is not None:
                    self._finish(message.number, stream)
                    stream._refuse(message.error)
            case EngineInfo():
                self._info, self._loaded = message, True
                self._ready.set_result(None)
            case Failed():
                self._failure = message.error
                log.log(logging.ERROR if self._loaded else logging.INFO, "%s", message.trace)
            case _:
                raise AssertionError(f"no message for a client: {message!r}")

    def _finish(self, number: int, stream: Stream) -> None:
        del self._running[stream.request_id]
        del self._streams[number]

    def _die(self, status: int | None) -> None:
        how = processes.ending(status)
        if self._closing:
            how = "was closed"
        elif self._failure is not None:
            how = f"failed with {type(self._failure).__name__}: {self._failure}"
        self.dead = f"the engine of {self.name} {how}"
        if not self._ready.done():
            self._ready.set_exception(self._failure or RuntimeError(self.dead))
        self.stats = replace(self.stats, running=0, waiting=0, pages_used=0)
        streams = list(self._streams.values())
        self._streams.clear()
        self._running.clear()
        for stream in streams:
            stream._end(self.dead)


async def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait so long for a process; whether it has ended."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True
