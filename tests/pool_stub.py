"""The stub of a Generator in a process of a pool. Its result of an item is a tuple: the item's number, the item, and
the id of the process. An item that is the name of a file is finished once this file exists."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastgen import SamplingParams

Numbered = tuple[int, Any]


def make(arguments: Any, device: str | None) -> tuple[SimpleNamespace, Any]:
    model = SimpleNamespace(vocab_size=8, eos_ids=())
    config = SimpleNamespace(summary="a stub")
    gen = SimpleNamespace(
        tokenizer=None, max_model_len=8, model_config=model, config=config, default_params=SamplingParams()
    )
    return gen, serve


def serve(items: Iterator[Numbered | None]) -> Iterator[tuple[int, tuple[int, Any, int]]]:
    waiting: list[Numbered] = []
    for item in items:
        if item is None:
            time.sleep(0.005)
        else:
            waiting.append(item)
        for number, value in waiting[:]:
            if not isinstance(value, str) or Path(value).exists():
                waiting.remove((number, value))
                yield number, (number, value, os.getpid())
