"""The served models: their engines, the facts that requests need, and the limits of waiting requests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fastgen.async_engine.client import AsyncGenerator, EngineError
from fastgen.cli.command import note
from fastgen.cli.serve.engine_input import ModelFacts, refused
from fastgen.cli.serve.metrics import Metrics, Throughput
from fastgen.cli.serve.openai_output import Vocabulary
from fastgen.cli.serve.options import ModelOptions, ServeOptions
from fastgen.cli.serve.validation import ApiError, Limits
from fastgen.engine.seeds import replica_seed, seed_of
from fastgen.engine.stats import Stats
from fastgen.processes.stopping import Stoppable
from fastgen.text.reasoning import template_parser
from fastgen.text.tokenizer import TOKENIZER_OPTIONS, Tokenizer, importing

log = logging.getLogger(__name__)

GARBAGE = 50_000  # new objects after which the garbage is collected; Python's 700 double the time to parse a large body
MAX_COMPUTED = 64  # maximum number of concurrent requests to the routes about tokens, whose bodies may have megabytes


class AdmissionQueue:
    """A counter of the samples without a first token and of their prompt tokens, which limits both."""

    def __init__(self, max_samples: int, max_tokens: int) -> None:
        self._max_samples, self._max_tokens = max_samples, max_tokens
        self._samples = self._tokens = 0

    @contextmanager
    def enter(self, sizes: Sequence[int], samples: int) -> Iterator[Callable[[int], None]]:
        """Count a request within the block. Yield a function that stops counting a prompt, for its first token.

        sizes: number of tokens of each prompt. samples: number of answers per prompt. Raises ApiError if the queue is
        full. An empty queue admits prompts of any length, since it will never have more room.
        """
        more = samples * len(sizes)
        if more > self._max_samples:
            message = f"{len(sizes)} prompts with n={samples} are {more} samples; one request may have "
            field = "prompt" if len(sizes) > self._max_samples else "n"
            raise ApiError(400, f"{message}{self._max_samples}", field, "invalid_value")
        full = self._samples + more > self._max_samples or self._tokens + sum(sizes) > self._max_tokens
        if self._samples and full:
            message = f"{self._samples} samples of prompts of {self._tokens} tokens are waiting; try again later"
            raise ApiError(503, message, code="overloaded")
        self._samples += more
        self._tokens += sum(sizes)
        waiting = dict(enumerate(sizes))

        def leave(prompt: int) -> None:
            if prompt in waiting:
                self._tokens -= waiting.pop(prompt)
                self._samples -= samples

        try:
            yield leave
        finally:
            for prompt in list(waiting):
                leave(prompt)


class ServedModel:
    """A served model. trouble: the reason if it has failed, else None. facts: set once the engine has started."""

    facts: ModelFacts

    def __init__(self, options: ModelOptions, queue: AdmissionQueue, grammar_timeout: float, rank: int) -> None:
        self.name, self.queue, self._options, self._grammar_timeout = options.name, queue, options, grammar_timeout
        self._rank = rank
        self.engine = self._make_engine()
        self.trouble: str | None = None
        seed = options.generator.get("seed")
        self._fleets = os.urandom(8) if seed is None else b"fleets of %d" % seed, itertools.count()

    def _make_engine(self, **changes: Any) -> AsyncGenerator:
        """Return an engine that has not started yet. changes: arguments that replace those of the options."""
        arguments = {**self._arguments, **changes}
        return AsyncGenerator(self._options.model, name=self.name, grammar_timeout=self._grammar_timeout, **arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        """The arguments of the engine. It does not see a chat template of the options, and so gets the reasoning parser
        that belongs to it."""
        arguments, template = dict(self._options.generator), self._options.chat_template
        arguments["seed"] = replica_seed(arguments.get("seed"), self._rank)
        if template is not None and arguments.get("reasoning_parser") is None:
            arguments["reasoning_parser"] = template_parser(template)
        return arguments

    async def start(self) -> None:
        """Start the engine and read the tokenizer. Raises what AsyncGenerator.start raises."""
        await self.engine.start()
        self.facts = await asyncio.to_thread(self._read_facts)

    def _read_facts(self) -> ModelFacts:
        info = self.engine.info
        tokenizer = vocabulary = None
        if info.tokenizer is not None:
            given = {name: value for name, value in self._arguments.items() if name in TOKENIZER_OPTIONS}
            tokenizer = Tokenizer(Path(info.tokenizer), **given)
            if self._options.chat_template is not None:
                tokenizer.hf.chat_template = self._options.chat_template
            tokenizer.encode("")  # changes the tokenizer's state, the first time, which several threads must not do
            with suppress(ValueError):  # there is no chat template, or it takes no such message
                # It imports jinja2, which takes a while, and modules of fastgen. Work that may be stopped must import
                # none: the lock of a module that is being imported is written in Python (see processes/stopping.py).
                tokenizer.read_chat([{"role": "user", "content": "a"}])
            vocabulary = Vocabulary(tokenizer)
        return ModelFacts(self.name, tokenizer, vocabulary, info.default_params, info.vocab_size, info.max_model_len)

    def fleet_seed(self) -> int:
        """Return another seed at each call, for a client that chooses the seeds of its requests: of one that uses
        several engines, whose own seeds may be equal."""
        base, numbers = self._fleets
        return seed_of(base, next(numbers))

    @property
    def ready(self) -> bool:
        return hasattr(self, "facts") and self.trouble is None and self.engine.ready

    def check_ready(self) -> None:
        """Raise ApiError if the model is not ready."""
        if not self.ready:
            raise ApiError(503, self.trouble or f"the model {self.name} is being loaded", code="not_ready")

    async def keep(self, restart: bool) -> None:
        """Wait until the engine dies, and restart it once if `restart` is true. Raises RuntimeError with the reason of
        the last death."""
        self.trouble = await self.engine.died()
        if restart:
            log.error("%s; another one is started", self.trouble)
            await self.engine.close()
            self.engine = self._make_engine(**self._options.again)
            await self.engine.start()
            self.trouble = None
            self.trouble = await self.engine.died()
        raise RuntimeError(self.trouble)


class Service:
    """All models of a server. rank: its number among replicas, whose engines draw different samples.

    loaded: set when every model has started. expired: True once `expire` was called. deadlines: the timeouts of the
    running requests. updating: the engines whose weights are being updated. work: the threads that work for requests.
    """

    def __init__(self, options: ServeOptions, rank: int = 0) -> None:
        self.options = options.server
        limits = (self.options.max_queued_requests, self.options.max_queued_tokens)
        seconds = self.options.grammar_timeout
        self.models = {
            model.name: ServedModel(model, AdmissionQueue(*limits), seconds, rank) for model in options.models
        }
        self.metrics = Metrics(self.stats)
        self.loaded = asyncio.Event()
        self.expired = False
        self.deadlines: set[asyncio.Timeout] = set()
        self.updating: set[AsyncGenerator] = set()
        self.work = WorkThreads()
        self._computed = 0  # number of requests to routes about tokens that wait or run

    async def run(self) -> None:
        """Start the models one after another and keep them running. Raises the error of the first that fails."""
        try:
            async with asyncio.TaskGroup() as group:
                if self.options.log_interval:
                    group.create_task(self._log_throughput(self.options.log_interval))
                for model in self.models.values():
                    await model.start()
                    note("fgserve", f"{model.name}: {model.engine.info.summary}")
                    group.create_task(model.keep(self.options.restart and not self.options.rollout))
                gc.collect()
                gc.set_threshold(GARBAGE)
                gc.freeze()  # otherwise, collecting everything that was imported would delay some tokens by 30 ms
                self.loaded.set()
                note("fgserve", f"ready: {', '.join(self.models)}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def stats(self) -> dict[str, Stats]:
        """Return the current statistics of each model's engine, by the name of the model."""
        return {name: model.engine.stats for name, model in self.models.items()}

    async def _log_throughput(self, interval: float) -> None:
        """Log the throughput of each model every `interval` seconds, but nothing of idle models."""
        throughput = Throughput(self.stats)
        while True:
            await asyncio.sleep(interval)
            for line in throughput.lines():
                note("fgserve", line)

    async def close(self) -> None:
        """End the engines."""
        await asyncio.gather(*(model.engine.close() for model in self.models.values()))

    async def compute(self, large: bool, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function for a route about tokens and return its result; see `WorkThreads.run`. Raises ApiError if too
        many requests to these routes wait."""
        if self._computed >= MAX_COMPUTED:
            raise ApiError(
                503, f"{self._computed} requests about tokens are waiting; try again later", code="overloaded"
            )
        self._computed += 1
        try:
            return await self.work.run(large, function, *args)
        finally:
            self._computed -= 1

    def expire(self) -> None:
        """End all running requests. Later ones end at once."""
        self.expired = True
        for deadline in self.deadlines:
            expire(deadline)

    @property
    def trouble(self) -> str | None:
        """The reason if the service is not healthy, else None."""
        for model in self.models.values():
            if model.trouble is not None:
                return model.trouble
            if model.engine.stalled > self.options.stall_timeout:
                return f"the engine of {model.name} has finished no step for {model.engine.stalled:.0f} seconds"
        return None

    def limits(self, model_name: Any) -> Limits:
        """Return the limits of the model that a body names, which has not been checked. If no model has this name, they
        are the largest ones of all models. A model that is not loaded yet has none."""
        named = [model for name, model in self.models.items() if name == model_name] or list(self.models.values())
        loaded = [model.facts for model in named if hasattr(model, "facts")]
        context = max((facts.max_model_len for facts in loaded), default=sys.maxsize)
        ids = max((facts.vocab_size for facts in loaded), default=sys.maxsize)
        return Limits(context, self.options.max_queued_requests, ids)

    def choose(self, name: str | None) -> ServedModel:
        """Return the model that a request names; a single model answers to any name. Raises ApiError if there is no
        such model or it is not ready."""
        served = ", ".join(self.models)
        model = next(iter(self.models.values())) if len(self.models) == 1 else self.models.get(name or "")
        if model is None and name is None:
            raise ApiError(400, f"model is required; give one of {served}", "model", "missing_required_parameter")
        if model is None:
            message = f"the model {(name or '')[:100]!r} is not served; give one of {served}"
            raise ApiError(404, message, "model", "model_not_found")
        model.check_ready()
        return model


def engine_error(error: ValueError | TypeError | RuntimeError, field: str | None = None) -> ApiError:
    """Return the ApiError of the routes for clients for an error of an engine. field: the one to name if the engine
    refuses the request."""
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    if isinstance(error, RuntimeError):
        return ApiError(503, str(error), code="not_ready")  # the weights are asleep or torn
    return refused(error, field)


def expire(deadline: asyncio.Timeout) -> None:
    """Let a timeout expire now if it has not expired yet."""
    if not deadline.expired():
        deadline.reschedule(0)


def import_tokenizers() -> None:
    """Import transformers' tokenizers without torch, which transformers would import too. This saves 3 s and 300 MB.

    Use it only in a process that does not import torch; other parts of transformers do not work there.
    """
    with importing:
        if {"torch", "transformers"} & sys.modules.keys():
            return
        logger, silence = logging.getLogger("transformers"), logging.Filter("nothing")
        logger.addFilter(silence)  # it would report that torch is missing
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
        try:
            from transformers import AutoTokenizer  # noqa: F401
        finally:
            del sys.modules["torch"]
            logger.removeFilter(silence)


# ------------------------------------------------------------------------------------------------- threads

Result = TypeVar("Result")

SMALL_THREADS = 4
LARGE_THREADS = 2


class WorkThreads:
    """Threads that work for requests. Small work and large work have separate threads, so that the former, which
    takes milliseconds, does not wait for the latter, which may take seconds."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(SMALL_THREADS, "fastgen-small")
        self._large = ThreadPoolExecutor(LARGE_THREADS, "fastgen-large")

    async def run(self, large: bool, function: Callable[..., Result], *args: object) -> Result:
        """Call a function in a thread and return its result. A cancellation ends the call too: it does not begin, or it
        stops at its next Python instruction."""
        block = Stoppable()

        def call() -> Result:
            with block:
                try:
                    return function(*args)
                except ApiError as error:
                    raise error.with_traceback(None) from None  # whose frames hold what was parsed

        try:
            return await asyncio.get_running_loop().run_in_executor(self._large if large else self._small, call)
        except asyncio.CancelledError:
            block.stop()
            raise
