"""The models that are served: each an engine, its tokenizer, and the requests that wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from fastgen.cli.serve.engine import Engine
from fastgen.cli.serve.metrics import Metrics
from fastgen.cli.serve.options import ModelOptions, Options
from fastgen.cli.serve.protocol import ApiError, choose_model
from fastgen.cli.serve.tokens import Vocabulary
from fastgen.model.config import sampling_defaults
from fastgen.request import SamplingParams
from fastgen.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Queue:
    """Counts the samples that have come and whose prompts have no first token yet, and the tokens of these prompts."""

    def __init__(self, max_samples: int, max_tokens: int) -> None:
        self._max_samples, self._max_tokens = max_samples, max_tokens
        self.samples = self.tokens = 0

    def enter(self, sizes: Sequence[int], samples: int = 1) -> Place:
        """Let in a request of prompts of so many tokens, and so many samples of each. Raises ApiError where there is no
        room now.

        Where nothing waits, a request of any number of samples and tokens comes in: there will never be more room.
        """
        if len(sizes) > self._max_samples:
            message = f"prompt holds {len(sizes)} prompts; one request may have {self._max_samples}"
            raise ApiError(400, message, "prompt", "invalid_value")
        more = samples * len(sizes)
        full = self.samples + more > self._max_samples or self.tokens + sum(sizes) > self._max_tokens
        if self.samples and full:
            message = f"{self.samples} samples of prompts of {self.tokens} tokens are waiting; try again later"
            raise ApiError(503, message, code="overloaded")
        return Place(self, sizes, samples)


class Place:
    """What one request counts in a queue; leaving the `with` block, nothing."""

    def __init__(self, queue: Queue, sizes: Sequence[int], samples: int) -> None:
        self._queue, self._sizes, self._samples = queue, dict[int, int](), samples
        for prompt, size in enumerate(sizes):
            self.count(prompt, size)

    def count(self, prompt: int, size: int) -> None:
        """A prompt has so many tokens."""
        self.leave(prompt)
        self._sizes[prompt] = size
        self._queue.samples += self._samples
        self._queue.tokens += size

    def leave(self, prompt: int) -> None:
        """A prompt waits no more."""
        if prompt in self._sizes:
            self._queue.samples -= self._samples
            self._queue.tokens -= self._sizes.pop(prompt)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        for prompt in list(self._sizes):
            self.leave(prompt)


class Served:
    """One model. trouble: why it does not work, until it does again. What `start` reads is there once it is `ready`."""

    def __init__(self, options: ModelOptions, queue: Queue) -> None:
        self.name, self.queue, self._options = options.name, queue, options
        self.engine = Engine(options.model, name=options.name, **options.generator)
        self.tokenizer: Tokenizer | None = None
        self.vocabulary: Vocabulary | None = None
        self.defaults = SamplingParams()
        self.trouble: str | None = None
        self._read = False

    async def start(self) -> None:
        """Raises what Engine.start does."""
        await self.engine.start()
        await asyncio.to_thread(self._read_files)
        self._read = True

    def _read_files(self) -> None:
        info = self.engine.info
        self.defaults = SamplingParams(**sampling_defaults(Path(info.folder)))  # type: ignore[arg-type]
        if info.tokenizer is not None:
            self.tokenizer = Tokenizer(Path(info.tokenizer))
            self.tokenizer.encode("")  # settles what tokenizers change about themselves, which threads must not
            self.vocabulary = Vocabulary(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        return self.engine.info.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.engine.info.max_model_len

    @property
    def ready(self) -> bool:
        return self._read and self.trouble is None and self.engine.ready

    def check_ready(self) -> None:
        """Raises ApiError where it is not ready."""
        if not self.ready:
            raise ApiError(503, self.trouble or f"the model {self.name} is being loaded", code="not_ready")

    async def keep(self, restart: bool) -> None:
        """Start the engine again where it dies, once. Raises RuntimeError, saying why, when that was all."""
        self.trouble = await self.engine.died()
        if restart:
            log.error("%s; it is started again", self.trouble)
            await self.engine.restart(**self._options.again)
            self.trouble = None
            self.trouble = await self.engine.died()
        raise RuntimeError(self.trouble)


class Service:
    """All models. expired: set when what still runs is to end, for the server does."""

    def __init__(self, options: Options) -> None:
        self.options = options.server
        limits = (self.options.max_queued_requests, self.options.max_queued_tokens)
        self.models = {model.name: Served(model, Queue(*limits)) for model in options.models}
        self.metrics = Metrics({name: model.engine for name, model in self.models.items()})
        self.expired = asyncio.Event()
        self.loaded = asyncio.Event()

    async def run(self) -> None:
        """Start the models, one after another, and keep them. Ends with an exception, when one can not be kept."""
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

    @property
    def trouble(self) -> str | None:
        """Why it is not healthy."""
        for model in self.models.values():
            if model.trouble is not None:
                return model.trouble
            if model.engine.stalled > self.options.stall_timeout:
                return f"the engine of {model.name} has finished no step for {model.engine.stalled:.0f} seconds"
        return None

    def choose(self, wanted: str | None) -> Served:
        """The model that a request is for. Raises ApiError where there is none, or it is not ready."""
        model = self.models[choose_model(wanted, list(self.models))]
        model.check_ready()
        return model
