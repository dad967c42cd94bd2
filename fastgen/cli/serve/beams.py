"""Beam search in /completions and /chat/completions: the field `use_beam_search`, as in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastgen.cli.serve.openai_input import GenerationFields
from fastgen.cli.serve.service import ServedModel
from fastgen.cli.serve.validation import ApiError
from fastgen.request import SHARED, Event, RequestOutput, SamplingParams

TAKEN = {"n", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs"}
IGNORED = {"temperature", "top_p", "top_k", "min_p", "seed"}  # a search draws nothing


async def search_beams(
    model: ServedModel, prompts: list[list[int]], params: SamplingParams, request: GenerationFields, field: str | None
) -> AsyncIterator[list[Event]]:
    """Yield, at once, one event for each of the n beams of each prompt. field: name of the field that the grammar of
    `params` comes from. Raises ApiError for parameters that a search does not take, and what
    AsyncGenerator.beam_search raises."""
    _check(params, model.facts.defaults, field)
    searches = [
        model.engine.beam_search(
            ids,
            params.n,
            model.facts.max_model_len if params.max_tokens is None else params.max_tokens,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            priority=request.priority or 0,
        )
        for ids in prompts
    ]
    outputs = await asyncio.gather(*searches)
    yield [event for number, output in enumerate(outputs) for event in _events(number, output)]


def _check(params: SamplingParams, defaults: SamplingParams, field: str | None) -> None:
    neutral = SamplingParams()
    for name in params.__dataclass_fields__.keys() - TAKEN - IGNORED:
        if getattr(params, name) not in (getattr(defaults, name), getattr(neutral, name)):
            name = field if name == "grammar" and field is not None else name
            message = f"{name} is not available with use_beam_search; leave one of them out"
            raise ApiError(400, message, name, "unsupported_parameter")


def _events(number: int, output: RequestOutput) -> list[Event]:
    """Return the beams of prompt `number` as events."""
    return [
        Event(
            id=number,
            prompt_token_ids=output.prompt_token_ids,
            cached_tokens=output.cached_tokens,
            **{name: getattr(beam, name) for name in SHARED},
        )
        for beam in output.completions
    ]
