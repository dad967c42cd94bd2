"""Ctrl-C at a time when it breaks nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], None]

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
        self._installed = False  # whether SIGINT has it now
        self._outermost: list[bool] = []  # of each block that has been entered
        self._count = 0  # SIGINTs that wait

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            outermost = not self._installed and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if outermost:
                self._replace(signal.default_int_handler, self._handler)
            self._outermost.append(outermost)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if threading.current_thread() is not threading.main_thread() or not self._outermost.pop():
            return
        self._replace(self._handler, signal.default_int_handler)
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
        lifted = self._installed
        self.check()
        try:
            if lifted:
                self._replace(self._handler, signal.default_int_handler)
            return [next(iterator)]
        except StopIteration:
            return []
        finally:
            if lifted:
                self._replace(signal.default_int_handler, self._handler)

    def _replace(self, old: Handler, new: Handler) -> None:
        """Install a handler in another's place. One that code within the block has installed stays."""
        self._installed = False  # first: where `new` is Python's, a SIGINT may raise right behind the next call
        found = signal.signal(signal.SIGINT, new)
        if found is not old:
            signal.signal(signal.SIGINT, found)
        else:
            self._installed = new is self._handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= IMPATIENT:
            signal.default_int_handler(number, frame)
