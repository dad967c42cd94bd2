"""A process of a pool: one Generator, which works on the items that the parent sends.

Importing this module imports neither torch nor numpy.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from fastgen.async_engine.loop import Answer, EngineInfo, Numbered
from fastgen.processes.channel import Channel, Failed, Start
from fastgen.processes.spawning import end_with_parent

if TYPE_CHECKING:
    import fastgen

Serve = Callable[[Iterator[Any]], Generator[tuple[int, Any], None, None]]
"""A function that works on items as its Generator takes them, and yields (number, result) in the order of completion.
An item None lets the Generator do a step."""


@dataclass(frozen=True, slots=True)
class Item(Numbered):
    """Message to a process: an item, and its number. The process answers with an Answer if it cannot read the item."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Cancel:
    """Message to a process: end the work on all items with lower numbers than this."""

    below: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Message from a process: its Generator has taken the item with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Message from a process: the result of the item with this number."""

    number: int
    result: Any


class _CancelledError(Exception):
    """The work on all items that run is to end."""


class Worker:
    """The work on items that arrive. send: function that sends a message to the parent."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._running = 0  # number of items in the Generator
        self._newest = self._cancelled = 0  # number of the last item taken; numbers below this one are cancelled

    def deliver(self, message: object) -> None:
        """Take a message of the parent, in the channel's thread."""
        if message is None:
            os._exit(0)
        if isinstance(message, Cancel):
            self._cancelled = message.below
        else:
            self._inbox.put(message)

    def start(self) -> Start:
        """Wait for the first message."""
        start = self._inbox.get()
        assert isinstance(start, Start), start
        return start

    def run(self, serve: Serve) -> None:
        """Work until the parent ends this process. Raises what the Generator raises."""
        while True:
            self._running = 0
            with suppress(_CancelledError), closing(serve(self._items())) as results:
                for number, result in results:
                    self._running -= 1
                    self._send(Finished(number, result))
                    self._check()

    def _items(self) -> Iterator[Any]:
        while True:
            self._check()
            try:
                item = self._inbox.get(block=not self._running)
            except Empty:
                yield None
                continue
            if isinstance(item, Answer):
                self._send(item)
            elif item.number >= self._cancelled:
                self._running, self._newest = self._running + 1, item.number
                self._send(Taken(item.number))
                yield item.value

    def _check(self) -> None:
        if self._running and self._newest < self._cancelled:
            raise _CancelledError


def share_of(device: str | None, place: int, count: int, ranks: int) -> str | None:
    """Return the device of process number `place` of `count`, each of which uses `ranks` GPUs. On the CPU, processes
    share the cores. Raises ValueError if there are fewer GPUs."""
    import torch

    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus == 0:
        torch.set_num_threads(max(torch.get_num_threads() // count, 1))
        return device
    if gpus < count * ranks:
        raise ValueError(
            f"data_parallel is {count}, which takes {count * ranks} GPUs, and torch finds {gpus} here; lower it"
        )
    if ranks == 1:
        return f"cuda:{place}"
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names.split(",")[place * ranks :][:ranks])  # CUDA has not started yet
    return "cuda"


def serve_requests(arguments: dict[str, Any], device: str | None) -> tuple[fastgen.Generator, Serve]:
    """Return a Generator with these arguments, and the work on Requests, whose ids are their numbers."""
    from fastgen.generator import Generator

    gen = Generator(**arguments, device=device)
    return gen, lambda requests: ((int(output.id), output) for output in gen.stream(requests))


def _run(
    worker: Worker, channel: Channel, place: int, make: str, arguments: Any, device: str | None, count: int, ranks: int
) -> None:
    """Make a Generator, and work until the parent ends this process. make: "module:name" of a function such as
    `serve_requests`, and `arguments` for it. The others are those of `share_of`."""
    module, _, name = make.partition(":")
    gen, serve = getattr(import_module(module), name)(arguments, share_of(device, place, count, ranks))
    gc.collect()
    gc.freeze()  # otherwise a garbage collection over all of torch's objects would delay some step by 80 ms
    channel.send(EngineInfo.of(gen))
    worker.run(serve)


def main() -> None:
    """Run a process, which ends with its socket and with the process that started it. The last two arguments of the
    program are its place, and the file descriptor of its end of the socket."""
    faulthandler.enable()
    end_with_parent()
    place, file = map(int, sys.argv[-2:])
    worker = Worker(lambda message: channel.send(message))
    channel = Channel(socket.socket(fileno=file), worker.deliver)
    try:
        start = worker.start()
        logging.basicConfig(format=f"engine {place}: %(levelname)s %(message)s")
        logging.getLogger("fastgen").setLevel(start.log_level)
        _run(worker, channel, place, **start.arguments)
    except BaseException as error:
        with suppress(OSError):  # the parent may be gone
            channel.send(Failed.of(error))
        os._exit(1)
