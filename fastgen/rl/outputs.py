"""Outputs and events from the JSON of a server. This module does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastgen.request import Completion, Event, Request, RequestOutput, Timings


def completion_of(found: dict[str, Any]) -> Completion:
    """Return the completion described by JSON."""
    completion = Completion(**found)
    _restore(completion)
    return completion


def event_of(found: dict[str, Any], id: str | int) -> Event:
    """Return the event described by JSON, with another id."""
    event = Event(**{**found, "id": id})
    _restore(event)
    event.prompt_top_logprobs = with_ids(event.prompt_top_logprobs)
    return event


def output_of(found: dict[str, Any], id: str | int) -> RequestOutput:
    """Return the output described by JSON, with another id."""
    output = RequestOutput(**{**found, "id": id})
    output.completions = [completion_of(each) for each in found["completions"]]
    output.prompt_top_logprobs = with_ids(output.prompt_top_logprobs)
    output.timings = Timings(**found["timings"])
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
    drawn.top_logprobs = with_ids(drawn.top_logprobs)


def with_ids(tops: list[dict[Any, float]] | None) -> list[dict[int, float]] | None:
    """Return alternatives with integer ids, which are strings in JSON."""
    return None if tops is None else [{int(id): logprob for id, logprob in top.items()} for top in tops]
