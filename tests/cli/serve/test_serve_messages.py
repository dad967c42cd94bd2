"""Messages between the HTTP process and an engine: events, serialized and merged."""

from __future__ import annotations

import math

from fastgen.cli.serve.messages import decode, encode, joined
from fastgen.request import Event


def test_events_survive_serialization() -> None:
    plain = Event(3, 0, [1], [-0.5], [-0.25], "a\udc80b")
    full = Event(4, 1, [1, 2], [-0.5, 0.0], [-0.25, -math.inf], "é", "stop", "x", None, [{3: -1.0}], [[1, 2]],
                 [math.inf, -2.0], [{}, {5: -0.5}], 64)  # fmt: skip
    failed = Event(5, 0, [], [], [], "", "error", 17, "the mask raised")
    events = [plain, full, failed]
    assert decode(encode(events)) == events


def test_events_of_a_sample_are_merged_in_the_order_of_prompts_and_samples() -> None:
    events = [
        Event(1, 0, [5], [-1.0], [-2.0], "b", started=3.0),
        Event(0, 1, [6], [-1.5], [-2.5], "c", "stop"),
        Event(0, 0, [8], [-1.5], [-2.5], "d"),
        Event(1, 0, [7], [-3.0], [-4.0], "e", "length", cached_tokens=2),
    ]
    merged = joined(events)
    assert [(event.id, event.index) for event in merged] == [(0, 0), (0, 1), (1, 0)]
    assert merged[2] == Event(1, 0, [5, 7], [-1.0, -3.0], [-2.0, -4.0], "be", "length", cached_tokens=2, started=3.0)
