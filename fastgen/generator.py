"""Generator: the public API, and the loop of the engine."""

from __future__ import annotations

import functools
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Generator as PyGenerator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fastgen.device.memory import release_memory
from fastgen.device.profiling import Tracer, span
from fastgen.engine.inputs import InputProcessor, pair_scores, prompt_list
from fastgen.engine.interface import StepRunner
from fastgen.engine.interrupts import OneCaller
from fastgen.engine.options import GeneratorOptions, takes_fields_of
from fastgen.engine.outputs import ActiveRequest, ActiveSample, OutputQueue, Stats, error_output, with_progress
from fastgen.engine.scheduler import NOT_FINITE, Scheduler
from fastgen.engine.step import Launched
from fastgen.model.adapter import AdapterUpdate
from fastgen.model.config import read_config, sampling_defaults
from fastgen.model.loader import find_tokenizer, resolve
from fastgen.model.parameters import checkpoint_shards
from fastgen.model.weights import DROPPED, TAGS, TORN, Tensors, Update, WeightState, check_in_flight, check_tags
from fastgen.ranks.protocol import Follower, Leader, on_all_ranks
from fastgen.ranks.start import agreeing, log_start, resolve_options, start_runner
from fastgen.request import (
    Completion,
    Event,
    Message,
    Params,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    Status,
)
from fastgen.text.tokenizer import chat_arguments
from fastgen.text.tool_calls import parse_message

log = logging.getLogger(__name__)

AHEAD = 4096  # requests of one generate() call that are in the engine at a time
READ_STEPS = 4  # new prompts of at most so many steps' token budgets are read before each step
LOG_SECONDS = 10.0  # seconds of steps between two lines in the log


class Generator:
    """A model that generates text, for many requests at a time.

    The arguments are the fields of `GeneratorOptions`; `help(Generator)` describes them. `config` has the values that
    were chosen for options that were left open, `max_model_len` the context in tokens, and `default_params` the
    parameters of requests that give none, with what the model's generation_config.json says.

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
                self.model_config = read_config(self.folder, in_fp8=options.quantization is not None)
                tokenizer = beside.submit(find_tokenizer, options.tokenizer, self.folder, options.allow_special_tokens)
                resolved = resolve_options(self.model_config, options)
                start = time.perf_counter()
                if options.load == "auto":
                    self.folder = resolve(options.model, options.revision)
            me = weakref.proxy(self)  # so that ranks end with what holds them
            arguments = self.model_config, resolved, self.folder
            runner = start_runner(arguments, options.tp_group, status=lambda: me.stats)
            try:
                with agreeing(options.tp_group):
                    self.tokenizer = tokenizer.result()
            except BaseException:
                runner.close()
                raise
        self._closed = False
        self._runner = cast(StepRunner, runner)  # a Follower replays the leader's steps, and none is launched here
        self._team = None if options.tp_group is None else cast(Leader | Follower, runner)
        self.config = runner.config  # only now is it known how large the KV pool is
        self.max_model_len = self.config.max_model_len
        log_start(self.folder.name, time.perf_counter() - start, self.config, self.model_config)
        self._tracer = Tracer()
        self.default_params = SamplingParams(**(sampling_defaults(self.folder) if options.generation_config else {}))
        self._inputs = InputProcessor(
            self.model_config, self.tokenizer, self.max_model_len, options.seed, self.default_params
        )
        self._weights = WeightState(has_adapter=options.adapter is not None)
        self._adapter_base = options.adapter_base
        self._scheduler = Scheduler(self.config)
        self.history = self._scheduler.history
        self._in_flight: Launched | None = None  # the last launched step, until it is collected
        self._interrupt = OneCaller()
        self._stepping = False  # True within a step
        self._late_aborts: list[str | int] = []  # requests that were aborted from within a step
        self._active: dict[str | int, ActiveRequest] = {}
        self._owners: dict[Sequence, tuple[ActiveRequest, ActiveSample]] = {}  # in order of arrival
        self._events: list[Event] = []
        self._logged = Stats()  # the counts at the last line in the log
        self._ids = itertools.count()

    # --------------------------------------------------------------------------------------- whole answers

    @on_all_ranks
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Iterable[Params] = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate outputs for one prompt or an iterable of prompts, and return them in the order of the prompts.

        prompts: a prompt is a string, a list of ids, a list of messages, or a dict: {"prompt": text},
            {"prompt_token_ids": ids}, or {"messages": messages} with arguments of `chat`. A list that begins with an
            int or a message is one prompt. A prompt that can not be served gives an output with an `error`, and the log
            counts these.
        params: the parameters of all prompts, or a list with those of each: SamplingParams; a dict of those that differ
            from `default_params`; or None, which stands for these. progress: show a bar of requests and tokens/s.

        Raises ValueError or TypeError for what is wrong for all prompts, before anything runs: parameters that all
        share, a tokenizer or chat template that the model does not have.
        """
        (pairs,) = self._interrupt.reading(map(self._inputs.pair, [prompts], [params]))
        requests = [Request(prompt, p, self._new_id()) for prompt, p in pairs]
        with closing(self._serve(requests, ahead=AHEAD)) as done:
            outputs = {output.id: output for output in with_progress(done, len(requests), progress)}
        results = [outputs[request.id] for request in requests if request.id is not None]
        if errors := [output.error for output in results if output.error is not None]:
            log.warning("%d of %d prompts failed; the first error is: %s", len(errors), len(results), errors[0])
        return results

    def chat(
        self,
        messages: SequenceOf[Message] | Iterable[SequenceOf[Message]],
        params: Params | Iterable[Params] = None,
        *,
        tools: SequenceOf[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of some; see `generate`, also for errors.

        messages: dicts with "role" and "content". tools: functions for the chat template, as OpenAI's dicts or as
            Python functions with types and docstrings; `parse_message` reads the calls in an answer.
        chat_template_kwargs: other variables of the template. add_generation_prompt: begin a message of the assistant;
            None: unless continue_final_message, which lets the answer continue the last message.
        """
        fields = {
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        variables = chat_arguments(fields)["variables"]  # raises what is wrong for all conversations
        if self.tokenizer is not None:
            self.tokenizer.check_template(variables)
        if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
            raise TypeError(f"messages must be a list of dicts, or a list of such lists, not {type(messages).__name__}")
        prompts = [{"messages": conversation, **fields} for conversation in prompt_list(messages)]
        return self.generate(prompts, params, progress=progress)

    def parse_message(self, text: str, tools: Iterable[Any] = ()) -> dict[str, Any]:
        """Return the message of an answer: {"role": "assistant", "content": ..., "tool_calls": [...]}, where
        "tool_calls" is there if the text has any. It fits into the messages of the next `chat`.

        tools: those of the `chat`. The "arguments" of a call are a dict; of a call that was cut off, a string. Raises
        ValueError if the model's chat template has no known form of calls.
        """
        return parse_message(text, self.tokenizer, tools)

    def stream(self, requests: Iterable[Request | None]) -> PyGenerator[RequestOutput, None, None]:
        """Yield the outputs of requests from an iterable, which may be endless, in the order of completion.

        The iterable is read only as far as lanes and pages are free. The item None stands for no request, and lets the
        engine do a step first. Closing the stream early aborts its requests. A request that can not be served gives an
        output with an error. Raises TypeError for other items.
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
            if not self._interrupt.exiting():
                with self._interrupt:
                    outputs.close()

    def _serve(self, requests: Iterable[Request | None], ahead: int) -> PyGenerator[RequestOutput, None, None]:
        """Yield outputs as `stream` does; the caller defers Ctrl-C around each item. After the first steps, at least
        `ahead` requests are in the engine as long as there are some, which lets the scheduler plan. They are read a few
        at a time, since the first step need not wait until all texts are tokenized."""
        source, more, queue = self._interrupt.reading(requests), True, OutputQueue()
        try:
            while more or queue.running or queue.done:
                stats = self._scheduler.stats
                enough = stats.prompt_tokens + READ_STEPS * self.config.max_step_tokens
                while more and not queue.done and stats.prompt_tokens < enough:
                    if len(queue.running) >= ahead and not self._scheduler.wants_more:
                        break
                    more = self._read_request(source, queue)
                self._scheduler.closed = not more
                if not queue.done:
                    self._advance()
                while queue.done:
                    yield queue.done.popleft()
        finally:
            self._scheduler.closed = False
            self._abort(list(queue.running))

    def _read_request(self, source: Iterator[Request | None], queue: OutputQueue) -> bool:
        """Begin the next request of `source`; return False at its end."""
        try:
            request = next(source)
        except StopIteration:
            return False
        if request is None:
            self._advance()
            return True
        if not isinstance(request, Request):
            raise TypeError(f"stream takes Requests, not {type(request).__name__}; give Request(prompt, params)")
        try:
            self._begin(request, queue)
        except (ValueError, TypeError) as error:
            queue.done.append(error_output(self._new_id() if request.id is None else request.id, error))
        return True

    @on_all_ranks
    def score(
        self, sequences: Iterable[Prompt], start: int | SequenceOf[int] = 0, temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the logprobs of given tokens: float32, of log_softmax(logits / temperature).

        sequences: prompts, mostly lists of ids. start: the first position to score, for all sequences or a list with
        one for each. The result has len - start floats for each sequence; position 0 has no logprob, and is NaN, as is
        a position whose logits are not finite. Raises ValueError for a sequence that can not be scored.
        """
        ((sequences, starts),) = self._interrupt.reading(map(pair_scores, [sequences], [start], [temperature]))
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        queue = OutputQueue()
        try:
            ids = [
                self._begin(Request(sequence, params), queue, (first, float(temperature))).id
                for sequence, first in zip(sequences, starts, strict=True)
            ]
            while queue.running:
                self._advance()
        finally:
            self._abort(list(queue.running))
        found = {output.id: output.prompt_logprobs or [] for output in queue.done}
        return [found[id][first:] for id, first in zip(ids, starts, strict=True)]

    # --------------------------------------------------------------------------------------- step by step

    @on_all_ranks
    def add(
        self,
        prompt: Prompt,
        params: Params = None,
        id: str | int | None = None,
        resume: Completion | None = None,
    ) -> str | int:
        """Begin a request, whose events `step` returns, and return its id. Raises ValueError or TypeError for a request
        that can not be served. resume: a completion of this prompt to continue; see `Request`."""
        return self._begin(Request(prompt, params, id, resume), queue=None).id

    def step(self) -> list[Event]:
        """Run one step, and return the new events of requests that were added. Ctrl-C is raised at the end of the step,
        and the next call then returns its events."""
        with self._interrupt:
            new = self._step()
            self._events += new  # where a Ctrl-C at the end of this block leaves them for the next call
        return self.take_events()

    @on_all_ranks
    def _step(self) -> list[Event]:
        if self._scheduler.busy:
            self._advance()
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return the events that the next `step` would return at its beginning, without a step: of requests that an
        update of the weights has ended, for instance."""
        events, self._events = self._events, []
        return events

    @on_all_ranks
    def abort(self, ids: str | int | Iterable[str | int]) -> list[RequestOutput]:
        """End requests, and return their outputs so far. Ids of requests that are not in the engine are skipped."""
        return self._abort([ids] if isinstance(ids, str | int) else list(ids))

    def _abort(self, wanted: list[str | int]) -> list[RequestOutput]:
        if self._stepping or self._interrupt.exiting():  # by a mask, or by a stream that is garbage-collected
            self._late_aborts += wanted
            return []
        if not any(id in self._active for id in wanted):
            return []
        self._within_step(self._collect)
        outputs = []
        for active in [self._active[id] for id in dict.fromkeys(wanted) if id in self._active]:
            for sample in active.samples:
                if sample.sequence in self._owners:
                    self._scheduler.finish(sample.sequence, "abort")
                    sample.update_text(self.tokenizer)
                    del self._owners[sample.sequence]
            self._active.pop(active.id).leave()
            self._scheduler.stats.aborted += 1
            self._events = [event for event in self._events if event.id != active.id]
            outputs.append(active.output())
        return outputs

    @property
    def unfinished(self) -> int:
        """The number of requests in the engine, and of requests whose last events the next `step` returns."""
        if isinstance(self._team, Follower):
            stats = self.stats
            return stats.requests - stats.finished - stats.aborted
        return len(self._active.keys() | {event.id for event in self._events})

    @property
    def stats(self) -> Stats:
        """Counts since the start, and the current state; on ranks above 0, those of the end of the last call."""
        if isinstance(self._team, Follower):
            return self._team.status or Stats()
        scheduler, pages = self._scheduler, self._scheduler.pages
        return replace(
            scheduler.stats,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=pages.num_pages - pages.available,
        )

    def profile(self, path: str | Path, steps: int = 8) -> AbstractContextManager[None]:
        """Record the block (`with`) until `steps` steps have run in it, and write a Chrome trace at the block's end.

        path: of a new file, .json or .json.gz. The trace shows what the CPU and a GPU did, with ranges for the parts of
        a step: schedule, launch, collect (of the step before) and update. With several ranks, rank 0 writes it. Raises
        ValueError (in a tp_group on rank 0) for steps below 1, for a path in no folder, and where a trace is being
        recorded already.
        """
        return nullcontext() if isinstance(self._team, Follower) else self._tracer.block(path, steps)

    def update_weights(
        self, named: Tensors, version: int | None = None, partial: bool = False, in_flight: str = "error"
    ) -> int:
        """Replace the weights, in place, and return their version, by default the one before plus 1 (the first is 0).

        named: whole tensors by their Hugging Face names, such as `model.state_dict()`, in any float dtype, on the CPU
            or a GPU. They are copied one at a time. The `lm_head.weight` of a tied model may be left out. In a tp_group
            each rank gives the same tensors, from an iterable of its own.
        version: a number of your own, other than the current one. partial: tensors that are not given stay as they are.
        in_flight: the treatment of requests in the engine: "error" refuses the update; "keep" continues them with the
            KV of the old weights, but a prompt in the middle of its prefill begins again, and so do requests after it;
            "recompute" computes their KV again with the new weights; "abort" ends them with the finish_reason "abort"
            and their tokens so far.
            `Completion.weight_versions` holds the version of each token. Later requests never use KV of old weights.

        Raises ValueError with the first 20 names, shapes and dtypes that do not fit. A mapping, its items and a
        sequence are checked before anything is written, and the old weights stay. With any other iterable, or if
        reading one fails midway, generating raises RuntimeError until an update that is not partial is complete.
        """
        update = Update(named, checkpoint_shards(self.model_config), partial, self._interrupt.reading)
        return self._update_on_all("update_weights", update, version, in_flight)

    def update_adapter(
        self, named: Tensors | None, config: Any = None, version: int | None = None, in_flight: str = "error"
    ) -> int:
        """Merge a LoRA adapter into the weights, in place of the one before; return their version, as `update_weights`.

        named: all tensors of the adapter by PEFT's names, such as `get_peft_model_state_dict(model)`; None: give back
            the weights without an adapter, to the bit. config: PEFT's LoraConfig, or a dict of its fields.

        The first call copies the weights that the adapter changes, to the memory of the option `adapter_base`. Raises
        ValueError, and the old weights stay, for all that does not fit or is not plain LoRA of linear layers.
        """
        self._check_open()
        update = AdapterUpdate(named, config, checkpoint_shards(self.model_config), self._runner.weights.adapted)
        return self._update_on_all("update_adapter", update, version, in_flight)

    def _update_on_all(self, name: str, update: Update, version: int | None, in_flight: str) -> int:
        change = functools.partial(self._update_weights, update, version, in_flight)
        with self._interrupt:
            following: int = change() if self._team is None else self._team.call(name, change, update)
            self._weights.version = following  # of ranks above 0, too
        return following

    @property
    def torn(self) -> bool:
        """True while nothing can be generated: an update of the weights has failed midway, or `sleep` dropped them."""
        return bool(self._weights.torn)

    @property
    def weight_version(self) -> int:
        """The version of the weights, as `update_weights` returned it; 0 before the first."""
        return self._weights.version

    @on_all_ranks
    def sleep(self, tags: str | Iterable[str] = TAGS, keep_weights: bool = True) -> int:
        """Give device memory back to the driver, between two uses; return the number of bytes that this freed.

        tags: "weights", "kv_cache" or both. Addresses stay valid, and so do CUDA graphs; memory that torch caches is
            given back too. With "kv_cache" the prefix cache and the host tier are emptied.
        keep_weights: True: `wake` restores the weights from pinned copies on the host, which are allocated at the first
            call and kept for the next. False: the weights are dropped, and after `wake` nothing can be generated until
            `update_weights` was called with all of them.

        Parts that are asleep already stay asleep. Until `wake`, generating raises RuntimeError. Raises ValueError if
        requests are in flight, or if the host has too little memory for the weights. The bytes are those that the GPU's
        driver reports before and after; with several ranks, their sum. On the CPU no memory is given back.
        """
        self._check_open()
        wanted = check_tags(tags)
        self._within_step(self._collect)
        if self._active:
            raise ValueError(f"{len(self._active)} requests are in flight; finish or abort them before sleep")
        new = wanted - self._weights.asleep
        if not new:
            return 0
        if "weights" in new and not keep_weights:
            self._weights.torn = DROPPED
        self._weights.asleep |= new  # before the memory goes: after an exception, `wake` restores all of it
        try:
            freed = self._runner.weights.sleep(sorted(new), keep_weights)
        except ValueError:
            self.wake(new)
            raise
        return freed

    @on_all_ranks
    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Take back the memory that `sleep` released, and fill it. tags: "weights", "kv_cache" or both; None: both.

        A trainer may wake "weights" alone, call `update_weights`, release its own memory, and wake the rest. Raises
        torch.OutOfMemoryError if the GPU has too little memory; it may be called again when there is more.
        """
        self._check_open()
        wanted = check_tags(TAGS if tags is None else tags) & self._weights.asleep
        if not wanted:
            return
        self._runner.weights.wake(sorted(wanted))
        if "kv_cache" in wanted:
            self._scheduler.drop_prefixes()
        self._weights.asleep -= wanted

    def close(self) -> None:
        """Abort all requests and release the memory."""
        if self._closed or self._interrupt.forked:
            return
        with self._interrupt:
            self._check_open()
            runner, self._team, self._closed = self._runner, None, True  # other ranks may be gone
            del self._runner
            for active in self._active.values():
                active.finish("the Generator was closed")
            self._active, self._owners, self._events, self._in_flight = {}, {}, [], None
            self._scheduler.stats.aborted = self._scheduler.stats.requests - self._scheduler.stats.finished
            runner.close()
            del runner
            release_memory(self.config.device)

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------- the loop

    def _advance(self) -> None:
        """Run one turn of the loop, and then what had to wait for the end of the step: aborts and Ctrl-C."""
        self._check_open()
        self._weights.check()
        start = time.perf_counter()
        ran = self._within_step(self._turn)
        late, self._late_aborts = self._late_aborts, []
        self._abort(late)
        self._count_step(start, bool(ran))
        self._interrupt.check()

    def _turn(self) -> bool:
        """Schedule and launch a step, then collect the step before it and update. Return False if none was launched.

        A step with a mask draws its tokens last, since the mask depends on the tokens of the step before.
        """
        launched = None
        with span("schedule"):
            batch = self._scheduler.schedule()
        if batch is not None:
            with span("launch"):
                launched = self._runner.launch(batch)
        self._collect()
        if launched is not None and launched.batch.masked:
            with span("sample"):
                masks = self._scheduler.fill_masks(launched.batch, self.model_config.vocab_size)
                self._runner.sample(launched, masks)
        self._in_flight = launched
        if not self._active:  # the step in flight computes only tokens too many
            self._collect()
        return launched is not None

    def _collect(self) -> None:
        """Read the step in flight, and process the sequences that it changed."""
        if self._in_flight is None:
            return
        launched, self._in_flight = self._in_flight, None
        with span("collect"):
            result = self._runner.collect(launched)
        with span("update"):
            for sequence in self._scheduler.update(launched.batch, result):
                self._update_output(sequence)

    def _within_step(self, part: Callable[[], bool | None]) -> bool | None:
        """Run a part of a step. After an exception, drop the step in flight and preempt all running sequences, which
        compute again from the tokens that were read."""
        try:
            self._stepping = True
            return part()
        except BaseException:
            self._reset()
            raise
        finally:
            self._stepping = False

    def _reset(self) -> None:
        self._in_flight = None
        try:
            self._runner.synchronize()  # before the scheduler allocates pages again that launched steps read or write
        finally:
            self._scheduler.reset(self._owners)
            for sequence, (_, sample) in list(self._owners.items()):
                if sample.text is not None and self.tokenizer is not None:
                    sample.begin_text(self.tokenizer)
                if sample.text is not None or sequence.status is Status.FINISHED:
                    self._update_output(sequence)

    def _update_output(self, sequence: Sequence) -> None:
        """Update the text and the events of a sequence, and close its request if all its samples have finished."""
        active, sample = self._owners[sequence]
        if sequence.error == NOT_FINITE:
            sequence.error += self._weights.blame(self._runner.weights.find_not_finite)
        if active.first_token is None and sequence.output_len > sample.emitted[0]:
            active.first_token = time.perf_counter()
        shown = sample.text is not None or sequence.status is Status.FINISHED
        if shown and (stop := sample.update_text(self.tokenizer)) is not None:
            self._scheduler.finish(sequence, "stop", stop)
            # If an id or the length ended it with the same token, the string is still the reason: it cuts the text.
            sequence.finish_reason, sequence.stop_reason = "stop", stop
        if active.queue is None:
            sample.emit(self._events, active)
        elif sample.text is None:
            sequence.every_token = False  # only the time of its first token was wanted
        if sequence.status is Status.FINISHED:
            del self._owners[sequence]
            if not any(other.sequence in self._owners for other in active.samples):
                self._active.pop(active.id).finish()
                self._scheduler.stats.finished += 1

    def _begin(
        self, request: Request, queue: OutputQueue | None, score: tuple[int, float] | None = None
    ) -> ActiveRequest:
        """Check a request and hand its sequences to the scheduler. score: (first position, temperature)."""
        self._check_open()
        self._weights.check()
        id = self._new_id() if request.id is None else request.id
        if not isinstance(id, str | int):
            raise TypeError(f"id must be a string or an integer, not {id!r}")
        if id in self._active:
            raise ValueError(f"a request with the id {id!r} is running; give another id")
        active = self._inputs.process(id, request, queue, score)
        self._interrupt.check()  # the caller of `add` would not get the id
        self._active[id] = active
        if queue is not None:
            queue.running[id] = None
        for sample in active.samples:
            self._owners[sample.sequence] = (active, sample)
            sample.sequence.begin_version(self._weights.version)
            self._scheduler.add(sample.sequence)
        self._scheduler.stats.requests += 1
        self._scheduler.stats.prompt_tokens += len(active.prompt_ids)
        return active

    def _new_id(self) -> str:
        return next(key for key in map("r{}".format, self._ids) if key not in self._active)

    def _count_step(self, start: float, ran: bool) -> None:
        """Count a turn of the loop, and log the counts from time to time. ran: a step was launched."""
        stats = self._scheduler.stats
        stats.steps += ran
        stats.step_seconds += time.perf_counter() - start
        if ran:
            self._tracer.end_step()
        if stats.step_seconds - self._logged.step_seconds >= LOG_SECONDS:
            now = self.stats
            log.info("%s", now.since(self._logged))
            self._logged = now

    def _update_weights(self, update: Update, version: int | None, in_flight: str) -> int:
        """Update the weights; on rank 0, for all ranks."""
        self._check_open()
        weights = self._weights
        following = weights.check_update(update, version, in_flight)
        self._within_step(self._collect)
        check_in_flight(in_flight, len(self._active))

        def begin() -> None:
            self._runner.weights.keep_bases(update.adapted, self._adapter_base)
            weights.torn = TORN
            self._scheduler.drop_prefixes()
            if in_flight == "recompute":
                self._scheduler.preempt_all()
            for sequence in list(self._owners) if in_flight == "abort" else ():
                self._scheduler.finish(sequence, "abort")
                self._update_output(sequence)

        try:
            self._runner.weights.update(update, begin)
        except BaseException as error:
            if weights.torn:
                error.add_note("until update_weights is called with all weights again, nothing can be generated")
                self._reset()
            raise
        for sequence in self._owners:
            sequence.begin_version(following)
        weights.finish(update, following)
        return following

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Generator is closed; make a new one")
        if self._stepping:
            raise RuntimeError("a step of this Generator runs, from which only `abort` can be called")
