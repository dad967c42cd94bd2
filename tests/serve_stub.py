"""fgserve with stub engines: real processes with a Generator that computes nothing and starts at once.

Run it as `serve_stub.py [arguments of fgserve]`. The name of a model selects its behavior. A model with "slow" in its
name loads for 0.3 s; if the name is an absolute path, it loads until that file exists. A model with "broken" in its
name fails to load. A prompt that begins with BAD makes the step fail. A folder with a file SCRIPT has a tokenizer, and
says what stands there: a JSON list of (id, text) of each token.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from fastgen.engine.stats import Stats
from fastgen.processes import spawning as processes
from fastgen.request import Event, SamplingParams

STEP_SECONDS = 0.01
SLEEP_SECONDS = 0.8  # duration of a call of `sleep`
BAD = 13
SCRIPT = "script.json"


class StubGenerator:
    """A Generator that says "x" in each step for each of the first max_seqs requests, which hold one page each. The id
    of "x" is 7 plus the priority of the request."""

    tokenizer: Any = None
    needs_weights = False
    max_model_len = 4096
    default_params = SamplingParams()

    def __init__(self, model: str | None = None, max_seqs: int = 256, **_: Any) -> None:
        if model is not None and "slow" in model:
            time.sleep(0.3)
            while Path(model).is_absolute() and not Path(model).exists():
                time.sleep(0.01)
        if model is not None and "broken" in model:
            raise ValueError(f"{model} is broken; mend it")
        self.config = SimpleNamespace(max_seqs=max_seqs, page_size=16, num_pages=100, summary="a stub")
        self._script: list[tuple[int, str]] = []
        if model is not None and (Path(model) / SCRIPT).exists():
            self._script = json.loads((Path(model) / SCRIPT).read_text())
            self.tokenizer = SimpleNamespace(hf=SimpleNamespace(name_or_path=model))
        self.model_config = SimpleNamespace(vocab_size=5000 if self._script else 1000, eos_ids=(2,))
        self._requests: dict[int, tuple[Sequence[int], SamplingParams, int]] = {}
        self._started: dict[int, float] = {}
        self._said: dict[int, int] = {}
        self._stats = Stats(pages=100)

    def add(self, prompt: Sequence[int], params: SamplingParams, number: int, resume: Any, priority: int) -> None:
        self._requests[number] = (prompt, params, priority)
        self._said[number] = 0
        self._stats.requests += 1
        self._stats.prompt_tokens += len(prompt)

    def abort(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._requests.pop(number, None) is not None:
                self._stats.aborted += 1

    def step(self) -> list[Event]:
        events = []
        running = self._running()
        for number in running:
            self._started.setdefault(number, time.monotonic())
        if running:
            time.sleep(STEP_SECONDS / 4 if self._script else STEP_SECONDS)
        for number in running:
            prompt, params, priority = self._requests[number]
            if prompt[0] == BAD:
                raise RuntimeError("bad luck")
            token, text = self._script[self._said[number]] if self._script else (7 + priority, "x")
            self._said[number] += 1
            self._stats.generated_tokens += 1
            reason = "length" if self._said[number] == params.max_tokens else None
            reason = "stop" if self._said[number] == len(self._script) else reason
            started = self._started[number] if self._said[number] == 1 else None
            events.append(Event(number, 0, [token], text, reason, started=started, logprobs=[0.0], raw_logprobs=[0.0]))
            if reason is not None:
                del self._requests[number]
                self._stats.finished += 1
        self._stats.steps += 1
        return events

    def sleep(self, tags: Sequence[str] = (), keep_weights: bool = True) -> int:
        time.sleep(SLEEP_SECONDS)
        return 0

    def _running(self) -> list[int]:
        return list(self._requests)[: self.config.max_seqs]

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    @property
    def stats(self) -> Stats:
        self._stats.running = self._stats.pages_used = len(self._running())
        self._stats.waiting = len(self._requests) - self._stats.running
        return self._stats


def be_an_engine() -> None:
    from fastgen.async_engine import loop

    stub = ModuleType("fastgen.generator")
    stub.Generator = StubGenerator  # type: ignore[attr-defined]
    sys.modules["fastgen.generator"] = stub
    loop.main()


def spawn(program: Sequence[str], started: list[subprocess.Popen[bytes]]) -> socket.socket:
    """Start a stub engine instead of the program; replaces `processes.spawn`."""
    return _spawn((__file__, "engine"), started)


_spawn = processes.spawn


def serve() -> None:
    from fastgen.cli.serve import main

    processes.spawn = spawn
    main.import_tokenizers = lambda: None  # type: ignore[attr-defined]
    main.command()


if __name__ == "__main__":
    be_an_engine() if sys.argv[1:2] == ["engine"] else serve()
