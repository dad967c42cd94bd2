"""The copies, flags and waits of all ranks of an exchange, run in random orders that their streams allow."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.kernels.allreduce import add_in_order
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.parallel.overlap import Exchange, ExchangeLayout, PeerMemory
from fastgen.processes.errors import DepartedError

TOKENS, HIDDEN = 13, 8
GUARD = 64
LATE = 2**32 - 3  # a phase whose number is about to wrap around
NORMS = [RMSNorm(torch.rand(HIDDEN, generator=torch.Generator().manual_seed(seed)) + 0.5, 1e-5) for seed in range(3)]
Step = tuple[int, int]
"""The number of tokens in each of its two halves."""


def always() -> bool:
    return True


@dataclass(eq=False)
class Queue:
    """The operations of a stream. Each runs when it is ready and all earlier ones have run."""

    operations: deque[tuple[Callable[[], bool], Callable[[], object]]] = field(default_factory=deque)

    def add(self, run: Callable[[], object], ready: Callable[[], bool] = always) -> None:
        self.operations.append((ready, run))


class Event:
    def __init__(self, current: Queue) -> None:
        self.current, self.happened = current, False

    def happen(self) -> None:
        self.happened = True

    def wait(self) -> None:
        self.current.add(lambda: None, lambda: self.happened)


@dataclass
class Side:
    """A SideStream over two queues."""

    current: Queue
    own: Queue

    def begin(self) -> None:
        event = Event(self.current)
        self.current.add(event.happen)
        self.own.add(lambda: None, lambda: event.happened)

    def copy(self, target: int, source: int, size: int) -> None:
        for part in (slice(0, size // 2), slice(size // 2, size)):  # others may see a part of it
            self.own.add(partial(ctypes.memmove, target + part.start, source + part.start, part.stop - part.start))

    def write(self, address: int, value: int) -> None:
        self.own.add(lambda: setattr(ctypes.c_uint32.from_address(address), "value", value))

    def wait(self, address: int, value: int) -> None:
        found = ctypes.c_uint32.from_address(address)
        self.own.add(lambda: None, lambda: (found.value - value) % 2**32 < 2**31)

    def launch(self, function: Callable[..., object], *arguments: Any) -> None:
        self.own.add(partial(function, *arguments))

    def end(self) -> Event:
        event = Event(self.current)
        self.own.add(event.happen)
        return event

    def is_idle(self) -> bool:
        return not self.own.operations


@dataclass
class Ranks:
    """The exchanges of all ranks. memory: uint8 [N, bytes]; each row ends with a guard."""

    exchanges: list[Exchange]
    currents: list[Queue]
    queues: list[Queue]
    memory: Tensor

    @staticmethod
    def make(size: int, one_queue: bool = False, phase: int = 0) -> Ranks:
        """Make the ranks. one_queue: whether all streams of a rank share one queue."""
        at = ExchangeLayout.of(size, TOKENS, HIDDEN, torch.float32)
        memory = torch.zeros(size, at.end + GUARD, dtype=torch.uint8)
        memory[:, : at.flags].view(torch.float32).fill_(torch.nan)
        memory[:, at.flags : at.end].view(torch.int32).fill_(phase - 2**32 if phase else 0)
        memory[:, at.end :] = 255
        peers = [row.data_ptr() for row in memory]
        ranks = Ranks([], [], [], memory)
        for rank in range(size):
            current, *own = queues = [Queue()] * 3 if one_queue else [Queue() for _ in range(3)]
            sides = [Side(current, queue) for queue in own]
            shared = PeerMemory(memory[rank, : at.end], peers, None)
            made = Exchange(rank, shared, TOKENS, HIDDEN, torch.float32, sides)
            made._phases = [phase, phase]
            ranks.exchanges.append(made)
            ranks.currents.append(current)
            ranks.queues += dict.fromkeys(queues)
        return ranks

    def run(self, rng: random.Random) -> None:
        """Run all operations. Each queue has a random speed."""
        speeds = [rng.choice([0.02, 0.2, 1.0]) for _ in self.queues]
        while any(queue.operations for queue in self.queues):
            heads = [queue.operations[0] if queue.operations else None for queue in self.queues]
            ready = [number for number, head in enumerate(heads) if head is not None and head[0]()]
            assert ready, "all wait for each other"
            (chosen,) = rng.choices(ready, [speeds[number] for number in ready])
            self.queues[chosen].operations.popleft()[1]()


def draw(step: int, half: int, rank: int, count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 * step + 10 * half + rank))


def product(x: Tensor, rank: int) -> Tensor:
    return x.roll(rank + 1, 1) * (0.5 + rank)


def expected(steps: list[Step], size: int) -> list[Tensor]:
    """Return the residual stream of each half of each step, [T, HIDDEN]."""
    found = []
    for number, step in enumerate(steps):
        for half, count in enumerate(step):
            x = torch.zeros(count, HIDDEN)
            parts = [draw(number, half, rank, count) for rank in range(size)]
            for norm in NORMS:
                add_in_order(x, parts)
                parts = [product(rms_norm(x, norm), rank) for rank in range(size)]
            add_in_order(x, parts)
            found.append(x)
    return found


def program(made: Exchange, steps: list[Step], current: Queue, kept: list[Tensor]) -> list[Tensor]:
    """Put a rank's steps into its current queue. Return tensors that hold the results when the queue has run. kept:
    receives tensors that must stay alive until then, since memory here is not reused in stream order."""
    found = []
    for number, step in enumerate(steps):
        ys = [draw(number, half, made.rank, count) for half, count in enumerate(step)]
        kept += ys
        shares = [torch.zeros_like(y[made.rows_of(len(y))]) for y in ys]
        ways = [made.add(half, shares[half], ys[half], NORMS[0]) for half in (0, 1)]
        for norm in (*NORMS[1:], None):
            for half, count in enumerate(step):
                x, y = ways[half].wait(), torch.full((count, HIDDEN), torch.nan)
                kept.append(y)
                current.add(lambda x=x, y=y: y.copy_(product(x, made.rank)))  # type: ignore[misc]
                ways[half] = made.add(half, shares[half], y, norm)
        for half, count in enumerate(step):
            x, whole = ways[half].wait(), torch.full((count, HIDDEN), torch.nan)
            current.add(lambda x=x, whole=whole: whole.copy_(x))  # type: ignore[misc]
            found.append(whole)
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_any_order_that_streams_allow_the_sums_are_right(size: int, seed: int) -> None:
    rng, kept = random.Random(seed), list[Tensor]()
    ranks = Ranks.make(size, one_queue=seed % 4 == 3, phase=LATE * (seed % 2))
    steps = [(rng.randint(1, TOKENS), rng.randint(1, TOKENS)) for _ in range(3)]
    found = [program(made, steps, queue, kept) for made, queue in zip(ranks.exchanges, ranks.currents, strict=True)]
    ranks.run(rng)
    wanted = expected(steps, size)
    assert all(torch.equal(x, y) for results in found for x, y in zip(results, wanted, strict=True))
    assert (ranks.memory[:, -GUARD:] == 255).all(), "nothing is written past the end"


def test_an_interrupt_ends_the_waits_for_a_rank_that_is_gone() -> None:
    """A rank that ends a little later may still write its flag after the interrupt."""
    ranks = Ranks.make(3)
    for phase in range(4):
        for half in (0, 1):
            for rank, made in enumerate(ranks.exchanges):
                if phase < 4 - rank:
                    y = draw(phase, half, rank, TOKENS)
                    made.add(half, torch.zeros_like(y[made.rows_of(TOKENS)]), y, None)

    def run() -> None:
        while heads := [queue for queue in ranks.queues if queue.operations and queue.operations[0][0]()]:
            heads[0].operations.popleft()[1]()

    run()
    stuck = [made for made, current in zip(ranks.exchanges, ranks.currents, strict=True) if current.operations]
    assert not all(side.is_idle() for side in ranks.exchanges[0]._sides)
    assert not stuck, "current streams hold only what the side streams wait for"
    threads = [threading.Thread(target=made.interrupt) for made in ranks.exchanges]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        run()
    assert all(side.is_idle() for made in ranks.exchanges for side in made._sides)
    with pytest.raises(DepartedError):
        ranks.exchanges[0].add(0, y[:1], y[:1], None)
