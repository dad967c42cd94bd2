"""Deferral of Ctrl-C (SIGINT) to a moment at which the engine's state is consistent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], None]


class DeferredInterrupt:
    """Context manager that defers Ctrl-C: `check`, or the end of the outermost block, raises KeyboardInterrupt.

    It replaces the handler of SIGINT within the block. It does nothing outside of the main thread, since Python handles
    signals in the main thread alone, and nothing if the handler is not Python's default: a program with a handler of
    its own decides itself. Blocks may be nested, also those of several objects. Ctrl-\\ ends a call that hangs.
    """

    def __init__(self) -> None:
        self._handler = self._note  # one object, for comparisons with `is`
        self._installed = False
        self._depth = 0  # of nested blocks
        self._count = 0  # deferred SIGINTs

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth += 1
            if self._depth == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._replace(signal.default_int_handler, self._handler)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        if self._installed:
            self._replace(self._handler, signal.default_int_handler)
        count, self._count = self._count, 0
        if count and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if a SIGINT was deferred."""
        if self._count:
            self._count = 0
            raise KeyboardInterrupt

    def reading(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items of a user's iterable. Ctrl-C is not deferred while the iterable makes its next item."""
        iterator = iter(items)
        while True:
            installed = self._installed
            self.check()
            try:
                if installed:
                    self._replace(self._handler, signal.default_int_handler)
                item = next(iterator)
            except StopIteration:
                return
            finally:
                if installed:
                    self._replace(signal.default_int_handler, self._handler)
            yield item
            del item  # no reference is held while the next item is made

    def _replace(self, old: Handler, new: Handler) -> None:
        """Install `new` if the current handler is `old`. A handler that code in the block has installed stays."""
        self._installed = False  # before the call: once Python's handler is installed, a SIGINT may raise at once
        found = signal.signal(signal.SIGINT, new)
        if found is not old:
            signal.signal(signal.SIGINT, found)
        else:
            self._installed = new is self._handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1


class OneCaller(DeferredInterrupt):
    """DeferredInterrupt whose blocks one thread of one process may be in at a time. Entering raises RuntimeError while
    another thread is in one, and in a fork of the process, where the threads that compute are missing."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        super().__enter__()
        try:
            self._take()
        except RuntimeError:
            super().__exit__(None, None, None)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._lock.release()

    @property
    def forked(self) -> bool:
        """True in a fork of the process that made this."""
        return os.getpid() != self._process

    def _take(self) -> None:
        if self.forked:
            raise RuntimeError(
                f"this Generator was made by process {self._process}, and a fork of it can not use it; make one in "
                "this process (in multiprocessing, with the start method 'spawn')"
            )
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is using this Generator; call it from one thread at a time, with a lock of yours, "
                "or use an AsyncGenerator"
            )
