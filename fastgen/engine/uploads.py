"""The arrays that the host sends for a step with prefills, in one copy: to new memory, or to fixed addresses that CUDA
graphs read.

Shape letters: T tokens in the step, with padding; C lanes whose KV lengths change; R draws.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device.pinned import Parts, upload_together
from fastgen.engine.step import Lanes, StepSequences
from fastgen.model.attention.interface import CapturableAttention
from fastgen.request import Batch

INT32: np.dtype[Any] = np.dtype(np.int32)
INT64: np.dtype[Any] = np.dtype(np.int64)
Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


class StepTensors(NamedTuple):
    """The arrays of a step on the device.

    rows: int64 [R], the row of the step that each draw reads. sources: int64 [R], the lane of this row. ends: int32
    [R], the KV length at this row, which is the position of the token to draw. draw_lanes: int64 [R], the lane that
    draws; a fork is not its own source. lanes: int64 [C]: the lanes that decode, those that prefill, and forks.
    kv_lens: int32 [C], their KV lengths after the step. decode_lens: int32 [D], D <= C, the same for the lanes that
    decode, perhaps followed by zeros for other lanes. ids, positions, slots: int64 [T], of which padding has the slot
    -1.
    """

    rows: Tensor
    sources: Tensor
    ends: Tensor
    draw_lanes: Tensor
    lanes: Tensor
    kv_lens: Tensor
    decode_lens: Tensor
    ids: Tensor
    positions: Tensor
    slots: Tensor


class StepArrays(NamedTuple):
    """The arrays of a step on the host; see StepTensors."""

    rows: Ints
    sources: Ints
    ends: Ints32
    draw_lanes: Ints
    lanes: Ints
    kv_lens: Ints32
    decode_lens: Ints32
    ids: Ints
    positions: Ints
    slots: Ints

    @classmethod
    def empty(cls, padding: int) -> StepArrays:
        """Return the arrays of a step that has only tokens of padding."""
        none, none32, zeros = np.zeros(0, INT64), np.zeros(0, INT32), np.zeros(padding, INT64)
        return cls(none, none, none32, none, none, none32, none32, zeros, zeros, zeros - 1)

    @classmethod
    def of(cls, batch: Batch, step: StepSequences, lanes: Lanes, padding: int) -> StepArrays:
        """Return the arrays of a batch with `padding` tokens of padding. step: the sequences of the batch."""
        changed = np.concatenate([step.lanes, step.forks])
        kv_lens = lanes.host_kv_lens[changed].astype(np.int32)
        positions = step.positions()
        slots = lanes.slots(np.repeat(step.lanes, step.query_lens), positions)
        return cls(
            rows=np.repeat(step.query_lens.cumsum() - 1, step.num_draws),
            sources=np.repeat(step.lanes, step.num_draws),
            ends=np.repeat(step.kv_lens, step.num_draws).astype(np.int32),
            draw_lanes=np.array(batch.sampling, dtype=np.int64),
            lanes=changed,
            kv_lens=kv_lens,
            decode_lens=kv_lens[: len(batch.decodes)],
            ids=step.token_ids(batch, padding),
            positions=_extended(positions, len(positions) + padding, 0),
            slots=_extended(slots, len(slots) + padding, -1),
        )

    def send(self, device: torch.device) -> StepTensors:
        """Copy the arrays to new memory."""
        return StepTensors(*upload_together(self, device))


class StepMemory:
    """Memory at fixed addresses for the arrays of a step and the lists of its prefill chunks (see Attention.lists).

    There is room for `lanes` draws and lanes. What follows the last draw repeats the first one, so that a graph of more
    draws writes equal results; what follows the last lane is the lane of padding, whose number is `lanes`. sizes: the
    numbers of tokens of the steps, padding included.
    """

    def __init__(self, lanes: int, attention: CapturableAttention, sizes: list[int], device: torch.device) -> None:
        self._lanes = lanes
        self._parts = {size: self._layout(size, attention.list_sizes(size)) for size in sizes}
        self._memory = torch.zeros(self._parts[sizes[-1]].size, dtype=torch.uint8, device=device)
        self._tensors = {size: parts.tensors(self._memory) for size, parts in self._parts.items()}

    def _layout(self, tokens: int, lists: list[int]) -> Parts:
        """Return the parts of a step: the fields of StepArrays, then lists of these maximum lengths."""
        lengths = [*[self._lanes] * 6, min(self._lanes, tokens), *[tokens] * 3, *lists]
        return Parts.of(lengths, [INT64, INT64, INT32, INT64, INT64, INT32, INT32, *[INT64] * 3, *[INT32] * len(lists)])

    def tensors(self, tokens: int) -> tuple[StepTensors, list[Tensor]]:
        """Return the arrays and lists of a step of `tokens` tokens, padding included."""
        parts, arrays = self._tensors[tokens], len(StepTensors._fields)
        return StepTensors(*parts[:arrays]), parts[arrays:]

    def send(self, arrays: StepArrays, lists: list[Ints32]) -> None:
        """Write a step in the order of the current stream; the host does not wait. lists: none for a step without
        prefill chunks."""
        parts, padding = self._parts[len(arrays.ids)], self._lanes
        lists = lists or [np.zeros(length, INT32) for length in parts.lengths[len(arrays) :]]  # lists of nothing
        draw = [x[0] for x in arrays[:3]] if len(arrays.rows) else [0, padding, 1]
        fills = [*draw, padding, padding, 0, 0, 0, 0, -1]
        host = parts.pack([*arrays, *lists], self._memory.device, fills)
        self._memory[: parts.size].copy_(host, non_blocking=True)


def _extended(array: Ints, size: int, fill: int) -> Ints:
    """Return an array with `fill` after its end, up to `size` elements."""
    longer = np.full(size, fill, dtype=array.dtype)
    longer[: len(array)] = array
    return longer
