"""Gate: the requests of a replica, and whether new ones may begin."""

from __future__ import annotations

import asyncio


class Gate:
    """Requests enter and leave. While the gate is closed, further ones wait, or are refused.

    inside: number of requests that have entered and not left.
    """

    def __init__(self) -> None:
        self.inside = 0
        self._refuses = False
        self._opened, self._left = asyncio.Event(), asyncio.Event()
        self._opened.set()

    async def enter(self) -> bool:
        """Wait until the gate is open, and enter. Return False if the gate refuses requests."""
        while not self._opened.is_set():
            if self._refuses:
                return False
            await self._opened.wait()
        self.inside += 1
        return True

    def leave(self) -> None:
        """Leave after `enter` has returned True."""
        self.inside -= 1
        self._left.set()

    async def empty(self) -> None:
        """Wait until all requests have left."""
        while self.inside:
            self._left.clear()
            await self._left.wait()

    def close(self, refuse: bool) -> None:
        """Let no request enter. refuse: refuse those that come, instead of letting them wait."""
        self._refuses = refuse
        self._opened.clear()

    def open(self) -> None:
        """Let requests enter again."""
        self._refuses = False
        self._opened.set()
