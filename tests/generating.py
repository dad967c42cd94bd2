"""Helpers for tests of fggen: input files, and records of outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fggen = Callable[..., int]


def write(name: str, *rows: Any) -> str:
    """Write a file with these rows as lines, and return its name. Strings are written as they are, others as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return name


def read(name: str) -> list[dict[str, Any]]:
    """Return the records of a file in their order."""
    return [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]


def by_row(name: str) -> list[dict[str, Any]]:
    """Return the records of a file, one for each row of the input, in the order of the rows."""
    found = sorted(read(name), key=lambda record: record["row"])
    assert [record["row"] for record in found] == list(range(len(found)))
    return found


PROMPTS = [{"prompt": f"hello {word}"} for word in ("world", "the other", "you", "fox", "dog")]
SHORT = ("--max-tokens", 5, "--seed", 3)
