"""CUDA graphs of steps with prefills.

Launched kernel by kernel, such a step takes as long as the host needs for its launches, which is longer than the GPU
needs if the step has few tokens or the model is small. In graphs, it takes one upload and two replays: of the layers
up to the queries of the last one, by number of tokens; and of the rest and the logits, by number of draws, since only
the rows that tokens are drawn from go through all of the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from fastgen.device.profiling import span
from fastgen.engine.cuda_graphs import Graphs, smallest_size
from fastgen.engine.step import Lanes
from fastgen.engine.uploads import StepArrays, StepMemory, StepTensors
from fastgen.kernels.lane_updates import begin_step
from fastgen.model.attention.interface import CapturableAttention, StepLayout
from fastgen.model.kv_pool import KVPool
from fastgen.model.transformer import StepPart, Transformer
from fastgen.parallel.residual import ReplicatedResidual


class PrefillGraphs:
    """The graphs, and the memory at fixed addresses that they read and write.

    sizes: numbers of tokens of the steps, ascending. draws: numbers of draws, ascending, up to the number of lanes.
    logits: float32 [lanes or more, V], which receives the logits. shares: whether there are graphs for decodes that
    share keys. partner: graphs to share a memory pool with; None: a new pool.

    layers: the graphs of the layers by number of tokens, for decodes that share keys and that do not. ends: the graphs
    of the rest by number of draws.
    """

    def __init__(
        self, model: Transformer, pool: KVPool, attention: CapturableAttention, lanes: Lanes, logits: Tensor,
        sizes: list[int], draws: list[int], shares: bool, partner: Graphs[int] | None = None,
    ) -> None:  # fmt: skip
        self.sizes = sizes
        self._model, self._pool, self._attention, self._lanes, self._logits = model, pool, attention, lanes, logits
        most, like, heads = sizes[-1], model.parameters.embedding, model.query_rows
        self._memory = StepMemory(lanes.padding, attention, sizes, like.device)
        self._x = like.new_zeros(most, model.config.hidden_size)
        self._q = like.new_zeros(most, heads, model.config.head_size)
        kinds = (False, True) if shares else (False,)
        self.layers = {shared: Graphs(sizes, like.device, partner) for shared in kinds}
        self.ends = Graphs(draws, like.device, partner)

    def rehearse(self, layers: Sequence[int]) -> None:
        """Run a step of padding of each size through these layers, one of each kind, which compiles the kernels."""
        for size in reversed(self.sizes):  # the largest first, whose memory the others use again
            self._memory.send(StepArrays.empty(size), [])
            for shared in self.layers:
                self._run_layers(size, shared, [*layers, layers[-1]])  # of the last, only the queries are computed
        for count in self.ends.keys:
            self._finish(count)

    def capture(self) -> None:
        """Capture all graphs, after `rehearse`."""
        self._memory.send(StepArrays.empty(self.sizes[-1]), [])  # the largest step runs before its capture
        for shared, graphs in self.layers.items():
            graphs.capture(partial(self._run_layers, shared=shared), compiled=True)
        self.ends.capture(self._finish, compiled=True)

    def size_for(self, tokens: int) -> int:
        """Return the smallest size that holds this number of tokens."""
        return smallest_size(self.sizes, tokens)

    def run(self, arrays: StepArrays, layout: StepLayout) -> StepTensors:
        """Run a step whose number of tokens is one of `sizes` up to the attention of the last layer. Return the arrays,
        which the next step overwrites."""
        size = len(arrays.ids)
        self._memory.send(arrays, self._attention.lists(layout))
        with span("graph"):
            self.layers[layout.shared].run(size)
        return self._memory.tensors(size)[0]

    def draw(self, count: int) -> None:
        """Write the logits of the `count` draws of the step that `run` has begun to the first rows of `logits`."""
        with span("graph"):
            self.ends.run(self.ends.size_for(count))

    def finish(self, size: int, layout: StepLayout) -> Tensor:
        """Return the residual stream of all tokens, [T, hidden], after the step of `size` tokens that `run` has begun,
        instead of `draw`. It is launched kernel by kernel."""
        part = self._part(size, layout.shared)
        part.residual = ReplicatedResidual(self._model.group, self._x[:size])
        return self._model.finish([part], [self._q[:size]], self._attention, len(self._model.layers) - 1)

    def _part(self, size: int, shared: bool) -> StepPart:
        step, lists = self._memory.tensors(size)
        table, lanes = self._lanes.page_table, step.lanes[: len(step.decode_lens)]
        plan = self._attention.plan_lists(lanes, step.decode_lens, table, lists, shared)
        return StepPart(step.ids, self._model.slot_mapping(self._pool, step.positions, step.slots, size), plan)

    def _run_layers(self, size: int, shared: bool, layers: Sequence[int] | None = None) -> None:
        """Launch the kernels of a graph of `layers`."""
        model, lanes, x = self._model, self._lanes, self._x[:size]
        step, _ = self._memory.tensors(size)
        begin_step(step.lanes, step.kv_lens, step.decode_lens, step.ids, lanes.state.last_token, lanes.kv_lens)
        part = self._part(size, shared)
        model.embed([part])
        x.copy_(part.residual.whole())
        part.residual = ReplicatedResidual(model.group, x)
        numbers = range(len(model.layers)) if layers is None else layers
        self._q[:size] = model.run_layers([part], self._pool, self._attention, numbers)[0]

    def _finish(self, count: int) -> None:
        """Launch the kernels of a graph of `ends`."""
        step, _ = self._memory.tensors(self.sizes[-1])  # the first arrays are at the same addresses for any size
        rows, model = step.rows[:count], self._model
        plan = self._attention.plan_decode(step.sources[:count], step.ends[:count], self._lanes.page_table)
        x = model.finish_rows(self._x[rows], self._q[rows], rows, plan, self._attention)
        model.logits(x, self._logits[:count])
