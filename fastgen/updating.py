"""What is done to a Generator's weights and KV between two steps: new weights, and sleep."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from numbers import Integral
from typing import Any, Protocol

from torch import Tensor

from fastgen.arch import ModelConfig
from fastgen.interrupts import DeferredInterrupt
from fastgen.model import checkpoint_parts
from fastgen.ranks.protocol import Follower, Leader, on_all_ranks
from fastgen.request import Sequence
from fastgen.scheduler import Scheduler
from fastgen.weights import Update

IN_FLIGHT = ("error", "keep", "recompute")
TAGS = ("weights", "kv_cache")
TORN = "the weights are torn, as an update was cut short or failed"
DROPPED = "the weights were dropped by sleep"


class Loop(Protocol):
    """What of a Generator an update, and sleep, have to do with."""

    _runner: Any
    _scheduler: Scheduler
    _weights: Weights
    _stepping: bool
    _interrupt: DeferredInterrupt
    model_config: ModelConfig

    @property
    def _team(self) -> Leader | Follower | None: ...
    @property
    def _closed(self) -> bool: ...
    @property
    def _active(self) -> Collection[object]: ...
    @property
    def _owners(self) -> Iterable[Sequence]: ...
    def _settle(self) -> None: ...
    def _reset(self) -> None: ...
    def wake(self, tags: Iterable[str]) -> None: ...


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

    def following(self, version: int | None) -> int:
        """The version that comes next, where one is asked for or not. Raises ValueError or TypeError."""
        if version is None:
            return self.version + 1
        if not isinstance(version, Integral) or isinstance(version, bool):
            raise TypeError(f"version must be an integer, not {version!r}")
        if version == self.version:
            raise ValueError(f"version is {version}, which is the current one; give another, or none")
        return int(version)


class BetweenSteps:
    """What of a Generator is done between two steps."""

    def update_weights(
        self: Loop,
        named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        version: int | None = None,
        partial: bool = False,
        in_flight: str = "error",
    ) -> int:
        """Replace the weights, in place; returns their version, by default the one before plus 1 (the first is 0).

        named: whole tensors by their Hugging Face names, such as `model.state_dict()`, in any float dtype, on the CPU
            or a GPU; at most one of them is there a second time. The `lm_head.weight` of a tied model may be left out.
            In a tp_group each rank gives the same tensors, from an iterable of its own.
        version: a number of your own, other than the current one. partial: what is not given stays as it is.
        in_flight: what becomes of requests that are in the engine: "error": the update is refused; "keep": they go on
            with the KV that the old weights made; "recompute": it is computed again with the new ones.
            `Completion.weight_versions` tells which tokens came from which. No later request finds KV of old weights.

        Raises ValueError with all that is wrong with names, shapes and dtypes. A mapping, its items and a sequence are
        checked before anything is written, and the old weights stay. With any other iterable, or where reading one
        fails midway, nothing can be generated (RuntimeError) until an update that is not partial is complete.
        """
        update = Update(named, checkpoint_parts(self.model_config), partial, self._interrupt.reading)

        def change() -> int:
            return _replace(self, update, version, in_flight)

        with self._interrupt:
            following: int = change() if self._team is None else self._team.call("update_weights", change, update)
            self._weights.version = following  # of ranks above 0, too
        return following

    @property
    def weight_version(self: Loop) -> int:
        """The version of the weights, as `update_weights` returned it; 0 before the first."""
        return self._weights.version

    @on_all_ranks
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
        wanted = _checked(self, "sleep", tags)
        self._settle()
        if self._active:
            raise ValueError(f"{len(self._active)} requests are in flight; finish or abort them before sleep")
        state = self._weights
        tired = wanted - state.asleep
        if not tired:
            return 0
        if "weights" in tired and not keep_weights:
            state.torn = DROPPED
        state.asleep |= tired  # first: wherever an exception comes, wake sets it right
        try:
            freed: int = self._runner.sleep(sorted(tired), keep_weights)
        except ValueError:
            self.wake(tired)
            raise
        return freed

    @on_all_ranks
    def wake(self: Loop, tags: str | Iterable[str] | None = None) -> None:
        """Take the memory again that `sleep` gave back, all or that of some tags, and fill it; what is awake stays so.

        A trainer may wake "weights" alone, call `update_weights`, give up its own memory, and wake the rest. Raises
        torch.OutOfMemoryError where the GPU has too little; then more can be freed, and wake called again.
        """
        state = self._weights
        wanted = _checked(self, "wake", TAGS if tags is None else tags) & state.asleep
        if not wanted:
            return
        self._runner.wake(sorted(wanted))
        if "kv_cache" in wanted:
            self._scheduler.pages.forget_pages()
        state.asleep -= wanted


def _replace(loop: Loop, update: Update, version: int | None, in_flight: str) -> int:
    """`update_weights`, on one rank."""
    _check_between(loop, "update_weights")
    state = loop._weights
    following = state.following(version)
    if in_flight not in IN_FLIGHT:
        raise ValueError(f"in_flight is {in_flight!r}; it must be one of {', '.join(map(repr, IN_FLIGHT))}")
    if "weights" in state.asleep:
        raise RuntimeError("the weights are asleep; call wake first, of 'weights' at least")
    if update.partial:
        state.check_whole()
    loop._settle()
    if loop._active and in_flight == "error":
        raise ValueError(
            f"{len(loop._active)} requests are in flight; finish or abort them, or pass in_flight='keep' (they go "
            "on with the KV of the old weights) or 'recompute' (it is computed again)"
        )

    def begin() -> None:
        state.torn = TORN
        loop._scheduler.forget_prefixes()
        if in_flight == "recompute":
            loop._scheduler.compute_again()

    try:
        loop._runner.update_weights(update, begin)
    except BaseException as error:
        if state.torn:
            error.add_note("until update_weights is called with all weights again, nothing can be generated")
            loop._reset()
        raise
    for sequence in loop._owners:
        sequence.begin_version(following)
    state.version, state.torn = following, ""
    return following


def _check_between(loop: Loop, name: str) -> None:
    """Raise RuntimeError where a method of this name can not be called now."""
    if loop._closed:
        raise RuntimeError("this Generator is closed; make a new one")
    if loop._stepping:
        raise RuntimeError(f"{name} is called from within a step; call it between two")


def _checked(loop: Loop, name: str, tags: str | Iterable[str]) -> frozenset[str]:
    _check_between(loop, name)
    wanted = frozenset((tags,) if isinstance(tags, str) else tags)
    unknown = wanted.difference(TAGS)
    if unknown:
        raise ValueError(f"tags has {', '.join(sorted(map(repr, unknown)))}; there are 'weights' and 'kv_cache'")
    return wanted
