"""Property tests: `holds_for` runs a function on many arguments that hypothesis makes, the same in each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

EXAMPLES = pytest.mark.parametrize(
    "examples", [60, pytest.param(6000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)


def holds_for(examples: int, *strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Return a decorator that runs a function on so many examples of its arguments, at once."""
    limits = settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )

    def run(function: Callable[..., None]) -> None:
        limits(given(*strategies)(function))()

    return run
