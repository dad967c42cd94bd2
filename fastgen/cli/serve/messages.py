"""Messages between the process that serves HTTP and the process of an engine. A request is a number here, which its
sender counts up and never uses again."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from fastgen.engine.outputs import Stats
from fastgen.ranks.channel import Failed, Start
from fastgen.request import Event, Prompt, SamplingParams, drawn_lists

PIECE = 1024  # positions of a prompt's logprobs that go in one message, so that reading it is short

_row: Callable[[Event], tuple[Any, ...]] = attrgetter(*Event.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: a request.

    mask: pickled, which `params` leave out: a TokenMask, or what has a method `compile(gen, kept) -> TokenMask`. That
    runs in a thread beside the steps, and may read of the Generator only what does not change; kept: the same dict for
    all compilations of an engine, which come one after another. A ValueError fails that request alone.
    """

    number: int
    prompt: Prompt
    params: SamplingParams
    mask: bytes | None


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: forget a request, of which nothing more is to be told."""

    number: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """From the engine, when its Generator is made: what a model's server has to know of it.

    tokenizer: the folder or hub id that it was loaded from, None where there is none. max_model_len: of prompt and
    answer together, in tokens.
    """

    folder: str
    tokenizer: str | None
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Refused:
    """From the engine: a request that it does not take."""

    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Turn:
    """From the engine: what is new after a step. events: see `decode`; time: time.monotonic() at the end of the step,
    which is the same clock in all processes; stats: a few times a second, and when nothing is left to do."""

    events: bytes
    time: float
    stats: Stats | None


Message = Start | Submit | Abort | EngineInfo | Refused | Turn | Failed


def encode(events: Iterable[Event]) -> bytes:
    """Events, many times faster than pickle takes dataclasses. Both ends run the same Python, as marshal wants it."""
    return marshal.dumps(list(map(_row, events)), 2)


def decode(data: bytes) -> list[tuple[Any, ...]]:
    """The events of a Turn: of each the fields in their order."""
    rows: list[tuple[Any, ...]] = marshal.loads(data)
    return rows


def messages_of(events: list[Event]) -> Iterator[list[Event]]:
    """Events as they go into messages: together, after the pieces of long prompt logprobs.

    A piece is an event of index -1 with prompt logprobs alone; what the last event of sample 0 has of them follows all
    pieces.
    """
    for at, event in enumerate(events):
        logprobs, top = event.prompt_logprobs, event.prompt_top_logprobs
        if logprobs is None or len(logprobs) <= PIECE:
            continue
        cuts = [slice(start, start + PIECE) for start in range(0, len(logprobs), PIECE)]
        pieces = [(logprobs[cut], top and top[cut]) for cut in cuts]
        for some, some_top in pieces[:-1]:
            yield [Event(event.id, -1, [], [], [], "", prompt_logprobs=some, prompt_top_logprobs=some_top)]
        events[at] = replace(event, prompt_logprobs=pieces[-1][0], prompt_top_logprobs=pieces[-1][1])
    yield events


def joined(events: Iterable[Event]) -> list[Event]:
    """One event a sample, in the order of the samples, that says what all of its events do."""
    parts: dict[int, list[Event]] = {}
    for event in events:
        parts.setdefault(event.index, []).append(event)
    return [own[0] if len(own) == 1 else _joined(own) for _, own in sorted(parts.items())]


def _joined(events: list[Event]) -> Event:
    first, last = events[0], events[-1]
    names = ["token_ids", *drawn_lists(last)]
    lists: dict[str, Any] = {name: [item for event in events for item in getattr(event, name) or ()] for name in names}
    return replace(last, **lists, text="".join(event.text for event in events), started=first.started)
