"""Generator: the engine as people use it."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from fastgen.device.memory import release_memory
from fastgen.device.profiling import Tracer, span
from fastgen.engine.inputs import InputProcessor, paired, scored
from fastgen.engine.interrupts import DeferredInterrupt
from fastgen.engine.options import GeneratorOptions, takes_fields_of
from fastgen.engine.outputs import ActiveRequest, ActiveSample, OutputQueue, Stats, failed, shown
from fastgen.engine.scheduler import Scheduler
from fastgen.model.config import read_config
from fastgen.model.loader import resolve
from fastgen.model.transformer import checkpoint_shards
from fastgen.model.weights import Update, Weights
from fastgen.ranks.protocol import Follower, Leader, on_all_ranks
from fastgen.ranks.start import RankSetup, agreeing, log_start
from fastgen.request import Completion, Event, Prompt, Request, RequestOutput, SamplingParams, Sequence, Status
from fastgen.tokenizer import Tokenizer

log = logging.getLogger(__name__)

AHEAD = 4096  # requests of one generate() that are in the engine at a time, if there are so many
READ_STEPS = 4  # so many steps' tokens are read of new prompts before each step, at most
LOG_SECONDS = 10.0  # of steps, between two lines in the log
IN_FLIGHT = ("error", "keep", "recompute")
TAGS = ("weights", "kv_cache")
TORN = "the weights are torn, as an update was cut short or failed"
DROPPED = "the weights were dropped by sleep"


class Generator:
    """A model that generates text, for many requests at a time.

    The arguments are the fields of `GeneratorOptions`; `help(Generator)` describes them. `config` has the values that
    were chosen for options that were left open, and `max_model_len` the context in tokens.

    Raises ValueError, or TypeError, for options that can not work, saying what to change. Use it from one thread at a
    time. Nothing global is changed: no default dtype or device, no random number generator.
    """

    @takes_fields_of(GeneratorOptions)
    def __init__(self, options: GeneratorOptions) -> None:
        # Importing transformers takes seconds, and so do loading weights and compiling kernels: both at once.
        with ThreadPoolExecutor(1, "tokenizer") as beside:
            with agreeing(options.tp_group):
                options.check()
                self.folder = resolve(options.model, options.revision, weights=False)  # checks come before the weights
                self.model_config = read_config(self.folder)
                tokenizer = beside.submit(_find_tokenizer, options.tokenizer, self.folder)
                setup = RankSetup.find(self.model_config, options)
                start = time.perf_counter()
                if options.load == "auto":
                    self.folder = resolve(options.model, options.revision)
            me = weakref.proxy(self)  # so that ranks end with what holds them
            self._runner: Any = setup.start(self.folder, status=lambda: me.stats)
            try:
                with agreeing(options.tp_group):
                    self.tokenizer = tokenizer.result()
            except BaseException:
                self._runner.close()
                raise
        self._team: Leader | Follower | None = None if options.tp_group is None else self._runner
        self.config = self._runner.config  # only now is it known how large the KV pool is
        self.max_model_len = self.config.max_model_len
        log_start(self.folder.name, time.perf_counter() - start, self.config, self.model_config)
        self._tracer = Tracer(self.config.device)
        self._inputs = InputProcessor(self.model_config, self.tokenizer, self.max_model_len, options.seed)
        self._weights = Weights()
        self._scheduler = Scheduler(self.config)
        self._in_flight: Any = None  # what the runner's launch has returned
        self._interrupt = DeferredInterrupt()
        self._stepping = False
        self._late_aborts: list[str | int] = []
        self._active: dict[str | int, ActiveRequest] = {}
        self._owners: dict[Sequence, tuple[ActiveRequest, ActiveSample]] = {}
        self._watched: set[Sequence] = set()  # those whose next token is waited for: the first, or each that is read
        self._events: list[Event] = []
        self._stats = Stats(pages=self.config.num_pages)
        self._logged = Stats()  # the counts at the last line in the log
        self._ids = itertools.count()

    # --------------------------------------------------------------------------------------- whole answers

    @on_all_ranks
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
        requests = [Request(prompt, p, self._new_id()) for prompt, p in paired(prompts, params)]
        with closing(self._serve(requests, ahead=AHEAD)) as done:
            outputs = {output.id: output for output in shown(done, len(requests), progress)}
        return [outputs[request.id] for request in requests if request.id is not None]

    def stream(self, requests: Iterable[Request | None]) -> PyGenerator[RequestOutput, None, None]:
        """Answer requests as they come from an iterable, endless ones too, in the order of completion.

        The iterable is read only as far as lanes and pages are free; None in it is no request, but a step to be done
        first. Leaving early aborts what was begun. A request that can not be served is an output with an error.
        """
        outputs = self._serve(requests, ahead=0)
        if self._team is not None:
            outputs = self._team.iterate("stream", outputs)
        try:
            while True:
                with self._interrupt:
                    output = next(outputs, None)
                if output is None:
                    return
                yield output
        finally:
            with self._interrupt:
                outputs.close()

    def _serve(self, requests: Iterable[Request | None], ahead: int) -> PyGenerator[RequestOutput, None, None]:
        """`stream`, whose items are taken with Ctrl-C deferred. After the first steps, at least `ahead` requests are in
        the engine as long as there are some, which lets the scheduler plan. They come a few at a time, since the first
        step need not wait until all texts are tokens."""
        source: Iterator[Request | None] | None = self._interrupt.reading(requests)
        sink = OutputQueue()
        try:
            while source is not None or sink.running or sink.done:
                enough = self._stats.prompt_tokens + READ_STEPS * self.config.max_step_tokens
                while source is not None and not sink.done and self._wants_more(sink, ahead, enough):
                    source = self._pull(source, sink)
                self._scheduler.closed = source is None
                if not sink.done:
                    self._advance()
                while sink.done:
                    yield sink.done.popleft()
        finally:
            self._scheduler.closed = False
            self._abort(list(sink.running))

    def _wants_more(self, sink: OutputQueue, ahead: int, enough: int) -> bool:
        """Whether to read another request before the next step; enough: the prompt tokens in `stats` to stop at."""
        return (len(sink.running) < ahead or self._scheduler.wants_more) and self._stats.prompt_tokens < enough

    def _pull(self, source: Iterator[Request | None], sink: OutputQueue) -> Iterator[Request | None] | None:
        """Begin the next request of an iterator, for `sink`; None where it has ended."""
        try:
            request = next(source)
        except StopIteration:
            return None
        if request is None:
            self._advance()
            return source
        try:
            if not isinstance(request, Request):
                raise TypeError(f"stream takes Requests, not {type(request).__name__}")
            self._begin(request, sink)
        except (ValueError, TypeError) as error:
            id = getattr(request, "id", None)
            sink.done.append(failed(self._new_id() if id is None else id, error))
        return source

    @on_all_ranks
    def score(
        self, sequences: SequenceOf[Prompt], start: int | SequenceOf[int] = 0, temperature: float = 1.0
    ) -> list[list[float]]:
        """Logprobs of given tokens: float32, of log_softmax(logits / temperature), for positions start, start + 1, ...

        sequences: prompts, mostly lists of ids; start: one for all, or one a sequence. Each list has len - start
        floats; position 0 has no logprob, and is NaN. Raises ValueError for a sequence that can not be scored.
        """
        sequences, starts = scored(sequences, start, temperature)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        sink = OutputQueue()
        try:
            ids = [
                self._begin(Request(sequence, params), sink, (first, float(temperature))).id
                for sequence, first in zip(sequences, starts, strict=True)
            ]
            while sink.running:
                self._advance()
        finally:
            self._abort(list(sink.running))
        found = {output.id: output.prompt_logprobs or [] for output in sink.done}
        return [found[id][first:] for id, first in zip(ids, starts, strict=True)]

    # --------------------------------------------------------------------------------------- step by step

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        id: str | int | None = None,
        resume: Completion | None = None,
    ) -> str | int:
        """Begin a request, whose events `step` returns; returns its id. A bad one raises ValueError or TypeError.
        resume: a completion of this prompt to go on with, as `Request` says."""
        request = Request(prompt, SamplingParams() if params is None else params, id, resume)
        added: str | int | None = None
        try:
            with self._interrupt:
                added = self._add(request)
        except KeyboardInterrupt:
            if added is not None:  # the caller does not get to know the id
                self.abort(added)
            raise
        return added

    @on_all_ranks
    def _add(self, request: Request) -> str | int:
        return self._begin(request, sink=None).id

    def step(self) -> list[Event]:
        """Run one step; returns what is new of the requests that were added, [] where nothing is. Ctrl-C is raised at
        the end of the step, whose events the next one returns."""
        with self._interrupt:
            new = self._step()
            self._events += new
        events, self._events = self._events, []
        return events

    @on_all_ranks
    def _step(self) -> list[Event]:
        if self._scheduler.busy:
            self._advance()
        events, self._events = self._events, []
        return events

    @on_all_ranks
    def abort(self, ids: str | int | Iterable[str | int]) -> list[RequestOutput]:
        """End requests with what they have; returns it. Ids that are not, or no longer, in the engine are skipped."""
        return self._abort([ids] if isinstance(ids, str | int) else list(ids))

    def _abort(self, wanted: list[str | int]) -> list[RequestOutput]:
        if self._stepping:  # called from within a step, by a mask or a stream that is collected
            self._late_aborts += wanted
            return []
        if not any(key in self._active for key in wanted):
            return []
        self._settle()
        outputs = []
        for active in [self._active[key] for key in dict.fromkeys(wanted) if key in self._active]:
            for answer in active.answers:
                if answer.sequence in self._owners:
                    self._scheduler.abort(answer.sequence)
                    answer.read(self.tokenizer)
                    self._forget(answer.sequence)
            self._close_request(active)
            self._stats.aborted += 1
            self._events = [event for event in self._events if event.id != active.id]
            outputs.append(active.output())
        return outputs

    @property
    def unfinished(self) -> int:
        """Requests in the engine, and those whose last events the next `step` returns."""
        if isinstance(self._team, Follower):
            stats = self.stats
            return stats.requests - stats.finished - stats.aborted
        return len(self._active.keys() | {event.id for event in self._events})

    @property
    def stats(self) -> Stats:
        """Counts since the start, and what is held now; of a tp_group, ranks above 0 know the end of the last call."""
        if isinstance(self._team, Follower):
            return self._team.status or Stats()
        return self._stats.now(self._scheduler)

    def profile(self, path: str | Path, steps: int = 8) -> AbstractContextManager[None]:
        """Record the block (`with`) until `steps` steps have run in it, and write a Chrome trace at the block's end.

        path: of a new file, .json or .json.gz. The trace shows what the CPU and a GPU did, with ranges for the parts of
        a step: schedule, launch, collect (of the step before) and update. With several ranks, rank 0 writes it. Raises
        ValueError (in a tp_group on rank 0) for steps below 1, for a path in no folder, and where a trace is being
        recorded already.
        """
        return nullcontext() if isinstance(self._team, Follower) else self._tracer.block(path, steps)

    def update_weights(
        self,
        named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        version: int | None = None,
        partial: bool = False,
        in_flight: str = "error",
    ) -> int:
        """Replace the weights, in place; returns their version, by default the one before plus 1 (the first is 0).

        named: whole tensors by their Hugging Face names, such as `model.state_dict()`, in any float dtype, on the CPU
            or a GPU; at most one of them is there a second time. The `lm_head.weight` of a tied model may be left out.
            In a tp_group each rank gives the same tensors, from an iterable of its own.
        version: a number of your own, other than the current one. partial: what is not given stays as it is.
        in_flight: what becomes of requests that are in the engine: "error": the update is refused; "keep": they go on
            with the KV that the old weights made; "recompute": it is computed again with the new ones.
            `Completion.weight_versions` tells which tokens came from which. No later request finds KV of old weights.

        Raises ValueError with all that is wrong with names, shapes and dtypes. A mapping, its items and a sequence are
        checked before anything is written, and the old weights stay. With any other iterable, or where reading one
        fails midway, nothing can be generated (RuntimeError) until an update that is not partial is complete.
        """
        update = Update(named, checkpoint_shards(self.model_config), partial, self._interrupt.reading)

        def change() -> int:
            return self._replace(update, version, in_flight)

        with self._interrupt:
            following: int = change() if self._team is None else self._team.call("update_weights", change, update)
            self._weights.version = following  # of ranks above 0, too
        return following

    @property
    def weight_version(self) -> int:
        """The version of the weights, as `update_weights` returned it; 0 before the first."""
        return self._weights.version

    @on_all_ranks
    def sleep(self, tags: str | Iterable[str] = TAGS, keep_weights: bool = True) -> int:
        """Give device memory back to the driver, between two uses; returns how many bytes are free now that were not.

        tags: "weights", "kv_cache" or both. Addresses stay, so that CUDA graphs do; what torch only keeps for later is
            given back too. The prefix cache is emptied with "kv_cache", but for the pages in the host tier.
        keep_weights: `wake` brings the weights back, from pinned copies on the host. These take their time when they
            are made for the first time, and stay for the next. Else the weights are dropped: behind `wake`, nothing can
            be generated until `update_weights` was called with all of them. On the CPU, weights that are kept stay.

        What is asleep already stays as it is. Until `wake`, generating is a RuntimeError. Raises ValueError where
        requests are in flight, and where the host has too little memory for the weights. The bytes are what the GPU's
        driver says before and after, or of the CPU what this process has in memory; of several ranks, their sum.
        """
        wanted = self._checked("sleep", tags)
        self._settle()
        if self._active:
            raise ValueError(f"{len(self._active)} requests are in flight; finish or abort them before sleep")
        state = self._weights
        tired = wanted - state.asleep
        if not tired:
            return 0
        if "weights" in tired and not keep_weights:
            state.torn = DROPPED
        state.asleep |= tired  # first: wherever an exception comes, wake sets it right
        try:
            freed: int = self._runner.sleep(sorted(tired), keep_weights)
        except ValueError:
            self.wake(tired)
            raise
        return freed

    @on_all_ranks
    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Take the memory again that `sleep` gave back, all or that of some tags, and fill it; what is awake stays so.

        A trainer may wake "weights" alone, call `update_weights`, give up its own memory, and wake the rest. Raises
        torch.OutOfMemoryError where the GPU has too little; then more can be freed, and wake called again.
        """
        state = self._weights
        wanted = self._checked("wake", TAGS if tags is None else tags) & state.asleep
        if not wanted:
            return
        self._runner.wake(sorted(wanted))
        if "kv_cache" in wanted:
            self._scheduler.pages.drop_device_pages()
        state.asleep -= wanted

    def close(self) -> None:
        """Abort everything and let the memory go."""
        if self._closed:
            return
        with self._interrupt:
            self._stats.aborted += len(self._active)
            self._active.clear()
            self._owners.clear()
            self._in_flight = None
            runner, self._team = self._runner, None  # nobody is there to call with
            del self._runner
            runner.close()
            del runner
            release_memory(self.config.device)

    @property
    def _closed(self) -> bool:
        return not hasattr(self, "_runner")

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------- the loop

    def _advance(self) -> None:
        """One turn of the loop: launch a step, then read the one before it."""
        self._weights.check()
        start = time.perf_counter()
        with self._step_or_reset():
            with span("schedule"):
                batch = self._scheduler.schedule()
            launched = None
            if batch is not None:
                with span("launch"):
                    launched = self._runner.launch(batch)
            self._read()
            if launched is not None and batch is not None and batch.masked:
                with span("sample"):
                    masks = self._scheduler.fill_masks(batch, self.model_config.vocab_size)
                    self._runner.sample(launched, masks)
            self._in_flight = launched
            if not self._active:  # what is still in flight are tokens too many
                self._read()
        if self._late_aborts:
            late, self._late_aborts = self._late_aborts, []
            self._abort(late)
        self._stats.steps += batch is not None
        self._stats.step_seconds += time.perf_counter() - start
        if batch is not None:
            self._tracer.end_step()
        if self._stats.step_seconds - self._logged.step_seconds >= LOG_SECONDS:
            stats = self.stats
            log.info("%s", stats.since(self._logged))
            self._logged = stats
        self._interrupt.check()

    def _read(self) -> None:
        """Collect the step in flight, and see what has come of it."""
        if self._in_flight is None:
            return
        launched, self._in_flight = self._in_flight, None
        with span("collect"):
            result = self._runner.collect(launched)
        with span("update"):
            watched, finished = self._watched, Status.FINISHED
            for sequence in self._scheduler.update(launched.batch, result):
                if sequence.status is finished or sequence in watched:
                    self._see(sequence)

    def _settle(self) -> None:
        """Read the step in flight without launching another."""
        with self._step_or_reset():
            self._read()

    @contextmanager
    def _step_or_reset(self) -> Iterator[None]:
        """Run a step within; after an exception, `_reset`."""
        self._stepping = True
        try:
            yield
        except BaseException:
            self._reset()
            raise
        finally:
            self._stepping = False

    def _reset(self) -> None:
        """Drop what is in flight; all that runs computes again from the tokens that were read, which are seen now."""
        self._in_flight = None
        try:
            self._runner.settle()  # before pages that steps on their way read or write are given to others
        finally:
            self._scheduler.reset()
            for sequence, (_, answer) in list(self._owners.items()):
                answer.forget_text(self.tokenizer)
                if answer.text is not None or sequence.status is Status.FINISHED:
                    self._see(sequence)

    def _see(self, sequence: Sequence) -> None:
        """Text, events and the end of a sequence that has something new."""
        active, answer = self._owners[sequence]
        if active.first_token is None and sequence.output_len > answer.told[0]:
            active.first_token = time.perf_counter()
        if answer.text is not None or sequence.status is Status.FINISHED:
            stop = answer.read(self.tokenizer)
            if stop is not None:
                self._scheduler.finish(sequence, "stop", stop)
                # Where an id or the length ended it at once, the string is still the reason: it cuts the text.
                sequence.finish_reason, sequence.stop_reason = "stop", stop
        if active.sink is None:
            answer.tell(self._events, active.cached_tokens)
        elif answer.text is None:
            self._watched.discard(sequence)  # nobody reads it before its end
        if sequence.status is Status.FINISHED:
            self._forget(sequence)
            if not any(other.sequence in self._owners for other in active.answers):
                self._close_request(active)
                self._stats.finished += 1
                if active.sink is not None:
                    active.sink.done.append(active.output())

    def _forget(self, sequence: Sequence) -> None:
        self._owners.pop(sequence, None)
        self._watched.discard(sequence)

    def _close_request(self, active: ActiveRequest) -> None:
        del self._active[active.id]
        if active.sink is not None:
            active.sink.running.pop(active.id, None)

    def _begin(
        self, request: Request, sink: OutputQueue | None, score: tuple[int, float] | None = None
    ) -> ActiveRequest:
        """Check a request and hand its sequences to the scheduler. score: (first position, temperature)."""
        if self._closed:
            raise RuntimeError("this Generator is closed; make a new one")
        self._weights.check()
        self._inputs.check_params(request.params)
        id = self._new_id() if request.id is None else request.id
        if not isinstance(id, str | int):
            raise TypeError(f"id must be a string or an integer, not {id!r}")
        if id in self._active:
            raise ValueError(f"a request with the id {id!r} is running; give another id")
        active = self._inputs.take(id, request, sink, score)
        self._active[id] = active
        if sink is not None:
            sink.running[id] = None
        for answer in active.answers:
            self._owners[answer.sequence] = (active, answer)
            self._watched.add(answer.sequence)
            answer.sequence.begin_version(self._weights.version)
            self._scheduler.add(answer.sequence)
        self._stats.requests += 1
        self._stats.prompt_tokens += len(active.prompt_ids)
        return active

    def _new_id(self) -> str:
        return next(key for key in map("r{}".format, self._ids) if key not in self._active)

    def _replace(self, update: Update, version: int | None, in_flight: str) -> int:
        """`update_weights`, on one rank."""
        self._check_between("update_weights")
        state = self._weights
        following = state.following(version)
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight is {in_flight!r}; it must be one of {', '.join(map(repr, IN_FLIGHT))}")
        if "weights" in state.asleep:
            raise RuntimeError("the weights are asleep; call wake first, of 'weights' at least")
        if update.partial:
            state.check_whole()
        self._settle()
        if self._active and in_flight == "error":
            raise ValueError(
                f"{len(self._active)} requests are in flight; finish or abort them, or pass in_flight='keep' (they go "
                "on with the KV of the old weights) or 'recompute' (it is computed again)"
            )

        def begin() -> None:
            state.torn = TORN
            self._scheduler.drop_prefixes()
            if in_flight == "recompute":
                self._scheduler.preempt_all()

        try:
            self._runner.update_weights(update, begin)
        except BaseException as error:
            if state.torn:
                error.add_note("until update_weights is called with all weights again, nothing can be generated")
                self._reset()
            raise
        for sequence in self._owners:
            sequence.begin_version(following)
        state.version, state.torn = following, ""
        return following

    def _check_between(self, name: str) -> None:
        """Raise RuntimeError where a method of this name can not be called now."""
        if self._closed:
            raise RuntimeError("this Generator is closed; make a new one")
        if self._stepping:
            raise RuntimeError(f"{name} is called from within a step; call it between two")

    def _checked(self, name: str, tags: str | Iterable[str]) -> frozenset[str]:
        self._check_between(name)
        wanted = frozenset((tags,) if isinstance(tags, str) else tags)
        unknown = wanted.difference(TAGS)
        if unknown:
            raise ValueError(f"tags has {', '.join(sorted(map(repr, unknown)))}; there are 'weights' and 'kv_cache'")
        return wanted


def _find_tokenizer(name: str | Path | None, folder: Path) -> Tokenizer | None:
    """Return the tokenizer of that name, else the model's own; None where the model has none."""
    found = Tokenizer.find(folder if name is None else resolve(name, weights=False))
    if name is not None and found is None:
        raise ValueError(f"tokenizer is {str(name)!r}, which has no tokenizer files")
    return found
