"""Sleep: the memory of weights and KV goes back to the device, on all ranks, and comes again when it is wanted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from fastgen.links import Message
from fastgen.processes import portable
from fastgen.scheduler import Scheduler

T = TypeVar("T")

TAGS = ("weights", "kv_cache")
DROPPED = "the weights were dropped by sleep"

# ------------------------------------------------------------------------------------------- the ranks


@dataclass(frozen=True, slots=True)
class Sleep(Message):
    """To all ranks: see Runner.sleep."""

    number: int
    tags: tuple[str, ...]
    keep_weights: bool


@dataclass(frozen=True, slots=True)
class Wake(Message):
    """To all ranks: see Runner.wake."""

    number: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rested(Message):
    """From a rank: what came of a Sleep or Wake. freed: bytes."""

    number: int
    freed: int = 0
    error: Exception | None = None


class Sleeper(Protocol):
    """What can sleep: a Runner, or ranks that each have one."""

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int: ...
    def wake(self, tags: Collection[str]) -> None: ...


def rest(asked: Sleep | Wake, runner: Sleeper) -> Rested:
    """Do on a rank what is asked. Where there is too little memory all ranks go on; other errors are raised."""
    try:
        if isinstance(asked, Sleep):
            return Rested(asked.number, runner.sleep(asked.tags, asked.keep_weights))
        runner.wake(asked.tags)
    except (ValueError, torch.OutOfMemoryError) as error:
        return Rested(asked.number, error=portable(error))
    return Rested(asked.number)


def total(outcomes: Mapping[int, Rested]) -> int:
    """The bytes that all ranks have freed; raises what the first of them has raised."""
    for rank in sorted(outcomes):
        error = outcomes[rank].error
        if error is not None:
            error.add_note(f"raised on rank {rank}")
            raise error
    return sum(rested.freed for rested in outcomes.values())


class SleepingRanks(ABC):
    """`sleep` and `wake` of a Runner, by messages to all ranks."""

    _numbers: Iterator[int]

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int:
        """See Runner; the bytes of all ranks."""
        return total(self._rest(Sleep(next(self._numbers), tuple(tags), keep_weights)))

    def wake(self, tags: Collection[str]) -> None:
        """See Runner."""
        total(self._rest(Wake(next(self._numbers), tuple(tags))))

    @abstractmethod
    def _rest(self, asked: Sleep | Wake) -> Mapping[int, Rested]:
        """What comes of it on each rank."""


# ------------------------------------------------------------------------------------------- the Generator


class State(Protocol):
    """The state of the weights, and `asleep`, the tags of what is."""

    torn: str
    asleep: frozenset[str]


class Loop(Protocol):
    """What of a Generator sleep has to do with."""

    _runner: Any
    _scheduler: Scheduler
    _weights: State
    _stepping: bool

    @property
    def _team(self) -> Any: ...
    @property
    def _closed(self) -> bool: ...
    @property
    def _active(self) -> Collection[object]: ...
    def _settle(self) -> None: ...


class Sleeps:
    """What of a Generator lends its memory out."""

    def sleep(self: Loop, tags: str | Iterable[str] = TAGS, keep_weights: bool = True) -> int:
        """Give device memory back to the driver, between two uses; returns how many bytes are free now that were not.

        tags: "weights", "kv_cache" or both. Addresses stay, so that CUDA graphs do; what torch only keeps for later is
            given back too. The prefix cache is emptied with "kv_cache", but for the pages in the host tier.
        keep_weights: `wake` brings the weights back, from pinned copies on the host. These take their time when they
            are made for the first time, and stay for the next. Else the weights are dropped: behind `wake`, nothing can
            be generated until `update_weights` was called with all of them. On the CPU, weights that are kept stay.

        What is asleep already stays as it is. Until `wake`, generating is a RuntimeError. Raises ValueError where
        requests are in flight, and where the host has too little memory for the weights. The bytes are what the GPU's
        driver says before and after, or of the CPU what this process has in memory; of several ranks, their sum.
        """
        return _on_all(self._team, "sleep", partial(_sleep, self, tags, keep_weights))

    def wake(self: Loop, tags: str | Iterable[str] | None = None) -> None:
        """Take the memory again that `sleep` gave back, all or that of some tags, and fill it; what is awake stays so.

        A trainer may wake "weights" alone, call `update_weights`, give up its own memory, and wake the rest. Raises
        torch.OutOfMemoryError where the GPU has too little; then more can be freed, and wake called again.
        """
        _on_all(self._team, "wake", partial(_wake, self, tags))


def _on_all(team: Any, name: str, function: Callable[[], T]) -> T:
    """team: the ranks of a tp_group, which all call this; rank 0 does it."""
    result: T = function() if team is None else team.call(name, function)
    return result


def _sleep(loop: Loop, tags: str | Iterable[str], keep_weights: bool) -> int:
    wanted = _checked(loop, "sleep", tags)
    loop._settle()
    if loop._active:
        raise ValueError(f"{len(loop._active)} requests are in flight; finish or abort them before sleep")
    state = loop._weights
    tired = wanted - state.asleep
    if not tired:
        return 0
    if "weights" in tired and not keep_weights:
        state.torn = DROPPED
    state.asleep |= tired  # first: wherever an interrupt comes, wake sets it right
    try:
        freed: int = loop._runner.sleep(sorted(tired), keep_weights)
    except ValueError:
        _wake(loop, tired)
        raise
    return freed


def _wake(loop: Loop, tags: str | Iterable[str] | None) -> None:
    state = loop._weights
    wanted = _checked(loop, "wake", TAGS if tags is None else tags) & state.asleep
    if not wanted:
        return
    loop._runner.wake(sorted(wanted))
    if "kv_cache" in wanted:
        loop._scheduler.pages.forget_pages()
    state.asleep -= wanted


def _checked(loop: Loop, name: str, tags: str | Iterable[str]) -> frozenset[str]:
    if loop._closed:
        raise RuntimeError("this Generator is closed; make a new one")
    if loop._stepping:
        raise RuntimeError(f"{name} is called from within a step; call it between two")
    wanted = frozenset((tags,) if isinstance(tags, str) else tags)
    unknown = wanted.difference(TAGS)
    if unknown:
        raise ValueError(f"tags has {', '.join(sorted(map(repr, unknown)))}; there are 'weights' and 'kv_cache'")
    return wanted
