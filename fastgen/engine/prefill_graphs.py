"""CUDA graphs of steps with prefills of few tokens: everything but the attention of a forward pass.

Launched kernel by kernel, such a step takes as long as the host needs for its launches, which is longer than the GPU
needs. A CUDA graph can not hold the attention of prefill chunks, whose grids and work lists differ from step to step.
So each graph goes from one layer's attention to the next one's: the o projection and MLP of a layer, then the queries,
keys and values of the next. The last layer's attention and MLP are launched kernel by kernel too, since they are
computed for the wanted rows alone.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from fastgen.device.cuda_graphs import Graphs
from fastgen.device.profiling import span
from fastgen.model.attention import Attention
from fastgen.model.kv_pool import KVPool
from fastgen.model.transformer import Microbatch, StepInput, Transformer
from fastgen.parallel.residual import ReplicatedResidual

SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Step sizes, in tokens, that are captured; few, since each takes a graph for each layer. Multiples of ROW_TILE."""


def prefill_sizes(most: int) -> list[int]:
    """Return the SIZES up to `most`, the tokens of the largest step."""
    return [size for size in SIZES if size <= most]


class PrefillGraphs:
    """Captures graphs for steps of `sizes` tokens (ascending), and runs steps through them.

    beside: graphs to share a memory pool with. The number of a graph is its size times the number of layers, plus the
    layer whose queries it ends with.
    """

    def __init__(self, model: Transformer, pool: KVPool, sizes: list[int], beside: Graphs) -> None:
        self.sizes = sizes
        self._model, self._pool = model, pool
        self._layers = len(model.layers)
        heads, head_size, like = model.config.num_heads, model.config.head_size, model.embedding
        most = sizes[-1]
        # The inputs of the graphs, and what they hand to each other and to attention, at fixed addresses.
        self._ids, self._positions, self._slots = torch.zeros(3, most, dtype=torch.int64, device=like.device)
        self._slots.fill_(-1)
        self._x = like.new_zeros(most, model.config.hidden_size)
        self._q = like.new_zeros(most, heads, head_size)
        self._attended = like.new_zeros(most, heads * head_size)
        numbers = [size * self._layers + layer for size in sizes for layer in range(self._layers)]
        self.graphs = Graphs(numbers, like.device, beside)
        self.graphs.capture(self._launch)

    def size_of(self, tokens: int) -> int:
        """Return the size that a step of `tokens` tokens, at most sizes[-1], is padded to."""
        return self.sizes[bisect.bisect_left(self.sizes, tokens)]

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """Do what `Transformer.forward` does for a step that is padded to one of `sizes`. The next call may overwrite
        the result."""
        size, model = len(step.token_ids), self._model
        self._ids[:size] = step.token_ids
        self._positions[:size] = step.mapping.positions
        self._slots[:size] = step.mapping.slots
        batch, q = Microbatch(step, ReplicatedResidual(model.group, self._x[:size])), self._q[:size]
        for number in range(self._layers):
            if number:
                attended = model.attend(batch, number - 1, q, attention)
                self._attended[: len(attended)] = attended
            step.wait(number)
            with span("graph"):
                self.graphs.run(size * self._layers + number)
        last = self._layers - 1
        model.add_attended(batch, last, model.attend(batch, last, q, attention))
        model.add_mlp(batch, last)
        return batch.residual.whole()[: step.wanted]

    def _launch(self, number: int) -> None:
        """Launch the kernels of a graph."""
        size, layer = divmod(number, self._layers)
        model, x, ids = self._model, self._x[:size], self._ids[:size]
        mapping = model.slot_mapping(self._pool, self._positions[:size], self._slots[:size], size)
        batch = Microbatch(StepInput(ids, mapping, plan=None), ReplicatedResidual(model.group, x))
        if layer == 0:
            x.copy_(model.embed([ids])[0].whole())
        else:
            model.add_attended(batch, layer - 1, self._attended[:size])
            model.add_mlp(batch, layer - 1)
        self._q[:size] = model.queries(batch, layer, self._pool)
