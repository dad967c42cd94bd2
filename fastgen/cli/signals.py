"""Signals that the command-line tools obey. The library itself installs none."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastgen.generator import Generator


def trace_on_signal(gen: Generator, folder: Path) -> None:
    """From now on SIGUSR2 writes a trace of the next 8 steps to a file in `folder`, named after process and time."""

    def ask(signum: int, frame: FrameType | None) -> None:
        gen.recorder.asked = folder  # no more than that: the engine may be anywhere in a step

    if hasattr(signal, "SIGUSR2"):  # not on Windows
        signal.signal(signal.SIGUSR2, ask)


def leave(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C while loading. There is nothing to keep, and a KeyboardInterrupt may be lost in some __del__ of an import,
    or wait for the threads of a download."""
    os.write(2, b"\n")
    os._exit(130)
