"""Sparse deltas: new values of some elements of a weight, which a partial update takes instead of a tensor.

Most weights in bfloat16 do not change in a step of RL, so that the changed elements are a small part of the model. A
delta holds the new values, not differences: applying it twice changes nothing more. It travels, to ranks and over the
wire, as one tensor under the weight's name with the suffix DELTA. A copy of the weights in host memory takes deltas in
place; a tensor whose dtype cannot hold the new values exactly becomes float64 there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

DELTA = ":delta"
AT_ONCE = 1 << 22  # maximum number of elements that are written at a time
INTEGERS = (torch.int64, torch.int32)


class Slice(Protocol):
    """The fields of model.weights.Shard that are used here."""

    @property
    def view(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dim(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def scales(self) -> Tensor | None: ...
    @property
    def is_whole(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class Delta:
    """New values of a weight's elements. packed: float64 [2, n], the flat indices of the elements in the whole tensor,
    in increasing order, and their values; float64 holds all indices and values exactly."""

    packed: Tensor

    @classmethod
    def of(cls, name: str, given: Any) -> Delta:
        """Return the delta of a pair of tensors, indices and values. Raises ValueError for anything else."""
        pair = list(given)
        if len(pair) != 2 or not all(isinstance(each, Tensor) for each in pair):
            raise ValueError(f"{name!r} has a {type(given).__name__} that is not a pair of tensors (indices, values)")
        indices, values = (each.detach() for each in pair)
        if indices.dim() != 1 or indices.shape != values.shape:
            shapes = f"{list(indices.shape)} and {list(values.shape)}"
            raise ValueError(f"the delta of {name!r} has shapes {shapes}; give two vectors of the same length")
        if indices.dtype not in INTEGERS or not values.dtype.is_floating_point:
            kinds = f"{indices.dtype} and {values.dtype}"
            raise ValueError(f"the delta of {name!r} has {kinds}; give indices in int64 and values in a float dtype")
        return cls(torch.stack((indices.double(), values.to(indices.device).double())))

    def check(self, name: str, shard: Slice, partial: bool) -> None:
        """Raise ValueError if this is no delta of the weight with this shard."""
        if not partial:
            raise ValueError(f"{name!r} has a delta, which only partial=True allows")
        if shard.scales is not None or not shard.shape:
            raise ValueError(f"{name!r} is quantized, and deltas of quantized weights are not supported; give it whole")
        if self.packed.dim() != 2 or len(self.packed) != 2 or self.packed.dtype != torch.float64:
            kind = f"{self.packed.dtype} {list(self.packed.shape)}"
            raise ValueError(f"the delta of {name!r} is {kind}; packed deltas are float64 [2, n]")
        indices, size = self.packed[0], math.prod(shard.shape)
        if not bool((indices.diff() > 0).all()) or bool((indices != indices.floor()).any()):
            raise ValueError(f"the indices in the delta of {name!r} do not increase; sort them, each one once")
        if len(indices) and (float(indices[0]) < 0 or float(indices[-1]) >= size):
            raise ValueError(f"the delta of {name!r} has indices outside of its {size} elements")

    def applied_to(self, whole: Tensor) -> Tensor:
        """Return a whole tensor with the values of this delta: the same tensor, changed in place, unless another dtype
        is needed to hold them exactly."""
        indices, values = self.packed[0].long(), self.packed[1]
        exact = torch.equal(values.to(whole.dtype).double(), values)
        whole = (whole if exact else whole.double()).contiguous()
        whole.view(-1)[indices] = values.to(whole.dtype)
        return whole

    def then(self, later: Delta) -> Delta:
        """Return the delta that does what this one and a later one do."""
        both = torch.cat((self.packed, later.packed), 1)
        indices, order = both[0].sort(stable=True)
        last = torch.cat((indices.diff() != 0, indices.new_ones(min(len(indices), 1), dtype=torch.bool)))
        return Delta(both[:, order[last]])


class DeltaTarget:
    """Writes deltas of a weight into a rank's slice of it."""

    def __init__(self, shard: Slice) -> None:
        self._shard = shard

    def write(self, packed: Tensor) -> None:
        """Write a packed delta."""
        for part in torch.split(packed.to(self._shard.view.device), AT_ONCE, 1):
            self._write_part(part[0].long(), part[1])

    def _write_part(self, indices: Tensor, values: Tensor) -> None:
        shard, view = self._shard, self._shard.view.detach()
        if view.dim() == 1 or shard.is_whole or shard.dim == 0:  # a range of the whole tensor's elements
            local = indices - shard.start * (view.shape[1] if view.dim() > 1 else 1)
            inside = (local >= 0) & (local < view.numel())
            view.view(-1)[local[inside]] = values[inside].to(view.dtype)
            return
        rows, columns = indices // shard.shape[1], indices % shard.shape[1] - shard.start
        inside = (columns >= 0) & (columns < view.shape[1])
        view[rows[inside], columns[inside]] = values[inside].to(view.dtype)


def delta_targets(shards: Mapping[str, Slice]) -> dict[str, DeltaTarget]:
    """Return what writes the deltas of each weight, by the name under which they travel."""
    return {name + DELTA: DeltaTarget(shard) for name, shard in shards.items()}
