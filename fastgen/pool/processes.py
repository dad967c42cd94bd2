"""The parent's side of a pool: it starts the processes, sends each item to one of them, and collects the results."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastgen.async_engine.client import EngineError
from fastgen.async_engine.loop import Answer, EngineInfo
from fastgen.pool.child import Cancel, Finished, Item, Taken
from fastgen.processes.channel import Failed, Peers, Start
from fastgen.processes.spawning import describe_exit, end_processes, spawn

log = logging.getLogger(__name__)

AHEAD = 128  # number of items that a process has besides those that its Generator has taken
PROGRAM = ("-c", "from fastgen.pool.child import main; main()")
EXIT_SECONDS = 0.5  # time that a process has to end after its connection

Cost = Callable[[Any], int]
"""A function that estimates the tokens of an item, prompt and answer."""


@dataclass(eq=False)
class _Process:
    """The items of a process.

    held: (item, cost) by number. left: sum of the costs. waiting: the numbers of items that its Generator has not taken
    yet.
    """

    place: int
    held: dict[int, tuple[Any, int]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    left: int = 0


class Processes:
    """Processes with one Generator each, which share the work on items. A Generator takes items as it has room, and
    the next item goes to the process with the fewest tokens left. If a process ends, the others do its items again.

    make, arguments: see `child.py`. count: number of processes. ranks: number of GPUs of each. device: cpu, cuda or
    None. info: properties of the model.

    Raises what the Generators raise, and EngineError if a process dies at its start.
    """

    info: EngineInfo
    _exiting = staticmethod(sys.is_finalizing)  # an attribute, since globals are None when the interpreter ends

    def __init__(self, make: str, arguments: Any, count: int, ranks: int, device: str | None) -> None:
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"device is {device!r}; with data_parallel it is 'cpu', or 'cuda' for the first GPUs")
        self._programs: list[subprocess.Popen[bytes]] = []
        self._peers = Peers()
        self._processes = {place: _Process(place) for place in range(count)}  # those that run
        self._returned: deque[tuple[int, Any]] = deque()  # items of processes that have ended
        self._above = 0  # above the numbers of all items so far
        self._running = False
        start = {"make": make, "arguments": arguments, "device": device, "count": count, "ranks": ranks}
        try:
            for place in range(count):
                self._peers.add(place, spawn((*PROGRAM, str(place)), self._programs))
            self._peers.send(Start(start, logging.getLogger("fastgen").getEffectiveLevel()))
            for _ in range(count):
                place, message = self._peers.receive()
                if isinstance(message, Failed):
                    raise self._error(place, message)
                self.info = message
        except BaseException:
            self.close()
            raise

    def run(self, items: Iterable[tuple[int, Any] | None], cost: Cost) -> Generator[Any, None, None]:
        """Yield the results of numbered items in the order of completion; for an item that a process cannot read, the
        pair of its number and the error. The items are read as the Generators take them; None stands for no item yet.
        Closing the iterator ends the work.

        Raises the error of the last process that ends, EngineError if it died, and RuntimeError while another iterator
        is not at its end.
        """
        if self._running:
            raise RuntimeError("another stream of this pool is not at its end; read all of it, or close it")
        source, more, self._running = iter(items), True, True
        try:
            while True:
                if not self._processes:
                    raise EngineError("the processes of this pool have ended; make a new one")
                more = self._send(source, cost) and more
                if any(process.held for process in self._processes.values()):
                    yield from self._receive()
                elif not more:
                    return
        finally:
            self._running = False
            if not self._exiting():
                self._cancel()

    def _cancel(self) -> None:
        """End the work on all items."""
        self._returned.clear()
        for place in self._processes:
            self._peers.send_to(place, Cancel(self._above))
            self._processes[place] = _Process(place)

    def _send(self, source: Iterator[tuple[int, Any] | None], cost: Cost) -> bool:
        """Send items while a process has room for them. Return False if there are no more."""
        while ready := [process for process in self._processes.values() if len(process.waiting) < AHEAD]:
            try:
                numbered = self._returned.popleft() if self._returned else next(source)
            except StopIteration:
                return False
            if numbered is None:
                break
            (number, item), process = numbered, min(ready, key=lambda process: process.left)
            self._peers.send_to(process.place, Item(number, item))
            tokens = cost(item)
            process.held[number] = item, tokens
            process.waiting.add(number)
            process.left += tokens
            self._above = max(self._above, number + 1)
        return True

    def _receive(self) -> Iterator[Any]:
        """Handle the next message, and yield the result that it has, if any."""
        place, message = self._peers.receive()
        process = self._processes.get(place)
        if process is None:
            return
        match message:
            case Taken():
                process.waiting.discard(message.number)
            case Finished() | Answer() if message.number in process.held:  # otherwise it was cancelled
                process.waiting.discard(message.number)
                process.left -= process.held.pop(message.number)[1]
                yield message.result if isinstance(message, Finished) else (message.number, message.error)
            case Failed():
                self._lose(process, message)

    def _lose(self, process: _Process, failed: Failed) -> None:
        """Return the items of a process that has ended."""
        del self._processes[process.place]
        error = self._error(process.place, failed)
        if not self._processes:
            raise error
        log.warning("%s; its %d items go to the others", error, len(process.held))
        self._returned += [(number, item) for number, (item, _) in sorted(process.held.items())]

    def _error(self, place: int, failed: Failed) -> Exception:
        """Return the error that ended a process."""
        if failed.error is not None:
            return failed.error
        program = self._programs[place]
        with suppress(subprocess.TimeoutExpired):
            program.wait(EXIT_SECONDS)
        return EngineError(f"engine {place} {describe_exit(program.returncode)}")

    def close(self) -> None:
        """End the processes."""
        self._processes.clear()
        end_processes(self._programs, self._peers.close)
