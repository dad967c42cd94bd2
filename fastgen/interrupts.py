"""Ctrl-C at a time when it breaks nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

IMPATIENT = 3
"""SIGINTs within one `with` block: the last of them is raised at once, since the call may hang."""


class DeferredInterrupt:
    """Context manager that defers Ctrl-C: `check`, or the end of the outermost block, raises KeyboardInterrupt.

    It replaces the handler of SIGINT within the block, and puts it back behind. It does nothing outside of the main
    thread, in which alone Python handles signals, and nothing where the handler is not Python's default one: a program
    that has its own decides itself. Blocks may be nested, also those of several objects: the outermost one counts.
    """

    def __init__(self) -> None:
        self._handler = self._note  # one object, which `is` finds again
        self._outermost: list[bool] = []  # of each block that has been entered
        self._count = 0  # SIGINTs that wait

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            outermost = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if outermost:
                signal.signal(signal.SIGINT, self._handler)
            self._outermost.append(outermost)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if threading.current_thread() is not threading.main_thread() or not self._outermost.pop():
            return
        left = signal.signal(signal.SIGINT, signal.default_int_handler)
        if left is not self._handler:  # code within the block has installed its own, to stay
            signal.signal(signal.SIGINT, left)
        count, self._count = self._count, 0
        if count and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if a SIGINT waits."""
        if self._count:
            self._count = 0
            raise KeyboardInterrupt

    def reading(self, items: Iterable[T]) -> Iterator[T]:
        """Return the items of an iterable of the user's. Ctrl-C is not deferred while it makes the next one."""
        iterator = iter(items)
        while found := self._next(iterator):
            yield found.pop()  # not held while the next is made

    def _next(self, iterator: Iterator[T]) -> list[T]:
        """Return the next item in a list, or an empty list at the end."""
        lifted = signal.getsignal(signal.SIGINT) is self._handler
        self.check()
        try:
            if lifted:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return [next(iterator)]
        except StopIteration:
            return []
        finally:
            if lifted and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= IMPATIENT:
            signal.default_int_handler(number, frame)
