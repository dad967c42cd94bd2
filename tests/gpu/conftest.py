"""Workers of pytest-xdist share the GPU, except while a test measures its memory."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test marked `alone` wait until no other runs, and the others wait for it; fixtures count as their test."""
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with (Path(tempfile.gettempdir()) / "fastgen-tests-gpu.lock").open("w") as file:
        fcntl.flock(file, kind)
        return (yield)
