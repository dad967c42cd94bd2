"""Ends a block of Python code from another thread.

    block = Stoppable()
    with block:  # in one thread
        ...
    block.stop()  # in another thread: StoppedError is raised in the block

The exception takes effect at the next Python instruction of the thread. This ends loops and recursion. It cannot
interrupt a single operation such as "a" * 10**10. Code in a block may only take locks that are written in C, by `with`:
others might never be released.
"""

from __future__ import annotations

import ctypes
import os
import threading
from types import TracebackType


class StoppedError(BaseException):
    """The exception that ends a block. Code in the block that catches Exception does not catch it."""


class Stoppable:
    """A block of code that any thread may stop. An object is used for one block.

    Blocks may be nested. StoppedError is raised only in the block that was stopped, also if it comes late: not after
    the end of the block.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._thread = 0  # identifier of the thread that runs the block; 0 before the block, and from its stop or end
        self._outer: Stoppable | None = None  # the block around this one

    def __enter__(self) -> Stoppable:
        outer: Stoppable | None = getattr(_current, "block", None)
        while outer is not None and not outer.runs:  # StoppedError was raised as it ended
            outer = outer._outer
        self._outer = outer
        with _lock:
            if self._stopped:
                raise StoppedError
            self._thread = threading.get_ident()
        _current.block = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            with _lock:
                self._thread = 0
                _current.block = self._outer
                interrupted = self.interrupted  # a call, in which an exception that is still to come is raised
        except StoppedError:
            if self.interrupted:
                raise
            return  # it was for this block, which has ended
        if interrupted and kind is not StoppedError:  # the block has caught what was meant for one around it
            raise StoppedError

    @property
    def runs(self) -> bool:
        """True while the block runs and neither it nor a block around it was stopped."""
        return self._thread != 0 and (self._outer is None or self._outer.runs)

    @property
    def interrupted(self) -> bool:
        """True if a block around this one was stopped. StoppedError must then go on."""
        return self._outer is not None and (self._outer._stopped or self._outer.interrupted)

    def stop(self) -> None:
        """Raise StoppedError in the block if it runs, or at its beginning if it has not begun."""
        with _lock:
            if self.runs:
                _raise_in(self._thread, StoppedError)
            self._stopped, self._thread = True, 0


_current = threading.local()  # block: the innermost block of the thread
_lock = threading.Lock()  # of all blocks; held for a few instructions


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it, which the child does not have


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next Python instruction.

    CPython could also cancel it, by NULL. But CPython 3.11 then looks for an exception at every instruction, for ever,
    and a profiler (sys.setprofile, cProfile) does not get beyond the next call.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
