"""Messages between the process that serves HTTP and the process of an engine. Requests have numbers, which the sender
counts up and never uses again."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from fastgen.engine.outputs import Stats
from fastgen.request import Event, Prompt, SamplingParams

# The constructor of Event takes the fields of its base class, Drawn, by keyword alone.
_POSITIONAL = tuple(field.name for field in fields(Event) if not field.kw_only)
_KEYWORDS = tuple(field.name for field in fields(Event) if field.kw_only)
_row: Callable[[Event], tuple[Any, ...]] = attrgetter(*_POSITIONAL, *_KEYWORDS)


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: a request. grammar: of its answers (see `grammar.Compiler`), or None for any answer."""

    number: int
    prompt: Prompt
    params: SamplingParams
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: end these requests. Nothing more is reported of them."""

    numbers: range


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """From the engine when its Generator is ready: the facts that a server needs.

    folder: the model's. tokenizer: folder or hub id of the tokenizer, None without one. max_model_len: maximum tokens
    of prompt and answer together.
    """

    folder: str
    tokenizer: str | None
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Refused:
    """From the engine: a request is not accepted."""

    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class StepEnded:
    """From the engine after a step. events: as `encode` writes them. time: time.monotonic() at the end of the step, a
    clock that all processes of a machine share. stats: sent a few times a second, and when the engine becomes idle."""

    events: bytes
    time: float
    stats: Stats | None


def encode(events: Iterable[Event]) -> bytes:
    """Serialize events, many times faster than pickle does. Both processes run the same Python, as marshal requires."""
    return marshal.dumps(list(map(_row, events)), 2)


def decode(data: bytes) -> list[Event]:
    """Return the events that `encode` has serialized."""
    size = len(_POSITIONAL)
    return [Event(*row[:size], **dict(zip(_KEYWORDS, row[size:], strict=True))) for row in marshal.loads(data)]


def joined(events: list[Event]) -> list[Event]:
    """Merge the events of each sample into one; return them in the order of prompts (`id`) and samples."""
    if len(events) == 1:
        return events
    samples: dict[tuple[Any, int], list[Event]] = {}
    for event in events:
        samples.setdefault((event.id, event.index), []).append(event)
    return [own[0] if len(own) == 1 else _merge(own) for _, own in sorted(samples.items())]


def _merge(events: list[Event]) -> Event:
    first, last = events[0], events[-1]
    names = ["token_ids", *last.lists()]
    lists: dict[str, Any] = {name: [item for event in events for item in getattr(event, name) or ()] for name in names}
    return replace(last, **lists, text="".join(event.text for event in events), started=first.started)
