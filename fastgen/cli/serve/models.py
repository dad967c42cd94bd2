"""The served models: an engine each, the facts that requests need, and the limit of waiting requests."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastgen.cli.serve.engine import Engine
from fastgen.cli.serve.metrics import Metrics
from fastgen.cli.serve.options import ModelOptions, Options
from fastgen.cli.serve.protocol import ApiError, choose_model
from fastgen.cli.serve.tokens import ModelFacts, Vocabulary
from fastgen.model.config import sampling_defaults
from fastgen.request import SamplingParams
from fastgen.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class AdmissionQueue:
    """Counts the samples without a first token, and the tokens of their prompts, and limits both."""

    def __init__(self, max_samples: int, max_tokens: int) -> None:
        self._max_samples, self._max_tokens = max_samples, max_tokens
        self.samples = self.tokens = 0

    def enter(self, sizes: Sequence[int], samples: int = 1) -> Waiting:
        """Admit a request; sizes: tokens of each prompt; samples: answers to each. Raises ApiError where the queue is
        full. An empty queue admits a request of any size, since it will never have more room."""
        if len(sizes) > self._max_samples:
            message = f"prompt holds {len(sizes)} prompts; one request may have {self._max_samples}"
            raise ApiError(400, message, "prompt", "invalid_value")
        more = samples * len(sizes)
        full = self.samples + more > self._max_samples or self.tokens + sum(sizes) > self._max_tokens
        if self.samples and full:
            message = f"{self.samples} samples of prompts of {self.tokens} tokens are waiting; try again later"
            raise ApiError(503, message, code="overloaded")
        self.samples += more
        self.tokens += sum(sizes)
        return Waiting(self, dict(enumerate(sizes)), samples)


@dataclass
class Waiting:
    """The waiting prompts of one request, to be used in a `with` block. sizes: tokens, by the index of the prompt."""

    queue: AdmissionQueue
    sizes: dict[int, int]
    samples: int

    def leave(self, prompt: int) -> None:
        """Count a prompt no longer: it has its first token."""
        if prompt in self.sizes:
            self.queue.tokens -= self.sizes.pop(prompt)
            self.queue.samples -= self.samples

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        for prompt in list(self.sizes):
            self.leave(prompt)


class ServedModel:
    """One model. trouble: the reason why it fails; None while it works. facts: set once the engine has started."""

    def __init__(self, options: ModelOptions, queue: AdmissionQueue) -> None:
        self.name, self.queue, self._options = options.name, queue, options
        self.engine = Engine(options.model, name=options.name, **options.generator)
        self.trouble: str | None = None
        self._facts: ModelFacts | None = None

    async def start(self) -> None:
        """Start the engine and read the tokenizer. Raises what Engine.start raises."""
        await self.engine.start()
        self._facts = await asyncio.to_thread(self._read_facts)

    def _read_facts(self) -> ModelFacts:
        info = self.engine.info
        tokenizer = vocabulary = None
        if info.tokenizer is not None:
            tokenizer = Tokenizer(Path(info.tokenizer))
            tokenizer.encode("")  # a tokenizer's first call changes its state, which threads must not do
            vocabulary = Vocabulary(tokenizer)
        defaults = SamplingParams(**sampling_defaults(Path(info.folder)))  # type: ignore[arg-type]
        return ModelFacts(self.name, tokenizer, vocabulary, defaults, info.vocab_size, info.max_model_len)

    @property
    def ready(self) -> bool:
        return self._facts is not None and self.trouble is None and self.engine.ready

    def check_ready(self) -> None:
        """Raise ApiError where the model is not ready."""
        if not self.ready:
            raise ApiError(503, self.trouble or f"the model {self.name} is being loaded", code="not_ready")

    @property
    def facts(self) -> ModelFacts:
        """Facts of a model that has been ready."""
        assert self._facts is not None
        return self._facts

    async def keep(self, restart: bool) -> None:
        """Wait until the engine dies; restart it once if `restart` is true. Raises RuntimeError with the reason of the
        last death."""
        self.trouble = await self.engine.died()
        if restart:
            log.error("%s; it is started again", self.trouble)
            await self.engine.restart(**self._options.again)
            self.trouble = None
            self.trouble = await self.engine.died()
        raise RuntimeError(self.trouble)


class Service:
    """All models of a server. loaded: set when every model has started. expired: True once `expire` was called.
    deadlines: of the running requests."""

    def __init__(self, options: Options) -> None:
        self.options = options.server
        limits = (self.options.max_queued_requests, self.options.max_queued_tokens)
        self.models = {model.name: ServedModel(model, AdmissionQueue(*limits)) for model in options.models}
        self.metrics = Metrics({name: model.engine for name, model in self.models.items()})
        self.loaded = asyncio.Event()
        self.expired = False
        self.deadlines: set[asyncio.Timeout] = set()

    async def run(self) -> None:
        """Start the models one after another, and keep them running. Raises the error of the first that fails."""
        try:
            async with asyncio.TaskGroup() as group:
                for model in self.models.values():
                    await model.start()
                    group.create_task(model.keep(self.options.restart))
                self.loaded.set()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def close(self) -> None:
        """End the engines."""
        await asyncio.gather(*(model.engine.close() for model in self.models.values()))

    def expire(self) -> None:
        """End all running requests; later ones end at once."""
        self.expired = True
        for deadline in self.deadlines:
            expire(deadline)

    @property
    def trouble(self) -> str | None:
        """The reason why the service is not healthy; None while it is."""
        for model in self.models.values():
            if model.trouble is not None:
                return model.trouble
            if model.engine.stalled > self.options.stall_timeout:
                return f"the engine of {model.name} has finished no step for {model.engine.stalled:.0f} seconds"
        return None

    def choose(self, wanted: str | None) -> ServedModel:
        """Return the model that a request names. Raises ApiError where there is none, or it is not ready."""
        model = self.models[choose_model(wanted, list(self.models))]
        model.check_ready()
        return model


def expire(deadline: asyncio.Timeout) -> None:
    """Let a timeout expire now, unless it has."""
    if not deadline.expired():
        deadline.reschedule(0)


def import_tokenizers() -> None:
    """Import transformers' tokenizers while torch is hidden, which transformers would import: 3 s and 300 MB less.

    For a process that does not import torch; the other parts of transformers do not work in it.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        return
    logger, silence = logging.getLogger("transformers"), logging.Filter("nothing")
    logger.addFilter(silence)  # it reports that torch is missing
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]
        logger.removeFilter(silence)
