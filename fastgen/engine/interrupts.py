"""Ctrl-C (SIGINT) is deferred to the end of the step that runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class DeferredInterrupt:
    """Context manager that defers SIGINT. `check` and the end of the block call the handler that was installed before
    the block: Python's own raises KeyboardInterrupt, and a user's may do anything. Blocks may be nested.

    Nothing is deferred outside the main thread, since Python runs handlers in the main thread, or while SIGINT is
    ignored. Ctrl-\\ ends a block that hangs.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None  # of the user, while SIGINT is deferred
        self._nested: list[bool] = []  # for each open block, whether SIGINT was deferred when it began
        self._pending = False

    def __enter__(self) -> None:
        if _in_main_thread():
            self._nested.append(self._handler is not None)
            if self._handler is None:
                self._defer()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if _in_main_thread() and not self._nested.pop():
            self._deliver()

    def check(self) -> None:
        """Call the handler if a SIGINT has been deferred."""
        if self._pending and self._handler is not None:
            self._pending = False
            self._handler(signal.SIGINT, None)

    def reading(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items of a user's iterable. SIGINT is not deferred while the iterable makes its next item. If the
        iterable installs a handler, that one becomes the user's handler."""
        iterator = iter(items)
        while True:
            deferred = _in_main_thread() and self._handler is not None
            try:
                if deferred:
                    self._deliver()
                item = next(iterator)
            except StopIteration:
                return
            finally:
                if deferred:
                    self._defer()
            yield item
            del item  # no reference is held while the next item is made

    def _defer(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            signal.signal(signal.SIGINT, self._note)  # the first thing: before it, Ctrl-C must leave nothing behind
            self._handler = handler

    def _deliver(self) -> None:
        """Give SIGINT back to the user's handler, and call it if a SIGINT has been deferred."""
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self._pending:
                self._pending = False
                handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = True


class OneCaller(DeferredInterrupt):
    """DeferredInterrupt for one thread of one process at a time. Entering a block raises RuntimeError while another
    thread is in one, and in a fork of the process, which does not have the threads that compute."""

    exiting = staticmethod(sys.is_finalizing)  # an attribute, since globals are None when the interpreter frees modules

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
        """True in a fork of the process that made this object."""
        return os.getpid() != self._process

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads and forks out of a block, as a block of this object does, but do not defer SIGINT."""
        self._take()
        try:
            yield
        finally:
            self._lock.release()

    def _take(self) -> None:
        if self.forked:
            raise RuntimeError(
                f"this Generator was made by process {self._process}, and a fork of it cannot use it; in "
                "multiprocessing, use the start method 'spawn', and make a Generator in each process"
            )
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is using this Generator; call it from one thread at a time, with a lock of yours, "
                "or use an AsyncGenerator"
            )
