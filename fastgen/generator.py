"""Generator: the engine as people use it."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import time
from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from fastgen.arch import read_config
from fastgen.config import EngineConfig
from fastgen.loader import resolve
from fastgen.outputs import Active, Answer, Sink, Stats
from fastgen.request import (
    Completion,
    Event,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    Status,
    TokenMask,
)
from fastgen.runner import Launched, build_runner, find_device
from fastgen.scheduler import Scheduler
from fastgen.tokenizer import AnswerText, Tokenizer, encode_prompt

log = logging.getLogger(__name__)


class Generator:
    """Generates text from a model, many requests at a time.

    model: a folder in Hugging Face format or a hub id; None: the bundled model. revision: of the hub id.
    tokenizer: a folder or hub id to take the tokenizer from, where it is not the model's own.
    dtype: "auto" (the checkpoint's on a GPU, float32 on the CPU), "float32", "bfloat16" or "float16".
    device: a torch device; None: the GPU where there is one, else the CPU.
    max_model_len: the context, prompt and answer together, in tokens; None: the model's, or what the KV pool holds
        where that is less; the attribute of that name tells.
    max_seqs: sequences that run at a time. max_step_tokens: tokens that one step computes at most.
    page_size: tokens a page of the KV pool; num_pages, or kv_cache_gb (10^9 bytes), sizes the pool.
    attention: "auto" or "reference". load: "auto", or "dummy" for random weights.
    seed: where requests without one derive theirs from; None: from the operating system.

    Raises ValueError for what can not work, saying what to change. Use it from one thread at a time. Nothing global is
    changed: no default dtype or device, no random number generator.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_model_len: int | None = None,
        max_seqs: int = 256,
        max_step_tokens: int = 2048,
        page_size: int = 64,
        num_pages: int | None = None,
        kv_cache_gb: float | None = None,
        attention: str = "auto",
        load: str = "auto",
        seed: int | None = None,
    ) -> None:
        if load not in ("auto", "dummy"):
            raise ValueError(f"load is {load!r}; it must be 'auto' or 'dummy'")
        self.folder = resolve(model, revision, weights=False)  # the weights follow when all else is known to be right
        self.model_config = read_config(self.folder)
        self.config = EngineConfig.make(
            self.model_config,
            device=find_device(device),
            dtype=dtype,
            max_model_len=max_model_len,
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            page_size=page_size,
            num_pages=num_pages,
            kv_cache_gb=kv_cache_gb,
            attention=attention,
        )
        self.max_model_len = self.config.max_model_len
        if max_model_len is None and self.max_model_len < self.model_config.max_position:
            log.warning(
                "the KV pool holds a context of %d tokens, and the model's is %d; raise kv_cache_gb for more",
                self.max_model_len,
                self.model_config.max_position,
            )
        self.tokenizer = Tokenizer.find(self.folder if tokenizer is None else resolve(tokenizer, weights=False))
        if tokenizer is not None and self.tokenizer is None:
            raise ValueError(f"tokenizer is {str(tokenizer)!r}, which has no tokenizer files")
        start = time.perf_counter()
        if load == "auto":
            self.folder = resolve(model, revision)
        self._runner = build_runner(self.model_config, self.config, self.folder, load)
        log.info("%s in %.1f s: %s", self.folder.name, time.perf_counter() - start, self.config)
        self._scheduler = Scheduler(self.config)
        self._in_flight: Launched | None = None
        self._recovering = False
        self._stepping = False
        self._late_aborts: list[str | int] = []
        self._active: dict[str | int, Active] = {}
        self._owners: dict[Sequence, tuple[Active, Answer]] = {}
        self._events: list[Event] = []
        self._stats = Stats(pages=self.config.num_pages)
        self._seed = os.urandom(8) if seed is None else str(seed).encode()
        self._seeds = itertools.count()
        self._ids = itertools.count()

    # --------------------------------------------------------------------------------------- whole answers

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one prompt or a list of them; outputs in their order. params: one for all, or one a prompt.

        A prompt is a string, a list of ids or a list of messages; a list that begins with an int or a dict is one
        prompt. A bad prompt comes back as an output with an error. progress: show a bar of requests and tokens/s.
        """
        requests = [Request(prompt, p, self._new_id()) for prompt, p in _paired(prompts, params)]
        outputs: dict[str | int, RequestOutput] = {}
        start, generated = time.perf_counter(), 0
        bar = tqdm(total=len(requests), unit="req", disable=not progress)
        with bar, closing(self.stream(requests)) as outputs_as_done:
            for output in outputs_as_done:
                outputs[output.id] = output
                generated += sum(len(completion.token_ids) for completion in output.completions)
                bar.set_postfix_str(f"{generated / (time.perf_counter() - start):.1f} tok/s", refresh=False)
                bar.update()
        return [outputs[request.id] for request in requests if request.id is not None]

    def stream(self, requests: Iterable[Request]) -> PyGenerator[RequestOutput, None, None]:
        """Answer requests as they come from an iterable, endless ones too, in the order of completion.

        The iterable is read only as far as lanes and pages are free. Leaving early aborts what was begun. A request
        that can not be served comes back as an output with an error, and the others never notice.
        """
        source: Iterator[Request] | None = iter(requests)
        sink = Sink()
        try:
            while source is not None or sink.running or sink.done:
                while source is not None and self._scheduler.wants_more and not sink.done:
                    source = self._pull(source, sink)
                if not sink.done:
                    self._advance()
                while sink.done:
                    yield sink.done.popleft()
        finally:
            self.abort(sink.running)

    def _pull(self, source: Iterator[Request], sink: Sink) -> Iterator[Request] | None:
        """Begin the next request of an iterator, for `sink`; None where it has ended."""
        try:
            request = next(source)
        except StopIteration:
            return None
        try:
            if not isinstance(request, Request):
                raise TypeError(f"stream takes Requests, not {type(request).__name__}")
            self._begin(request.prompt, request.params, request.id, sink)
        except (ValueError, TypeError) as error:
            completion = Completion(0, [], "", [], [], "error", error=str(error))
            id = getattr(request, "id", None)
            sink.done.append(RequestOutput(self._new_id() if id is None else id, [], [completion]))
        return source

    def score(
        self, sequences: SequenceOf[Prompt], start: int | SequenceOf[int] = 0, temperature: float = 1.0
    ) -> list[list[float]]:
        """Logprobs of given tokens: float32, of log_softmax(logits / temperature), for positions start, start + 1, ...

        sequences: prompts, mostly lists of ids; start: one for all, or one a sequence. Each list has len - start
        floats; position 0 has no logprob, and is NaN. Raises ValueError for a sequence that can not be scored.
        """
        if not (isinstance(temperature, Real) and 0 < float(temperature) < math.inf):
            raise ValueError(f"temperature is {temperature}; scores need one above 0")
        sequences = _prompts(sequences)
        starts = [start] * len(sequences) if isinstance(start, Integral) else list(start)
        if not all(isinstance(first, Integral) for first in starts):
            raise TypeError(f"start must be an integer, or one a sequence, not {start!r}")
        if len(starts) != len(sequences):
            raise ValueError(
                f"there are {len(sequences)} sequences and {len(starts)} starts; give one start a sequence"
            )
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        sink = Sink()
        try:
            ids = [
                self._begin(sequence, params, None, sink, (first, float(temperature))).id
                for sequence, first in zip(sequences, starts, strict=True)
            ]
            while sink.running:
                self._advance()
        finally:
            self.abort(sink.running)
        found = {output.id: output.prompt_logprobs or [] for output in sink.done}
        return [found[id][first:] for id, first in zip(ids, starts, strict=True)]

    # --------------------------------------------------------------------------------------- step by step

    def add(self, prompt: Prompt, params: SamplingParams | None = None, id: str | int | None = None) -> str | int:
        """Begin a request, whose events `step` returns; returns its id. A bad one raises ValueError or TypeError."""
        return self._begin(prompt, SamplingParams() if params is None else params, id, sink=None).id

    def step(self) -> list[Event]:
        """Run one step; returns what is new of the requests that were added, [] where nothing is."""
        if self._scheduler.busy or self._recovering:
            self._advance()
        events, self._events = self._events, []
        return events

    def abort(self, ids: str | int | Iterable[str | int]) -> list[RequestOutput]:
        """End requests with what they have; returns it. Ids that are not, or no longer, in the engine are skipped."""
        wanted = [ids] if isinstance(ids, str | int) else list(ids)
        if self._stepping:  # called from within a step, by a mask or a stream that is collected
            self._late_aborts += wanted
            return []
        if not any(key in self._active for key in wanted):
            return []
        self._settle()
        ended = [self._active[key] for key in dict.fromkeys(wanted) if key in self._active]
        unread = [answer for active in ended for answer in active.answers if answer.sequence in self._owners]
        for active in ended:  # out of the engine first, so that no interrupt finds them half in it
            for answer in active.answers:
                self._scheduler.abort(answer.sequence)
                self._owners.pop(answer.sequence, None)
            self._close_request(active)
            self._events = [event for event in self._events if event.id != active.id]
            self._stats.aborted += 1
        for answer in unread:
            answer.read(self.tokenizer)
        return [active.output() for active in ended]

    @property
    def unfinished(self) -> int:
        """Requests in the engine."""
        return len(self._active)

    @property
    def stats(self) -> Stats:
        """Counts since the start, and what is held now."""
        self._stats.running = len(self._scheduler.running)
        self._stats.waiting = len(self._scheduler.waiting)
        self._stats.pages_used = self._scheduler.pages.num_pages - self._scheduler.pages.num_free
        self._stats.generated_tokens = self._scheduler.generated_tokens
        self._stats.preemptions = self._scheduler.preemptions
        return replace(self._stats)

    def close(self) -> None:
        """Abort everything and let the memory go."""
        if self._closed:
            return
        self.abort(list(self._active))
        del self._runner

    @property
    def _closed(self) -> bool:
        return not hasattr(self, "_runner")

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------------- the loop

    def _advance(self) -> None:
        """One turn of the loop: launch a step, then read the one before it."""
        start = time.perf_counter()
        self._stepping = True
        try:
            if self._recovering:
                for sequence in [s for s, (_, answer) in self._owners.items() if answer.unseen]:
                    self._see(sequence)
                self._recovering = False
            batch = self._scheduler.schedule()
            launched = self._runner.launch(batch) if batch else None
            self._read()
            if launched and batch and batch.masked:
                masks = self._scheduler.fill_masks(batch, self.model_config.vocab_size)
                self._runner.sample(launched, masks)
            self._in_flight = launched
            if not self._active:  # what is still in flight are tokens too many
                self._read()
        except BaseException:
            self._recover()
            raise
        finally:
            self._stepping = False
        if self._late_aborts:
            late, self._late_aborts = self._late_aborts, []
            self.abort(late)
        self._stats.steps += batch is not None
        self._stats.step_seconds += time.perf_counter() - start

    def _read(self) -> None:
        """Collect the step in flight, and see what has come of it."""
        if self._in_flight is None:
            return
        launched, self._in_flight = self._in_flight, None
        changed = self._scheduler.update(launched.batch, self._runner.collect(launched))
        for sequence in changed:
            self._see(sequence)

    def _settle(self) -> None:
        """Read the step in flight without launching another."""
        self._stepping = True
        try:
            self._read()
        except BaseException:
            self._recover()
            raise
        finally:
            self._stepping = False

    def _recover(self) -> None:
        """After an exception (Ctrl-C too) in the loop: what was on its way is lost, what was read is kept."""
        self._in_flight = None
        self._scheduler.rewind()
        for _, answer in self._owners.values():
            answer.forget_text(self.tokenizer)
        self._recovering = True

    def _see(self, sequence: Sequence) -> None:
        """Text, events and the end of a sequence that has something new."""
        active, answer = self._owners[sequence]
        if active.first_token is None and sequence.output_len:
            active.first_token = time.perf_counter()
        if answer.text is not None or sequence.status is Status.FINISHED:
            stop = answer.read(self.tokenizer)
            if stop is not None:
                self._scheduler.finish(sequence, "stop", stop)
                # Where an id or the length ended it at once, the string is still the reason: it cuts the text.
                sequence.finish_reason, sequence.stop_reason = "stop", stop
        if active.sink is None:
            answer.tell(self._events)
        if sequence.status is Status.FINISHED:
            del self._owners[sequence]
            if not any(other.sequence in self._owners for other in active.answers):
                self._close_request(active)
                self._stats.finished += 1
                if active.sink is not None:
                    active.sink.done.append(active.output())

    def _close_request(self, active: Active) -> None:
        del self._active[active.id]
        if active.sink is not None:
            active.sink.running.discard(active.id)

    # --------------------------------------------------------------------------------------- in and out

    def _begin(
        self,
        prompt: Prompt,
        params: SamplingParams,
        id: str | int | None,
        sink: Sink | None,
        score: tuple[int, float] | None = None,
    ) -> Active:
        """Check a request and hand its sequences to the scheduler. score: (first position, temperature)."""
        if self._closed:
            raise RuntimeError("this Generator is closed; make a new one")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        params.validate(self.model_config.vocab_size)
        id = self._new_id() if id is None else id
        if not isinstance(id, str | int):
            raise TypeError(f"id must be a string or an integer, not {id!r}")
        if id in self._active:
            raise ValueError(f"a request with the id {id!r} is running; give another id")
        ids = self._prompt_ids(prompt, params)
        if score is None and params.prompt_logprobs is not None:
            score = (0, 1.0)
        if score is not None and not 0 <= score[0] <= len(ids):
            raise ValueError(f"start is {score[0]}; it must be from 0 to the sequence's length, {len(ids)}")
        seed = self._next_seed() if params.seed is None else int(params.seed)
        answers = [self._answer(id, index, ids, params, seed, sink, score) for index in range(params.n)]
        active = Active(id, ids, answers, sink, added=time.perf_counter())
        self._active[id] = active
        if sink is not None:
            sink.running.add(id)
        for answer in answers:
            self._owners[answer.sequence] = (active, answer)
            self._scheduler.add(answer.sequence)
        self._stats.requests += 1
        self._stats.prompt_tokens += len(ids)
        return active

    def _prompt_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        ids = encode_prompt(prompt, self.tokenizer)
        vocab_size, context = self.model_config.vocab_size, self.max_model_len
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"the prompt holds the id {wrong}, outside the vocabulary of {vocab_size} tokens")
        room = context if params.max_tokens == 0 else context - 1
        if len(ids) > room:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the context of {context} tokens has room for {room}; "
                "shorten it, or raise max_model_len or the KV pool where the model allows it"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("this model has no tokenizer files, so stop strings can not be found; use stop_token_ids")
        return ids

    def _answer(
        self,
        id: str | int,
        index: int,
        ids: list[int],
        params: SamplingParams,
        seed: int,
        sink: Sink | None,
        score: tuple[int, float] | None,
    ) -> Answer:
        eos_ids = () if params.ignore_eos else self.model_config.eos_ids
        stop_ids = {id for id in (*params.stop_token_ids, *eos_ids) if 0 <= id < self.model_config.vocab_size}
        tokens = self.max_model_len if params.max_tokens is None else params.max_tokens
        sequence = Sequence(
            request_id=id,
            index=index,
            params=params,
            token_ids=list(ids),
            prompt_len=len(ids),
            max_len=min(len(ids) + tokens, self.max_model_len),
            seed=seed,
            stop_ids=frozenset(stop_ids),
            mask=_own(params.mask),
        )
        if score is not None and index == 0:
            sequence.score_start, sequence.score_temperature = score
            sequence.prompt_logprobs = [math.nan] * len(ids)
            if params.prompt_logprobs:
                sequence.prompt_top_logprobs = [{} for _ in ids]
        text = None
        if self.tokenizer is not None and (sink is None or params.stop_strings):
            text = AnswerText(self.tokenizer, ids, params.stop_strings)
        return Answer(sequence, text)

    def _next_seed(self) -> int:
        digest = hashlib.blake2b(self._seed + b":%d" % next(self._seeds), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _new_id(self) -> str:
        return next(key for key in map("r{}".format, self._ids) if key not in self._active)


def _own(mask: TokenMask | None) -> TokenMask | None:
    """A sample's own copy of a mask, which is the user's code."""
    try:
        return deepcopy(mask)
    except Exception as error:
        raise ValueError(f"the mask can not be copied (copy.deepcopy): {error!r}") from error


def _prompts(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """A list of prompts, also of one: a string, or what begins with an int or a dict."""
    if hasattr(prompts, "tolist"):  # a tensor or array of ids
        prompts = prompts.tolist()
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral | Mapping))
    return [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]


def _paired(
    prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters. Raises ValueError where there is not one a prompt."""
    many = _prompts(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, SamplingParams() if params is None else params) for prompt in many]
    if len(params) != len(many):
        raise ValueError(f"there are {len(many)} prompts and {len(params)} params; give one, or one a prompt")
    return list(zip(many, params, strict=True))
