"""The state of a Generator's weights: their version, and whether they can be used. It does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Literal, get_args

from fastgen.names import MAX_FAULTS

if TYPE_CHECKING:  # updates load with the first one
    from fastgen.model.weight_updates import WeightUpdate

InFlight = Literal["error", "keep", "recompute", "abort"]
"""The treatment of requests in the engine by an update; see `Generator.update_weights`."""
TAGS = ("weights", "kv_cache")  # the parts of the memory that can sleep
TORN = "the weights are torn, as an update was cut short or failed"
DROPPED = "the weights were dropped by sleep"


class WeightState:
    """The version of a Generator's weights, and whether they can be used.

    version: version of the weights in the model. unusable: why all weights have to be written again, or "". asleep:
    the parts of the memory that `sleep` has released. has_adapter: an adapter is merged. not_finite: names of weights
    that contain NaN or an infinity, or None before the first search. written: returns whether a trainer has written the
    weights in place since they got their version.
    """

    def __init__(self, has_adapter: bool) -> None:
        self.version = 0
        self.unusable = ""
        self.has_adapter = has_adapter
        self.asleep: frozenset[str] = frozenset()
        self.not_finite: list[str] | None = None
        self.written: Callable[[], bool] = lambda: False

    def check(self) -> None:
        """Raise RuntimeError if the model cannot generate because it is asleep, or because its weights are torn."""
        if self.asleep:
            raise RuntimeError(f"asleep: {', '.join(sorted(self.asleep))}; call wake first")
        self.check_whole()

    def check_awake(self) -> None:
        """Raise RuntimeError if the weights are asleep."""
        if "weights" in self.asleep:
            raise RuntimeError("the weights are asleep; call wake first, of 'weights' at least")

    def check_whole(self) -> None:
        """Raise RuntimeError if the weights are torn."""
        if self.unusable:
            raise RuntimeError(f"{self.unusable}; call update_weights with all of them")

    def check_committed(self) -> None:
        """Raise RuntimeError if the weights are newer than their version, and than cached prefixes."""
        if self.written():
            raise RuntimeError("the weights were trained after their last commit; call commit() of the Policy first")

    def blame(self, find_not_finite: Callable[[], list[str]]) -> str:
        """Return the end of a message about logits that are not finite: the names of weights that are not finite."""
        if self.not_finite is None:
            self.not_finite = find_not_finite()
        if not self.not_finite:
            return ""
        more = f" and {len(self.not_finite) - MAX_FAULTS} more" if len(self.not_finite) > MAX_FAULTS else ""
        return f", nor are the weights {', '.join(self.not_finite[:MAX_FAULTS])}{more}; load or update them again"

    def check_update(self, update: WeightUpdate, version: int | None, in_flight: InFlight) -> int:
        """Return the version after an update: `version`, or the next number if it is None.

        Raises TypeError for a version that is not an integer, ValueError for the current version, and ValueError or
        RuntimeError if the update cannot begin now.
        """
        if version is None:
            version = self.version + 1
        elif not isinstance(version, Integral) or isinstance(version, bool):
            raise TypeError(f"version must be an integer, not {version!r}")
        if version == self.version:
            raise ValueError(f"version is {version}, which is the current one; give another, or none")
        if in_flight not in (choices := get_args(InFlight)):
            raise ValueError(f"in_flight is {in_flight!r}; it must be one of {', '.join(map(repr, choices))}")
        self.check_awake()
        if update.partial or update.merges:
            self.check_whole()
        if update.partial and self.has_adapter:
            raise ValueError("partial=True with an adapter in the weights; call update_adapter(None) first")
        return int(version)

    def finish(self, update: WeightUpdate, version: int) -> None:
        """Note that an update is complete."""
        self.version, self.unusable, self.not_finite = version, "", None
        self.has_adapter = update.merges and bool(update.names)


def check_tags(tags: str | Iterable[str] | None) -> frozenset[str]:
    """Return the parts of the memory to put to sleep; None stands for all. Raises ValueError for an unknown one."""
    parts = frozenset((tags,) if isinstance(tags, str | int) else TAGS if tags is None else tags)
    if unknown := parts.difference(TAGS):
        raise ValueError(f"tags has {', '.join(sorted(map(repr, unknown)))}; there are {' and '.join(map(repr, TAGS))}")
    return parts


def check_in_flight(treatment: str, requests: int) -> None:
    """Raise ValueError if there are requests in flight and their treatment is "error"."""
    if requests and treatment == "error":
        raise ValueError(
            f"requests are in flight ({requests}); finish or abort them, or pass in_flight='keep' (they continue with "
            "the KV of the old weights), 'recompute' (their KV is computed again) or 'abort'"
        )
