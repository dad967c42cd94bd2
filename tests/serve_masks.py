"""Masks and factories of masks that the tests of fgserve send to an engine's process, which imports them from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class Say:
    """A mask that makes the model say exactly these ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.said = 0

    def fill(self, row: np.ndarray) -> None:
        row[:] = 0
        token = self.ids[self.said]
        row.view(np.uint32)[token // 32] = 1 << token % 32

    def accept(self, token: int) -> None:
        self.said += 1


@dataclass(frozen=True)
class Spell:
    """A factory of the mask that says the first two tokens of a text; what was made before is said backwards."""

    text: str

    def compile(self, gen: Any, kept: dict[Any, Any]) -> Say:
        if not self.text:
            raise ValueError("there is nothing to spell")
        ids = gen.tokenizer.hf(self.text, add_special_tokens=False)["input_ids"][:2]
        if self in kept:
            ids.reverse()
        kept[self] = True
        return Say(ids)


class Unreadable:
    """Pickles, and can not be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("not a number",))
