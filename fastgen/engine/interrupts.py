"""Ctrl-C (SIGINT) is deferred to the end of the step that runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

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
        self._found: list[Any] = []  # for each open block, the handler that was installed when it began
        self._pending = False

    def __enter__(self) -> None:
        if _in_main_thread():
            self._found.append(signal.getsignal(signal.SIGINT))
            if callable(self._found[-1]):
                signal.signal(signal.SIGINT, self._note)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if _in_main_thread():
            found = self._found.pop()
            if callable(found):
                signal.signal(signal.SIGINT, found)
            self._call(found)  # in a nested block, `found` is `_note`, which notes the signal again

    def check(self) -> None:
        """Call the handler if a SIGINT has been deferred."""
        if self._pending:
            self._call(self._found[self._outer()])

    def reading(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items of a user's iterable. SIGINT is not deferred while the iterable makes its next item."""
        iterator = iter(items)
        while True:
            self.check()
            deferring = _in_main_thread() and signal.getsignal(signal.SIGINT) == self._note
            try:
                if deferring:
                    signal.signal(signal.SIGINT, self._found[self._outer()])
                item = next(iterator)
            except StopIteration:
                return
            finally:
                if deferring:  # if the iterable has installed a handler, it is the user's from now on
                    self._found[self._outer()] = signal.signal(signal.SIGINT, self._note)
            yield item
            del item  # no reference is held while the next item is made

    def _outer(self) -> int:
        """Return the index of the innermost block that began while SIGINT was not deferred by this object."""
        return max(at for at, found in enumerate(self._found) if found != self._note)

    def _note(self, number: int, frame: object) -> None:
        self._pending = True

    def _call(self, handler: Any) -> None:
        if self._pending:
            self._pending = False
            handler(signal.SIGINT, None)


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

    def _take(self) -> None:
        if self.forked:
            raise RuntimeError(
                f"this Generator was made by process {self._process}, and a fork of it cannot use it; make one in "
                "this process (in multiprocessing, with the start method 'spawn')"
            )
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is using this Generator; call it from one thread at a time, with a lock of yours, "
                "or use an AsyncGenerator"
            )
