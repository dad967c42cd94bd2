"""Graphs that call the step where a GPU would replay it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastgen.engine.cuda_graphs import Graphs
from fastgen.model.attention.cpu import CpuAttention


class Called(Graphs[Any]):
    """Calls the step instead of replaying it."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.ran: list[Any] = []

    def capture(self, step: Callable[[Any], None], compiled: bool = False) -> None:
        self._step = step

    def run(self, key: Any) -> None:
        self.ran.append(key)
        self._step(key)


def capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Runner captures from now on is `Called`."""
    monkeypatch.setattr("fastgen.engine.warm_up.Graphs", Called)
    monkeypatch.setattr("fastgen.engine.cuda_graphs.Graphs", Called)
    monkeypatch.setattr(CpuAttention, "capturable", True)
