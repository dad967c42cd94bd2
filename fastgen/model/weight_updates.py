"""Updates of the weights: tensors that a program gives, checked against the model."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.model.deltas import DELTA, Delta
from fastgen.model.tied import Tie
from fastgen.model.weights import UNEXPECTED, Shard, TensorMatcher, shard_of, text_name
from fastgen.names import MAX_FAULTS


class WeightUpdate:
    """A weight update: tensors that a program gives as a mapping or as an iterable of (name, tensor).

    shards: the whole tensors of the model by Hugging Face name; only their shapes are used. partial: tensors may be
    missing. reading: a function that wraps the iterable while it is read. names: names of the tensors that matched in
    the last pass over `tensors`. merges: the update merges an adapter. adapted: see `AdapterUpdate`. tie: of a
    tied model that is updated; None if only names and shapes are checked.
    """

    unexpected = UNEXPECTED
    merges = False
    adapted: frozenset[str] = frozenset()

    def __init__(
        self,
        given: Any,
        shards: Mapping[str, Shard],
        partial: bool = False,
        reading: Callable[[Iterable[Any]], Iterator[Any]] = iter,
        tie: Tie | None = None,
    ) -> None:
        self.partial = partial
        self.names: list[str] = []
        self._given, self._shards, self._reading, self._tie = given, shards, reading, tie

    def check(self) -> None:
        """Check all tensors against the model before any is written, if they can be read twice: a mapping, its items
        and a sequence can. Raises ValueError as `tensors` does, and TypeError for an object that is not iterable."""
        _check_iterable(self._given)
        if isinstance(self._given, Mapping | ItemsView | Sequence):
            for _ in self._followed(copy(self._tie)):
                pass

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that match the model. No reference to a tensor is kept while the next one is made.

        After the last tensor, raise ValueError with all faults: names that are unexpected, given twice or missing, and
        shapes and dtypes that do not match. It is not raised earlier, because the iterables of several ranks may make
        their tensors together.
        """
        return self._followed(self._tie)

    def _followed(self, tie: Tie | None) -> Iterator[tuple[str, Tensor]]:
        return self._matched() if tie is None else tie.follow(self._matched(), self.partial)

    def _matched(self) -> Iterator[tuple[str, Tensor]]:
        matcher, self.names = TensorMatcher(self._shards, self.unexpected), []
        faults: list[str] = []
        for item in self._reading(self._given.items() if isinstance(self._given, Mapping) else self._given):
            try:
                name, tensor = _checked(item)
                name = travels = text_name(name)
                shape: Sequence[int] = tensor.shape
                dtype = tensor.dtype
                if name.endswith(DELTA):
                    name = name.removesuffix(DELTA)
                    shape, dtype = self._check_delta(name, tensor)
                has_shard = matcher.find(name, shape, dtype) is not None
            except ValueError as error:
                if str(error) not in faults:  # a thousand items without a name have the same fault
                    faults.append(str(error))
                continue
            finally:
                del item
            if has_shard:
                self.names.append(name)
                yield travels, tensor
            del tensor
        complete: list[Callable[[], None]] = [] if self.partial else [partial(matcher.check_complete, MAX_FAULTS)]
        for check in (*complete, matcher.check_names):
            try:
                check()
            except ValueError as error:
                faults.insert(0, str(error))
        if self.partial and not self.names and not faults:
            faults.append("no tensors are given")
        if faults:
            more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
            raise ValueError("\n  ".join(["the weights do not fit the model:", *faults[:MAX_FAULTS], *more]))

    def _check_delta(self, name: str, packed: Tensor) -> tuple[Sequence[int], torch.dtype]:
        """Check a delta of the model's weight. Return the shape of the weight, and a dtype that it takes; those of the
        delta if there is no such weight."""
        shard = shard_of(name, self._shards)
        if shard is None:
            return packed.shape, packed.dtype
        Delta(packed).check(name, shard, self.partial)
        return shard.shape, torch.float64


class WrittenUpdate(WeightUpdate):
    """A weight update whose tensors a trainer has written already, into the memory of the weights."""

    def __init__(self) -> None:
        super().__init__((), {})


def named_items(given: Any) -> list[tuple[str, Any]]:
    """Return the tensors that a program sends to another one as a list, where each delta is one tensor, under the name
    with which it travels. DTensors stay as they are. Raises TypeError or ValueError for what cannot be sent."""
    _check_iterable(given)
    items = given.items() if isinstance(given, Mapping) else given
    return [(item[0], item[1]) if _is_sharded(item) else _checked(item) for item in items]


def _check_iterable(given: object) -> None:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        kind = type(given).__name__
        raise TypeError(f"the weights must be a mapping, or an iterable of (name, tensor), not {kind}")


def _is_sharded(item: Any) -> bool:
    """Return whether an item has a name and a DTensor."""
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and isinstance(item[0], str)
        and hasattr(item[1], "full_tensor")
    )


def _checked(item: Any) -> tuple[str, Tensor]:
    """Return the name and tensor of an item, where a delta has the name with which it travels. Raises ValueError for
    another item, or a tensor that cannot be copied."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ValueError(f"{type(item).__name__} is given, and no (name, tensor)")
    name, tensor = item
    if isinstance(name, str) and isinstance(tensor, tuple | list):
        name, tensor = name + DELTA, Delta.of(name, tensor).packed
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise ValueError(f"({type(name).__name__}, {type(tensor).__name__}) is given, and no (name, tensor)")
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"tensor {name!r} is a DTensor; give its full_tensor()")
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensor {name!r} is {tensor.layout} on {tensor.device}; give a dense one on a CPU or GPU")
    return name, tensor
