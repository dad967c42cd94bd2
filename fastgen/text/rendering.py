"""Limits the time and memory of chat templates, which come with a model and may loop or multiply text.

A thread watches all renderings of the process, and stops one that exceeds a limit. This ends loops, recursion and text
that grows step by step. It cannot interrupt a single operation such as "a" * 10**10.

Time is the CPU time of the thread that renders: on a busy machine, a rendering may wait for much longer than it
computes. Memory is measured for the whole process. If it grows too much, the rendering is stopped. If that does not
give the memory back, another thread has taken it, and the rendering begins again.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from fastgen.processes.process_memory import trim_heap, used_memory
from fastgen.processes.stopping import Stoppable, StoppedError

TEMPLATE_SECONDS = 5.0  # CPU time; usual conversations take milliseconds
TEMPLATE_CHARS = 100_000_000
TEMPLATE_BYTES = 2**30  # growth of the process's memory while a template renders
POLL_SECONDS = 0.05
MAX_POLLS = 6000  # of one rendering: five minutes, not counting the time when this process is suspended
IDLE_SECONDS = 5.0  # the watcher ends after this time without a rendering


def rendered(render: Callable[[], Any]) -> str:
    """Return the text that a chat template renders. Raises ValueError if it exceeds a limit.

    render: function that renders. It has no effects, since it may be called again.
    """
    attempt = _Attempt()
    while (text := attempt.run(render)) is None:
        if attempt.is_to_blame():
            raise ValueError(f"{attempt.reason}; look for a loop in the template, or shorten the messages")
        attempt = _Attempt(attempt.polls)
    if len(text) > TEMPLATE_CHARS:
        raise ValueError(f"it renders {len(text)} characters, above the maximum of {TEMPLATE_CHARS}")
    return text


class _Attempt:
    """An attempt to render a text. reason: why it was stopped, or "". polls: number of checks, also of earlier
    attempts."""

    def __init__(self, polls: int = 0) -> None:
        self.polls, self.reason = polls, ""
        self._block, self._clock, self._begun = Stoppable(), _thread_clock(), 0.0
        self._memory: int | None = None  # bytes at the first check
        self._grown = 0  # bytes when it was stopped because of its memory

    def run(self, render: Callable[[], Any]) -> str | None:
        """Return the text, or None if the attempt was stopped."""
        try:
            with self._block:
                self._begun = _seconds(self._clock)
                _watcher.add(self)
                return str(render())
        except StoppedError:
            if self._block.interrupted:
                raise
            return None

    def is_to_blame(self) -> bool:
        """Return whether the attempt, which was stopped, has exceeded a limit itself."""
        if not self._grown:
            return True
        gc.collect()
        trim_heap()
        return self._grown - used_memory() > TEMPLATE_BYTES // 2

    # The watcher calls these.

    @property
    def runs(self) -> bool:
        return self._block.runs

    def check_time(self, memory: int) -> float:
        """Stop the attempt if it takes too long. Return its CPU time in seconds. memory: bytes that the process uses
        now, with which those of later checks are compared."""
        self.polls += 1
        self._memory = memory if self._memory is None else self._memory
        try:
            seconds = _seconds(self._clock) - self._begun
        except OSError:  # the thread has ended in the meantime
            return 0.0
        if seconds > TEMPLATE_SECONDS:
            self._stop(f"{TEMPLATE_SECONDS:g} seconds of CPU time")
        elif self.polls > MAX_POLLS:
            self._stop(f"{MAX_POLLS * POLL_SECONDS:g} seconds")
        return seconds

    def check_memory(self, memory: int) -> None:
        """Stop the attempt if the process has grown too much since it began."""
        if self._memory is not None and memory - self._memory > TEMPLATE_BYTES and not self.reason:
            self._grown = memory
            self._stop(f"{TEMPLATE_BYTES // 2**20} MiB of memory")

    def _stop(self, limit: str) -> None:
        self.reason = f"rendering takes more than {limit}"
        self._block.stop()


class _Watcher:
    """The thread that watches renderings. It starts with the first rendering and ends after a while without any;
    starting a thread for each would double the time of a usual rendering."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: list[_Attempt] = []
        self._runs = False

    def add(self, attempt: _Attempt) -> None:
        with self._lock:
            self._attempts.append(attempt)
            if not self._runs:
                threading.Thread(target=self._run, name="fastgen-templates", daemon=True).start()
                self._runs = True

    def _run(self) -> None:
        idle = 0  # number of polls without a rendering
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                self._attempts = [attempt for attempt in self._attempts if attempt.runs]
                idle = 0 if self._attempts else idle + 1
                if idle * POLL_SECONDS > IDLE_SECONDS:
                    self._runs = False
                    return
            if idle == 0:
                _check(list(self._attempts), used_memory())


def _check(attempts: list[_Attempt], memory: int) -> None:
    """Stop attempts that exceed a limit; of those that may have taken the memory, only the one that has run longest, so
    that the memory it gives back is its own."""
    seconds = [attempt.check_time(memory) for attempt in attempts]
    attempts[seconds.index(max(seconds))].check_memory(memory)


_watcher = _Watcher()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_watcher.__init__)  # type: ignore[misc]  # a fork has no other threads


def _thread_clock() -> int | None:
    """Return the clock of this thread's CPU time; None if the system has none that other threads can read."""
    return time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None


def _seconds(clock: int | None) -> float:
    """Return the CPU time in seconds of the thread with this clock; 0 without a clock. Raises OSError if the thread has
    ended."""
    return 0.0 if clock is None else time.clock_gettime(clock)
