"""The ranks of a program (tp_group) as a Generator sees them, on which every public method runs together."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Generator as PyGenerator
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:  # this module imports torch
    from fastgen.model.weight_updates import WeightUpdate

T = TypeVar("T")
P = ParamSpec("P")


class Team(Protocol):
    """Protocol of one rank of a tp_group; see `Rank` in ranks/protocol.py.

    follows: this is not rank 0. status: on such a rank, the leader's status at the end of the last call.
    """

    follows: bool
    status: Any

    def call(self, name: str, function: Callable[[], T], update: WeightUpdate | None = None) -> T:
        """Return the value of rank 0's function, or raise its error, on all ranks, which must all make a call of this
        name. update: the update that this rank's program has given, if the call updates weights."""

    def iterate(self, name: str, items: PyGenerator[T, None, None]) -> PyGenerator[T, None, None]:
        """Yield the items of rank 0's generator on all ranks, which must all leave it at the same item."""


def on_all_ranks(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of Generator that all ranks of a tp_group call: rank 0 executes it, the others replay its
    steps, and all return the same value. Ctrl-C is deferred until the method ends."""

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> T:
        generator: Any = args[0]
        with generator._interrupt:
            if generator._team is None:
                return method(*args, **options)
            result: T = generator._team.call(method.__name__.lstrip("_"), lambda: method(*args, **options))
            return result

    return call
