"""Router: the choice of the engine that serves a request, by load and by what its prefix cache holds.

This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fastgen.request import Prompt

KEY_IDS = 64  # number of token ids per key of a prompt
KEY_CHARS = 256  # number of characters per key of a text, which is about as many tokens
MAX_KEYS = 1 << 17  # maximum number of keys that a router remembers
SLACK = 16  # samples that an engine with the prefix may have beyond twice the smallest load


def prefix_keys(prompt: Prompt) -> list[int]:
    """Return one key for each beginning of a prompt, the shortest first. Prompts that share a beginning of whole blocks
    of KEY_IDS ids, or of KEY_CHARS characters, share its keys; the last key stands for the whole prompt. A prompt that
    engines refuse has no keys."""
    inner: Any = prompt
    if isinstance(inner, Mapping) and len(inner) == 1:
        (inner,) = inner.values()
    if hasattr(inner, "tolist"):
        inner = inner.tolist()
    if isinstance(inner, Mapping) or (isinstance(inner, Sequence) and any(isinstance(each, Mapping) for each in inner)):
        inner = json.dumps(inner, default=str)
    if not isinstance(inner, str | Sequence) or any(isinstance(each, list) for each in inner):
        return []
    size = KEY_CHARS if isinstance(inner, str) else KEY_IDS
    keys, last = list[int](), 0
    for start in range(0, len(inner), size):
        block = inner[start : start + size]
        last = hash((last, block if isinstance(block, str) else tuple(block)))
        keys.append(last)
    return keys


class Router:
    """Chooses engines for requests, and counts the samples that run on each.

    A request goes to the least loaded of the engines that had the longest beginning of its prompt, unless even this one
    has more than twice the smallest load plus SLACK samples; then it goes to the least loaded engine.

    loads: {engine: number of samples that it serves}. Engines are numbers that the caller chooses. The caller sees to
    it that only one thread at a time uses a router.
    """

    def __init__(self) -> None:
        self.loads: dict[int, int] = {}
        self._places: dict[int, set[int]] = {}  # engines that had a prompt with this key, the latest key last

    def choose(self, keys: Sequence[int], samples: int, engines: Collection[int]) -> int:
        """Return the engine for a request, and count its samples. keys: `prefix_keys` of the prompt. engines: the
        engines that may serve it, at least one."""
        least = min(engines, key=self._load)
        chosen = min(self._holders(keys, engines), key=self._load, default=least)
        if self._load(chosen) > 2 * self._load(least) + SLACK:
            chosen = least
        self.loads[chosen] = self._load(chosen) + samples
        for key in keys:
            places = self._places.pop(key, set())
            places.add(chosen)
            self._places[key] = places
        while len(self._places) > MAX_KEYS:
            del self._places[next(iter(self._places))]
        return chosen

    def leave(self, engine: int, samples: int) -> None:
        """Count the samples of a request no longer."""
        self.loads[engine] -= samples

    def forget(self, engines: Iterable[int] | None = None) -> None:
        """Forget which prompts these engines had; None: all engines."""
        if engines is None:
            self._places.clear()
        else:
            gone = set(engines)
            for places in self._places.values():
                places -= gone

    def _load(self, engine: int) -> int:
        return self.loads.get(engine, 0)

    def _holders(self, keys: Sequence[int], engines: Collection[int]) -> list[int]:
        """Return those engines that had the longest beginning of a prompt that any of them had."""
        for key in reversed(keys):
            if holders := [engine for engine in engines if engine in self._places.get(key, ())]:
                return holders
        return []
