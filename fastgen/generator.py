"""Generator: the public API. Its loop is in engine/loop.py."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from fastgen.device.memory import release_memory
from fastgen.display import engine_line
from fastgen.engine.inputs import InputProcessor
from fastgen.engine.interface import EarlierOutputs, StepRunner
from fastgen.engine.interrupts import OneCaller
from fastgen.engine.loop import Loop
from fastgen.engine.options import GeneratorOptions
from fastgen.engine.outputs import OutputQueue, error_output
from fastgen.engine.prompts import Ids, ids_of, prompt_list, request_source
from fastgen.engine.stats import Stats, with_progress
from fastgen.engine.team import Team, on_all_ranks
from fastgen.engine.weight_state import TAGS, InFlight, WeightState
from fastgen.model.config import read_config
from fastgen.model.generation_config import sampling_defaults
from fastgen.model.loader import find_tokenizer, follow_head, read_tensors, resolve, with_eos_of
from fastgen.model.parameters import checkpoint_shards
from fastgen.model.quantization import check_requantize
from fastgen.model.weights import Tensors
from fastgen.names import explains_names
from fastgen.option import takes_fields_of
from fastgen.prefill_only import PrefillOnly
from fastgen.request import Completion, Event, Message, Params, Prompt, Request, RequestOutput, SamplingParams
from fastgen.start import agreeing, log_start, resolve_options, start_runner
from fastgen.text.tokenizer import TOKENIZER_OPTIONS, chat_arguments

if TYPE_CHECKING:  # for updates of the weights only
    from fastgen.engine.weight_changes import WeightChanges
    from fastgen.model.tied import Tie
    from fastgen.model.weight_updates import WeightUpdate

log = logging.getLogger(__name__)

AHEAD = 4096  # minimum number of requests of a generate() call in the engine, while there are more
READ_STEPS = 4  # new prompts of at most so many steps' token budgets are read before each step


@explains_names("generate", "chat", "stream", "score", "classify", "embed", "features", "beam_search")
class Generator(PrefillOnly):
    """A model that generates text, for many requests at a time.

    The arguments are the fields of `GeneratorOptions`; `help(Generator)` describes them. `config` has the values that
    were chosen for options that were left open, `max_model_len` the context in tokens, and `default_params` the
    parameters of requests that give none, with what the model's generation_config.json says.

    Raises ValueError, or TypeError, for options that cannot work, saying what to change. Use it from one thread at a
    time. Nothing global is changed: no default dtype or device, no random number generator.
    """

    @takes_fields_of(GeneratorOptions)
    def __init__(self, options: GeneratorOptions) -> None:
        # Importing transformers takes seconds, so the tokenizer is loaded while weights load and kernels compile.
        with ThreadPoolExecutor(1, "tokenizer") as background:
            with agreeing(options.tp_group):
                options.check()
                self.folder = resolve(options.model, options.revision, weights=False)  # checks come before the weights
                self.model_config = read_config(self.folder, options.quantization)
                reading = {name: getattr(options, name) for name in TOKENIZER_OPTIONS}
                tokenizer = background.submit(find_tokenizer, options.tokenizer, self.folder, **reading)
                resolved = resolve_options(self.model_config, options)
                start = time.perf_counter()
                if options.load == "auto":
                    self.folder = resolve(options.model, options.revision)
                    self.model_config = follow_head(self.model_config, self.folder)
            me = weakref.proxy(self)  # a strong reference would keep this Generator, and so the ranks, alive
            runner = start_runner((self.model_config, resolved, self.folder), options.tp_group, lambda: me.stats)
            try:
                with agreeing(options.tp_group):
                    self.tokenizer = tokenizer.result()
                    self.model_config = with_eos_of(self.tokenizer, self.model_config)
            except BaseException:
                runner.close()
                raise
        self._runner = cast(StepRunner, runner)  # a Follower replays the leader's steps, and none is launched here
        # None without a tp_group, even if spawned ranks run.
        self._team = None if options.tp_group is None else cast(Team, runner)
        self.config = runner.config  # only now is it known how large the KV pool is
        self.max_model_len = self.config.max_model_len
        log_start(self.folder.name, time.perf_counter() - start, self.config, self.model_config)
        self.default_params = SamplingParams(**(sampling_defaults(self.folder) if options.generation_config else {}))
        self._inputs = InputProcessor(
            self.model_config, self.tokenizer, self.max_model_len, options.seed, self.default_params
        )
        self._interrupt = OneCaller()
        self._loop = Loop(self._runner, self._inputs, WeightState(options.adapter is not None), self._interrupt)
        self._adapter_base = options.adapter_base

    @property
    def engine(self) -> Loop:
        """The loop of this Generator, whose `scheduler` and `runner.draw` may be replaced while no request runs
        (docs/ideas.md). The modules below it may change in any version."""
        return self._loop

    @functools.cached_property
    def history(self) -> EarlierOutputs:
        """Outputs of earlier requests, from which tokens are drafted; `history.clear()` removes them."""
        return self._loop.scheduler.history

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
            int or a message is one prompt. A prompt that cannot be served gives an output with an `error`, and the log
            counts these.
        params: the parameters of all prompts, or a list with one entry per prompt: SamplingParams; a dict of parameters
            that differ from `default_params`; or None, which stands for these. progress: show a bar of requests and
            tokens/s.

        Raises ValueError or TypeError for what is wrong for all prompts, before anything runs: parameters that all
        share, a tokenizer or chat template that the model does not have.
        """
        (pairs,) = self._interrupt.reading(map(self._inputs.pair, [prompts], [params]))
        requests = [Request(prompt, p, self._loop.new_id()) for prompt, p in pairs]
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

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        stop_token_ids: SequenceOf[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
    ) -> list[RequestOutput]:
        """Return the `width` best-scoring answers to each prompt, found by beam search, as completions, best first.

        prompts: see `generate`, also for errors. max_tokens: maximum length of an answer. length_penalty: the `score`
            of a completion (a BeamCompletion) is the sum of its raw logprobs divided by (number of tokens) **
            length_penalty, so values above 0 favor long answers. stop_token_ids: ids that end a beam, besides the
            model's eos ids, which ignore_eos turns off. logprobs: number of raw alternatives to return with each token.

        Beams, scores and the end of the search are those of transformers' `generate(num_beams=width)` with its default
        early_stopping=False. A search draws nothing, and does not depend on other requests. `width` plus the number of
        stop ids may be at most 128.
        """
        from fastgen.beam_search import BeamOptions, search_all

        options = BeamOptions(
            width=width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            eos_ids=self.model_config.eos_ids,
            context=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
        )
        return search_all(prompt_list(prompts), options, self.generate, self.tokenizer)

    def parse_message(
        self, text: str | Completion, tools: Iterable[Any] = (), *, prompt: str | SequenceOf[int] | None = None
    ) -> dict[str, Any]:
        """Return the message of an answer: {"role": "assistant", "content": ..., "reasoning_content": ...,
        "tool_calls": [...]}, the last two if the text has any. It fits into the messages of the next `chat`.

        text: the answer, or its completion, whose finish_reason tells whether an incomplete call was cut off or is as
            the model ended it. tools: the tools that were given to `chat`. The "arguments" of a call are a dict; of a
            call that was cut off, a string. prompt: the answer's prompt, which tells whether an answer that was cut off
            while thinking began inside the reasoning; without it, an answer with only a closing mark did.

        Raises ValueError if the model's chat template has no known form of calls, and there are tools or no reasoning.
        """
        from fastgen.text.tool_calls import parse_message  # with all parsers, which generating does not need

        return parse_message(text, self.tokenizer, tools, prompt)

    def stream(
        self, requests: Prompt | Iterable[Request | Prompt | None], params: Params = None
    ) -> PyGenerator[RequestOutput, None, None]:
        """Yield the outputs of requests from an iterable, which may be endless, in the order of completion.

        requests: Requests or prompts, which are read only as far as lanes and pages are free; or one prompt. The item
            None stands for no request, and lets the engine do a step first. params: of prompts, and of Requests without
            params; see `generate`.

        Closing the stream early aborts its requests. A request that cannot be served gives an output with an error.
        Raises ValueError or TypeError for wrong params, and TypeError for other items.
        """
        outputs = self._serve(requests, ahead=0, params=params)
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

    def _serve(
        self, requests: Prompt | Iterable[Request | Prompt | None], ahead: int, params: Params = None
    ) -> PyGenerator[RequestOutput, None, None]:
        """Yield outputs as `stream` does; the caller defers Ctrl-C around each item. After the first steps, at least
        `ahead` requests are in the engine as long as there are some, which lets the scheduler plan. They are read a few
        at a time, since the first step need not wait until all texts are tokenized."""
        if params is not None:
            self._inputs.pair([], params)  # raises for wrong params
        source, more, queue = self._interrupt.reading(request_source(requests, params)), True, OutputQueue()
        try:
            while more or queue.running or queue.done:
                stats = self._loop.scheduler.stats
                enough = stats.prompt_tokens + READ_STEPS * self.config.max_step_tokens
                while more and not queue.done and stats.prompt_tokens < enough:
                    if len(queue.running) >= ahead and not self._loop.scheduler.wants_more:
                        break
                    more = self._read_request(source, queue)
                self._loop.scheduler.complete = not more
                if not queue.done:
                    self._loop.advance()
                while queue.done:
                    yield queue.done.popleft()
        finally:
            self._loop.scheduler.complete = False
            self._loop.abort(list(queue.running))

    def _read_request(self, source: Iterator[Request | None], queue: OutputQueue) -> bool:
        """Begin the next request of `source`; return False at its end."""
        try:
            request = next(source)
        except StopIteration:
            return False
        if request is None:
            self._loop.advance()
            return True
        try:
            self._loop.begin(request, queue)
        except (ValueError, TypeError) as error:
            queue.done.append(error_output(self._loop.new_id() if request.id is None else request.id, error))
        return True

    # --------------------------------------------------------------------------------------- step by step

    @on_all_ranks
    def add(
        self,
        prompt: Prompt,
        params: Params = None,
        id: str | int | None = None,
        resume: Completion | None = None,
        priority: int = 0,
    ) -> str | int:
        """Begin a request, whose events `step` returns, and return its id. Raises ValueError or TypeError for a request
        that cannot be served. resume, priority: see `Request`."""
        return self._loop.begin(Request(prompt, params, id, resume, priority), queue=None)

    def step(self) -> list[Event]:
        """Run one step, and return the new events of requests that were added. Ctrl-C is raised at the end of the step,
        and the next call then returns its events."""
        with self._interrupt:
            new = self._step()
            self._loop.events += new  # where a Ctrl-C at the end of this block leaves them for the next call
        return self.take_events()

    @on_all_ranks
    def _step(self) -> list[Event]:
        if self._loop.scheduler.busy:
            self._loop.advance()
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return the events that the next `step` would return at its beginning, without a step: of requests that an
        update of the weights has ended, for instance."""
        events, self._loop.events = self._loop.events, []
        return events

    @on_all_ranks
    def abort(self, ids: Ids = None) -> list[RequestOutput]:
        """End requests (None: all), and return their outputs so far, which `step` and `stream` then do not. Ids of
        requests that are not in the engine are skipped. Completions can be resumed; see `RequestOutput.resume`."""
        return self._loop.abort(ids_of(ids, self._loop.active))

    @on_all_ranks
    def cut_off(self, ids: Ids = None) -> None:
        """End requests as `abort` does, but report them like finished ones: `step`, `take_events` or `stream` returns
        their tokens so far, with the finish_reason "abort"."""
        self._loop.cut_off(ids_of(ids, self._loop.active))

    @property
    def unfinished(self) -> int:
        """The number of requests in the engine, and of requests whose last events the next `step` returns."""
        if self._team is not None and self._team.follows:
            stats = self.stats
            return stats.requests - stats.finished - stats.aborted
        return len(self._loop.active.keys() | {event.id for event in self._loop.events})

    @property
    def stats(self) -> Stats:
        """Counts since the start, and the current state; on ranks above 0, as of the end of the last call."""
        if self._team is not None and self._team.follows:
            return self._team.status or Stats()
        return self._loop.stats

    def profile(self, path: str | Path, steps: int = 8) -> AbstractContextManager[None]:
        """Record the block (`with`) until `steps` steps have run in it, and write a Chrome trace at the block's end.

        path: of a new file, .json or .json.gz. The trace shows what the CPU and a GPU did, with ranges for the parts of
        a step: schedule, launch, collect (of the previous step) and update. With several ranks, rank 0 writes it.
        Raises ValueError (in a tp_group on rank 0) for steps below 1, for a path in no folder, and if a trace is
        being recorded already.
        """
        if self._team is not None and self._team.follows:
            return nullcontext()
        return self._loop.tracer.block(path, steps)

    def update_weights(
        self,
        named: Tensors | str | Path,
        version: int | None = None,
        partial: bool = False,
        in_flight: InFlight = "error",
        requantize: bool = False,
    ) -> int:
        """Replace the weights, in place, and return their version, by default the one before plus 1 (the first is 0).

        named: whole tensors by their Hugging Face names, such as `model.state_dict()`, in any float dtype, on the CPU
            or a GPU; or the path of a safetensors file, or of a folder of them. They are copied one at a time. The
            `lm_head.weight` of a tied model may be left out; another one unties it, on the CPU. In a tp_group each rank
            gives the same tensors, from its own iterable.
        version: your own number, other than the current one. partial: tensors that are not given stay as they are.
        in_flight: the treatment of requests in the engine: "error" refuses the update; "keep" continues them with the
            KV of the old weights, but a prompt in the middle of its prefill begins again, and so do requests after it;
            "recompute" computes their KV again with the new weights; "abort" ends them with the finish_reason "abort"
            and their tokens so far.
            `Completion.weight_versions` holds the version of each token. Later requests never use KV of old weights.
        requantize: needed by a model in int4: its linear layers are rounded to the nearest numbers of int4.

        Raises ValueError with the first 20 names, shapes and dtypes that do not fit. A mapping, its items and a
        sequence are checked before anything is written, and the old weights stay. With any other iterable, or if
        reading one fails midway, generating raises RuntimeError until an update that is not partial is complete.
        """
        from fastgen.model.weight_updates import WeightUpdate  # many Generators are never updated

        check_requantize(self.model_config.quantization, requantize)
        if isinstance(named, str | Path):
            named = read_tensors(Path(named))
        update = WeightUpdate(named, checkpoint_shards(self.model_config), partial, self._interrupt.reading, self._tie)
        return self._update_on_all("update_weights", update, version, in_flight)

    def weights_changed(self, version: int | None = None, in_flight: InFlight = "error") -> int:
        """Note that a trainer has written the weights in place, which `fastgen.rl.policy.Policy` does on a GPU; return
        their version. version, in_flight: see `update_weights`."""
        from fastgen.model.weight_updates import WrittenUpdate  # as above

        return self._update_on_all("update_weights", WrittenUpdate(), version, in_flight)

    def update_adapter(
        self, named: Tensors | None, config: Any = None, version: int | None = None, in_flight: InFlight = "error"
    ) -> int:
        """Merge a LoRA adapter into the weights, replacing the previous one; return their version, as `update_weights`.

        named: all tensors of the adapter by PEFT's names, such as `get_peft_model_state_dict(model)`; None: give back
            the weights without an adapter, to the bit. config: PEFT's LoraConfig, or a dict of its fields.

        The first call copies the weights that the adapter changes, to the memory of the option `adapter_base`. Raises
        ValueError, and the old weights stay, for all that does not fit or is not plain LoRA of linear layers.
        """
        from fastgen.model.adapter import AdapterUpdate  # most Generators have no adapter

        self._loop.check_open()
        update = AdapterUpdate(named, config, checkpoint_shards(self.model_config), self._runner.weights.adapted)
        return self._update_on_all("update_adapter", update, version, in_flight)

    def update_drafter(self, named: Tensors | str | Path) -> None:
        """Replace the weights of the head that drafts, in place, also while requests run. No output changes by it.

        named: all tensors of the head, by their names in its checkpoint, or a path as for `update_weights`.

        Raises ValueError, and the old weights stay, if they do not fit or if there is no head, and RuntimeError while
        the weights are asleep.
        """
        tensors = read_tensors(Path(named)) if isinstance(named, str | Path) else named
        with self._interrupt:
            self._changes.update_drafter(tensors)

    @on_all_ranks
    def weight_checksums(self) -> list[dict[str, str]]:
        """Return the SHA-256 of each weight by its Hugging Face name, in a dict for each rank: of the bytes of the
        tensor in the model's dtype, or of the part of it that the rank holds. If it is quantized, its scales and zeros
        follow. With them a trainer checks that an update has arrived. Raises RuntimeError while the weights sleep."""
        return self._changes.checksums()

    def _update_on_all(self, name: str, update: WeightUpdate, version: int | None, in_flight: InFlight) -> int:
        change = functools.partial(self._changes.update, update, version, in_flight)
        with self._interrupt:
            following: int = change() if self._team is None else self._team.call(name, change, update)
            self._loop.weight_state.version = following  # of ranks above 0, too
        return following

    @functools.cached_property
    def _changes(self) -> WeightChanges:
        """The changes of the weights, whose module loads with the first one."""
        from fastgen.engine.weight_changes import WeightChanges

        return WeightChanges(self._loop, self._adapter_base)

    @functools.cached_property
    def _tie(self) -> Tie | None:
        """The tie of embedding and head, which updates of a tied model follow from the first one on."""
        from fastgen.model.tied import Tie

        can_untie = self.config.device == "cpu"
        return Tie(self.model_config.own_head, can_untie) if self.model_config.tied else None

    @property
    def needs_weights(self) -> bool:
        """True while nothing can be generated until `update_weights` was called with all weights: an update has failed
        midway, or `sleep` dropped them."""
        return bool(self._loop.weight_state.unusable)

    @property
    def torn(self) -> bool:
        """Raise AttributeError, which names `needs_weights`."""
        raise AttributeError("Generator.torn was renamed; use Generator.needs_weights")

    @property
    def weight_version(self) -> int:
        """The version of the weights, as `update_weights` returned it; 0 before the first."""
        return self._loop.weight_state.version

    @property
    def asleep(self) -> frozenset[str]:
        """The parts of the memory that are released by `sleep`: "weights", "kv_cache"."""
        return self._loop.weight_state.asleep

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
        return self._changes.sleep(tags, keep_weights)

    @on_all_ranks
    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Take back the memory that `sleep` released, and fill it. tags: "weights", "kv_cache" or both; None: both.

        A trainer may wake only "weights", call `update_weights`, release its own memory, and wake the rest. Raises
        torch.OutOfMemoryError if the GPU has too little memory; it may be called again when there is more.
        """
        self._changes.wake(TAGS if tags is None else tags)

    def close(self) -> None:
        """Abort all requests and release the memory."""
        if self._loop.closed or self._interrupt.forked:
            return
        with self._interrupt:
            self._loop.check_open()
            self._team = None  # other ranks may be gone
            del self._runner
            self._loop.close()
            release_memory(self.config.device)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Generator cannot be copied or pickled; make one in each process")

    def __repr__(self) -> str:
        return engine_line(self)

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
