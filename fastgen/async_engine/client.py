"""AsyncGenerator: a Generator for asyncio programs, in a separate process.

    async with AsyncGenerator("Qwen/Qwen3-8B", max_seqs=128) as gen:
        async for event in gen.stream("Once upon a time", SamplingParams(max_tokens=100)):
            print(event.text, end="", flush=True)

This module does not import torch. No method blocks the event loop on the engine.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import time
from collections.abc import AsyncGenerator as PyAsyncGenerator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fastgen.async_engine.grammars import GRAMMAR_TIMEOUT, MAX_TIMEOUT
from fastgen.async_engine.loop import Abort, Answer, Call, EngineInfo, StepEnded, Submit
from fastgen.engine.options import OPTIONS, GeneratorOptions
from fastgen.engine.prompts import Ids, ids_of
from fastgen.engine.stats import Stats
from fastgen.names import explains_names
from fastgen.option import option, takes_fields_of
from fastgen.processes import spawning as processes
from fastgen.processes.channel import HEAD, Failed, Start, frame
from fastgen.request import PRIORITY, SHARED, Completion, Event, Params, Prompt, RequestOutput, Timings, params_of
from fastgen.text.grammar import params_grammar, structure_name

log = logging.getLogger(__name__)

DRAIN_SECONDS = 0.02  # between two looks at requests that finish before a pause


def joined(events: list[Event]) -> list[Event]:
    """Merge the events of each sample into one event. Return these in the order of prompts (`id`) and samples."""
    if len(events) == 1:
        return events
    samples: dict[tuple[Any, int], list[Event]] = {}
    for event in events:
        samples.setdefault((event.id, event.index), []).append(event)
    return [own[0] if len(own) == 1 else _merge(own) for _, own in sorted(samples.items())]


def continued(completion: Completion, event: Event) -> Event:
    """Return an event that also has the tokens of the resumed completion, which `event` continues."""
    lists = {name: getattr(completion, name) + values for name, values in event.lists().items()}
    text = completion.text[: event.resumed_chars] + event.text
    return replace(event, **lists, token_ids=completion.token_ids + event.token_ids, text=text)


def _merge(events: list[Event]) -> Event:
    first, last = events[0], events[-1]
    names = ["token_ids", *last.lists()]
    lists: dict[str, Any] = {name: [item for event in events for item in getattr(event, name) or ()] for name in names}
    return replace(last, **lists, text="".join(event.text for event in events), started=first.started)


# ------------------------------------------------------------------------------------------------- client


class EngineError(RuntimeError):
    """Error of an AsyncGenerator whose engine has ended or is not ready."""


class EventStream:
    """Asynchronous iterator over the events of a request, in non-empty lists; to be used in a `with` block.

    The `id` of an event is the index of its prompt in the request. A list has at most one event per sample, which
    merges everything that has arrived since the last list was taken: a slow reader gets fewer and longer events. The
    iterator ends after the last event of every sample. Leaving the block before that aborts the request.

    Raises ValueError or TypeError if the engine does not accept the request, RuntimeError if its weights are asleep,
    and EngineError if the engine ends.
    """

    def __init__(self, engine: AsyncGenerator, numbers: range, samples: int, every_step: bool) -> None:
        self._engine, self.numbers, self._every_step = engine, numbers, every_step
        self._unfinished = len(numbers) * samples
        self._begun: set[int] = set()  # indices of the prompts with at least one event
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
            self._engine._abort(self.numbers)
            self._end()
        self._events = []

    def _put(self, event: Event) -> None:
        assert isinstance(event.id, int)
        event.id = prompt = event.id - self.numbers.start
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
        self._engine._forget(self.numbers)
        self._news.set()


@dataclass
class _Running:
    """A running call of `generate`. output: its result; cancelled if the call raises."""

    numbers: range
    output: asyncio.Future[RequestOutput]


@dataclass(frozen=True, kw_only=True)
class AsyncGeneratorOptions(GeneratorOptions):
    """The arguments of an AsyncGenerator: those of a Generator and two more."""

    # Readers of streams wait for each token, so that a long prompt must not delay the others.
    max_prefill_tokens: int | None = option(0, OPTIONS["max_prefill_tokens"].help, low=0)
    grammar_timeout: float = option(
        GRAMMAR_TIMEOUT, "seconds of CPU time that structured output may take to compile; a request whose schema needs "
        "longer is a ValueError", low=0, high=MAX_TIMEOUT, above=True,
    )  # fmt: skip
    name: str | None = option(None, "name of the model in messages", unset="the value of `model`")


@explains_names("generate", "stream", "beam_search")
class AsyncGenerator:
    """A Generator for asyncio programs, in a separate process: this one does not import torch. Use it from one event
    loop. The arguments are the fields of `AsyncGeneratorOptions`; `help(AsyncGenerator)` describes them.

    dead: description of how the engine ended; None while it runs.
    info: properties of the model, set by `start`.
    stats: the Generator's `stats`, at most a quarter of a second old while the Generator works.
    """

    info: EngineInfo

    @takes_fields_of(AsyncGeneratorOptions)
    def __init__(self, options: AsyncGeneratorOptions) -> None:
        self.name = options.name or ("the bundled model" if options.model is None else str(options.model))
        self.dead: str | None = None
        self.stats = Stats()
        given = {name: getattr(options, name) for name in OPTIONS}
        self._arguments = {name: value for name, value in given.items() if value != OPTIONS[name].default}
        self._grammar_timeout = options.grammar_timeout
        self._next_number = 0
        self._streams: dict[str | int, EventStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._named: dict[str | int, _Running] = {}  # running calls of `generate`, by id
        self._ended_all = 0  # calls of `cut_off` for all requests
        self._progress = 0.0  # time.monotonic() of the last step or call, or of the request that ended an idle time
        self._peer: _Process | None = None
        self._loaded = self._closing = self._paused = False
        self._failure: Exception | None = None

    # ------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the engine and wait until its model is loaded.

        Raises what the Generator raises (ValueError or TypeError for wrong arguments), and EngineError if the process
        dies or `close` is called in the meantime.
        """
        if self._peer is not None:
            raise RuntimeError(f"the engine of {self.name} has been started; make a new AsyncGenerator")
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peer = await _Process.start(self._arguments)
        self._listener = asyncio.create_task(self._listen(self._peer))
        try:
            if self._closing:
                raise EngineError(f"the engine of {self.name} was closed")
            await self._ready
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the engine and wait until it has ended. Running requests fail. Further calls have no effect."""
        self._closing = True
        if self._peer is not None:
            await self._peer.end()
            await asyncio.wait([self._listener])

    async def died(self) -> str:
        """Wait until the engine has ended; return `dead`."""
        await asyncio.wait([self._listener])
        assert self.dead is not None
        return self.dead

    async def __aenter__(self) -> AsyncGenerator:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "ready" if self.ready else self.dead or ("closed" if self._closing else "not ready")
        return f"AsyncGenerator({self.name!r}, {state})"

    @property
    def ready(self) -> bool:
        """True while the engine accepts requests."""
        return self._loaded and self.dead is None and not self._closing

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._paused

    @property
    def stalled(self) -> float:
        """Seconds since the last step or call, or since the first request after an idle time; 0 while the engine is
        idle, paused, or in a call such as an update of the weights."""
        steps = self._streams and not self._paused and not self._calls
        return max(time.monotonic() - self._progress, 0.0) if steps else 0.0

    # ------------------------------------------------------------------------------------ requests

    async def stream(self, prompt: Prompt, params: Params = None, priority: int = 0) -> PyAsyncGenerator[Event, None]:
        """Yield the events of a request as they arrive. The events of its n samples alternate; `index` is the sample.

        The last event of a sample has a finish_reason, and an `error` if the sample failed. A reader that is slower
        than the model gets fewer and longer events. Leaving the loop early, or cancelling its task, aborts the request.
        priority: see `Request`. Raises what `submit` and EventStream raise.
        """
        with self.submit([prompt], params, priority=priority) as stream:
            async for events in stream:
                for event in events:
                    yield event

    async def generate(
        self,
        prompt: Prompt,
        params: Params = None,
        id: str | int | None = None,
        resume: Completion | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Return the output of one prompt; use asyncio.gather for many prompts. Cancellation aborts the request.

        id: name of the request for `cut_off`, and of its output; None: a number. resume, priority: see `Request`.
        Raises what `submit` and EventStream raise, and ValueError if a request with this id runs.
        """
        if id in self._named:
            raise ValueError(f"a request with the id {id!r} is running; give another id")
        added, first_token, events = time.perf_counter(), None, list[Event]()
        with self.submit([prompt], params, every_step=False, resume=resume, priority=priority) as stream:
            id = stream.numbers.start if id is None else id
            self._named[id] = running = _Running(stream.numbers, asyncio.get_running_loop().create_future())
            try:
                async for new in stream:
                    if first_token is None and any(event.token_ids for event in new):
                        first_token = time.perf_counter() - added
                    events += new
                samples = joined(events)
                if resume is not None:
                    samples = [continued(resume, samples[0])]
                output = _output(id, samples, Timings(first_token, time.perf_counter() - added))
                running.output.set_result(output)
            finally:
                running.output.cancel()  # does nothing if there is an output
                del self._named[id]
        return output

    async def beam_search(
        self,
        prompt: Prompt,
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Return the `width` best-scoring answers to one prompt; see `Generator.beam_search`. priority: see `Request`.
        Cancellation ends the search. After `abort` or `cut_off` of all requests, the output has the beams so far.
        Raises what `generate` raises."""
        from fastgen.beam_search import BeamOptions, output_of, search_one

        self._running_peer()
        options = BeamOptions(
            width=width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            eos_ids=self.info.eos_ids,
            context=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
        )
        ended_all = self._ended_all

        async def generate(prompt: Prompt, params: Params) -> RequestOutput:
            output = await self.generate(prompt, params, priority=priority)
            if self._ended_all > ended_all:  # perhaps when no step of this search ran
                output.completions[0].finish_reason = "abort"
            return output

        result = await search_one(prompt, options, generate)
        texts = await self.call("texts", result.first.prompt_token_ids, result.shown_ids(options))
        return output_of(result.first.id, result, options, texts)

    async def abort(self, ids: Ids = None) -> list[RequestOutput]:
        """End requests as `cut_off` does, and return the outputs that their calls of `generate` return."""
        ids = None if ids is None else ids_of(ids, ())
        outputs = [self._named[id].output for id in ids_of(ids, self._named) if id in self._named]
        await self.cut_off(ids)
        if outputs:
            await asyncio.wait(outputs)
        return [output.result() for output in outputs if not output.cancelled()]

    async def cut_off(self, ids: Ids = None) -> int:
        """End calls of `generate` that have these ids; None: all requests. They return the tokens that they have, with
        the finish_reason "abort"; the completions can be resumed. Ids of requests that do not run are skipped. Return
        the number of prompts that were cut off."""
        numbers = None
        if ids is None:
            self._ended_all += 1
        else:
            running = [self._named[id] for id in ids_of(ids, ()) if id in self._named]
            numbers = [number for each in running for number in each.numbers]
        ended = len(self._streams if numbers is None else numbers)
        await self.call("cut_off", numbers)
        return ended

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the Generator between two steps, such as `call("score", sequences)` or
        `call("update_weights", state_dict, in_flight="keep")`; return its result or raise its error.

        Arguments and result are pickled. Once a call has begun, it cannot be cancelled unless it receives weights.
        """
        peer = self._running_peer()
        number = self._number(1).start
        self._calls[number] = result = asyncio.get_running_loop().create_future()
        try:
            peer.send(Call(number, method, args, kwargs))
            return await result
        except asyncio.CancelledError:
            self._abort(range(number, number + 1))
            raise
        finally:
            del self._calls[number]
            self._progress = time.monotonic()

    async def pause(self) -> None:
        """Run no steps until `resume`. Running requests stay as they are, and new ones wait."""
        await self.call("pause")
        self._paused = True

    async def pause_drained(self) -> None:
        """Wait until all running requests have finished, while new ones wait, and pause. A call that is cancelled lets
        the new ones run."""
        try:
            while await self.call("drain"):
                await asyncio.sleep(DRAIN_SECONDS)
        except asyncio.CancelledError:
            await self.resume()
            raise
        await self.pause()

    async def resume(self) -> None:
        """Run steps again."""
        self._paused = False
        await self.call("resume")

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        *,
        every_step: bool = True,
        resume: Completion | None = None,
        priority: int = 0,
    ) -> EventStream:
        """Submit a request of one or more prompts. Return the stream of its events.

        prompts: lists of ids, or other prompts, which the engine tokenizes between two steps.
        params: parameters of every prompt, without a mask.
        every_step: False for a reader that needs only the complete answer; the stream then has one list for the first
            event of each prompt, and one list for all other events.
        resume: a completion of the only prompt, which the events continue; see `continued`. priority: see `Request`.

        Raises ValueError or TypeError for wrong params, and EngineError if the engine is not ready.
        """
        peer = self._running_peer()
        params = params_of(params, self.info.default_params)
        params.validate(self.info.vocab_size)
        PRIORITY.check(priority)
        if params.mask is not None:
            raise ValueError("a mask cannot be sent to another process; use json_schema, regex, choice or grammar")
        structure = structure_name(params)
        if (grammar := params_grammar(params)) is not None:
            params = replace(params, json_schema=None, regex=None, choice=None, grammar=grammar)
        if not self._streams:
            self._progress = time.monotonic()
        numbers = self._number(len(prompts))
        stream = EventStream(self, numbers, int(params.n), every_step)
        try:
            for number, prompt in zip(numbers, prompts, strict=True):
                self._streams[number] = stream
                peer.send(Submit(number, prompt, params, self._grammar_timeout, structure, resume, priority))
        except BaseException:  # a prompt that cannot be pickled
            stream.__exit__()
            raise
        return stream

    def _running_peer(self) -> _Process:
        if self._peer is None or not self.ready:
            raise EngineError(self.dead or f"the engine of {self.name} is not ready; await start, or use async with")
        return self._peer

    def _number(self, count: int) -> range:
        """Return `count` new numbers for requests or calls."""
        numbers = range(self._next_number, self._next_number + count)
        self._next_number = numbers.stop
        return numbers

    def _abort(self, numbers: range) -> None:
        if self._peer is not None and self.dead is None:
            self._peer.send(Abort(numbers))

    def _forget(self, numbers: range) -> None:
        for number in numbers:
            self._streams.pop(number, None)

    # ------------------------------------------------------------------------------------ messages

    async def _listen(self, peer: _Process) -> None:
        """Handle messages until the engine ends, then handle its end."""
        how = "sent a message that cannot be read"
        try:
            how = await peer.listen(self._receive)
        except Exception:  # requests must not be left waiting
            log.exception("a message of the engine of %s", self.name)
        self._die(how)

    def _receive(self, message: object) -> None:
        match message:
            case StepEnded():
                self._progress = max(self._progress, message.time)
                if message.stats is not None:
                    self.stats = message.stats
                for event in message.events:
                    if stream := self._streams.get(event.id):  # else it was aborted
                        stream._put(event)
            case Answer():
                result = self._calls.get(message.number)
                if stream := self._streams.get(message.number):
                    self._abort(stream.numbers)
                    stream._end(message.error)
                elif result is None or result.done():
                    pass  # the call was cancelled
                elif message.error is not None:
                    result.set_exception(message.error)
                else:
                    result.set_result(message.result)
            case EngineInfo():
                self.info, self._loaded = message, True
                if not self._ready.done():  # else the start was cancelled
                    self._ready.set_result(None)
            case Failed():
                self._failure = message.error
                log.log(logging.ERROR if self._loaded else logging.INFO, "%s", message.trace)
            case _:
                raise AssertionError(f"unexpected message from an engine: {message!r}")

    def _die(self, how: str) -> None:
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
        for result in self._calls.values():
            if not result.done():
                result.set_exception(EngineError(self.dead))


def _output(id: str | int, samples: list[Event], timings: Timings) -> RequestOutput:
    """Return the output of a request. samples: one event per sample, with all its tokens."""
    completions = [Completion(**{name: getattr(event, name) for name in SHARED}) for event in samples]
    first = samples[0]
    return RequestOutput(
        id=id,
        prompt_token_ids=first.prompt_token_ids or [],
        completions=completions,
        prompt=first.prompt,
        prompt_logprobs=first.prompt_logprobs,
        prompt_top_logprobs=first.prompt_top_logprobs,
        prompt_ranks=first.prompt_ranks,
        cached_tokens=first.cached_tokens,
        timings=timings,
    )


# ------------------------------------------------------------------------------------------------- engines


class _Process:
    """Process of an engine, with the connection to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, arguments: dict[str, Any]) -> _Process:
        """Start a process that makes a Generator with these arguments."""
        started: list[subprocess.Popen[bytes]] = []
        connection = processes.spawn(("-c", "from fastgen.async_engine.loop import main; main()"), started)
        self = cls(started[0], *await asyncio.open_unix_connection(sock=connection))
        self.send(Start(arguments, logging.getLogger("fastgen").getEffectiveLevel()))
        return self

    def send(self, message: object) -> None:
        """Send a message. If the connection has ended, drop it: `listen` ends soon, and whoever waits for an answer
        then gets the engine's error. uvloop would raise RuntimeError."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))  # the event loop sends later what the socket cannot take now

    async def listen(self, receive: Callable[[object], None]) -> str:
        """Pass messages to `receive` until the connection ends. Return how the process ended."""
        try:
            while True:
                (length,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                receive(pickle.loads(await self._reader.readexactly(length)))  # noqa: S301 (from our own process)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer.close()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, 0.5)
        return processes.describe_exit(self.process.returncode)

    async def end(self) -> None:
        """End the process by closing its connection, and kill it if it does not end."""
        self._writer.close()
        await asyncio.to_thread(processes.end_processes, [self.process])
