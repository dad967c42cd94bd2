"""The transformer. One model implements all families (docs/models.md), which differ in flags of ModelConfig.

Under tensor parallelism each rank holds some of the heads, a slice of the MLP and a slice of the vocabulary. The
outputs of o and of down are summed over the ranks (Megatron-LM, arXiv 1909.08053). Every rank holds the whole residual
stream, except in a step that is cut in two, where each rank holds some of its tokens (`parallel/residual.py`).

Shape letters: T tokens in the step, R tokens whose logits are wanted, H query heads, K KV heads (both of this rank), D
head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.pinned import to_host
from fastgen.device.profiling import span
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.embedding import embed
from fastgen.kernels.epilogue import geglu, sigmoid_gate
from fastgen.kernels.norm import rms_norm
from fastgen.kernels.rope import SlotMapping, rope_write
from fastgen.model.attention.interface import Attention
from fastgen.model.kv_pool import KVPool
from fastgen.model.parameters import Parameters
from fastgen.model.rope import query_scales, rope_tables
from fastgen.model.weights import Tensors
from fastgen.parallel.residual import ReplicatedResidual, Residual


@dataclass(eq=False)
class KeptStreams:
    """Copies of the residual stream of a step.

    layers: numbers of the layers after which it is copied; -1: after the embedding. rows: int64 [R], the rows of the
    step to copy; None: all. on_host: each copy goes on to the host at once, so that a GPU holds one layer's at a time.
    streams: the copies so far, [R, hidden], by layer.
    """

    layers: Collection[int]
    rows: Tensor | None = None
    on_host: bool = False
    streams: dict[int, Tensor] = field(default_factory=dict)

    def keep(self, part: StepPart, number: int) -> None:
        """Copy the stream after a layer."""
        x = part.residual.whole()
        kept = x[: part.mapping.real].clone() if self.rows is None else x[self.rows]
        self.streams[number] = to_host(kept) if self.on_host else kept


@dataclass(eq=False)
class StepPart:
    """The tokens of a step, or of one half of a step that is cut in two, on their way through the layers.

    token_ids: int64 [T]. mapping: the positions and slots of the tokens. plan: the result of Attention.plan. arrivals:
    the events of HostTier.load, by layer, which the layers wait for. kept: receives copies of the residual stream; None
    under tensor parallelism, since no rank may hold the whole stream. residual: the residual stream.
    """

    token_ids: Tensor
    mapping: SlotMapping
    plan: object
    arrivals: Mapping[int, torch.cuda.Event] = field(default_factory=dict)
    kept: KeptStreams | None = None
    residual: Residual = field(init=False)

    def wait(self, number: int) -> None:
        """Make work launched from now on wait until the loaded pages of a layer are in the pool."""
        if number in self.arrivals:
            self.arrivals[number].wait()


class Observer(Protocol):
    """Reads the residual stream between layers, in every step. What it launches may become part of a CUDA graph. It
    does not work under tensor parallelism, where no rank may hold the whole stream."""

    @property
    def layers(self) -> Collection[int]:
        """Numbers of the layers that it reads the stream after."""

    def observe(self, part: StepPart, number: int) -> None:
        """Read `part.residual` after layer `number`, one of `layers`."""

    def observe_rows(self, x: Tensor, rows: Tensor) -> None:
        """Read the stream after the last layer, if that is one of `layers`, in a step in which only some tokens go
        through all of it: x [R, hidden], the stream of the step's rows `rows`, int64 [R]."""

    def update(self, named: Tensors) -> None:
        """Replace its weights; see `Generator.update_drafter`."""

    def release(self) -> None:
        """Release the memory of its weights; see `Memory`."""

    def restore(self) -> None:
        """Take the memory back, with the weights."""


class LayersInOneCall(Protocol):
    """Runs the layers of short steps faster than one after the other."""

    def run(self, part: StepPart, numbers: Sequence[int]) -> bool:
        """Run layers `numbers`, all of them to their end. Return False, and do nothing, if the step needs them one by
        one."""


class Transformer:
    """The model. parameters: this rank's parameters. context: number of positions in the rope tables. in_one_call: runs
    the layers of short steps; None: they run one by one. Hybrid models have a subclass, in fastgen/recurrent."""

    observer: Observer | None = None
    in_one_call: LayersInOneCall | None = None

    def __init__(self, parameters: Parameters, context: int) -> None:
        self.parameters = parameters
        self.config, self.group, self.layers = parameters.config, parameters.group, parameters.layers
        self.row_tile = parameters.row_tile
        kinds = (False, True) if self.config.other_layers else (False,)
        tables = [rope_tables(self.config, context, other) for other in kinds]
        self.turns = [(cos.to(parameters.device), sin.to(parameters.device)) for cos, sin in tables]
        self.embedding_scale = self.config.embedding_scale
        if self.config.scaled_embedding:
            self.embedding_scale = float(torch.tensor(self.embedding_scale, dtype=parameters.dtype))
        scales = query_scales(self.config.rope, context, self.config.max_position)
        self.query_scales = None if scales is None else scales.to(parameters.device, parameters.dtype)[:, None, None]

    def forward(
        self, parts: Sequence[StepPart], pool: KVPool, attention: Attention, layers: Sequence[int] | None = None
    ) -> Tensor:
        """Return the residual stream of all tokens after the last layer: [T, hidden].

        parts: one, or the two halves of a step (see `run_layers`). layers: the numbers of the layers to run (None:
        all).
        """
        numbers = range(len(self.layers)) if layers is None else layers
        self.embed(parts)
        if self._run_in_one_call(parts, numbers):
            return parts[0].residual.whole()[: len(parts[0].token_ids)]
        queries = self.run_layers(parts, pool, attention, numbers)
        return self.finish(parts, queries, attention, numbers[-1])

    def embed(self, parts: Sequence[StepPart]) -> None:
        """Begin the residual streams with the embeddings of the tokens."""
        sizes, norm = [len(part.token_ids) for part in parts], self.layers[0].input_norm
        embedding = self.parameters.embedding
        for number, part in enumerate(parts):
            x = embed(part.token_ids, embedding, self.group.rank * len(embedding) if self.group.size > 1 else None)
            if self.embedding_scale != 1:
                x.mul_(self.embedding_scale)
            if self.parameters.bare_norm is not None:  # on another rank than the embedding's, the norm of 0 is 0
                x = rms_norm(x, self.parameters.bare_norm)
            part.residual = self.group.begin_residual(sizes, number, x, norm)
            self._observe(part, -1)

    def project_qkv(self, part: StepPart, number: int, pool: KVPool) -> Tensor:
        """Return a layer's queries [T, query_rows, D], and write its keys and values into the pool."""
        layer, keys, values = self.layers[number], pool.keys[number], pool.values[number]
        mapping = part.mapping.of_layer(layer.has_other_rope, layer.window)
        with span("qkv"):
            if not (layer.head_norm or layer.wide_norm or pool.fp8 or self.config.partial_rope):
                rope = Fused(rope=RopeWrite(mapping, keys, values))
                q = part.residual.project(layer.qkv, layer.input_norm, rope)
            else:
                qkv = part.residual.project(layer.qkv, layer.input_norm)
                qkv = qkv if layer.wide_norm is None else layer.wide_norm.apply(qkv)
                q = rope_write(qkv, mapping, keys, values, layer.head_norm)
            return q if mapping.query_scales is None else q.mul_(mapping.query_scales)

    def run_layers(
        self, parts: Sequence[StepPart], pool: KVPool, attention: Attention, numbers: Sequence[int]
    ) -> list[Tensor]:
        """Run layers after `embed`, the last of them only up to its attention, and return its queries for each part.

        Writes the step's keys and values into the pool. parts: one, or the two halves of a step, the later tokens last.
        Halves take turns in each layer, so that the sums over the ranks of one half overlap with the computation of the
        other.
        """
        *before, last = numbers
        if self._run_in_one_call(parts, before):
            before = []
        for number in before:
            for part in parts:
                part.wait(number)
                self.add_attended(part.residual, number, self._mix(part, number, pool, attention))
            for part in parts:
                self.add_mlp(part.residual, number)
                self._observe(part, number)
        for part in parts:
            part.wait(last)
        return [self.project_qkv(part, last, pool) for part in parts]

    def _mix(self, part: StepPart, number: int, pool: KVPool, attention: Attention) -> Tensor:
        """Return what the tokens of a step take from each other and from earlier ones in a layer: the input of o."""
        q = self.project_qkv(part, number, pool)
        return self._attend(part.plan, number, q[: part.mapping.real], attention)

    def _run_in_one_call(self, parts: Sequence[StepPart], numbers: Sequence[int]) -> bool:
        if self.in_one_call is None or self.observer is not None or len(parts) > 1:
            return False
        with span("layers"):
            return self.in_one_call.run(parts[0], numbers)

    def finish(self, parts: Sequence[StepPart], queries: Sequence[Tensor], attention: Attention, number: int) -> Tensor:
        """Return the residual stream of all tokens after layer `number`, [T, hidden]. queries: from `run_layers`."""
        for part, q in zip(parts, queries, strict=True):
            attended = self._attend(part.plan, number, q[: part.mapping.real], attention)
            self.add_attended(part.residual, number, attended)
        for part in parts:
            self.add_mlp(part.residual, number)
            self._observe(part, number)
        found = [part.residual.whole()[: len(part.token_ids)] for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def finish_rows(self, x: Tensor, q: Tensor, rows: Tensor, plan: object, attention: Attention) -> Tensor:
        """Return the residual stream after the last layer of some tokens only, [R, hidden].

        x: [R, hidden], their stream before the attention of the last layer, which may be overwritten. q: their queries,
        [R, query_rows, D]. rows: int64 [R], their rows in the step. plan: of a step with only these tokens, as decodes.
        """
        last, residual = len(self.layers) - 1, ReplicatedResidual(self.group, self._padded(x))
        self.add_attended(residual, last, self._attend(plan, last, q, attention))
        self.add_mlp(residual, last)
        found = residual.whole()[: len(q)]
        if self.observer is not None and last in self.observer.layers:
            self.observer.observe_rows(found, rows)
        return found

    def _attend(self, plan: object, number: int, q: Tensor, attention: Attention) -> Tensor:
        """Return the attention of a layer's queries q, [T, query_rows, D]: [T, H * D]."""
        with span("attention"):
            return attention.attend(plan, number, q, self.layers[number].window).flatten(1)

    @property
    def query_rows(self) -> int:
        """Number of vectors of the head size that `project_qkv` returns for a token: its queries."""
        return self.config.num_heads

    def add_attended(self, residual: Residual, number: int, attended: Tensor) -> None:
        """Add o of the result of attention, [T, H * D] with or without rows of padding, to the residual stream."""
        layer = self.layers[number]
        with span("o"):
            if len(attended) < len(residual):
                attended = F.pad(attended, (0, 0, 0, len(residual) - len(attended)))
            if layer.o_gate is not None:
                attended = sigmoid_gate(attended, residual.project(layer.o_gate, layer.input_norm))
            residual.apply(layer.o, attended, layer.post_norm, layer.o_end)

    def add_mlp(self, residual: Residual, number: int) -> None:
        """Add the MLP of the normed residual stream to it."""
        layer, following = self.layers[number], self.layers[number + 1 : number + 2]
        with span("mlp"):
            hidden = residual.project(layer.gate_up, layer.post_norm, Fused(swiglu=self.config.swiglu))
            if self.config.gelu:
                hidden = geglu(hidden)
            elif not self.config.gated:
                hidden.relu_().square_()
            residual.apply(layer.down, hidden, following[0].input_norm if following else None, layer.down_end)

    def _observe(self, part: StepPart, number: int) -> None:
        if self.observer is not None and number in self.observer.layers:
            self.observer.observe(part, number)
        if part.kept is not None and number in part.kept.layers:
            part.kept.keep(part, number)

    def slot_mapping(self, pool: KVPool, positions: Tensor, slots: Tensor, real: int) -> SlotMapping:
        """Return the SlotMapping of tokens whose keys and values go into `pool`."""
        num_kv, page_size = pool.keys[0].shape[1:3]
        scales = None if self.query_scales is None else self.query_scales[positions]

        def mapping(slots: Tensor) -> SlotMapping:
            first, *other = (
                SlotMapping(positions, slots, *pair, real, num_kv, page_size, scales) for pair in self.turns
            )
            return replace(first, other=other[0]) if other else first

        of_windows = pool.slots_of_windows(slots)
        return mapping(slots) if of_windows is None else replace(mapping(slots), windowed=mapping(of_windows))

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return logits, float32 [R, V], of rows x [R, hidden] of `forward`, in `out` if given; None on ranks above
        0."""
        padded = self._padded(x)
        whole = self.group.size == 1 and len(padded) == len(x)  # nothing is left to gather, or to leave out
        fused = Fused(out_dtype=torch.float32, out=out if whole else None)
        own = self.parameters.lm_head.apply(padded, fused, self.parameters.norm)
        if self.config.logits_divisor != 1:
            own.div_(self.config.logits_divisor)
        if self.config.logits_cap:
            own.div_(self.config.logits_cap).tanh_().mul_(self.config.logits_cap)
        return own if whole else self.group.gather(own[: len(x)], out)

    def _padded(self, x: Tensor) -> Tensor:
        """Return x [T, hidden] with rows of zeros added, up to a multiple of `row_tile`."""
        padding = -len(x) % self.row_tile
        return F.pad(x, (0, 0, 0, padding)) if padding else x
