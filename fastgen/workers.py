"""The ranks of tensor parallelism as processes of their own: started, driven and ended by one that has no GPU.

`Ranks` stands where a Runner does. Each call of it is a message to all ranks, which replay them in order; rank 0 sends
back what the steps came to. All live and die together: when a rank fails, or the caller is gone, the connections end,
and with its connection each rank.

`python -m fastgen.workers FD` is a rank; FD is its end of a socket.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fastgen.arch import ModelConfig
from fastgen.asking import Asker, Do, Done, do
from fastgen.config import EngineConfig
from fastgen.links import NOTED, Draw, Failed, Launch, Link, Links, Message, Port, Ready, Result, Settle, Settled, Start
from fastgen.parallel import Group
from fastgen.processes import end, end_with_caller, ending, spawn
from fastgen.profiling import LocalTracer
from fastgen.request import Batch, StepResult
from fastgen.runner import Launched, Runner
from fastgen.startup import build_rank, find_device
from fastgen.transfer import Arriving, SharedMemory, Taken, Weight, packed
from fastgen.weights import Update

Build = Callable[[Start, Link], Runner]

CONSEQUENCES = 3.0  # seconds, from a failure that comes of another rank's, in which that one's is heard of
EAGER = 0.1  # seconds, longer than most steps; see Link


# ------------------------------------------------------------------------------------------------ the caller's side


@dataclass(frozen=True, slots=True)
class Handle:
    """A step on its way."""

    number: int
    batch: Batch


class Ranks(Asker):
    """Ranks in processes of their own, used as a Runner is.

    size: how many; options: of EngineConfig.make, without device and memory; device: "cpu" or "cuda" (rank i is on
    GPU i). program: what Python runs as a rank.

    An interrupt may come to any call; after one, `settle` is needed before the next launch, and steps launched before
    it can no longer be collected. When a rank raises or dies, all end, and the running call or the next raises the
    rank's error, or a RuntimeError for a death; later calls raise a RuntimeError.
    """

    config: EngineConfig

    def __init__(
        self,
        size: int,
        model_config: ModelConfig,
        options: Mapping[str, Any],
        folder: Path,
        load: str,
        device: str = "cuda",
        program: SequenceOf[str] = ("-m", "fastgen.workers"),
    ) -> None:
        self.size = self._asked = size
        self._links = Links()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._shared = SharedMemory.make()
        self._end = weakref.finalize(self, _end, self._links, self._processes, self._shared, os.getpid())
        self._numbers = itertools.count()
        self._settled = -1  # steps up to this number are not collected
        self._early: dict[int, StepResult] = {}  # that came while something else was waited for
        self._sent: deque[tuple[int, float]] = deque(maxlen=NOTED)  # launches, and when they were asked for
        self._broken: Exception | None = None
        level = logging.getLogger("fastgen").getEffectiveLevel()
        try:
            for rank in range(size):
                self._links.add(rank, spawn(program, self._processes, self._shared.file))
            start = Start(0, size, model_config, dict(options), folder, load, device, level)
            self._links.send({rank: replace(start, rank=rank) for rank in range(size)})
            self.config = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def launch(self, batch: Batch) -> Handle:
        """Run a step on all ranks; returns at once."""
        now = time.monotonic()
        self._check()
        number = next(self._numbers)
        self._sent.append((number, now))
        self._links.send(Launch(number, batch))
        return Handle(number, batch)

    def sample(self, launched: Handle, masks: np.ndarray) -> None:
        """Draw the tokens of a launched step whose batch is masked; masks: int32 [R, ceil(V / 32)]."""
        self._check()
        mine, others = Draw(launched.number, masks), Draw(launched.number, None)
        self._links.send({rank: others if rank else mine for rank in range(self.size)})

    def collect(self, launched: Handle) -> StepResult:
        """Wait for a step, and read it. Steps are collected in the order of their launch."""
        self._check()
        assert launched.number > self._settled, "this step was given up"
        if launched.number in self._early:
            return self._early.pop(launched.number)
        while True:
            _, message = self._receive()
            if isinstance(message, Result) and message.number == launched.number:  # others are of lost steps
                return message.result

    def update_weights(self, update: Update, begin: Callable[[], None]) -> None:
        """See Runner. One tensor is on its way at a time, until all ranks have taken their parts of it."""
        update.check()
        self._check()
        begin()
        for name, tensor in update.tensors():
            number = next(self._numbers)
            self._links.send(packed(number, name, tensor, self._shared))
            self._answers(Taken, number)
            del tensor
        self._settle()
        self._shared.clear()

    def _do(self, asked: Do) -> dict[int, Done]:
        self._check()
        self._links.send(asked)
        return self._answers(Done, asked.number)

    def start_trace(self) -> None:
        """Record what rank 0 does from the next step on."""
        self._check()
        self._links.send({0: Do(next(self._numbers), "start_trace")})

    def write_trace(self, path: Path) -> None:
        """Write what rank 0 has recorded; raises OSError where it can not be written. path: absolute."""
        if self._broken is not None or not self._end.alive:
            raise OSError("the ranks have ended")
        number = next(self._numbers)
        self._links.send({0: Do(number, "write_trace", (path,))})
        while True:
            _, message = self._receive()
            if isinstance(message, Result):  # is collected later
                self._early[message.number] = message.result
            elif isinstance(message, Done) and message.number == number:
                break
        if message.error is not None:
            raise message.error

    def settle(self) -> None:
        """Wait until nothing is on its way. Does nothing where the ranks have failed, as that is what holds then."""
        if self._broken is None and self._end.alive:
            self._settle()

    def delays(self) -> list[float]:
        """Seconds from `launch` until the last rank had the message, of the latest steps; settles."""
        self._check()
        received = [dict(settled.received) for settled in self._settle()]
        known = [(number, at) for number, at in self._sent if all(number in times for times in received)]
        return [max(times[number] for times in received) - at for number, at in known]

    def close(self) -> None:
        """End the ranks, whatever they do, and wait for their ends. More calls do nothing."""
        self._end()

    def _settle(self) -> list[Settled]:
        number = next(self._numbers)
        self._links.send(Settle(number))
        self._settled = number
        self._early.clear()
        return list(self._answers(Settled, number).values())

    def _wait_until_ready(self) -> EngineConfig:
        configs: dict[int, EngineConfig] = {}
        while len(configs) < self.size:
            rank, message = self._receive()
            if isinstance(message, Port):
                self._links.send(dict.fromkeys(range(1, self.size), message))
            elif isinstance(message, Ready):
                configs[rank] = message.config
        assert len({replace(config, device="") for config in configs.values()}) == 1, "the ranks differ"
        return configs[0]

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"this Generator is broken, make a new one: {self._broken}") from self._broken
        if self._links.failures:
            raise self._failure()
        if not self._end.alive:
            raise RuntimeError("this Generator is closed; make a new one")

    def _receive(self) -> tuple[int, Message]:
        while not self._links.failures:  # an interrupt may lose a message, and never a failure
            found = self._links.receive(1.0)
            if found is not None and not isinstance(found[1], Failed):
                return found
        raise self._failure()

    def _failure(self) -> Exception:
        """End all ranks after a failure; returns what began it."""
        failed = self._links.first_failure(CONSEQUENCES)
        assert failed is not None
        if failed.error is None:
            error: Exception = self._death(failed.rank)
        else:
            error = failed.error
            error.add_note(f"on rank {failed.rank} of {self.size}:\n{failed.trace}")
        self._end()
        self._broken = error
        return error

    def _death(self, rank: int) -> RuntimeError:
        """How a rank ended without a word."""
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return RuntimeError(f"rank {rank} of {self.size} {ending(process.returncode)}; make a new Generator")


def _end(links: Links, processes: list[subprocess.Popen[bytes]], shared: SharedMemory, owner: int) -> None:
    """End ranks and wait for them. A rank ends with its connection; those that do not are killed."""
    if os.getpid() != owner:  # a fork, which has no say in this
        return

    def tell() -> None:
        links.close()
        shared.close()

    end(processes, tell)


# ------------------------------------------------------------------------------------------------ a rank's side


class Replay:
    """Does on a rank what the messages say.

    failed: given on rank 0, which sends the results of steps, from a thread that waits for them, so that the next step
    is launched meanwhile; called with what is raised in that thread.
    """

    def __init__(self, runner: Runner, link: Link, failed: Callable[[BaseException], None] | None = None) -> None:
        self._runner = runner
        self._link = link
        self._failed = failed
        self._tracer = LocalTracer(runner.config.device, all_threads=True)
        self._undrawn: tuple[int, Launched] | None = None
        self._answers: SimpleQueue[tuple[int, Launched] | Message] = SimpleQueue()
        if failed is not None:
            threading.Thread(target=self._answer, args=(failed,), name="fastgen-collect", daemon=True).start()

    def take(self, message: Message) -> None:
        """Do what a message says."""
        if isinstance(message, Launch):
            with self._tracer.span("launch"):
                launched = self._runner.launch(message.batch)
            # An undrawn step still there is one whose Draw an interrupt has lost.
            self._undrawn = (message.number, launched) if message.batch.masked else None
            if not message.batch.masked:
                self._collect_later(message.number, launched)
        elif isinstance(message, Draw):
            assert self._undrawn is not None
            number, launched = self._undrawn
            assert number == message.number
            self._undrawn = None
            with self._tracer.span("sample"):
                self._runner.sample(launched, message.masks)
            self._collect_later(number, launched)
        elif isinstance(message, Weight):
            arriving = Arriving(message, self._link)
            self._runner.write_weights(arriving)
            if arriving.following is not None:
                self.take(arriving.following)
        elif isinstance(message, Do):
            tracing = message.method in ("start_trace", "write_trace")
            self._link.send(do(message, self._tracer if tracing else self._runner))
        else:
            assert isinstance(message, Settle), message
            self._undrawn = None
            self._runner.settle()
            settled = Settled(message.number, self._link.received)
            if self._failed is None:
                self._link.send(settled)
            else:
                self._answers.put(settled)  # after what was launched before

    def _collect_later(self, number: int, launched: Launched) -> None:
        if self._failed is not None:
            self._answers.put((number, launched))

    def _answer(self, failed: Callable[[BaseException], None]) -> None:
        try:
            while True:
                answer = self._answers.get()
                if not isinstance(answer, Message):
                    number, launched = answer
                    with self._tracer.span("collect"):
                        answer = Result(number, self._runner.collect(launched))
                self._link.send(answer)
        except BaseException as error:
            failed(error)


def eagerness(device: str, ranks: int) -> float:
    """What `Link.eager` is to be: 0 where the cores are needed, for steps on the CPU or because they are few."""
    return EAGER if device != "cpu" and len(os.sched_getaffinity(0)) > 2 * ranks else 0.0


def serve(connection: socket.socket, build: Build, leave: Callable[[int], Any] = os._exit) -> None:
    """Be a rank, until its connection ends. build: makes its runner. leave: ends the process, with a status."""
    link = Link(connection, lambda: leave(1))
    start = link.receive()
    if start is None:
        return
    assert isinstance(start, Start)

    def fail(error: BaseException) -> None:
        with suppress(OSError):  # the caller may be gone
            link.send(Failed.of(start.rank, error))
        leave(1)

    try:
        runner = build(start, link)
        link.send(Ready(runner.config))
        link.eager = eagerness(start.device, start.size)
        replay = Replay(runner, link, fail if start.rank == 0 else None)
        while (message := link.receive()) is not None:
            replay.take(message)
    except BaseException as error:
        fail(error)
    leave(1)  # as the link's thread does, whichever is first: nothing is to be taken apart in order


def main(build: Build | None = None) -> None:
    """What a rank's process runs; its last argument is the number of its socket."""
    faulthandler.enable()
    end_with_caller()
    serve(socket.socket(fileno=int(sys.argv[-1])), _build if build is None else build)


def _build(start: Start, link: Link) -> Runner:
    torch.set_num_threads(max(torch.get_num_threads() // start.size, 1) if start.device == "cpu" else 1)
    logging.basicConfig(format=f"rank {start.rank}: %(message)s")
    logging.getLogger("fastgen").setLevel(start.log_level if start.rank == 0 else logging.WARNING)
    device = torch.device(find_device(f"cuda:{start.rank}" if start.device == "cuda" else "cpu"))
    group = Group(_join(start, link, device), device)
    runner = build_rank(start.model_config, start.options, start.folder, start.load, str(device), group)
    gc.freeze()  # or a collection of all that torch has brought along would hold up some step for 80 ms
    return runner


def _join(start: Start, link: Link, device: torch.device) -> dist.ProcessGroup:
    """Join the other ranks, at a port that is free, and open to this host alone."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if start.rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        link.send(Port(port))
    else:
        message = link.receive()
        assert isinstance(message, Port)
        store = dist.TCPStore("127.0.0.1", message.port, is_master=False)  # type: ignore[attr-defined]
    backend, given = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=start.rank, world_size=start.size, device_id=given)
    group = dist.group.WORLD
    assert group is not None
    return group


if __name__ == "__main__":
    main()
