"""Limits the time and memory of chat templates, which come with a model and may loop or multiply text.

A thread watches all renderings of the process. If a rendering exceeds a limit, the watcher raises an exception in the
thread that renders, which takes effect at the next Python instruction of that thread. This ends loops, recursion and
text that grows step by step. It cannot interrupt a single operation such as "a" * 10**10.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

TEMPLATE_SECONDS = 5.0  # usual conversations take milliseconds
TEMPLATE_CHARS = 100_000_000
TEMPLATE_BYTES = 2**30  # growth of the process's memory while a template renders
POLL_SECONDS = 0.05
IDLE_SECONDS = 5.0  # the watcher ends after this time without a rendering


def rendered(render: Callable[[], Any]) -> str:
    """Return the text that a chat template renders. Raises ValueError if it exceeds a limit."""
    rendering = _Rendering()
    try:
        try:
            _watcher.add(rendering)
            text = str(render())
        finally:
            _watcher.remove(rendering)
    except _ExceededError:
        raise ValueError(f"{rendering.reason}; look for a loop in the template, or shorten the messages") from None
    if len(text) > TEMPLATE_CHARS:
        raise ValueError(f"it renders {len(text)} characters, above the maximum of {TEMPLATE_CHARS}")
    return text


class _ExceededError(BaseException):
    """The exception that ends a rendering. Neither templates nor jinja2 catch a BaseException."""


class _Rendering:
    """A rendering in the thread that creates this object. reason: why it was ended, or ""."""

    def __init__(self) -> None:
        self.thread, self._start, self.reason = threading.get_ident(), time.monotonic(), ""
        self._memory: int | None = None  # bytes at the first check

    def check(self, now: float, memory: int) -> None:
        """Set `reason` if a limit is exceeded. memory: bytes that the process uses now."""
        if self._memory is None:
            self._memory = memory
        if now - self._start > TEMPLATE_SECONDS:
            self.reason = f"rendering takes more than {TEMPLATE_SECONDS:g} seconds"
        elif memory - self._memory > TEMPLATE_BYTES:
            self.reason = f"rendering takes more than {TEMPLATE_BYTES // 2**20} MiB of memory"


class _Watcher:
    """The thread that watches renderings. It starts with the first rendering and ends after a while without any;
    starting a thread for each would double the time of a usual rendering."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renderings: set[_Rendering] = set()
        self._runs = False

    def add(self, rendering: _Rendering) -> None:
        with self._lock:
            self._renderings.add(rendering)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="fastgen-templates", daemon=True).start()

    def remove(self, rendering: _Rendering) -> None:
        """Stop watching a rendering of this thread. An exception that was sent is raised before this returns, or
        never."""
        with self._lock:
            self._renderings.discard(rendering)
            if rendering.reason:
                _raise_in(rendering.thread, None)

    def _run(self) -> None:
        last = time.monotonic()  # the last time when there was a rendering
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                now, memory = time.monotonic(), _used_memory() if self._renderings else 0
                for rendering in list(self._renderings):
                    last = now
                    rendering.check(now, memory)
                    if rendering.reason:
                        self._renderings.discard(rendering)
                        _raise_in(rendering.thread, _ExceededError)
                if now - last > IDLE_SECONDS:
                    self._runs = False
                    return


_watcher = _Watcher()
os.register_at_fork(after_in_child=_watcher.__init__)  # type: ignore[misc]  # a fork has no other threads


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next Python instruction. None: cancel an exception not yet raised."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)


def _used_memory() -> int:
    """Return the bytes of memory that this process uses, or 0 if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
