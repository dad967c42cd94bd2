"""The data types of requests, of engine steps and of outputs. This module does not import torch.

Data flows down: a Request becomes n Sequences (one for each sample), the scheduler puts parts of them into a Batch, the
runner answers a Batch with a StepResult, and finished Sequences become Completions of a RequestOutput.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastgen.display import completion_html, output_html, shown
from fastgen.drawn import Drawn
from fastgen.names import MAX_FAULTS, explains_names
from fastgen.option import ITEMS, Option, Options, check_items, option, options_of
from fastgen.prompt_score import PromptScore

if TYPE_CHECKING:  # fgserve's HTTP process does not load NumPy
    import numpy as np

    from fastgen.limits import RepetitionDetector, ThinkingBudget

Payload = TypeVar("Payload")

Message = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}."""

Prompt = str | SequenceOf[int] | SequenceOf[Message] | Mapping[str, Any]
"""Text, token ids, chat messages, or a dict with one of them; see `Generator.generate`."""

MAX_LOGPROBS = 128
REPETITION = "repetition"  # the stop_reason of an output that repetition_detection has ended
STRUCTURES = ("mask", "json_schema", "regex", "choice", "grammar")

MAX_BIASES = 4096
"""Maximum number of tokens whose logits logit_bias and min_tokens may change together in one request."""
MAX_VOCABULARY = 2**31


class TokenMask(Protocol):
    """A restriction of the next token of one sample, such as a grammar. Each sample gets a deep copy."""

    def fill(self, row: Any) -> None:
        """Write the allowed tokens into `row`, a numpy int32 array of ceil(V / 32) words; bit i of word w is token
        32 w + i; a set bit allows it. The row arrives with all bits set."""

    def accept(self, token: int) -> None:
        """Advance by a token that the sample has drawn."""


@shown()
@dataclass(frozen=True, kw_only=True)
class SamplingParams(Options):
    """The parameters that say how a prompt is continued. They are checked by `replace`, and when a request is added.

    They are complete: a parameter that is left out has the default below, whatever the model's generation_config.json
    says. `Generator.default_params` are the model's.

    n: number of samples.
    max_tokens: maximum number of tokens to generate; None: up to the end of the context (vLLM's default is 16); 0: none
        (with prompt_logprobs).
    min_tokens: number of tokens before which no eos id, stop_token_ids or stop ends the output, but a mask that allows
        nothing else, such as the mask of a complete structure.
    temperature: 0 is greedy.
    top_p, top_k, min_p: keep the smallest set of tokens with probability top_p, the k likeliest (0 or -1: all), and the
        tokens of at least min_p times the largest probability; applied in the order top_k, top_p, min_p, after the
        temperature.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once and once for each
        occurrence.
    logit_bias: token id -> number added to its logit; at most 4096, with the stop ids that min_tokens holds back. An
        id may be text, as JSON has it.
    seed: equal seeds and prompts give equal outputs; None derives a seed from the Generator's.
    stop: strings that end the output, perhaps in special tokens; the text is cut before them, the ids are kept.
    stop_token_ids: ids that end the output, as do the model's eos ids and its tokenizer's; they stay in token_ids.
    include_stop_str_in_output: the text ends with the stop string, or with the text of the stop id.
    skip_special_tokens: False: the text shows special tokens.
    ignore_eos: True: the model's eos ids do not end the output.
    logprobs: number of raw alternatives to return with each token (0 to 128); the logprob of the token itself is
        always returned.
    prompt_logprobs: score the prompt too, with this number of raw alternatives for each token.
    logprob_token_ids: ids, at most 128, whose raw logprobs are returned with each token, among the alternatives.
    mask: a TokenMask that restricts the tokens.
    allowed_token_ids: only these ids are drawn; an eos id is drawn only if it is among them.
    bad_words: texts whose tokens, with or without a space before them, are not completed in the output.
    json_schema, regex, choice, grammar: at most one of them, and no mask. The answer is JSON of this schema (a dict,
        its JSON, or a class of pydantic), a text that this regular expression matches as a whole, one of these
        strings, or a text of this grammar (Lark, as llguidance reads it); max_tokens may cut it off. If the model
        reasons, this holds after the reasoning (`reasoning_parser="off"`: from the first token). They need the package
        llguidance.
    thinking_token_budget: number of reasoning tokens after which the closing mark is drawn as soon as it is among the 5
        most likely tokens, or else a quarter of the budget later, but no more than 64 tokens later; -1: no budget.
    repetition_detection: {"max_pattern_size": a, "min_count": c, "min_pattern_size": b (default 1)} ends the output
        when its last tokens are c repetitions of a pattern of b to a tokens; the stop_reason is "repetition".
    return_sampling_mask: also return the token ids that truncation kept.
    speculate: False: no tokens are drafted for this request; they change nothing but its speed.
    """

    # The texts are the help of command-line flags.
    n: int = option(1, "samples of each prompt", low=1)
    max_tokens: int | None = option(None, "length of an answer", low=0, unset="to the end of the context")
    min_tokens: int = option(0, "tokens before which an answer does not end", low=0, high=2**31)
    temperature: float = option(1.0, "0 always takes the most likely token", low=0)
    top_p: float = option(1.0, "sample from the most likely tokens of this probability", low=0, above=True, high=1)
    top_k: int = option(0, "sample from so many of the most likely tokens", low=-1, unset="all")
    min_p: float = option(0.0, "sample from tokens with at least this share of the highest probability", low=0, high=1)
    repetition_penalty: float = option(1.0, "weakens tokens of prompt and answer", low=0, above=True)
    presence_penalty: float = option(0.0, "subtracted for tokens of the answer")
    frequency_penalty: float = option(0.0, "subtracted for tokens of the answer, per occurrence")
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = option(None, low=-(2**63), high=2**64 - 1)
    stop: str | SequenceOf[str] = ()
    stop_token_ids: SequenceOf[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = option(False, "continue after the model's end-of-sequence tokens")
    logprobs: int | None = option(None, low=0, high=MAX_LOGPROBS)
    prompt_logprobs: int | None = option(None, low=0, high=MAX_LOGPROBS)
    logprob_token_ids: SequenceOf[int] = ()
    mask: TokenMask | None = None
    json_schema: Mapping[str, Any] | str | type | None = None
    regex: str | None = None
    choice: SequenceOf[str] | None = None
    grammar: str | None = None
    allowed_token_ids: SequenceOf[int] | None = None
    bad_words: SequenceOf[str] = ()
    thinking_token_budget: int | None = option(None, "reasoning tokens before the answer", low=0, unset="all")
    repetition_detection: Mapping[str, int] | None = None
    return_sampling_mask: bool = False
    speculate: bool = True

    def __post_init__(self) -> None:
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        if isinstance(biases := self.logit_bias, Mapping) and any(isinstance(id, str) for id in biases):
            ids = {int(id) if isinstance(id, str) and id.isdecimal() else id: bias for id, bias in biases.items()}
            object.__setattr__(self, "logit_bias", ids)
        for name in ("stop", "stop_token_ids", "bad_words", "logprob_token_ids"):
            if getattr(self, name) is None:  # vLLM's default
                object.__setattr__(self, name, ())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def replace(self, **changes: Any) -> SamplingParams:
        """Return these parameters with changes. Raises ValueError or TypeError as `validate`."""
        params = replace(self, **changes)
        params.validate()
        return params

    def validate(self, vocab_size: int = MAX_VOCABULARY) -> None:
        """Raise ValueError, or TypeError for a value of the wrong type, naming the parameter and what it may be."""
        for name, value in vars(self).items():
            if value is _DEFAULTS[name]:  # most are, so that millions of requests are checked fast
                continue
            SAMPLING_OPTIONS[name].check(value)
            if name in ITEMS:
                check_items(name, value, vocab_size)
            elif name in ("logprobs", "prompt_logprobs") and value > vocab_size:
                raise ValueError(f"{name} is {value}; the vocabulary has {vocab_size} tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            wrong = "max_tokens is 0, so nothing would be computed; ask for at least 1 token"
            raise ValueError(f"{wrong} (in Python, 0 goes with prompt_logprobs)")
        if self.max_tokens == 0 and self.n != 1:
            raise ValueError(f"n is {self.n} with max_tokens=0; scoring a prompt takes n=1")
        self._check_structure()

    def _check_structure(self) -> None:
        values = (self.mask, self.json_schema, self.regex, self.choice, self.grammar)
        given = [name for name, value in zip(STRUCTURES, values, strict=True) if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given together; give one of them")
        if self.mask is not None and not (hasattr(self.mask, "fill") and hasattr(self.mask, "accept")):
            raise TypeError(f"mask must be an object with fill and accept (see fastgen.TokenMask), not {self.mask!r}")
        for name, text in (("regex", self.regex), ("grammar", self.grammar)):
            if not isinstance(text, str | None):
                raise TypeError(f"{name} must be a string, not {text!r}")


SAMPLING_OPTIONS = options_of(SamplingParams)
PRIORITY = Option("priority", int, 0)
_DEFAULTS = {name: option.default for name, option in SAMPLING_OPTIONS.items()}

Params = SamplingParams | Mapping[str, Any] | None
"""The parameters of a request: SamplingParams; a dict of those that differ from the model's, or None for these."""


def params_of(given: Params, defaults: SamplingParams) -> SamplingParams:
    """Return the parameters that `given` stands for. defaults: the model's. Raises TypeError for an unknown name, and
    for a value of another type."""
    if given is None:
        return defaults
    if isinstance(given, Mapping):
        return replace(defaults, **given)
    if not isinstance(given, SamplingParams):
        raise TypeError(f"params must be SamplingParams or a dict, not {type(given).__name__}")
    return given


@dataclass(frozen=True)
class Request:
    """A prompt and the parameters to continue it with. The output has the same `id` (None: the Generator makes one).

    params: SamplingParams; a dict of those that differ from `Generator.default_params`; None: these.
    resume: a completion of this prompt that ended by "length" or "abort", and is continued. With the same params, but
        for n=1 and perhaps a larger max_tokens (counted from the prompt's end), the tokens are those of a completion
        that never ended; its seed is used if params have none. The output holds all of the completion, under its old
        index; events hold the new tokens, and text that was held back.
    priority: requests with lower numbers leave the queue first. When the KV cache is full, those with the highest
        number are preempted, and computed again later. It changes no token.
    """

    prompt: Prompt
    params: Params = None
    id: str | int | None = None
    resume: Completion | None = None
    priority: int = 0


def empty_drawn(params: SamplingParams) -> Drawn:
    """Return empty lists for a sample with these parameters."""
    tops = params.logprobs or len(params.logprob_token_ids)
    return Drawn(top_logprobs=[] if tops else None, sampling_mask=[] if params.return_sampling_mask else None)


class Status(Enum):
    WAITING = "waiting"  # holds no lane and no pages
    RUNNING = "running"
    FINISHED = "finished"  # may hold its lane until the step in flight, which computes a token too many, is collected


@dataclass(eq=False, slots=True)
class Sequence:
    """The state of one sample of a request in the engine.

    index: number of the sample in its request. token_ids: the tokens that the host knows: the prompt and the output so
    far. pending: number of tokens that launched steps draw and the host has not read. computed: number of tokens whose
    KV is written by the steps launched so far, including steps in flight. limit: the value of `computed` at which it
    needs another page, or ends. pages: its page table. reserved: number of pages that it is expected to fill. indexed:
    number of its first pages that are in the prefix cache; see `PageAllocator.index`.
    """

    request_id: str | int
    index: int
    params: SamplingParams
    token_ids: list[int]
    prompt_len: int
    max_len: int  # maximum number of tokens of prompt and output together
    seed: int
    stop_ids: frozenset[int] = frozenset()
    score: PromptScore | None = None
    mask: TokenMask | None = None
    thinking: ThinkingBudget | None = None
    repetition: RepetitionDetector | None = None
    priority: int = 0

    status: Status = Status.WAITING
    lane: int = -1
    pages: list[int] = field(default_factory=list)
    prefill_len: int = 0  # number of tokens known when it took its lane; it decodes after them
    computed: int = 0
    pending: int = 0
    limit: int = 0
    reserved: int = 0
    indexed: int = 0
    preemptions: int = 0
    every_token: bool = True  # `Scheduler.update` returns it after each new token, and not only at its end
    started: float | None = None  # time.monotonic() when it first took a lane
    cached_tokens: int = 0  # prompt tokens that needed no computation when it first took a lane

    drawn: Drawn = field(init=False)  # logprobs and masks of the output's tokens
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)  # (weight version, output_len where it began)
    kv_version: int | None = None  # of the weights when it took a lane
    recomputed: list[tuple[int, int]] = field(default_factory=list)  # see Completion

    def __post_init__(self) -> None:
        self.drawn = empty_drawn(self.params)

    def begin_version(self, version: int) -> None:
        """Record that the tokens from now on are drawn with weights of this version."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, self.output_len))

    def start(self) -> None:
        """Begin to run. The current weights will compute the KV of all tokens that are known."""
        self.status, self.prefill_len = Status.RUNNING, len(self.token_ids)
        self.started = time.monotonic() if self.started is None else self.started
        version = self.versions[-1][0] if self.versions else None
        if self.output_len and version is not None and self.kv_version not in (None, version):
            self.recomputed.append((version, self.output_len))
        self.kv_version = version

    @property
    def weight_versions(self) -> list[tuple[int, int, int]]:
        """See Completion."""
        ends = [start for _, start in self.versions[1:]] + [self.output_len]
        return [(version, start, end) for (version, start), end in zip(self.versions, ends, strict=True) if start < end]

    @property
    def ends_at_length(self) -> bool:
        """True if only max_len can end it."""
        endless = not self.stop_ids and not self.params.stop and self.mask is None
        return endless and self.repetition is None

    @property
    def cacheable_len(self) -> int:
        """The number of known tokens whose KV may come from the prefix cache. The last one is computed, since its row
        is drawn from, and so are the rows that the score needs."""
        last = len(self.token_ids) - 1
        return max(0, last if self.score is None else min(last, self.score.first_row))

    @property
    def length(self) -> int:
        """The number of tokens that are known or pending."""
        return len(self.token_ids) + self.pending

    @property
    def prefill_left(self) -> int:
        """The number of known tokens, in a prefill, that no step has been given yet."""
        return self.prefill_len - self.computed

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def rewind(self) -> None:
        """Wait again, without a lane and pages, with all tokens that are known."""
        self.preemptions += self.status is Status.RUNNING
        self.status = Status.WAITING
        self.lane = -1
        self.pages.clear()
        self.computed = self.pending = self.reserved = self.indexed = 0
        self.finish_reason = self.stop_reason = self.error = None
        self.drawn.cut(self.output_len)  # an exception may have come between a token's values and the token

    def cut(self, output_len: int) -> None:
        """Drop the tokens after the first `output_len` of the output, and an error that came after them."""
        self.error = None
        del self.token_ids[self.prompt_len + output_len :]
        self.drawn.cut(output_len)


@dataclass(slots=True)
class LaneStart:
    """The sampling state of a sequence that takes a lane."""

    lane: int
    params: SamplingParams
    seed: int = 0
    index: int = 0
    prompt_len: int = 0
    stop_ids: frozenset[int] = frozenset()
    token_ids: tuple[int, ...] = ()  # prompt and output so far if penalties count them, else empty


@dataclass(slots=True)
class Prefill:
    """A chunk of known tokens (int32 [n]) of one lane, at positions `start` and up.

    sample: the chunk ends with the last known token, so that the next token is drawn. forks: lanes with the same known
    tokens, which draw from this chunk's last row too, and compute nothing.
    """

    lane: int
    start: int
    tokens: np.ndarray
    sample: bool
    forks: tuple[int, ...] = ()


@dataclass(slots=True)
class Batch:
    """A step, and how the lanes have changed since the previous step. Plain data, so that every rank can replay it.

    decodes: lanes that continue with the token they drew last; the step computes them first. prefills: the prefill
    chunks, which follow. starts: lanes that begin with a new sequence. page_updates: changed entries of page tables, as
    (lane, index of the first page, pages). copies: (page, page), partly filled pages to copy for forks when the step
    has computed. fresh: newly allocated pages, whose contents are undefined. masked: a lane that draws has a TokenMask,
    so that the sampler waits for the tokens of the previous step. features: the payloads of features, of
    different types; see engine.step.StepFeature.
    """

    decodes: tuple[int, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    starts: tuple[LaneStart, ...] = ()
    page_updates: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    fresh: tuple[int, ...] = ()
    masked: bool = False
    features: tuple[Any, ...] = ()

    def find(self, kind: type[Payload]) -> Payload | None:
        """Return the payload of a type, if a feature has added one."""
        return next((payload for payload in self.features if type(payload) is kind), None)

    @property
    def sampling(self) -> tuple[int, ...]:
        """The lanes that draw a token, in the order of a StepResult's lists."""
        drawing = [lane for chunk in self.prefills if chunk.sample for lane in (chunk.lane, *chunk.forks)]
        return (*self.decodes, *drawing)


@dataclass(slots=True)
class StepResult(Drawn):
    """The result of a Batch: a token and its values for each lane of `Batch.sampling`, and the results of features.

    lanes: the lane of each token: `Batch.sampling`; a lane occurs once for each of its tokens, if speculation
    kept several. A token is -1 if none could be drawn: the mask allowed none, or a logit is not finite.
    """

    tokens: list[int] = field(default_factory=list)
    lanes: tuple[int, ...] = ()
    features: list[Any] = field(default_factory=list)

    def find(self, kind: type[Payload]) -> Payload | None:
        """Return the result of a type, if a feature has added one."""
        return next((payload for payload in self.features if type(payload) is kind), None)


@shown("id", "index", "text", "token_ids", "finish_reason", "stop_reason", "error")
@dataclass(slots=True)
class Event(Drawn):
    """The new tokens and text of one sample since its last event; the last event has a finish_reason."""

    id: str | int
    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_logprobs: list[float] | None = None  # with the last event of the first sample
    prompt_top_logprobs: list[dict[int, float]] | None = None
    prompt_ranks: list[int] | None = None
    cached_tokens: int = 0  # see RequestOutput
    started: float | None = None  # with the sample's first event: time.monotonic() when it began to run
    weight_versions: list[tuple[int, int, int]] | None = None  # with the sample's last event: of all its tokens
    recomputed: list[tuple[int, int]] | None = None  # with the sample's last event; see Completion
    prompt_token_ids: list[int] | None = None  # with the last event of the first sample
    prompt: str | None = None  # its text, with the last event of the first sample too
    seed: int | None = field(default=None, compare=False)  # with the sample's last event; see Completion
    resumed_chars: int = 0  # length of the start of a resumed completion's text that the texts of its events continue


@explains_names()
@shown("index", "text", "token_ids", "finish_reason", "stop_reason", "error", html=completion_html)
@dataclass(slots=True)
class Completion(Drawn):
    """A finished sample, with what was `Drawn` with each of its tokens.

    token_ids: the generated ids, the stop token included. text: their text, cut before a stop string or stop id.
    finish_reason: "stop", "length", "abort" or "error". stop_reason: the stop id or string that ended it.
    weight_versions: (version, start, end) in order: the version of the weights, as `Generator.update_weights` numbers
        them, that token_ids[start:end] were drawn with.
    recomputed: (version, end) in order: the KV of the prompt and of token_ids[:end] was computed again by weights of
        another version: after a preemption, for in_flight="recompute", or because the completion was resumed.
    seed: the seed of its draws, together with its index; see `Request.resume`.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    recomputed: list[tuple[int, int]] = field(default_factory=list, compare=False)  # it depends on the schedule
    seed: int | None = field(default=None, compare=False)  # other seeds may give the same tokens

    @property
    def cumulative_logprob(self) -> float:
        """The sum of raw_logprobs, as vLLM computes it by default."""
        return sum(self.raw_logprobs)


SHARED = tuple(name for name in Event.__dataclass_fields__ if name in Completion.__dataclass_fields__)
"""Fields that Event and Completion have under the same name and with the same meaning."""


@dataclass(slots=True)
class Timings:
    """Seconds since the request was added. first_token: None if it ended without a token."""

    first_token: float | None
    finished: float


@explains_names()
@shown("id", "prompt", "completions", "error", html=output_html)
@dataclass(slots=True)
class RequestOutput:
    """A finished request.

    prompt: the text of the prompt, for chat messages with the chat template; None for a prompt of ids.
    completions: the samples, by index.
    prompt_logprobs: if asked for, float32 values as long as the prompt; NaN at position 0 and before the start of a
        score. prompt_top_logprobs: their alternatives. prompt_ranks: with alternatives, the rank of each token of the
        prompt in the vocabulary, from 1 for the most likely one; 0 if it has no logprob.
    cached_tokens: number of prompt tokens (and resumed ones) that its first sample did not compute: they were in the
        prefix cache, or another request computed them in the same step.
    """

    id: str | int
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    prompt_ranks: list[int] | None = None
    cached_tokens: int = 0
    timings: Timings | None = None
    prompt: str | None = None

    @property
    def error(self) -> str | None:
        """The reason why the request failed, or None; see `raise_for_errors`."""
        return next((c.error for c in self.completions if c.error), None)

    def resume(self, params: Params, index: int = 0) -> Request:
        """Return a Request that continues completion `index`, whose finish_reason is "length" or "abort", under the
        same id. params: those of this output, perhaps with a larger max_tokens; n becomes 1. Raises ValueError if the
        output has no prompt or no such completion."""
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.id!r} has failed or was not sent, so there is no prompt; send it again")
        if params is not None:
            if not isinstance(params, SamplingParams | Mapping):
                raise TypeError(f"params must be SamplingParams or a dict, not {type(params).__name__}")
            params = {**params, "n": 1} if isinstance(params, Mapping) else replace(params, n=1)
        count = len(self.completions)
        if index not in range(-count, count):
            raise ValueError(f"request {self.id!r} has no completion {index!r}; give an index from 0 to {count - 1}")
        return Request(self.prompt_token_ids, params, self.id, self.completions[index])

    @property
    def text(self) -> str:
        """The first completion's text. Raises ValueError with the reason if it failed; look at `error` first."""
        first = self.completions[0]
        if first.error is not None:
            raise ValueError(f"request {self.id!r} failed: {first.error}")
        return first.text


def raise_for_errors(outputs: Iterable[RequestOutput]) -> None:
    """Raise a ValueError if any request failed, with the ids and reasons of the first 20 of them. Raises TypeError for
    other values than outputs."""
    many = list(outputs) if isinstance(outputs, Iterable) else [outputs]
    if wrong := [type(each).__name__ for each in many if not isinstance(each, RequestOutput)]:
        raise TypeError(f"raise_for_errors takes a list of RequestOutput, as generate returns it, not {wrong[0]}")
    errors = [f"{output.id!r}: {output.error}" for output in many if output.error is not None]
    if errors:
        more = [f"and {len(errors) - MAX_FAULTS} more"] if len(errors) > MAX_FAULTS else []
        lines = [f"{len(errors)} of {len(many)} requests failed:", *errors[:MAX_FAULTS], *more]
        raise ValueError("\n  ".join(lines))
