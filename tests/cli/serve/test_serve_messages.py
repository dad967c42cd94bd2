"""What goes between the HTTP process and an engine's: events, whole and in pieces."""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace

import pytest

from fastgen.cli.serve.engine import Stream
from fastgen.cli.serve.messages import PIECE, decode, encode, messages_of
from fastgen.request import Event


def test_events_travel_whole() -> None:
    plain = Event(3, 0, [1], [-0.5], [-0.25], "a\udc80b")
    full = Event(4, 1, [1, 2], [-0.5, 0.0], [-0.25, -math.inf], "é", "stop", "x", None, [{3: -1.0}], [[1, 2]],
                 [math.inf, -2.0], [{}, {5: -0.5}], 64)  # fmt: skip
    failed = Event(5, 0, [], [], [], "", "error", 17, "the mask raised")
    events = [plain, full, failed]
    assert [Event(*row) for row in decode(encode(events))] == events
    assert fields(Event)[0].name == "id", "by which a client finds the stream"


@pytest.mark.parametrize("length", [1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("top", [True, False])
def test_long_prompt_logprobs_travel_in_pieces(length: int, top: bool) -> None:
    logprobs = [-float(i) for i in range(length)]
    alternatives = [{i: -1.0} for i in range(length)] if top else None
    last = Event(0, 0, [9], [0.0], [0.0], "x", "length", prompt_logprobs=logprobs, prompt_top_logprobs=alternatives)
    sent = list(messages_of([Event(1, 0, [2], [0.0], [0.0], "y"), last]))
    assert all(len(event.prompt_logprobs or ()) <= PIECE for message in sent for event in message)
    assert len(sent) == -(-length // PIECE)
    stream = Stream(SimpleNamespace(_forget=None), 0, "mine", 1)  # type: ignore[arg-type]
    for message in sent:
        for row in decode(encode(message)):
            if row[0] == 0:
                stream._take(row)
    assert stream._events == [
        Event("mine", 0, [9], [0.0], [0.0], "x", "length", prompt_logprobs=logprobs, prompt_top_logprobs=alternatives)
    ]
