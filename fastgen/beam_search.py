"""Beam search through a Generator or an AsyncGenerator: each step is a request of one token for each beam.

The prefix cache has the full pages of a beam, so a request computes only the tokens after them. No torch here.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from collections.abc import Generator as PyGenerator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from numbers import Integral, Real

from fastgen.engine.outputs import error_output
from fastgen.request import MAX_LOGPROBS, Completion, Prompt, RequestOutput, SamplingParams
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.tokenizer import Tokenizer

MAX_LENGTH_PENALTY = 40
"""With it, scores of beams of up to ten million tokens are still numbers."""


@dataclass(slots=True)
class BeamCompletion(Completion):
    """An answer of `Generator.beam_search`. All its logprobs are raw. score: their sum, divided by
    (number of tokens) ** length_penalty."""

    score: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """The arguments of a beam search; see `Generator.beam_search`.

    eos_ids, context, vocab_size: the model's ids that end a beam unless ignore_eos, its maximum number of tokens of
    prompt and beam together, and the size of its vocabulary.
    """

    width: int
    max_tokens: int
    length_penalty: float
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    eos_ids: Collection[int]
    context: int
    vocab_size: int

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a beam."""
        given = SamplingParams(stop_token_ids=self.stop_token_ids).stop_token_ids  # () for None
        return frozenset([*given, *(() if self.ignore_eos else self.eos_ids)])

    def check(self) -> None:
        """Raise ValueError or TypeError for arguments that cannot be used."""
        for name, value in (("width", self.width), ("max_tokens", self.max_tokens)):
            if not isinstance(value, Integral):
                raise TypeError(f"{name} must be an integer, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        SamplingParams(stop_token_ids=self.stop_token_ids).validate(self.vocab_size)
        if not isinstance(self.length_penalty, Real):
            raise TypeError(f"length_penalty must be a number, not {self.length_penalty!r}")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:  # NaN is not
            most = MAX_LENGTH_PENALTY
            raise ValueError(f"length_penalty is {self.length_penalty}; it must be from -{most} to {most}")
        if self.width + len(self.stop_ids) > min(MAX_LOGPROBS, self.vocab_size):
            most = min(MAX_LOGPROBS, self.vocab_size) - len(self.stop_ids)
            stops = len(self.stop_ids)
            raise ValueError(f"{self.width} beams are too many with {stops} stop ids; ask for at most {most}")

    @cached_property
    def params(self) -> SamplingParams:
        """The parameters of each request. Its alternatives include `width` that are not stop ids, which is enough even
        if all beams of the next step continue this one."""
        count = max(self.width + len(self.stop_ids), self.logprobs or 0)
        return SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=count)

    def score(self, beam: Beam) -> float:
        """Return the score of a beam that has ended."""
        return beam.total / math.pow(max(len(beam.ids), 1), self.length_penalty)

    def stopped(self, beam: Beam) -> bool:
        """Return whether a stop id ended the beam."""
        return bool(beam.ids) and beam.ids[-1] in self.stop_ids


@dataclass(frozen=True, slots=True)
class Beam:
    """The tokens of a beam, their raw logprobs, the alternatives to each, and the sum of the logprobs."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    total: float = 0.0

    def with_token(self, id: int, top: dict[int, float]) -> Beam:
        logprob = top[id]
        return Beam([*self.ids, id], [*self.logprobs, logprob], [*self.tops, top], self.total + logprob)


_Candidate = tuple[float, Beam, int, dict[int, float]]
"""The sum of logprobs with another token, the beam before it, the token, and the alternatives to it."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. first: the output of the prompt's first request, or of a request that failed. beams: best
    first; none if a request failed. reason: the finish_reason of beams without a stop id."""

    first: RequestOutput
    beams: list[Beam]
    reason: str = "length"

    def shown_ids(self, options: BeamOptions) -> list[list[int]]:
        """Return the ids of each beam without its stop id, which its text does not show."""
        return [beam.ids[:-1] if options.stopped(beam) else beam.ids for beam in self.beams]


Search = PyGenerator[list[Prompt], list[RequestOutput], SearchResult]
"""Yields prompts, is sent their outputs with `BeamOptions.params`, and returns its result."""


def search(prompt: Prompt, options: BeamOptions) -> Search:
    """Search for the best continuations of a prompt.

    As in transformers with early_stopping=False, a beam ends only if it is among the best `width` of a step. The
    search ends when `width` beams have ended and the best running one, scored at its present length, is not better than
    the worst of them. If one of its requests is aborted, the result is the beams so far.
    """
    (first,) = yield [prompt]
    outputs, running, ended = [first], [Beam()], list[Beam]()
    most = min(options.max_tokens, options.context - len(first.prompt_token_ids))
    while True:
        if failed := next((output for output in outputs if output.error is not None), None):
            return SearchResult(failed, [])
        if any(output.completions[0].finish_reason == "abort" for output in outputs):
            begun = running if running[0].ids else running * options.width
            return SearchResult(first, heapq.nlargest(options.width, [*ended, *begun], key=options.score), "abort")
        tops = [top for output in outputs for top in output.completions[0].top_logprobs or ()]
        candidates = [
            (beam.total + top[id], beam, id, top) for beam, top in zip(running, tops, strict=True) for id in top
        ]
        at_end = len(running[0].ids) + 1 == most
        stopping = [each for each in _best(candidates, options.width) if each[2] in options.stop_ids or at_end]
        ended += [beam.with_token(id, top) for _, beam, id, top in stopping]
        ended = heapq.nlargest(options.width, ended, key=options.score)
        open_ones = [each for each in candidates if each[2] not in options.stop_ids]
        running = [beam.with_token(id, top) for _, beam, id, top in _best(open_ones, options.width)]
        if at_end or (len(ended) == options.width and options.score(running[0]) <= options.score(ended[-1])):
            return SearchResult(first, ended)
        outputs = yield [[*first.prompt_token_ids, *beam.ids] for beam in running]


def _best(candidates: list[_Candidate], count: int) -> list[_Candidate]:
    return heapq.nlargest(count, candidates, key=lambda each: each[0])


def search_all(
    prompts: Iterable[Prompt],
    options: BeamOptions,
    generate: Callable[[list[Prompt], SamplingParams], list[RequestOutput]],
    tokenizer: Tokenizer | None,
) -> list[RequestOutput]:
    """Run the searches of many prompts together, and return their outputs. generate: `Generator.generate`."""
    options.check()
    searches = [search(prompt, options) for prompt in prompts]
    asked = {number: next(each) for number, each in enumerate(searches)}
    results: dict[int, SearchResult] = {}
    while asked:
        outputs = iter(generate([prompt for ask in asked.values() for prompt in ask], options.params))
        answers = {number: list(islice(outputs, len(ask))) for number, ask in asked.items()}
        asked = {}
        for number, answer in answers.items():
            try:
                asked[number] = searches[number].send(answer)
            except StopIteration as end:
                results[number] = end.value
    return [
        output_of(number, each, options, texts_after(each.first.prompt_token_ids, each.shown_ids(options), tokenizer))
        for number, each in sorted(results.items())
    ]


async def search_one(
    prompt: Prompt, options: BeamOptions, generate: Callable[[Prompt, SamplingParams], Awaitable[RequestOutput]]
) -> SearchResult:
    """Run the search for one prompt. generate: `AsyncGenerator.generate`."""
    options.check()
    steps = search(prompt, options)
    asked = next(steps)
    while True:
        outputs = await asyncio.gather(*(generate(each, options.params) for each in asked))
        try:
            asked = steps.send(outputs)
        except StopIteration as end:
            result: SearchResult = end.value
            return result


def texts_after(prompt_ids: Sequence[int], answers: Iterable[list[int]], tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of each answer to a prompt; without a tokenizer, texts are empty."""
    if tokenizer is None:
        return ["" for _ in answers]
    return [Detokenizer(tokenizer, list(prompt_ids)).push(ids, last=True) for ids in answers]


def output_of(id: str | int, result: SearchResult, options: BeamOptions, texts: Sequence[str]) -> RequestOutput:
    """Return the output of a search. texts: those of its beams."""
    first = result.first
    if first.error is not None:
        return error_output(id, ValueError(first.error))
    beams: list[Completion] = [
        _completion(index, beam, options, result.reason, text)
        for index, (beam, text) in enumerate(zip(result.beams, texts, strict=True))
    ]
    return RequestOutput(id, first.prompt_token_ids, beams, cached_tokens=first.cached_tokens, prompt=first.prompt)


def _completion(index: int, beam: Beam, options: BeamOptions, reason: str, text: str) -> BeamCompletion:
    stopped = options.stopped(beam)
    tops = [dict(islice(top.items(), options.logprobs)) for top in beam.tops] if options.logprobs else None
    return BeamCompletion(
        index=index,
        token_ids=beam.ids,
        logprobs=beam.logprobs,
        untruncated_logprobs=list(beam.logprobs),
        raw_logprobs=list(beam.logprobs),
        top_logprobs=tops,
        text=text,
        finish_reason="stop" if stopped else reason,
        stop_reason=beam.ids[-1] if stopped else None,
        score=options.score(beam),
    )
