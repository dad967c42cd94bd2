"""Messages between the HTTP process and an engine: events, serialized and merged."""

from __future__ import annotations

import math

from fastgen.cli.serve.messages import decode, encode, joined
from fastgen.request import Event


def test_events_survive_serialization() -> None:
    plain = Event(3, 0, [1], "a\udc80b", logprobs=[-0.5], raw_logprobs=[-0.25])
    drawn = {"logprobs": [-0.5, 0.0], "raw_logprobs": [-0.25, -math.inf], "top_logprobs": [{3: -1.0}]}
    scores = [math.inf, -2.0], [{}, {5: -0.5}]
    full = Event(4, 1, [1, 2], "é", "stop", "x", None, *scores, 64, sampling_mask=[[1, 2]], **drawn)
    failed = Event(5, 0, [], "", "error", 17, "the mask raised")
    events = [plain, full, failed]
    assert decode(encode(events)) == events


def test_events_of_a_sample_are_merged_in_the_order_of_prompts_and_samples() -> None:
    events = [
        Event(1, 0, [5], "b", started=3.0, logprobs=[-1.0], raw_logprobs=[-2.0]),
        Event(0, 1, [6], "c", "stop"),
        Event(0, 0, [8], "d"),
        Event(1, 0, [7], "e", "length", cached_tokens=2, logprobs=[-3.0], raw_logprobs=[-4.0]),
    ]
    merged = joined(events)
    assert [(event.id, event.index) for event in merged] == [(0, 0), (0, 1), (1, 0)]
    drawn = {"logprobs": [-1.0, -3.0], "raw_logprobs": [-2.0, -4.0]}
    assert merged[2] == Event(1, 0, [5, 7], "be", "length", cached_tokens=2, started=3.0, **drawn)
