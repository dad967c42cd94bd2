"""Turns the arguments of `generate` and `stream` (one prompt, many prompts, or Requests) into lists and requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, cast

from fastgen.option import Option
from fastgen.request import MAX_LOGPROBS, Params, Prompt, Request, SamplingParams

Ids = str | int | Iterable[str | int] | None
"""Ids of requests: one, some, or None for all."""
Scores = list[list[float]]
"""Logprobs of tokens, for each sequence."""
TopScores = list[list[dict[int, float]]]
"""The alternatives to each of these tokens, by token id, with their logprobs."""

_ALTERNATIVES = Option("logprobs", int, low=1, high=MAX_LOGPROBS)


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A string, a dict, or a list that begins with an int or a message is one prompt. Raises
    TypeError for other values than iterables."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
    many: list[Any] = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if many and isinstance(many[0], Request):
        raise TypeError("a Request goes to `stream`; give prompts here")
    return [many] if _begins_prompt(many) else many


def prompt_source(prompts: Prompt | Iterable[Prompt]) -> Iterable[Prompt]:
    """Return prompts that are read as they are needed; one prompt, or a list of them, as `prompt_list` does."""
    lazy = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | bytearray | Mapping | list | tuple)
    return cast(Iterable[Prompt], prompts) if lazy and not hasattr(prompts, "tolist") else prompt_list(prompts)


def params_list(params: Params | Iterable[Params], count: int) -> list[Params]:
    """Return the parameters of each of `count` prompts. params: one value for all prompts, or a list with one entry per
    prompt. Raises TypeError for other values, and ValueError for a list of another length."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    if not isinstance(params, Iterable) or isinstance(params, str):
        raise TypeError(f"params must be SamplingParams, a dict or a list of them, not {type(params).__name__}")
    each = list(params)
    if len(each) != count:
        raise ValueError(f"there are {count} prompts and {len(each)} params; give one, or one per prompt")
    return each


def _begins_prompt(many: list[Any] | tuple[Any, ...]) -> bool:
    first = many[0] if many else None
    message = isinstance(first, Mapping) and not first.keys().isdisjoint(("role", "content"))
    return message or isinstance(first, Integral)


def request_source(items: Prompt | Iterable[Request | Prompt | None], params: Params) -> Iterator[Request | None]:
    """Return the requests of the items of `stream`, as they are read. params: of items that have none. Raises TypeError
    for an item that is no Request, prompt or None."""

    def request_of(item: Any) -> Request | None:
        if item is None or isinstance(item, Request):
            return item if item is None or params is None or item.params is not None else replace(item, params=params)
        if not isinstance(item, str | Mapping | SequenceOf) and not hasattr(item, "tolist"):
            raise TypeError(f"stream takes prompts and Requests, not {type(item).__name__}")
        return Request(item, params)

    one = isinstance(items, str | Mapping) or (isinstance(items, list | tuple) and _begins_prompt(items))
    return map(request_of, [items] if one else items)


def pair_scores(
    sequences: Iterable[Prompt], start: int | SequenceOf[int], temperature: float, logprobs: int | None = None
) -> tuple[list[Prompt], list[int]]:
    """Return the sequences to score, and the first position of each. Raises ValueError or TypeError for arguments that
    do not fit together."""
    if not (isinstance(temperature, Real) and 0 < float(temperature) < math.inf):
        raise ValueError(f"temperature is {temperature!r}; scores need a number above 0")
    _ALTERNATIVES.check(logprobs)
    prompts = prompt_list(sequences)
    starts: Any = start.tolist() if hasattr(start, "tolist") else start
    if isinstance(starts, Integral):
        starts = [starts] * len(prompts)
    if not isinstance(starts, Collection) or not all(isinstance(first, Integral) for first in starts):
        raise TypeError(f"start must be an integer, or one for each sequence, not {start!r}")
    if len(starts) != len(prompts):
        raise ValueError(f"there are {len(prompts)} sequences and {len(starts)} starts; give one start per sequence")
    return prompts, list(starts)


def ids_of(ids: Ids, all_ids: Iterable[str | int]) -> list[str | int]:
    """Return ids as a list. all_ids: the ids that None stands for."""
    return list(all_ids if ids is None else [ids] if isinstance(ids, str | int) else ids)
