"""The version of the weights, and the way from one to the next between two steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from numbers import Integral
from typing import Any, Protocol

from fastgen.request import Sequence
from fastgen.scheduler import Scheduler
from fastgen.spmd import Follower, Leader
from fastgen.weights import Update

IN_FLIGHT = ("error", "keep", "recompute")
TORN = "the weights are torn, as an update was cut short or failed"


class Loop(Protocol):
    """What of a Generator an update has to do with."""

    _runner: Any
    _scheduler: Scheduler
    _stepping: bool

    @property
    def _closed(self) -> bool: ...
    @property
    def _active(self) -> Collection[object]: ...
    @property
    def _owners(self) -> Iterable[Sequence]: ...
    def _settle(self) -> None: ...
    def _recover(self) -> None: ...


class Weights:
    """version: of the weights that the model has; torn: why they are of no version, or ""; asleep: see `sleep`."""

    def __init__(self) -> None:
        self.version = 0
        self.torn = ""
        self.asleep: frozenset[str] = frozenset()

    def check(self) -> None:
        """Raise RuntimeError where there is nothing to generate with."""
        if self.asleep:
            raise RuntimeError(f"asleep: {', '.join(sorted(self.asleep))}; call wake first")
        self.check_whole()

    def check_whole(self) -> None:
        """Raise RuntimeError where the weights are torn."""
        if self.torn:
            raise RuntimeError(f"{self.torn}; call update_weights with all of them")

    def replace(
        self, loop: Loop, team: Leader | Follower | None, update: Update, version: int | None, in_flight: str
    ) -> int:
        """What `Generator.update_weights` says. team: the other ranks of a tp_group."""
        if isinstance(team, Follower):
            self.version = team.call("update_weights", update=update)
            return self.version
        change = partial(self._replace, loop, update, version, in_flight)
        return change() if team is None else team.call("update_weights", change)

    def _replace(self, loop: Loop, update: Update, version: int | None, in_flight: str) -> int:
        if loop._closed:
            raise RuntimeError("this Generator is closed; make a new one")
        following = self._following(version)
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight is {in_flight!r}; it must be one of {', '.join(map(repr, IN_FLIGHT))}")
        if "weights" in self.asleep:
            raise RuntimeError("the weights are asleep; call wake first, of 'weights' at least")
        if update.partial:
            self.check_whole()
        if loop._stepping:
            raise RuntimeError("update_weights is called from within a step; call it between two")
        loop._settle()
        if loop._active and in_flight == "error":
            raise ValueError(
                f"{len(loop._active)} requests are in flight; finish or abort them, or pass in_flight='keep' (they go "
                "on with the KV of the old weights) or 'recompute' (it is computed again)"
            )

        def begin() -> None:
            self.torn = TORN
            loop._scheduler.forget_prefixes()
            if in_flight == "recompute":
                loop._scheduler.compute_again()

        try:
            loop._runner.update_weights(update, begin)
        except BaseException as error:
            if self.torn:
                error.add_note("until update_weights is called with all weights again, nothing can be generated")
                loop._recover()
            raise
        for sequence in loop._owners:
            sequence.begin_version(following)
        self.version, self.torn = following, ""
        return following

    def _following(self, version: int | None) -> int:
        if version is None:
            return self.version + 1
        if not isinstance(version, Integral) or isinstance(version, bool):
            raise TypeError(f"version must be an integer, not {version!r}")
        if version == self.version:
            raise ValueError(f"version is {version}, which is the current one; give another, or none")
        return int(version)
