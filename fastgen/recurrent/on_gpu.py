"""Recurrent layers on a GPU: the plans of steps, and the launches of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.device.chip import power_of_two
from fastgen.device.pinned import upload
from fastgen.model.attention.interface import StepLayout
from fastgen.model.recurrent_layers import DELTA_HEAD, DeltaWeights, Recurrent
from fastgen.recurrent import decode_kernels, prefill_kernels
from fastgen.recurrent.planning import BLOCK
from fastgen.recurrent.states import PART, LaneStates

HEADER, CHUNK_FIELDS, BLOCK_FIELDS = 2, 8, 2
CHANNELS = 64  # per program of the convolution
FEW_LANES = 4  # up to which a decode takes half a head per program


@dataclass(frozen=True)
class MixPlan:
    """lanes, kv_lens: of the sequences that decode, the first rows of the step; kv_len 0: none. lists: of the prefill
    chunks, see arithmetic.py; None: none. chunks, blocks: the largest numbers of them."""

    lanes: Tensor
    kv_lens: Tensor
    lists: Tensor | None = None
    chunks: int = 0
    blocks: int = 0


class GpuMixer:
    """Computes recurrent layers; see HybridAttention. lanes: of sequences; max_seqs of them may be in a step. eps: of
    the norm of outputs."""

    def __init__(self, shape: Recurrent, lanes: LaneStates, max_seqs: int, eps: float) -> None:
        self._shape, self._eps, self._max_seqs = shape, eps, max_seqs
        self._layers = [lanes.layer(number) for number in range(len(shape.layers))]
        self._device = lanes.state.device
        self._room: dict[int, tuple[int, int]] = {}  # by the size of a list: the most chunks and blocks that it holds

    # ------------------------------------------------------------------------------------------------ plans

    def plan(self, layout: StepLayout) -> MixPlan:
        decodes = layout.decodes
        lanes = upload(layout.lanes[:decodes].astype(np.int64), self._device)
        kv_lens = upload(layout.kv_lens[:decodes].astype(np.int32), self._device)
        if len(layout.query_lens) == decodes:
            return MixPlan(lanes, kv_lens)
        numbers = lists_of(layout)
        return MixPlan(lanes, kv_lens, upload(numbers, self._device), int(numbers[0]), int(numbers[1]))

    def plan_decode(self, lanes: Tensor, kv_lens: Tensor) -> MixPlan:
        return MixPlan(lanes, kv_lens)

    def lists(self, layout: StepLayout) -> list[NDArray[np.int32]]:
        return [lists_of(layout)]

    def list_sizes(self, tokens: int) -> list[int]:
        chunks = min(tokens, self._max_seqs)
        blocks = min(tokens, tokens // BLOCK + 2 * chunks)
        size = HEADER + chunks * CHUNK_FIELDS + blocks * BLOCK_FIELDS
        self._room[size] = chunks, blocks
        return [size]

    def plan_lists(self, lanes: Tensor, kv_lens: Tensor, lists: Sequence[Tensor]) -> MixPlan:
        if not lists:
            return MixPlan(lanes, kv_lens)
        (made,) = lists
        return MixPlan(lanes, kv_lens, made, *self._room[len(made)])

    # ------------------------------------------------------------------------------------------------ layers

    def mix(self, plan: MixPlan, number: int, weights: DeltaWeights, x: Tensor) -> Tensor:
        lanes, shape = self._layers[number], self._shape
        results = torch.empty(len(x), shape.value_size, dtype=x.dtype, device=x.device)
        if len(plan.lanes):
            self._decode(plan, lanes, weights, x, results)
        if plan.lists is not None:
            self._prefill(plan, plan.lists, lanes, weights, x, results)
        out = torch.empty_like(results)
        decode_kernels.gate_kernel[(-(-len(x) // 16), shape.value_heads)](
            results, x, weights.norm, out, len(x), self._eps, shape.value_heads, shape.outputs, DELTA_HEAD,
            num_warps=4,
        )  # fmt: skip
        return out

    def _decode(self, plan: MixPlan, lanes: LaneStates, weights: DeltaWeights, x: Tensor, results: Tensor) -> None:
        shape, rows, size = self._shape, len(plan.lanes), DELTA_HEAD
        heads, group = shape.value_heads, shape.value_heads // shape.key_heads
        mixed = torch.empty(rows, shape.channels, dtype=x.dtype, device=x.device)
        gates = torch.empty(rows, 2, heads, device=x.device)
        decode_kernels.decode_inputs_kernel[(rows, -(-shape.channels // 1024))](
            x, plan.lanes, plan.kv_lens, weights.taps, weights.step, weights.decay, lanes.inputs, lanes.border_inputs,
            mixed, gates, heads, shape.channels, shape.outputs, 1024, power_of_two(heads), num_warps=4,
        )  # fmt: skip
        few = rows <= FEW_LANES
        columns = 64 if few else 128
        decode_kernels.decode_kernel[(size // columns, heads, rows)](
            mixed, gates, plan.lanes, plan.kv_lens, lanes.rounded, lanes.keys, lanes.factors, lanes.strengths,
            lanes.decays, lanes.residuals, lanes.writes, lanes.inverse, results, heads, group, size, columns, 32,
            PART, 3, num_warps=4 if few else 2, maxnreg=128 if few else 200,
        )  # fmt: skip
        decode_kernels.advance_kernel[(size // 32, heads, rows)](
            plan.lanes, plan.kv_lens, lanes.state, lanes.rounded, lanes.keys, lanes.factors, lanes.decays, lanes.writes,
            heads, group, size, 32, num_warps=4,
        )  # fmt: skip

    def _prefill(
        self, plan: MixPlan, lists: Tensor, lanes: LaneStates, weights: DeltaWeights, x: Tensor, results: Tensor
    ) -> None:
        shape, blocks, size = self._shape, plan.blocks, DELTA_HEAD
        heads, kinds, group = shape.value_heads, shape.key_heads, shape.value_heads // shape.key_heads
        width, places = kinds * size, power_of_two(heads)

        def buffer(*sizes: int, dtype: torch.dtype = x.dtype) -> Tensor:
            return torch.empty(blocks, *sizes, dtype=dtype, device=x.device)

        mixed, gates = buffer(BLOCK, shape.channels), buffer(BLOCK, 2, heads, dtype=torch.float32)
        decays, factors = buffer(BLOCK, heads, dtype=torch.float32), buffer(BLOCK, kinds, dtype=torch.float32)
        matrices, states, writes = buffer(heads, BLOCK, BLOCK), buffer(heads, size, size), buffer(BLOCK, heads, size)
        tiles = -(-shape.channels // CHANNELS)
        prefill_kernels.block_inputs_kernel[(blocks, tiles)](
            x, lists, weights.taps, weights.step, weights.decay, lanes.inputs, lanes.keys, lanes.strengths, mixed,
            gates, heads, shape.channels, shape.outputs, width, CHANNELS, places, num_warps=4,
        )  # fmt: skip
        prefill_kernels.sum_decays_kernel[(blocks,)](lists, lanes.decays, gates, decays, heads, places, num_warps=1)
        prefill_kernels.matrices_kernel[(BLOCK // PART, blocks, heads)](
            lists, mixed, gates, decays, factors, matrices, lanes.inverse, heads, group, size, num_warps=1
        )
        prefill_kernels.scan_kernel[(size // 32, heads, plan.chunks)](
            lists, mixed, gates, decays, factors, matrices, states, writes, lanes.state, lanes.rounded, lanes.residuals,
            lanes.writes, heads, group, size, 32, 3, num_warps=4,
        )  # fmt: skip
        prefill_kernels.outputs_kernel[(size // 64, heads, blocks)](
            lists, mixed, decays, factors, states, writes, results, heads, group, size, 64, num_warps=4
        )
        prefill_kernels.keep_kernel[(plan.chunks, tiles)](
            x, lists, mixed, gates, decays, factors, lanes.inputs, lanes.border_inputs, lanes.keys, lanes.factors,
            lanes.strengths, lanes.decays, heads, shape.channels, shape.outputs, width, kinds, CHANNELS, places,
            num_warps=4,
        )  # fmt: skip


def lists_of(layout: StepLayout) -> NDArray[np.int32]:
    """Return the lists of the prefill chunks of a step; see arithmetic.py."""
    first = (np.cumsum(layout.query_lens) - layout.query_lens)[layout.decodes :]
    lengths, ends, lanes = (each[layout.decodes :] for each in (layout.query_lens, layout.kv_lens, layout.lanes))
    starts = ends - lengths
    counts = -(-ends // BLOCK) - starts // BLOCK
    before = np.cumsum(counts) - counts
    chunks = np.zeros((len(ends), CHUNK_FIELDS), dtype=np.int32)
    chunks[:, :5] = np.stack([lanes, starts, ends, first, before], 1)
    of_blocks = np.repeat(np.arange(len(ends)), counts)
    positions = (np.arange(len(of_blocks)) - before[of_blocks] + (starts // BLOCK)[of_blocks]) * BLOCK
    blocks = np.stack([of_blocks, positions], 1).astype(np.int32)
    header = np.array([len(chunks), len(blocks)], dtype=np.int32)
    return np.concatenate([header, chunks.ravel(), blocks.ravel()])
