"""The work of requests outside the event loop: checks of their bodies, their prompts, and their responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastgen.cli.serve.checking import ApiError
from fastgen.processes.stopping import Stoppable

Result = TypeVar("Result")

SMALL_THREADS = 4
LARGE_THREADS = 2


class WorkThreads:
    """Threads that work for requests. Small work and large work have threads of their own, so that the former, which
    takes milliseconds, does not wait for the latter, which may take seconds."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(SMALL_THREADS, "fastgen-small")
        self._large = ThreadPoolExecutor(LARGE_THREADS, "fastgen-large")

    async def run(self, large: bool, function: Callable[..., Result], *args: object) -> Result:
        """Call a function in a thread and return its result. A cancellation ends the call too: it does not begin, or it
        stops at its next Python instruction."""
        block = Stoppable()

        def call() -> Result:
            with block:
                try:
                    return function(*args)
                except ApiError as error:
                    raise error.with_traceback(None) from None  # whose frames hold what was parsed

        try:
            return await asyncio.get_running_loop().run_in_executor(self._large if large else self._small, call)
        except asyncio.CancelledError:
            block.stop()
            raise
