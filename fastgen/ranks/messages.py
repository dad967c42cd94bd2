"""Messages between the leader and its followers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen.request import Batch


@dataclass(frozen=True, slots=True)
class Ready:
    """From a follower that was started: it joins the group now."""


@dataclass(frozen=True, slots=True)
class Launch:
    """To followers: launch a step. Its batch is without `starts`: rank 0 alone samples."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Sample:
    """To followers: take the tokens of the last step, whose batch is masked."""


@dataclass(frozen=True, slots=True)
class Invoke:
    """To followers: call a method of the runner."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteOwn:
    """To followers: check the tensors that the follower's program has given, or write them."""

    number: int
    write: bool
    partial: bool


@dataclass(frozen=True, slots=True)
class WriteSent:
    """To followers: write the tensors that follow, each a Weight, until NoMoreWeights."""

    number: int


@dataclass(frozen=True, slots=True)
class NoMoreWeights:
    """To followers: the update is complete, or was cut short."""


@dataclass(frozen=True, slots=True)
class Reply:
    """From a follower: the result of the message of this number. A leader skips replies that it no longer waits for."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """From a follower: its program calls this. Calls are numbered, since an interrupted one leaves messages."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Return:
    """To followers: the result of a call, pickled."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Raise:
    """To followers: a call raises."""

    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Closing:
    """From each rank to its peers: the rank closes, and leaves its group when all do, since others may still read what
    it has sent last."""
