"""The transformer. One model implements Llama, Mistral, Qwen2 and Qwen3, which differ in flags of ModelConfig.

Under tensor parallelism each rank holds some of the heads, a slice of the MLP and a slice of the vocabulary. The
outputs of o and of down are summed over the ranks (Megatron-LM, arXiv 1909.08053). Every rank holds the whole residual
stream, except in a step that is cut in two, where each rank holds some of its tokens (`parallel/residual.py`).

Shape letters: T tokens in the step, R rows whose logits are wanted, H query heads, K KV heads (both of this rank), D
head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device import mkl
from fastgen.device.memory import memory_on
from fastgen.device.profiling import span
from fastgen.kernels import fp8
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.norm import RMSNorm
from fastgen.kernels.rope import HeadNorm, SlotMapping, rope_write
from fastgen.model.adapter import AdapterBases
from fastgen.model.attention.interface import Attention, StepLayout
from fastgen.model.config import ModelConfig
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import UNFUSED, Linear
from fastgen.model.rope import rope_tables
from fastgen.model.weights import Shard
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import HALVES
from fastgen.parallel.residual import ReplicatedResidual, Residual, ShardedResidual

ROW_TILE = 16
"""Multiple to which steps and logits are padded on the CPU: BLAS then sums all rows in one order."""

PACKED_ROW_TILE = 4
"""The multiple for packed weights."""

Sizes = tuple[int, int]
"""The size of a dimension on this rank, and on all ranks."""

Modules = tuple[dict[str, Sizes], Sizes, bool]
"""The modules of Hugging Face's model of which a linear layer consists, one below the other: the rows of each by its
name, their columns, and True if they have biases. The ranks split rows or columns."""


@dataclass(frozen=True)
class Layer:
    """The weights of a layer: qkv holds the rows of q, k and v, gate_up the rows of gate and up."""

    input_norm: RMSNorm
    qkv: Linear
    head_norm: HeadNorm | None
    o: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(eq=False)
class StepPart:
    """The tokens of a step, or of one half of a step that is cut in two, on their way through the layers.

    token_ids: int64 [T]; mapping: their positions and slots; plan: of Attention.plan. ends: the rows of the tokens
    whose logits are wanted, int64 [R], one a sequence, and the layout of a step that has these tokens alone; None if
    all rows are wanted. arrivals: of HostTier.load, loads of pages that the step must wait for. residual: the residual
    stream.
    """

    token_ids: Tensor
    mapping: SlotMapping
    plan: Any
    ends: tuple[Tensor, StepLayout] | None = None
    arrivals: Mapping[int, torch.cuda.Event] = field(default_factory=dict)
    residual: Residual = field(init=False)

    @property
    def num_results(self) -> int:
        """The number of rows behind the last layer, without the padding that a product adds."""
        return len(self.token_ids if self.ends is None else self.ends[0])

    def wait(self, number: int) -> None:
        """Make work launched from now on wait until the loaded pages of a layer are in the pool."""
        if number in self.arrivals:
            self.arrivals[number].wait()


class Transformer:
    """The model: parameters on `device` in `dtype`, zeros until the loader fills `targets()`.

    config: of the whole model; the attribute `config` is the part of this rank. context: positions of the rope tables.
    half: the most tokens in one half of a step that is cut in two. deterministic: the bits of a row do not depend on
    the other rows; for one rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        group: Group | None = None,
        half: int = 0,
        deterministic: bool = False,
    ) -> None:
        self.group = Group() if group is None else group
        self.config, self._whole = config.split(self.group.size), config
        self._dtype, self._device = dtype, device
        self.memory = memory_on(device)
        self.bases = AdapterBases(self.memory, device)
        self._batch_invariant = deterministic and device.type == "cuda"  # on the CPU rows are padded for it
        self._quantization = config.quantization
        self._packs = mkl.PACKS and device.type == "cpu" and dtype == torch.float32 and not config.quantization
        self.row_tile = 1 if device.type != "cpu" else PACKED_ROW_TILE if self._packs else ROW_TILE
        self.group.prepare(config.hidden_size, dtype, half)
        self._vocab = config.vocab_size // self.group.size  # rows of embedding and head on this rank
        self.embedding = self._new(self._vocab, config.hidden_size)
        self.layers = [self._layer(number) for number in range(config.num_layers)]
        self.norm = self._norm(config.hidden_size)
        self.lm_head = self._tied() if config.tied else self._linear(config.hidden_size, self._vocab, bias=False)
        self.cos, self.sin = (table.to(device) for table in rope_tables(config, context))

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(shape, dtype=dtype or self._dtype, device="meta")
        return self.memory.zeros(shape, dtype or self._dtype)

    def _norm(self, size: int) -> RMSNorm:
        return RMSNorm(self._new(size), self.config.norm_eps)

    def _linear(self, size_in: int, size_out: int, bias: bool) -> Linear:
        return Linear(self._new(size_out, size_in), self._new(size_out) if bias else None, self._batch_invariant)

    def _layer_linear(self, rows: dict[str, Sizes], columns: Sizes, bias: bool) -> Linear:
        """Return a linear layer of a layer, in fp8 if the model is. The arguments are its Modules."""
        (size_in, all_in), form, sizes = columns, self._quantization, [own for own, _ in rows.values()]
        size_out, bias = sum(sizes), bias and (size_in == all_in or self.group.rank == 0)  # added once
        covered = [form is not None and form.covers(name) for name in rows]
        if form is None or not any(covered):
            return self._linear(size_in, size_out, bias)
        if not all(covered):
            raise ValueError(
                f"quantization_config leaves some of {', '.join(rows)} unquantized and not all of them, which is not "
                "supported"
            )
        if form.blocks and any(size % fp8.BLOCK for size in (size_in, *sizes)):
            raise ValueError(
                f"{', '.join(rows)} of {size_in} inputs and {', '.join(map(str, sizes))} outputs, on each rank, are "
                f"not whole blocks of {fp8.BLOCK} x {fp8.BLOCK}; run the model on fewer ranks"
            )
        shape = (size_out // fp8.BLOCK, size_in // fp8.BLOCK) if form.blocks else (size_out,)
        weight, scales = self._new(size_out, size_in, dtype=fp8.E4M3), self._new(*shape, dtype=torch.float32)
        return Linear(weight, self._new(size_out) if bias else None, self._device.type == "cuda", scales=scales)

    def _tied(self) -> Linear:
        return Linear(self.embedding, None, self._batch_invariant)

    def _modules(self, number: int) -> dict[str, Modules]:
        """Return the Modules of the linear layers of layer `number`, by their names in Layer."""
        c, whole = self.config, self._whole
        attention, mlp = f"model.layers.{number}.self_attn.", f"model.layers.{number}.mlp."
        heads = c.num_heads * c.head_size, whole.num_heads * c.head_size
        kv_heads = c.num_kv_heads * c.head_size, whole.num_kv_heads * c.head_size
        hidden, inner = (c.hidden_size, c.hidden_size), (c.intermediate_size, whole.intermediate_size)
        qkv = {attention + "q_proj": heads, attention + "k_proj": kv_heads, attention + "v_proj": kv_heads}
        return {
            "qkv": (qkv, hidden, c.qkv_bias),
            "o": ({attention + "o_proj": hidden}, heads, c.o_bias),
            "gate_up": ({mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, c.mlp_bias),
            "down": ({mlp + "down_proj": hidden}, inner, c.mlp_bias),
        }

    def _layer(self, number: int) -> Layer:
        c = self.config
        return Layer(
            input_norm=self._norm(c.hidden_size),
            head_norm=HeadNorm(self._new(c.head_size), self._new(c.head_size), c.norm_eps) if c.qk_norm else None,
            post_norm=self._norm(c.hidden_size),
            window=c.windows[number],
            **{name: self._layer_linear(*modules) for name, modules in self._modules(number).items()},
        )

    def targets(self, stored: bool = False) -> dict[str, Shard]:
        """Return this rank's shard of each Hugging Face parameter, by name. Weights must not be packed.

        stored: those of the checkpoint's own tensors, where these are in fp8, too; else shards quantize what is
        written.
        """
        stored = stored and self._quantization is not None and bool(self._quantization.stored)
        c, whole = self.config, self._whole
        found = {"model.norm.weight": Shard.whole(self.norm.weight)}
        found["model.embed_tokens.weight"] = self._shard(self.embedding, whole.vocab_size)
        if not c.tied:
            found["lm_head.weight"] = self._shard(self.lm_head.weight, whole.vocab_size)
        for number, layer in enumerate(self.layers):
            at = f"model.layers.{number}."
            found[at + "input_layernorm.weight"] = Shard.whole(layer.input_norm.weight)
            found[at + "post_attention_layernorm.weight"] = Shard.whole(layer.post_norm.weight)
            for name, modules in self._modules(number).items():
                found |= self._shards(getattr(layer, name), *modules, stored)
            if layer.head_norm:
                found[at + "self_attn.q_norm.weight"] = Shard.whole(layer.head_norm.q)
                found[at + "self_attn.k_norm.weight"] = Shard.whole(layer.head_norm.k)
        return found

    def _shard(self, view: Tensor, whole: int, dim: int = 0) -> Shard:
        """Return this rank's shard of a tensor with `whole` indices in dimension `dim`. The ranks hold equal parts in
        order; if there are fewer parts than ranks, successive ranks hold the same part."""
        size = view.shape[dim]
        start = self.group.rank * (whole // size) // self.group.size * size
        return Shard(view, (*view.shape[:dim], whole, *view.shape[dim + 1 :]), dim, start)

    def _shards(
        self, linear: Linear, rows: dict[str, Sizes], columns: Sizes, bias: bool, stored: bool
    ) -> dict[str, Shard]:
        """Return the shards of which a linear layer consists, by name. rows, columns, bias: its Modules."""
        found, first = dict[str, Shard](), 0
        dim = int(columns[0] < columns[1])  # the one that the ranks split
        for name, (own, whole) in rows.items():
            here, scales = slice(first, first + own), linear.scales
            if scales is not None:
                step = len(linear.weight) // len(scales)  # rows with one scale
                scales = scales[first // step : (first + own) // step]
            weight = self._shard(linear.weight[here], columns[1] if dim else whole, dim)
            found |= self._quantizable(name, weight, scales, stored)
            if linear.bias is not None:
                found[f"{name}.bias"] = self._shard(linear.bias[here], whole)
            elif bias:  # of another rank; not in the dtype of the weight, which may be fp8
                found[f"{name}.bias"] = Shard(self.norm.weight.new_empty(0), (whole,))
            first += own
        return found

    def _quantizable(self, name: str, weight: Shard, scales: Tensor | None, stored: bool) -> dict[str, Shard]:
        """Return the shard of a module's weight, and if `stored` that of its scales in the checkpoint."""
        if scales is None or not stored:
            return {name + ".weight": replace(weight, scales=scales)}
        assert self._quantization is not None
        if self._quantization.stored == "tensor":
            scale = Shard(scales, ())
        elif self._quantization.stored == "channel":
            scale = Shard(scales[:, None], (weight.shape[0], 1), 0, weight.start if weight.dim == 0 else 0)
        else:
            rows, columns = (-(-size // fp8.BLOCK) for size in weight.shape)
            scale = Shard(scales, (rows, columns), weight.dim, weight.start // fp8.BLOCK)
        return {name + ".weight": weight, name + ".weight_scale": scale}

    def pack(self) -> None:
        """Pack the weights of products on the CPU, after `targets` are filled; earlier shards are void then.

        Weights are packed one at a time, so that only one is in memory twice, and a head that is the embedding.
        """
        for linear in self._linears() if self._packs else ():
            linear.pack()

    def unpack(self) -> None:
        """Undo `pack`, one weight at a time, also after a `pack` that failed midway. `targets` can be called then."""
        if self.config.tied:
            self.lm_head = self._tied()
        for linear in self._linears():
            linear.unpack()

    def _linears(self) -> list[Linear]:
        return [self.lm_head, *(linear for layer in self.layers for linear in layer.linears)]

    @property
    def distinct(self) -> list[int]:
        """The number of one layer of each kind: where all rows are wanted, the others launch the same kernels."""
        kinds = {}
        for number, layer in enumerate(self.layers):
            kinds[layer.window, *(linear.scales is None for linear in layer.linears)] = number
        return sorted(kinds.values())

    def forward(
        self, parts: Sequence[StepPart], pool: KVPool, attention: Attention, layers: Sequence[int] | None = None
    ) -> Tensor:
        """Return the residual stream after the last layer: [T, hidden], or with `ends` [R, hidden].

        Writes the step's keys and values into the pool. In the last layer, rows that are not in `ends` need only their
        keys and values.

        parts: one, or the two halves of a step, the later tokens last. Halves take turns in each layer, so that the
        sums over the ranks of one half overlap with the computation of the other. Both have `ends`, or neither.
        layers: the numbers of the layers to run (None: all).
        """
        self.embed(parts)
        for number in range(len(self.layers)) if layers is None else layers:
            for part in parts:
                part.wait(number)
                q = self.project_qkv(part, number, pool)
                self.add_attended(part, number, self.attend(part, number, q, attention))
            for part in parts:
                self.add_mlp(part, number)
        found = [part.residual.whole()[: part.num_results] for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def embed(self, parts: Sequence[StepPart]) -> None:
        """Begin the residual streams with the embeddings of the tokens."""
        exchange = self.group.exchange
        if exchange is not None and (len(parts) != HALVES or max(len(p.token_ids) for p in parts) > exchange.tokens):
            exchange = None
        for half, part in enumerate(parts):
            x = self._embedding_of(part.token_ids)
            if exchange is None:
                part.residual = ReplicatedResidual(self.group, self.group.all_reduce(x))
            else:
                part.residual = ShardedResidual.begin(self.group, exchange, half, x, self.layers[0].input_norm)

    def _embedding_of(self, ids: Tensor) -> Tensor:
        """Return embeddings [T, hidden] of ids [T], zeros for ids that other ranks hold."""
        if self.group.size == 1:
            return F.embedding(ids, self.embedding)
        own = ids - self.group.rank * self._vocab
        here = (own >= 0) & (own < self._vocab)
        return F.embedding(own.masked_fill_(~here, 0), self.embedding).masked_fill_(~here[:, None], 0)

    def attend(self, part: StepPart, number: int, q: Tensor, attention: Attention) -> Tensor:
        """Return the attention of a layer's queries q [T, H, D], without padding: [real, H * D].

        In the last layer, rows that are not wanted end here, in the residual stream too: [R, H * D].
        """
        plan = part.plan
        if part.ends is not None and number == len(self.layers) - 1:
            rows, layout = part.ends
            part.residual = ReplicatedResidual(self.group, self._padded(part.residual.select(rows)))
            q = q[rows]
            if not len(q):
                return q.flatten(1)
            plan = attention.plan(layout)
        with span("attention"):
            return attention.attend(plan, number, q[: part.mapping.real], self.layers[number].window).flatten(1)

    def add_attended(self, part: StepPart, number: int, attended: Tensor) -> None:
        """Add o of the result of `attend`, with or without rows of padding, to the residual stream."""
        if not len(part.residual):
            return
        layer = self.layers[number]
        with span("o"):
            if len(attended) < len(part.residual):
                attended = F.pad(attended, (0, 0, 0, len(part.residual) - len(attended)))
            self._add(part, layer.o, attended, layer.post_norm)

    def add_mlp(self, part: StepPart, number: int) -> None:
        """Add the MLP of the normed residual stream to it."""
        if not len(part.residual):
            return
        layer, behind = self.layers[number], self.layers[number + 1 : number + 2]
        with span("mlp"):
            x, norm, delta = part.residual.input(layer.post_norm)
            hidden = layer.gate_up.apply(x, Fused(swiglu=True), norm, delta)
            self._add(part, layer.down, hidden, behind[0].input_norm if behind else None)

    def _add(self, part: StepPart, linear: Linear, x: Tensor, following: RMSNorm | None) -> None:
        """Add a linear layer that the ranks split by columns to the residual stream.

        following: the norm that comes next, None after the last layer.
        """
        if self.group.size == 1:
            linear.apply(x, Fused(add=part.residual.whole()))
        else:
            part.residual.add(linear.apply(x), following)

    def project_qkv(self, part: StepPart, number: int, pool: KVPool) -> Tensor:
        """Return a layer's queries [T, H, D], and write its keys and values into the pool.

        Pending sums of the residual stream are added to it.
        """
        layer, mapping, keys, values = self.layers[number], part.mapping, pool.keys[number], pool.values[number]
        with span("qkv"):
            x, norm, delta = part.residual.input(layer.input_norm)
            if layer.head_norm is None and not pool.fp8 and layer.qkv.fuses(x):
                return layer.qkv.apply(x, Fused(rope=RopeWrite(mapping, keys, values)), norm, delta)
            qkv = layer.qkv.apply(x, UNFUSED, norm, delta)
            turned: Tensor = rope_write(qkv, mapping, keys, values, layer.head_norm)
            return turned

    def slot_mapping(self, pool: KVPool, positions: Tensor, slots: Tensor, real: int) -> SlotMapping:
        """Return the SlotMapping of tokens whose keys and values go into `pool`."""
        num_kv, page_size = pool.keys.shape[2:4]
        return SlotMapping(positions, slots, self.cos, self.sin, real, num_kv, page_size)

    def products(self, mapping: SlotMapping, pool: KVPool) -> list[tuple[Linear, Fused]]:
        """Return each kind of linear layer, in fp8 and not where layers differ, with the operations fused with it for
        one token at `mapping`."""
        stream = self.norm.weight.new_zeros(1, self.config.hidden_size)
        rope = None if self.layers[0].head_norm or pool.fp8 else RopeWrite(mapping, pool.keys[0], pool.values[0])
        adds = Fused(add=stream)
        fused = {"qkv": Fused(rope=rope), "o": adds, "gate_up": Fused(swiglu=True), "down": adds}
        several = [(name, getattr(layer, name)) for layer in self.layers for name in fused]
        kinds = {(name, linear.scales is None): (linear, fused[name]) for name, linear in several}
        return [*kinds.values(), (self.lm_head, Fused(out_dtype=torch.float32))]

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return logits, float32 [R, V], of rows x [R, hidden] of `forward`, in `out` if given; None on ranks above
        0."""
        padded = self._padded(x)
        whole = self.group.size == 1 and len(padded) == len(x)  # nothing is left to gather, or to leave out
        fused = Fused(out_dtype=torch.float32, out=out if whole else None)
        own = self.lm_head.apply(padded, fused, self.norm)
        return own if whole else self.group.gather(own[: len(x)], out)

    def _padded(self, x: Tensor) -> Tensor:
        """Return x [T, hidden] with rows of zeros added, up to a multiple of `row_tile`."""
        padding = -len(x) % self.row_tile
        return F.pad(x, (0, 0, 0, padding)) if padding else x


def checkpoint_shards(config: ModelConfig) -> dict[str, Shard]:
    """Return the whole tensors of a checkpoint by Hugging Face name, as shards without memory."""
    return Transformer(config, torch.float32, torch.device("meta"), context=1).targets()
