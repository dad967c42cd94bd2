"""Updates of the weights: what a program gives is held to the model, and copied over what is there."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

LISTED = 20  # names, or faults, that an error lists
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Supported dtypes of weights, by their names in safetensors files."""


@dataclass(frozen=True)
class Shard:
    """The slice of one checkpoint tensor that a rank holds, and its place in the rank's memory.

    view: the tensor that the slice is copied into, often a part of a fused parameter. shape: of the whole checkpoint
    tensor. The slice covers indices start .. start + view.shape[dim] - 1 of dimension dim (0: rows, 1: columns) and all
    of the others. It may be empty, as a bias that another rank adds.
    """

    view: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        held = tuple(self.view.shape)
        if held == self.shape:
            assert self.start == 0
            return
        assert self.dim in (0, 1)
        assert 0 <= self.start <= self.start + held[self.dim] <= self.shape[self.dim]
        assert held == (*self.shape[: self.dim], held[self.dim], *self.shape[self.dim + 1 :])

    @classmethod
    def whole(cls, view: Tensor) -> Shard:
        """Return the shard that is all of a tensor."""
        return cls(view, tuple(view.shape))

    @property
    def is_whole(self) -> bool:
        return self.view.shape == self.shape

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice of a whole tensor [*shape], as a view of it."""
        return tensor if self.is_whole else tensor.narrow(self.dim, self.start, self.view.shape[self.dim])


class TensorMatcher:
    """The check of a checkpoint's tensors against `targets`, the model's shards by Hugging Face name."""

    def __init__(self, targets: Mapping[str, Shard]) -> None:
        self._targets = targets
        self._seen: set[str] = set()

    def find(self, name: str, shape: Sequence[int], dtype: torch.dtype | str) -> Shard | None:
        """Return the shard to take of a tensor; None for a tensor that is to be skipped.

        Raises ValueError for a tensor that is unexpected or doubled, or has another shape or an unsupported dtype.
        """
        shard = self._targets.get(name)
        if shard is None:
            if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight":
                return None
            raise ValueError(f"unexpected tensor {name!r}; the model of this config.json has no such parameter")
        if name in self._seen:
            raise ValueError(f"tensor {name!r} is given twice")
        self._seen.add(name)
        if list(shape) != list(shard.shape):
            raise ValueError(f"tensor {name!r} has shape {list(shape)}; the model needs {list(shard.shape)}")
        if dtype not in FLOATS.values():
            raise ValueError(f"tensor {name!r} is {dtype}; bfloat16, float16 and float32 weights are supported")
        return shard

    def check_complete(self, listed: int = 5) -> None:
        """Raise ValueError with the names of up to `listed` missing tensors, if any are missing."""
        missing = [name for name in self._targets if name not in self._seen]
        if missing:
            more = f" and {len(missing) - listed} more" if len(missing) > listed else ""
            names = ", ".join(missing[:listed])
            raise ValueError(f"missing {len(missing)} of {len(self._targets)} tensors: {names}{more}")


class Update:
    """The tensors of an update, as a program gives them: a mapping, or an iterable of (name, tensor).

    parts: Hugging Face parameter name -> the whole tensor of the model; its shape counts. partial: tensors may be
    missing. reading: what the iterable is read through. names: those that were found right when the tensors were last
    looked at.
    """

    def __init__(
        self,
        given: Any,
        parts: Mapping[str, Shard],
        partial: bool = False,
        reading: Callable[[Iterable[Any]], Iterator[Any]] = iter,
    ) -> None:
        self.partial = partial
        self.names: list[str] = []
        self._given, self._parts, self._reading = given, parts, reading

    def check(self) -> None:
        """Hold all tensors to the model, where they can be looked at twice: of a mapping, its items or a sequence.

        Raises ValueError as `tensors` does, and TypeError for what is no iterable.
        """
        if not isinstance(self._given, Iterable):
            kind = type(self._given).__name__
            raise TypeError(f"the weights must be a mapping, or an iterable of (name, tensor), not {kind}")
        if isinstance(self._given, Mapping | ItemsView | Sequence):
            for _ in self.tensors():
                pass

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those that the model has a place for, one at a time; none is held while the next is made.

        Raises ValueError behind the last, with all that is wrong: names that are unexpected, doubled or missing, and
        shapes and dtypes that do not fit. (Not before: the iterables of several ranks may make them together.)
        """
        matcher, faults, self.names = TensorMatcher(self._parts), [], []
        for item in self._reading(self._given.items() if isinstance(self._given, Mapping) else self._given):
            try:
                name, tensor = _checked(item)
                known = matcher.find(name, tensor.shape, tensor.dtype) is not None
            except ValueError as error:
                faults.append(str(error))
                continue
            finally:
                del item
            if known:
                self.names.append(name)
                yield name, tensor
            del tensor
        try:
            if not self.partial:
                matcher.check_complete(LISTED)
        except ValueError as error:
            faults.insert(0, str(error))
        if self.partial and not self.names:
            faults.append("no tensors are given")
        if faults:
            more = [f"and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
            raise ValueError("\n  ".join(["the weights do not fit the model:", *faults[:LISTED], *more]))


def _checked(item: Any) -> tuple[str, Tensor]:
    """A name and a tensor that can be copied from. Raises ValueError where these are not."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ValueError(f"{type(item).__name__} is given, and no (name, tensor)")
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise ValueError(f"({type(name).__name__}, {type(tensor).__name__}) is given, and no (name, tensor)")
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"tensor {name!r} is a DTensor; give its full_tensor()")
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensor {name!r} is {tensor.layout} on {tensor.device}; give a dense one on a CPU or GPU")
    return name, tensor


def write(targets: Mapping[str, Shard], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each whole tensor's part into its view, in place, converting dtype and device.

    Where a copy fails, the rest is still read, since other ranks may make it together with this one; then it raises.
    """
    failure: Exception | None = None
    for name, tensor in tensors:
        try:
            part = targets[name]
            with torch.no_grad():
                part.view.copy_(_near(part.of(tensor), part.view.device))
        except Exception as error:
            failure = failure or error
        del tensor
    if failure is not None:
        raise failure


def _near(tensor: Tensor, device: torch.device) -> Tensor:
    """On `device` where it is on another GPU: that one can not write to memory which is mapped for ours alone (see
    fastgen.device.memory)."""
    return tensor.to(device) if tensor.is_cuda and tensor.device != device else tensor


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
