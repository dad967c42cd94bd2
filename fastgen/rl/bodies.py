"""Requests, outputs and events as the bodies of HTTP, which are JSON. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastgen.request import Completion, Event, Params, Request, RequestOutput, SamplingParams, Timings
from fastgen.rl.http import Json

RESUMED = tuple(Completion.__dataclass_fields__)


def body_of(request: Request) -> Json:
    """Return the body of a request to /generate. Raises ValueError or TypeError for wrong params."""
    resume = None if request.resume is None else {name: getattr(request.resume, name) for name in RESUMED}
    body = {"prompt": request.prompt, "params": fields_of(request.params), "resume": resume}
    return {**body, "priority": request.priority}


def fields_of(params: Params) -> Json | None:
    """Return parameters for the body of a request, after checking them. Raises ValueError or TypeError."""
    if params is None:
        return None
    checked = SamplingParams(**params) if isinstance(params, Mapping) else params
    if not isinstance(checked, SamplingParams):
        raise TypeError(f"params must be SamplingParams or a dict, not {type(params).__name__}")
    checked.validate()
    if checked.mask is not None:
        raise ValueError("a mask cannot be sent to a server; use json_schema, regex, choice or grammar")
    return dict(params) if isinstance(params, Mapping) else dict(vars(checked))


def samples_of(body: Json) -> int:
    """Return the number of samples that a request asks for."""
    return int((body["params"] or {}).get("n", 1))


def completion_of(fields: Json) -> Completion:
    """Return the completion described by JSON."""
    completion = Completion(**fields)
    _restore(completion)
    return completion


def event_of(fields: Json, id: str | int) -> Event:
    """Return the event described by JSON, with another id."""
    event = Event(**{**fields, "id": id})
    _restore(event)
    event.prompt_logprobs = scores_of(event.prompt_logprobs)
    event.prompt_top_logprobs = with_ids(event.prompt_top_logprobs)
    return event


def output_of(fields: Json, id: str | int) -> RequestOutput:
    """Return the output described by JSON, with another id."""
    output = RequestOutput(**{**fields, "id": id})
    output.completions = [completion_of(each) for each in fields["completions"]]
    output.prompt_logprobs = scores_of(output.prompt_logprobs)
    output.prompt_top_logprobs = with_ids(output.prompt_top_logprobs)
    output.timings = Timings(**fields["timings"])
    return output


def unsent_output(request: Request, samples: int) -> RequestOutput:
    """Return the output of a request that was aborted before it was sent."""
    assert request.id is not None
    if request.resume is not None:
        return RequestOutput(request.id, [], [replace(request.resume, finish_reason="abort")])
    return RequestOutput(request.id, [], [Completion(index, [], "", "abort") for index in range(samples)])


def _restore(drawn: Completion | Event) -> None:
    """Give a completion or an event the tuples and the integer keys that JSON lacks."""
    if drawn.weight_versions is not None:
        drawn.weight_versions = [(version, start, end) for version, start, end in drawn.weight_versions]
    if drawn.recomputed is not None:
        drawn.recomputed = [(version, end) for version, end in drawn.recomputed]
    drawn.top_logprobs = with_ids(drawn.top_logprobs)


def scores_of(logprobs: Sequence[float | None] | None) -> list[float] | None:
    """Return the logprobs of a prompt, with NaN for tokens that have none, which are null in JSON."""
    return None if logprobs is None else [math.nan if logprob is None else logprob for logprob in logprobs]


def with_ids(tops: list[dict[Any, float]] | None) -> list[dict[int, float]] | None:
    """Return alternatives with integer ids, which are strings in JSON."""
    return None if tops is None else [{int(id): logprob for id, logprob in top.items()} for top in tops]
