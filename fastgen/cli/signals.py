"""Signals that the command-line tools obey. The library itself installs none."""

from __future__ import annotations

import os
from types import FrameType


def leave(signum: int, frame: FrameType | None) -> None:
    """End the process at a Ctrl-C while a model loads.

    There is nothing to keep, and a KeyboardInterrupt may be lost in some __del__ of an import, or wait for the threads
    of a download.
    """
    os.write(2, b"\n")
    os._exit(130)
