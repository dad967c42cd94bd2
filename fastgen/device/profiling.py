"""Traces of the engine's steps, and the names of their parts.

`span` names a part of a step. Spans show in any trace of torch.profiler, a user's own too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger(__name__)

SIGNAL_STEPS = 8
_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """A range of this name in the trace that is being recorded on this thread; a tenth of a microsecond if none is."""
    return record_function(name) if _profiler_enabled() else _NOTHING


class Tracer:
    """Records what this thread does, and a GPU."""

    def __init__(self, device: str) -> None:
        self._activities = [ProfilerActivity.CPU]
        if torch.device(device).type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profiler: profile | None = None

    def start_trace(self) -> None:
        assert self._profiler is None
        self._profiler = profile(activities=self._activities)
        self._profiler.start()

    def write_trace(self, path: Path) -> None:
        """Write what was recorded since `start_trace`; raises OSError where it can not be written."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()  # waits for the GPU
        profiler.export_chrome_trace(str(path))


@dataclass(eq=False)
class _Recording:
    """A trace that was asked for. It starts with the next step."""

    path: Path
    steps: int  # still to come
    loud: bool = False  # whether nobody hears of the file at level INFO
    started: bool = False


class Recorder:
    """Records steps of one Generator, which calls `before_step` and `after_step`, into Chrome traces of `tracer`.

    asked: a signal sets it to the folder where it wants a trace of the next steps.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.asked: Path | None = None
        self._tracer = tracer
        self._recording: _Recording | None = None

    @contextmanager
    def block(self, path: str | Path, steps: int) -> Iterator[None]:
        """Record the next steps that run inside the block; see Generator.profile."""
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps is {steps!r}; it must be an integer of at least 1")
        path = Path(path).absolute()  # the program may change its folder meanwhile
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"path is {str(path)!r}; give the name of a file in a folder that exists")
        if self._recording is not None or _profiler_enabled():
            raise ValueError("a trace is being recorded, and torch records one at a time; begin when it has ended")
        mine = self._recording = _Recording(path, steps)
        try:
            yield
        finally:
            if self._recording is mine:
                self.finish()

    def before_step(self) -> None:
        if self.asked is not None and self._recording is None:
            folder, self.asked = self.asked, None
            name = f"fastgen-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.json.gz"
            self._recording = _Recording(folder / name, SIGNAL_STEPS, loud=True)
        recording = self._recording
        if recording is None or recording.started:
            return
        if _profiler_enabled():  # a second one would end the first one's recording
            log.warning("no trace in %s: another profiler is recording", recording.path)
            self._recording = None
            return
        recording.started = True
        self._tracer.start_trace()

    def after_step(self) -> None:
        recording = self._recording
        if recording is not None and recording.started:
            recording.steps -= 1
            if not recording.steps:
                self.finish()

    def finish(self) -> None:
        """Write what there is of a trace, if one is being recorded."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if not recording.started:
            log.warning("no trace in %s: no step has run", recording.path)
            return
        try:
            self._tracer.write_trace(recording.path)
        except OSError as error:  # generation goes on
            log.warning("no trace in %s: %s", recording.path, error)
            return
        log.log(logging.WARNING if recording.loud else logging.INFO, "a trace of the steps is in %s", recording.path)
