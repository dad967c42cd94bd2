"""The engine of an AsyncGenerator: the loop that runs the steps of a Generator, and the messages between the loop and
the client.

The loop runs in a separate process (`main`). Importing this module imports neither torch nor numpy.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import marshal
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from fastgen.async_engine.grammars import GRAMMAR_TIMEOUT, GrammarPool
from fastgen.async_engine.log_pipe import LOG_SECONDS, LogPipe
from fastgen.engine.stats import Stats
from fastgen.processes.channel import Channel, Failed, Start
from fastgen.processes.errors import DepartedError, portable
from fastgen.processes.process_memory import trim_heap
from fastgen.processes.spawning import end_with_parent
from fastgen.request import Completion, Event, Prompt, SamplingParams
from fastgen.text.grammar import Compiler, GrammarMask, named_error
from fastgen.text.reasoning import after_reasoning, find_reasoning
from fastgen.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from fastgen.async_engine.updates import WeightUpdates
    from fastgen.generator import Generator

STATS_SECONDS = 0.25  # minimum interval between two messages with stats
INTAKE_SECONDS = 0.02  # maximum time between two steps for adding new requests to the Generator
WEIGHT_METHODS = (
    "weight_state", "init_weight_group", "close_weight_group", "receive_weights", "receive_adapter", "read_adapter",
    "check_drafter", "join_trainer", "receive_packed", "reset_weights", "transfer_state",
)  # fmt: skip
"""The methods of WeightUpdates that a client may call."""
OWN_METHODS = ("pause", "resume", "cut_off", "drain", "texts")
"""The methods of EngineLoop that a client may call."""
STEPPING = ("score", "classify", "embed", "features", "write_features", "generate", "chat", "beam_search")
"""Methods of the Generator that run steps; they are refused while the engine is paused."""


# ------------------------------------------------------------------------------------------------- messages

_NAMES = tuple(field.name for field in fields(Event))
_row: Callable[[Event], tuple[Any, ...]] = attrgetter(*_NAMES)


class Numbered:
    """Message about one request or call. A process that cannot read it, for example because it has no class or function
    of the same name, gets an Answer with an error instead."""

    __slots__: tuple[str, ...] = ()
    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, name) for name in type(self).__slots__]
        return _read, (type(self), self.number, pickle.dumps(values, protocol=5))


def _read(kind: Callable[..., Numbered], number: int, data: bytes) -> Numbered:
    try:
        return kind(*pickle.loads(data))  # noqa: S301 (from our own process)
    except Exception as error:
        reason = f"the other process cannot read this ({error}); its classes and functions must be in a module"
        return Answer(number, error=ValueError(reason))


@dataclass(frozen=True, slots=True)
class Submit(Numbered):
    """Message to the engine: a request.

    params: parameters in which structured output is given as a grammar.
    grammar_timeout: seconds that the grammar may take to compile.
    structure: name of the parameter that the grammar comes from, for errors.
    resume, priority: see `Request`.
    """

    number: int
    prompt: Prompt
    params: SamplingParams
    grammar_timeout: float = GRAMMAR_TIMEOUT
    structure: str = "grammar"
    resume: Completion | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Message to the engine: end these requests, or a call among them that receives weights. Nothing more is reported
    about them."""

    numbers: range


@dataclass(frozen=True, slots=True)
class Call(Numbered):
    """Message to the engine: call a method between two steps: a method of the Generator, one of WEIGHT_METHODS, or one
    of OWN_METHODS."""

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Message from the engine when its Generator is ready: properties of the model that a server needs.

    tokenizer: folder or hub id of the tokenizer; None: there is no tokenizer.
    max_model_len: maximum number of tokens of prompt and answer together.
    summary: description of the engine's configuration.
    default_params: parameters of requests that give none.
    eos_ids: ids that end an answer.
    """

    tokenizer: str | None
    max_model_len: int
    vocab_size: int
    summary: str
    default_params: SamplingParams
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, gen: Generator) -> EngineInfo:
        return cls(
            tokenizer=None if gen.tokenizer is None else str(gen.tokenizer.hf.name_or_path),
            max_model_len=gen.max_model_len,
            vocab_size=gen.model_config.vocab_size,
            summary=gen.config.summary,
            default_params=gen.default_params,
            eos_ids=gen.model_config.eos_ids,
        )


@dataclass(frozen=True, slots=True)
class Answer(Numbered):
    """Message from the engine: the result of a call, or the error of a call or a request. If the engine receives an
    Answer because it cannot read a message (see Numbered), it sends the Answer back."""

    number: int
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepEnded:
    """Message from the engine after a step.

    time: time.monotonic() at the end of the step; all processes of a machine share this clock.
    stats: statistics, sent a few times per second and when the engine becomes idle; else None.

    marshal serializes events many times faster than pickle does. It requires that both processes run the same Python.
    """

    events: list[Event]
    time: float
    stats: Stats | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_step, (marshal.dumps(list(map(_row, self.events)), 2), self.time, self.stats)


def _read_step(events: bytes, time: float, stats: Stats | None) -> StepEnded:
    rows = marshal.loads(events)  # noqa: S302 (from our own process)
    return StepEnded([Event(**dict(zip(_NAMES, row, strict=True))) for row in rows], time, stats)


# ------------------------------------------------------------------------------------------------- the loop


class EngineLoop:
    """Loop that runs the steps of a Generator while it has work, and handles messages between them.

    incoming: queue of the client's messages; None ends the loop.
    send: function that sends a message to the client. It does not wait for a slow reader, which must not delay steps.
    flush: function that waits until all messages are sent.
    """

    def __init__(
        self,
        gen: Generator,
        incoming: SimpleQueue[Any],
        send: Callable[[object], None],
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._gen, self._incoming, self._send, self._flush = gen, incoming, send, flush
        self._arrived: dict[int, Submit] = {}  # requests to be added to the Generator, in order
        # {number: (request, its grammar)} of requests whose grammar is being compiled.
        self._compiling: dict[int, tuple[Submit, Future[GrammarMask]]] = {}
        self._grammars = GrammarPool(partial(_make_compiler, gen))
        self._updates: WeightUpdates | None = None  # made at the first use, since its module imports torch
        self._held: deque[Any] = deque()  # messages that arrived during a call
        self._calling = -1  # number of the call that runs
        self._paused = False
        self._draining = False  # new requests are not added
        self._stats_sent = 0.0
        self._trimmed = False  # whether free memory has been returned since the last work
        self._ended = False

    def run(self) -> None:
        """Report that the Generator is ready, and run until the client ends the loop. Raises what `turn` raises."""
        self._send(EngineInfo.of(self._gen))
        try:
            while not self._ended:
                self.turn()
        finally:
            self._grammars.close()

    @property
    def idle(self) -> bool:
        """True while only a message can bring work. Running requests wait while the engine is paused, and after an
        update of the weights that has failed midway, until another one is complete."""
        arrived = self._arrived and not self._draining
        return not arrived and not self._held and (self._waits or not self._gen.unfinished)

    @property
    def _waits(self) -> bool:
        return self._paused or self._gen.needs_weights

    def turn(self) -> None:
        """Handle the messages that have arrived, run a step, and send its events. An idle loop waits for a message
        first. Raises what a step raises."""
        wait: float | None = 0
        if self.idle:
            self._flush()
            # Stats during a compilation show that this process is alive.
            wait = STATS_SECONDS if self._compiling or not self._trimmed else None
        self._handle_messages(wait)
        self._trim(waited=wait != 0)
        deadline = time.monotonic() + INTAKE_SECONDS
        for submit in () if self._draining else sorted(self._arrived.values(), key=attrgetter("priority")):
            if time.monotonic() >= deadline:
                break
            self._add(self._arrived.pop(submit.number))
        self._report(self._gen.take_events() if self._waits else self._gen.step())

    def _trim(self, waited: bool) -> None:
        """Return free memory to the system, once after each burst of work."""
        if not self.idle:
            self._trimmed = False
        elif waited and not self._trimmed:
            trim_heap()
            self._trimmed = True

    def pause(self) -> None:
        """Run no steps until `resume`. Running requests stay as they are, and new ones wait."""
        self._paused, self._draining = True, False
        self._stats_sent = 0.0
        self._report([])  # before the answer, so that whoever has paused the engine reads exact counters

    def resume(self) -> None:
        self._paused = self._draining = False

    def drain(self) -> int:
        """Let new requests wait until `pause` or `resume`, and return the number of unfinished ones. Raises
        RuntimeError if the engine is paused, so that these cannot finish."""
        if self._waits and self._gen.unfinished:
            raise RuntimeError("the engine is paused, so that its requests cannot finish; call resume first")
        self._draining = True
        return self._gen.unfinished

    def cut_off(self, numbers: Iterable[int] | None) -> None:
        """End requests (None: all). Their last events have the finish_reason "abort" and report what they have drawn;
        see `Generator.cut_off`."""
        for number in [*self._arrived, *self._compiling] if numbers is None else list(numbers):
            if number in self._compiling:
                submit, compiling = self._compiling.pop(number)
                compiling.cancel()
                self._add(replace(submit, params=replace(submit.params, grammar=None)))  # it draws nothing
            elif number in self._arrived:
                self._add(self._arrived.pop(number))
        self._gen.cut_off(numbers)

    def texts(self, prompt_ids: list[int], answers: list[list[int]]) -> list[str]:
        """Return the text of each answer to a prompt."""
        from fastgen.beam_search import texts_after  # few engines search beams

        return texts_after(prompt_ids, answers, self._gen.tokenizer)

    def _handle_messages(self, wait: float | None) -> None:
        """Handle all messages that have arrived. wait: seconds to wait for the first one; None: no limit."""
        while self._held:
            self._handle(self._held.popleft())
        with suppress(Empty):
            self._handle(self._incoming.get(block=wait != 0, timeout=wait))
            while True:
                self._handle(self._incoming.get_nowait())

    def _handle(self, message: object) -> None:
        match message:
            case Submit(params=SamplingParams(grammar=None)):
                self._arrived[message.number] = message
            case Submit(params=SamplingParams(grammar=str() as grammar)):
                self._compile(message, grammar)
            case Submit() as submit, Future() as compiled:
                if self._compiling.pop(submit.number, None):
                    self._take_compiled(submit, compiled)
            case Abort():
                for number in message.numbers:
                    self._arrived.pop(number, None)
                    if number in self._compiling:
                        self._compiling.pop(number)[1].cancel()
                self._gen.abort(message.numbers)
            case Call():
                self._call(message)
            case Answer():
                self._send(message)
            case None:
                self._ended = True
            case _:
                raise AssertionError(f"unexpected message to an engine: {message!r}")

    def _call(self, call: Call) -> None:
        self._calling = call.number
        try:
            self._send(Answer(call.number, self._method(call.method)(*call.args, **call.kwargs)))
        except Exception as error:  # of this call, or of pickling its result
            self._refuse(call.number, error)

    def _method(self, name: str) -> Callable[..., Any]:
        """Return the method that a call names. Raises RuntimeError if it runs steps and the engine is paused."""
        if self._paused and name in STEPPING:
            raise RuntimeError(f"the engine is paused; call resume before {name}")
        owner: Any = self if name in OWN_METHODS else self._gen
        if name in WEIGHT_METHODS:
            from fastgen.async_engine.updates import WeightUpdates

            owner = self._updates = self._updates or WeightUpdates(self._gen, self._check_wanted)
        method: Callable[..., Any] = getattr(owner, name)
        return method

    def _check_wanted(self) -> None:
        """Raise DepartedError if the client of the running call has gone. Other messages are kept for later."""
        with suppress(Empty):
            while True:
                self._held.append(self._incoming.get_nowait())
        for message in self._held:
            if message is None or (isinstance(message, Abort) and self._calling in message.numbers):
                raise DepartedError("the program that sends the weights has gone")

    def _compile(self, submit: Submit, grammar: str) -> None:
        """Begin to compile the grammar of a request, which holds after the reasoning of its answer. Where answers have
        reasoning, the prompt becomes ids, which tell whether it leaves the reasoning open."""
        gen = self._gen
        if gen.tokenizer is not None and find_reasoning(gen.tokenizer) is not None:
            try:
                ids, text = encode_prompt(submit.prompt, gen.tokenizer)
            except (ValueError, TypeError) as error:
                return self._refuse(submit.number, error)
            submit = replace(submit, prompt={"prompt_token_ids": ids, "prompt": text})
            grammar = after_reasoning(grammar, gen.tokenizer, ids, gen.model_config.eos_ids)
        compiled = self._grammars.compile(grammar, submit.grammar_timeout)
        self._compiling[submit.number] = submit, compiled
        compiled.add_done_callback(lambda done: self._incoming.put((submit, done)))

    def _take_compiled(self, submit: Submit, compiled: Future[GrammarMask]) -> None:
        if error := compiled.exception():  # any error fails only this request
            error = named_error(submit.structure, error) if isinstance(error, ValueError) else error
            self._refuse(submit.number, error)
        else:
            params = replace(submit.params, grammar=None, mask=compiled.result())
            self._arrived[submit.number] = replace(submit, params=params)

    def _add(self, submit: Submit) -> None:
        try:
            self._gen.add(submit.prompt, submit.params, submit.number, submit.resume, submit.priority)
        except Exception as error:  # a RuntimeError while the weights are asleep
            self._refuse(submit.number, error)

    def _refuse(self, number: int, error: BaseException) -> None:
        self._send(Answer(number, error=portable(error)))

    def _report(self, events: list[Event]) -> None:
        now = time.monotonic()
        stats = None
        if now - self._stats_sent >= STATS_SECONDS or self.idle:
            self._stats_sent, stats = now, self._gen.stats
        if events or stats is not None:
            self._send(StepEnded(events, now, stats))


def _make_compiler(gen: Generator) -> Compiler:
    model = gen.model_config
    return Compiler(gen.tokenizer, model.vocab_size, model.eos_ids)


def main() -> None:
    """Run the process of an engine, which ends with its socket and with the process that started it. The last argument
    of the program is the file descriptor of its end of the socket."""
    faulthandler.enable()
    sys.stderr = log = LogPipe()  # a log that nobody reads must not stop the steps
    end_with_parent()
    connection = socket.socket(fileno=int(sys.argv[-1]))
    incoming: SimpleQueue[Any] = SimpleQueue()
    channel = Channel(connection, lambda message: os._exit(0) if message is None else incoming.put(message))
    try:
        start = incoming.get()
        assert isinstance(start, Start), start
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("fastgen").setLevel(start.log_level)
        if start.log_level <= logging.WARNING:  # the default shows what a first start waits for
            logging.getLogger("fastgen.kernels.triton.compile_ahead").setLevel(min(start.log_level, logging.INFO))
        from fastgen.generator import Generator  # importing torch takes seconds

        gen = Generator(**start.arguments)
        gc.collect()
        gc.freeze()  # else a collection of all that torch has imported would hold up some step for 80 ms
        EngineLoop(gen, incoming, partial(channel.send, wait=False), channel.flush).run()
    except BaseException as error:
        with suppress(OSError):  # the other process may be gone
            channel.send(Failed.of(error))
        log.drain(LOG_SECONDS)
        os._exit(1)
