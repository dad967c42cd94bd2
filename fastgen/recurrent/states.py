"""The memory of recurrent layers on the device. Each lane holds a sequence's state and the rows of its current block;
each slot holds a state that is kept for prefixes.

Shape letters: R recurrent layers, L lanes, K key heads, H value heads, D head size (128), C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fastgen.device.memory import Memory
from fastgen.model.recurrent_layers import DELTA_HEAD, DELTA_TAPS, Recurrent
from fastgen.recurrent.planning import BLOCK

PART = 16  # tokens of a block that are solved together
MOVED = 1 << 28  # bytes of states that are moved at once, unless one lane has more; moves take as much memory


@dataclass(frozen=True)
class LaneStates:
    """The states of all lanes, which may hold anything before a sequence begins.

    A sequence's position p is in row p % 64 of its block. Rows after that of the last token are not used yet.
    """

    state: Tensor  # [R, L, H, D, D] float32: at the start of the current block
    rounded: Tensor  # [R, L, H, D, D]: the same in the dtype of the products
    inputs: Tensor  # [R, L, 3, C]: the last inputs of the convolution
    border_inputs: Tensor  # [R, L, 3, C]: those at the start of the current block
    keys: Tensor  # [R, L, 64, K, D], not normalized
    factors: Tensor  # [R, L, 64, K] float32, which normalize them
    strengths: Tensor  # [R, L, 64, H] float32: beta
    decays: Tensor  # [R, L, 64, H] float32: sums of logs of decays from the block's first token on
    residuals: Tensor  # [R, L, 16, H, D]: of the tokens' part of the block
    writes: Tensor  # [R, L, 64, H, D]
    inverse: Tensor  # [R, L, H, 16, 16] float32: of the part

    @classmethod
    def empty(cls, shape: Recurrent, lanes: int, dtype: torch.dtype, memory: Memory) -> LaneStates:
        layers, kinds, heads, size = len(shape.layers), shape.key_heads, shape.value_heads, DELTA_HEAD

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return memory.zeros((layers, lanes, *sizes), dtype)

        state = zeros(heads, size, size)
        return cls(
            state=state,
            rounded=state if dtype == torch.float32 else zeros(heads, size, size, dtype=dtype),
            inputs=zeros(DELTA_TAPS - 1, shape.channels, dtype=dtype),
            border_inputs=zeros(DELTA_TAPS - 1, shape.channels, dtype=dtype),
            keys=zeros(BLOCK, kinds, size, dtype=dtype),
            factors=zeros(BLOCK, kinds),
            strengths=zeros(BLOCK, heads),
            decays=zeros(BLOCK, heads),
            residuals=zeros(PART, heads, size, dtype=dtype),
            writes=zeros(BLOCK, heads, size, dtype=dtype),
            inverse=zeros(heads, PART, PART),
        )

    def layer(self, number: int) -> LaneStates:
        """Return the states of the `number`-th recurrent layer; tensors begin with L."""
        return LaneStates(*(getattr(self, field.name)[number] for field in fields(self)))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy lanes to other lanes, both int64 [n]. No lane is in both."""
        for some, others in _in_parts(self.state, sources, targets):
            for field in fields(self):
                tensor = getattr(self, field.name)
                tensor.index_copy_(1, others, tensor.index_select(1, some))


class KeptStates:
    """States at block borders for prefixes: [R, slots, H, D, D] float32, and [R, slots, 3, C]."""

    def __init__(self, lanes: LaneStates, slots: int, memory: Memory) -> None:
        self._lanes, self.slots = lanes, slots
        self._state, self._inputs = (
            memory.zeros((len(each), slots, *each.shape[2:]), each.dtype) for each in (lanes.state, lanes.border_inputs)
        )

    def save(self, lanes: Tensor, slots: Tensor) -> None:
        """Keep the states of lanes in slots, both int64 [n]."""
        for some, others in _in_parts(self._state, lanes, slots):
            self._state.index_copy_(1, others, self._lanes.state.index_select(1, some))
            self._inputs.index_copy_(1, others, self._lanes.border_inputs.index_select(1, some))

    def restore(self, slots: Tensor, lanes: Tensor) -> None:
        """Let lanes continue from the states in slots, at a border."""
        own = self._lanes
        for some, others in _in_parts(self._state, slots, lanes):
            state, inputs = self._state.index_select(1, some), self._inputs.index_select(1, some)
            own.state.index_copy_(1, others, state)
            if own.rounded is not own.state:
                own.rounded.index_copy_(1, others, state.to(own.rounded.dtype))
            for target in (own.inputs, own.border_inputs):
                target.index_copy_(1, others, inputs)


def _in_parts(states: Tensor, sources: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sources and targets, both int64 [n], so many at a time that their states, [R, ?, H, D, D], have at most
    MOVED bytes."""
    each = states[:, 0].numel() * states.element_size()
    most = max(MOVED // each, 1)
    return zip(torch.split(sources, most), torch.split(targets, most), strict=True)
