"""What is asked for, what becomes of it, and what one step of the engine is told to do. No torch here.

Data flows down: a Request becomes n Sequences (one a sample), the scheduler puts parts of them into a Batch, the
runner answers a Batch with a StepResult, and finished Sequences become Completions of a RequestOutput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the HTTP process does without
    import numpy as np

Message = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}."""

Prompt = str | SequenceOf[int] | SequenceOf[Message]
"""Text, token ids, or chat messages."""

MAX_LOGPROBS = 20

MAX_BIASES = 4096
"""Tokens of one request that logit_bias and min_tokens together may change the logits of."""


class TokenMask(Protocol):
    """Restricts what one sample may say next, as a grammar does. It is deep-copied for each sample."""

    def fill(self, row: Any) -> None:
        """Write the allowed tokens into `row`, a numpy int32 array of ceil(V / 32) words; bit i of word w is token
        32 w + i; a set bit allows it. The row arrives with all bits set."""

    def accept(self, token: int) -> None:
        """The sample has said `token`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Checked when a request is added, not when this is constructed.

    n: samples of the prompt.
    max_tokens: tokens to generate at most; None: to the end of the context; 0: none (with prompt_logprobs).
    min_tokens: no stop (eos, stop_token_ids, stop) before so many tokens.
    temperature: 0 is greedy.
    top_p, top_k, min_p: keep the smallest set of tokens with probability top_p, the k likeliest (0: all), and those
        of at least min_p times the likeliest; applied in the order top_k, top_p, min_p, after the temperature.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the answer.
    presence_penalty, frequency_penalty: subtracted for tokens of the answer, once and once an occurrence.
    logit_bias: token id -> added to its logit; at most 4096, with the stop ids that min_tokens holds back.
    seed: equal seeds and prompts give equal answers; None derives one from the Generator's seed.
    stop: strings that end the answer; the text is cut before them, the ids are kept.
    stop_token_ids: ids that end the answer, beside the model's eos ids; they stay in token_ids.
    ignore_eos: the model's eos ids do not end the answer.
    logprobs: raw alternatives a token (0 to 20); the logprobs of the tokens themselves are always there.
    prompt_logprobs: also score the prompt, with so many raw alternatives a token.
    mask: restricts the tokens (TokenMask).
    return_sampling_mask: also return the token ids that truncation kept, a list a token.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | SequenceOf[str] = ()
    stop_token_ids: SequenceOf[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    mask: TokenMask | None = None
    return_sampling_mask: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError, or TypeError for a value of the wrong type, naming the parameter and what it may be."""
        check_integer("n", self.n, 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 0)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise ValueError(
                    "max_tokens is 0, so nothing would be computed; ask for at least 1 token, or set prompt_logprobs"
                )
            if self.max_tokens == 0 and self.n != 1:
                raise ValueError(f"n is {self.n} with max_tokens=0; scoring a prompt takes n=1")
        check_integer("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}")
        _number("temperature", self.temperature, 0, math.inf)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        check_integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        _number("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63))
            if self.seed >= 2**64:
                raise ValueError(f"seed is {self.seed}; it must fit in 64 bits")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                check_integer(name, value, 0, min(MAX_LOGPROBS, vocab_size))
        if not isinstance(self.logit_bias, Mapping | None):
            raise TypeError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        _token_ids("logit_bias", self.logit_bias or (), vocab_size)
        for token, bias in (self.logit_bias or {}).items():
            _number(f"logit_bias[{token}]", bias, -math.inf, math.inf)
        for name, listed in (("stop_token_ids", self.stop_token_ids), ("stop", self.stop)):
            if not isinstance(listed, Iterable):
                raise TypeError(f"{name} must be a list, not {listed!r}")
        _token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise TypeError(f"stop must be a string or a list of strings, not {text!r}")
            if not text:
                raise ValueError("a stop string is empty and would end every answer at once; remove it")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise TypeError, or ValueError for one that is out of these bounds, which belong to them."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if int(value) < low or (high is not None and int(value) > high):
        raise ValueError(
            f"{name} is {value}; it must be {f'at least {low}' if high is None else f'from {low} to {high}'}"
        )


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        bounds = "finite" if low == -math.inf else f"{'above' if open_low else 'at least'} {low:g}"
        raise ValueError(
            f"{name} is {value}; it must be {bounds}{'' if high == math.inf else f' and at most {high:g}'}"
        )


def _token_ids(name: str, ids: Iterable[Any], vocab_size: int) -> None:
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise TypeError(f"{name} must hold token ids (integers), not {token!r}")
        if not 0 <= int(token) < vocab_size:
            raise ValueError(f"{name} holds the id {token}, outside the vocabulary of {vocab_size} tokens")


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it; `id` comes back on the output (None: one is made).

    resume: a completion of this prompt that ended by "length" or "abort", to go on with. With the params it was begun
        with, but for n=1 and perhaps a larger max_tokens (which counts from the prompt's end, as ever), the tokens are
        those that would have come if it had not ended; its seed is taken where params have none. The output has all of
        it, under its old index; events tell what is new, and text that was held back.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str | int | None = None
    resume: Completion | None = None


@dataclass(slots=True)
class Drawn:
    """What was drawn with each token of an answer: lists of one length, under the names of Completion, Event and
    StepResult. top_logprobs and sampling_mask are None where the parameters do not ask for them."""

    logprobs: list[float] = field(default_factory=list)
    untruncated_logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] | None = None
    sampling_mask: list[list[int]] | None = None

    @classmethod
    def asked(cls, params: SamplingParams) -> Drawn:
        """Return empty lists for an answer with these parameters."""
        tops, masks = params.logprobs, params.return_sampling_mask
        return cls(top_logprobs=[] if tops else None, sampling_mask=[] if masks else None)

    def since(self, start: int) -> dict[str, Any]:
        """Return the lists' parts from token `start` on, by name."""
        return {name: values[start:] for name, values in drawn_lists(self).items()}

    def append(self, result: StepResult, row: int) -> None:
        """Append what a step has drawn in a row."""
        for name, values in drawn_lists(self).items():
            values.append(getattr(result, name)[row])

    def extend(self, completion: Completion) -> None:
        """Append all that a completion has, which must have what the parameters ask for."""
        for name, values in drawn_lists(self).items():
            values += getattr(completion, name)

    def cut(self, length: int) -> None:
        """Drop what is behind the first `length` tokens."""
        for values in drawn_lists(self).values():
            del values[length:]


def drawn_lists(source: Drawn | Completion | Event) -> dict[str, Any]:
    """Return what was drawn with each token: the lists that are there, by name."""
    return {name: values for name in _DRAWN if (values := getattr(source, name)) is not None}


_DRAWN = tuple(Drawn.__dataclass_fields__)


class Status(Enum):
    WAITING = "waiting"  # holds no lane and no pages
    RUNNING = "running"
    FINISHED = "finished"  # may still hold its lane while a step in flight computes a token too many


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request on its way through the engine: what the scheduler and the text layer know of it.

    `token_ids` are the tokens that the host has read: the prompt and what was generated. `pending` counts tokens that
    a launched step samples and the host has not read; `computed` counts the tokens whose KV launched steps write.
    """

    request_id: str | int
    index: int
    params: SamplingParams
    token_ids: list[int]
    prompt_len: int
    max_len: int  # prompt and answer together never exceed it
    seed: int
    stop_ids: frozenset[int] = frozenset()
    score_start: int | None = None  # prompt logprobs are wanted for positions from here on
    score_temperature: float = 1.0
    mask: TokenMask | None = None

    status: Status = Status.WAITING
    lane: int = -1
    pages: list[int] = field(default_factory=list)
    prefill_len: int = 0  # tokens known when it took its lane; from there on it decodes
    computed: int = 0
    pending: int = 0
    preemptions: int = 0
    started: float | None = None  # time.monotonic() when it first took a lane
    cached_tokens: int = 0  # of the prompt, that were there when it first took a lane: cached, or just computed

    drawn: Drawn = field(init=False)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)  # of the weights, and the output_len each began at

    def __post_init__(self) -> None:
        self.drawn = Drawn.asked(self.params)

    def begin_version(self, version: int) -> None:
        """Tokens that come from now on are of weights of this version."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, self.output_len))

    @property
    def weight_versions(self) -> list[tuple[int, int, int]]:
        """See Completion."""
        ends = [start for _, start in self.versions[1:]] + [self.output_len]
        return [(version, start, end) for (version, start), end in zip(self.versions, ends, strict=True) if start < end]

    @property
    def ends_at_length(self) -> bool:
        """Whether nothing but max_len ends it."""
        return not self.stop_ids and not self.params.stop and self.mask is None

    @property
    def length(self) -> int:
        """Tokens read and in flight."""
        return len(self.token_ids) + self.pending

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(slots=True)
class LaneStart:
    """A sequence takes a lane: what the device keeps for it as long as it runs."""

    lane: int
    params: SamplingParams
    seed: int
    index: int
    prompt_len: int
    stop_ids: frozenset[int]
    token_ids: tuple[int, ...]  # prompt and answer so far where penalties count them, else empty


@dataclass(frozen=True, slots=True)
class Score:
    """Raw logprobs wanted of a prefill chunk: its row `row + i` predicts the prompt token `targets[i]` (int32 [n])."""

    row: int
    targets: np.ndarray
    top: int
    temperature: float


@dataclass(slots=True)
class Prefill:
    """A chunk of known tokens (int32 [n]) of one lane, from position `start` on; they attend to each other and all
    before.

    forks: lanes whose known tokens are the same: they draw from this chunk's last row too, and compute nothing.
    """

    lane: int
    start: int
    tokens: np.ndarray
    sample: bool  # the last known token is in it: draw the next one
    score: Score | None = None
    forks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, and what changed on the lanes since the step before. Plain data, so that every rank can replay it.

    decodes: lanes that go on with the token they sampled last, at their next position; then prefill chunks.
    pages: page-table updates (lane, first slot, pages). masked: some lane that samples has a TokenMask, so that its
    sampler waits for the tokens of the step before.

    fresh: pages that come from nobody: what they hold is of no use. Before the step computes anything, and in this
    order: saves (page, host slot) go to the host tier, loads (host slot, page) come back from it, and copies (page,
    page) of partial pages are made for the forks of an earlier step.
    """

    decodes: tuple[int, ...]
    prefills: tuple[Prefill, ...]
    starts: tuple[LaneStart, ...]
    pages: tuple[tuple[int, int, tuple[int, ...]], ...]
    masked: bool
    fresh: tuple[int, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(chunk.tokens) for chunk in self.prefills)

    @property
    def sampling(self) -> tuple[int, ...]:
        """The lanes that draw a token, in the order of a StepResult's lists."""
        drawing = [lane for chunk in self.prefills if chunk.sample for lane in (chunk.lane, *chunk.forks)]
        return (*self.decodes, *drawing)


@dataclass(slots=True)
class Scored:
    """Logprobs of the prompt tokens at positions start, start + 1, ..., of one lane."""

    lane: int
    start: int
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None = None


@dataclass(slots=True)
class StepResult:
    """What a Batch came to: lists over `Batch.sampling`, and the scores of its prefill chunks.

    A token is -1 where the mask allowed nothing.
    """

    tokens: list[int]
    logprobs: list[float]
    untruncated_logprobs: list[float]
    raw_logprobs: list[float]
    top_logprobs: list[dict[int, float] | None] | None = None
    sampling_mask: list[list[int] | None] | None = None
    scored: list[Scored] = field(default_factory=list)


@dataclass(slots=True)
class Event:
    """What is new of one sample since its last event; a finished one carries its finish_reason."""

    id: str | int
    index: int
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    sampling_mask: list[list[int]] | None = None
    prompt_logprobs: list[float] | None = None  # with the last event of the first sample
    prompt_top_logprobs: list[dict[int, float]] | None = None
    cached_tokens: int = 0  # see RequestOutput
    started: float | None = None  # with the sample's first event: time.monotonic() when it began to run
    weight_versions: list[tuple[int, int, int]] | None = None  # of the whole answer, with its last event
    untruncated_logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Completion:
    """One finished sample.

    token_ids: what was generated, the stop token included; text: their view, cut before a stop string or stop id.
    logprobs: of the distribution sampled from (0.0 at temperature 0); untruncated_logprobs: the same but for top_k,
        top_p and min_p, so over all of the vocabulary that penalties, biases and masks leave (equal to logprobs where
        nothing is truncated); raw_logprobs: of the untouched logits at temperature 1. All are float32 and as long as
        token_ids.
    finish_reason: "stop", "length", "abort" or "error"; stop_reason: the stop id or string that ended it.
    top_logprobs: the raw alternatives where `SamplingParams.logprobs` asks for them, and sampling_mask the ids that
        truncation kept, a list a token.
    seed: what it was drawn with, together with its index; see `Request.resume`.
    weight_versions: (version, start, end) in order: the weights that token_ids[start:end] were drawn with, as
        `Generator.update_weights` numbers them.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[float]
    untruncated_logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    seed: int | None = field(default=None, compare=False)  # another seed may have come to the same


@dataclass(slots=True)
class Timings:
    """Seconds since the request was added; None where it did not come to that."""

    first_token: float | None
    finished: float


@dataclass(slots=True)
class RequestOutput:
    """A finished request: its completions, by index, and its prompt's logprobs where they were asked for
    (float32, as long as the prompt, NaN at position 0 and before the start of a score).

    cached_tokens: of the prompt (and what was resumed), that were there when its first sample began: in the prefix
        cache, or computed by another request in the same step.
    """

    id: str | int
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    cached_tokens: int = 0
    timings: Timings | None = None

    @property
    def error(self) -> str | None:
        """Why the request failed, or None."""
        return next((c.error for c in self.completions if c.error), None)

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text
