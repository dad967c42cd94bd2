"""Changes of the weights of a running engine: updates, and memory that sleeps and wakes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastgen.engine.loop import Loop
from fastgen.engine.weight_state import DROPPED, TORN, InFlight, check_in_flight, check_tags
from fastgen.model.weights import Tensors

if TYPE_CHECKING:  # updates load with the first one
    from fastgen.model.weight_updates import WeightUpdate


class WeightChanges:
    """Changes the weights between two steps of a Loop, on rank 0 for all ranks; see the methods of Generator.

    adapter_base: the memory that keeps the weights without an adapter, an option of Generator.
    """

    def __init__(self, loop: Loop, adapter_base: str) -> None:
        self._loop, self._adapter_base = loop, adapter_base

    def update(self, update: WeightUpdate, version: int | None, in_flight: InFlight) -> int:
        """Update the weights, and return their version; see `Generator.update_weights`."""
        loop, weights = self._loop, self._loop.weight_state
        loop.check_open()
        following = weights.check_update(update, version, in_flight)
        loop.drain()
        check_in_flight(in_flight, len(loop.active))

        def begin() -> None:
            loop.runner.weights.keep_bases(update.adapted, self._adapter_base)
            weights.unusable = TORN
            loop.scheduler.drop_prefixes()
            if in_flight == "recompute":
                loop.scheduler.preempt_all()
            if in_flight == "abort":
                loop.cut_off(list(loop.active))

        try:
            loop.runner.weights.update(update, begin)
        except BaseException as error:
            if weights.unusable:
                error.add_note("until update_weights is called with all weights again, nothing can be generated")
                loop.reset()
            raise
        for sequence in loop.owners:
            sequence.begin_version(following)
        weights.finish(update, following)
        return following

    def update_drafter(self, named: Tensors) -> None:
        """Update the weights of the head that drafts; see `Generator.update_drafter`. The prefix cache is dropped,
        since it holds what the head keeps of earlier tokens."""
        loop = self._loop
        loop.check_open()
        if "weights" in loop.weight_state.asleep:
            raise RuntimeError("asleep: weights; call wake first")
        loop.drain()
        loop.runner.weights.update_drafter(named)
        loop.scheduler.drop_prefixes()

    def checksums(self) -> list[dict[str, str]]:
        """Return the checksums of the weights of each rank; see `Generator.weight_checksums`."""
        self._loop.check_open()
        self._loop.weight_state.check_awake()
        self._loop.drain()
        return self._loop.runner.weights.checksums()

    def sleep(self, tags: str | Iterable[str], keep_weights: bool) -> int:
        """Give memory back, and return the number of bytes; see `Generator.sleep`."""
        loop, weights = self._loop, self._loop.weight_state
        loop.check_open()
        new = check_tags(tags) - weights.asleep
        loop.drain()
        if loop.active:
            raise ValueError(f"requests are in flight ({len(loop.active)}); finish or abort them before sleep")
        if not new:
            return 0
        if "weights" in new and not keep_weights:
            weights.unusable = DROPPED
        weights.asleep |= new  # before the memory goes: after an exception, `wake` restores all of it
        try:
            freed = loop.runner.weights.sleep(sorted(new), keep_weights)
        except ValueError:
            self.wake(new)
            raise
        return freed

    def wake(self, tags: str | Iterable[str]) -> None:
        """Take back memory that sleeps; see `Generator.wake`."""
        loop, weights = self._loop, self._loop.weight_state
        loop.check_open()
        parts = check_tags(tags) & weights.asleep
        if not parts:
            return
        loop.runner.weights.wake(sorted(parts))
        if "kv_cache" in parts:
            loop.scheduler.drop_prefixes()
        weights.asleep -= parts
