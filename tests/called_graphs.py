"""Graphs that call the step where a GPU would replay it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastgen.engine.cuda_graphs import Graphs
from fastgen.model.attention.reference import ReferenceAttention


class Called(Graphs):
    """Calls the step in place of replaying it."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.ran: list[int] = []

    def capture(self, step: Callable[[int], None], compiled: bool = False) -> None:
        self._step = step

    def run(self, size: int) -> None:
        self.ran.append(size)
        self._step(size)


def capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Runner captures from now on is `Called`."""
    monkeypatch.setattr("fastgen.engine.runner.Graphs", Called)
    monkeypatch.setattr("fastgen.engine.cuda_graphs.Graphs", Called)
    monkeypatch.setattr(ReferenceAttention, "capturable", True)
