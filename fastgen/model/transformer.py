"""The transformer. Llama, Mistral, Qwen2 and Qwen3 are flags of one model.

Under tensor parallelism each rank holds a share of the heads, of the MLP and of the vocabulary. What its share of o and
of down gives is a part of a sum over the ranks (Megatron-LM, arXiv 1909.08053). The residual stream is whole on every
rank, but for that of a step cut in two, where the ranks share out its tokens (`residual.py`).

Shape letters: T tokens in the step, R rows whose logits are wanted, H query heads, K KV heads (both of this rank), D
head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.memory import memory_on
from fastgen.device.profiling import span
from fastgen.kernels import batch_invariant
from fastgen.kernels.epilogue import swiglu
from fastgen.kernels.launch import Chip
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.rope import HeadNorm, SlotMapping, rope_write
from fastgen.model.attention import Attention, StepLayout
from fastgen.model.config import ModelConfig
from fastgen.model.host_tier import Arrivals
from fastgen.model.kv_pool import KVPool
from fastgen.model.rope import rope_tables
from fastgen.model.weights import Shard
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import HALVES
from fastgen.parallel.residual import ReplicatedResidual, Residual, ShardedResidual

ROW_TILE = 16
"""On the CPU, steps and logits are padded to a multiple of so many rows, which BLAS all sums alike (promise 1)."""

PACKED_ROW_TILE = 4
"""The same for packed weights: with AVX2 MKL sums the last rows behind a multiple of 4 in another order."""

PACKS = hasattr(torch.ops.mkl, "_mkl_linear") and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
"""Whether torch has MKL's float32 product with a packed weight: up to twice as fast as F.linear, and the same to the
bit on any number of threads."""


@dataclass(frozen=True)
class Linear:
    """y = x weight^T + bias; weight [out, in], bias [out] or None.

    batch_invariant: on a GPU, a row of y is the same to the bit however many there are. pack: on the CPU, the weight in
    MKL's own order; `weight` then has only its shape, and no memory.
    """

    weight: Tensor
    bias: Tensor | None
    batch_invariant: bool = False
    pack: Tensor | None = None

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype not in (None, x.dtype):
            assert self.bias is None
            return torch.mm(x, self.weight.t(), out_dtype=out_dtype)
        if self.pack is not None:
            product: Tensor = torch.ops.mkl._mkl_linear(x, self.pack, self.weight, self.bias, len(x))
            return product
        return F.linear(x, self.weight, self.bias)

    def packed(self) -> Linear:
        """Return the same with its weight in the order of MKL's product, which otherwise orders it in each call."""
        if self.pack is not None:
            return self
        pack = torch.ops.mkl._mkl_reorder_linear_weight(self.weight, ROW_TILE)
        return Linear(self.weight.new_empty(()).expand(self.weight.shape), self.bias, pack=pack)

    def unpacked(self) -> Linear:
        """Return the same with a plain weight, from its product with the identity matrix, which rounds nothing."""
        if self.pack is None:
            return self
        transposed = replace(self, bias=None)(torch.eye(self.weight.shape[1]))
        return Linear(transposed.t().contiguous(), self.bias)


def apply(
    linear: Linear,
    x: Tensor,
    *,
    norm: RMSNorm | None = None,
    delta: Tensor | None = None,
    add: Tensor | None = None,
    gated: bool = False,
    rope: batch_invariant.RopeWrite | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A linear layer with what surrounds it: `norm` of its input x [T, in] before, to which `delta` is first added in
    place; SwiGLU of its output (`gated`; the weight holds gate, then up), an addition to `add` [T, out], in place, or
    what `rope` says (where `_fuses`) behind.

    All rows of a batch-invariant layer, and few rows of others, go through one kernel of our own; others through BLAS.
    """
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps, delta)
    if _fuses(x, linear):
        # A twin in place of a batch-invariant layer's kernel would have other bits.
        multiply = batch_invariant.product.launch if linear.batch_invariant else batch_invariant.product
        out: Tensor = multiply(x, linear.weight, linear.bias, batch_invariant.Fused(add, gated, rope, out_dtype))
        return out
    assert rope is None
    if add is not None and linear.bias is None and x.device.type != "cpu":
        return add.addmm_(x, linear.weight.t())  # the sum is then part of the product
    y = linear(x, out_dtype)
    if gated:
        y = swiglu(y)
    return y if add is None else add.add_(y)


@dataclass(frozen=True)
class Layer:
    """Fused weights: qkv holds the rows of q, k and v, gate_up those of gate and up."""

    input_norm: RMSNorm
    qkv: Linear
    head_norm: HeadNorm | None
    o: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int


@dataclass(frozen=True)
class Ends:
    """The tokens of a step whose logits are wanted, one a sequence.

    rows: int64 [R], in the step; layout: the same as a step of one query token a sequence.
    """

    rows: Tensor
    layout: StepLayout


@dataclass(frozen=True)
class StepInput:
    """token_ids: int64 [T]; mapping: where they stand; plan: Attention.plan of the step; ends: None where all rows are
    wanted; arrivals: of pages that are being loaded, if there are any."""

    token_ids: Tensor
    mapping: SlotMapping
    plan: Any
    ends: Ends | None = None
    arrivals: Arrivals | None = None

    @property
    def wanted(self) -> int:
        """How many rows there are behind the last layer, without the padding of ends."""
        return len(self.token_ids if self.ends is None else self.ends.rows)

    def wait(self, number: int) -> None:
        """Let what is launched from now on wait until what is loaded of a layer is in the pool."""
        if self.arrivals is not None:
            self.arrivals.wait(number)


@dataclass(eq=False)
class Stream:
    """Some tokens of a step on their way through the layers."""

    step: StepInput
    residual: Residual


def _fuses(x: Tensor, linear: Linear) -> bool:
    """Return whether a kernel of our own multiplies x [T, in], and does what surrounds the product as well."""
    ours = batch_invariant.product.runs_on(x.device)
    return linear.batch_invariant or (ours and batch_invariant.pays(len(x), x.shape[1], x.dtype, Chip.of(x.device)))


class Transformer:
    """Parameters on `device` in `dtype`, zeros; the loader fills `targets()`.

    config: of the whole model; the attribute of that name is what this rank of `group` computes. half: tokens of the
    largest half of a step that is cut in two. deterministic: no row depends on the others, to the bit; on one rank.
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
        self._batch_invariant = deterministic and device.type == "cuda"  # on the CPU rows are padded for it
        self._packs = PACKS and device.type == "cpu" and dtype == torch.float32
        self.row_tile = 1 if device.type != "cpu" else PACKED_ROW_TILE if self._packs else ROW_TILE
        self.group.prepare(config.hidden_size, dtype, half)
        self._vocab = config.vocab_size // self.group.size  # rows of embedding and head that are here
        self.embedding = self._new(self._vocab, config.hidden_size)
        self.layers = [self._layer(window) for window in config.windows]
        self.norm = self._norm(config.hidden_size)
        self.lm_head = self._tied() if config.tied else self._linear(config.hidden_size, self._vocab, bias=False)
        self.cos, self.sin = (table.to(device) for table in rope_tables(config, context))

    def _new(self, *shape: int) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(shape, dtype=self._dtype, device="meta")
        return self.memory.zeros(shape, self._dtype)

    def _norm(self, size: int) -> RMSNorm:
        return RMSNorm(self._new(size), self.config.norm_eps)

    def _linear(self, size_in: int, size_out: int, bias: bool) -> Linear:
        return Linear(self._new(size_out, size_in), self._new(size_out) if bias else None, self._batch_invariant)

    def _tied(self) -> Linear:
        return Linear(self.embedding, None, self._batch_invariant)

    def _layer(self, window: int) -> Layer:
        c, first = self.config, self.group.rank == 0  # who adds the biases of what is summed over the ranks
        q_size, kv_size = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        return Layer(
            input_norm=self._norm(c.hidden_size),
            qkv=self._linear(c.hidden_size, q_size + 2 * kv_size, c.qkv_bias),
            head_norm=HeadNorm(self._new(c.head_size), self._new(c.head_size), c.norm_eps) if c.qk_norm else None,
            o=self._linear(q_size, c.hidden_size, c.o_bias and first),
            post_norm=self._norm(c.hidden_size),
            gate_up=self._linear(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias),
            down=self._linear(c.intermediate_size, c.hidden_size, c.mlp_bias and first),
            window=window,
        )

    def targets(self) -> dict[str, Shard]:
        """Hugging Face parameter name -> this rank's part of it, and the view of a fused parameter that this is copied
        into."""
        c, whole, rank = self.config, self._whole, self.group.rank
        vocab = whole.vocab_size, rank * self._vocab
        found = {"model.embed_tokens.weight": _rows(self.embedding, *vocab), "model.norm.weight": _all(self.norm)}
        if not c.tied:
            found["lm_head.weight"] = _rows(self.lm_head.weight, *vocab)
        q, kv, inner = c.num_heads * c.head_size, c.num_kv_heads * c.head_size, c.intermediate_size
        first_kv = rank * whole.num_kv_heads // self.group.size * c.head_size
        heads = _Cut(q, whole.num_heads * c.head_size, rank * q)
        kv_heads = _Cut(kv, whole.num_kv_heads * c.head_size, first_kv)
        share = _Cut(inner, whole.intermediate_size, rank * inner)
        for number, layer in enumerate(self.layers):
            at = f"model.layers.{number}."
            found[at + "input_layernorm.weight"] = _all(layer.input_norm)
            found[at + "post_attention_layernorm.weight"] = _all(layer.post_norm)
            cuts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
            found |= _by_rows(layer.qkv, at + "self_attn.", cuts)
            found |= _by_columns(layer.o, at + "self_attn.o_proj", heads, c.o_bias)
            found |= _by_rows(layer.gate_up, at + "mlp.", {"gate_proj": share, "up_proj": share})
            found |= _by_columns(layer.down, at + "mlp.down_proj", share, c.mlp_bias)
            if layer.head_norm:
                found[at + "self_attn.q_norm.weight"] = Shard.whole(layer.head_norm.q)
                found[at + "self_attn.k_norm.weight"] = Shard.whole(layer.head_norm.k)
        return found

    def pack(self) -> None:
        """Lay the weights of products out for the CPU, where it pays; `targets` must have been filled before, and ends.

        One at a time, so that no more than one weight is there twice, but for the head that is the embedding too.
        """
        if self._packs:
            self._lay_out(Linear.packed)

    def unpack(self) -> None:
        """Undo `pack`, as far as it came, so that there are `targets` again. One weight at a time, too."""
        self._lay_out(Linear.unpacked)

    def release(self, keep: bool) -> None:
        """Give the weights' memory back, until `memory.restore`; see Memory. Those that are not kept are then to be
        written anew: there are `targets`."""
        if not keep:
            self._lay_out(self._blank)
        self.memory.release(keep)

    def _blank(self, linear: Linear) -> Linear:
        """The same with a plain weight, of zeros where it was packed."""
        return Linear(self._new(*linear.weight.shape), linear.bias) if linear.pack is not None else linear

    def _lay_out(self, anew: Callable[[Linear], Linear]) -> None:
        self.lm_head = anew(self._tied() if self.config.tied else self.lm_head)
        for number in range(len(self.layers)):
            for name in ("qkv", "o", "gate_up", "down"):
                layer = self.layers[number]
                changed: dict[str, Any] = {name: anew(getattr(layer, name))}
                self.layers[number] = replace(layer, **changed)

    def forward(self, steps: Sequence[StepInput], pool: KVPool, attention: Attention) -> Tensor:
        """The residual stream behind the last layer: [T, hidden], or with `ends` [R, hidden].

        Writes the step's keys and values into the pool. Of a prefill the last layer's keys and values are needed, and
        all that is behind them for the last token alone.

        steps: one, or a step cut in two, the later tokens last: they go through each layer in turn, so that one's sums
        over the ranks are made while the other computes. Both have `ends`, or neither.
        """
        residuals = self.embed([step.token_ids for step in steps])
        streams = [Stream(step, residual) for step, residual in zip(steps, residuals, strict=True)]
        for number in range(len(self.layers)):
            for stream in streams:
                stream.step.wait(number)
                q = self.queries(stream, number, pool)
                self.add_attended(stream, number, self.attend(stream, number, q, attention))
            for stream in streams:
                self.add_mlp(stream, number)
        found = [stream.residual.whole()[: stream.step.wanted] for stream in streams]
        return found[0] if len(found) == 1 else torch.cat(found)

    def embed(self, parts: Sequence[Tensor]) -> list[Residual]:
        """The residual streams of ids [T] each."""
        if self.group.size == 1:
            return [ReplicatedResidual(self.group, F.embedding(ids, self.embedding)) for ids in parts]
        found = [self._own_embedding(ids) for ids in parts]  # one of the ranks has it, and all others nothing
        exchange = self.group.exchange
        if exchange is None or len(parts) != HALVES or max(map(len, parts)) > exchange.tokens:
            return [ReplicatedResidual(self.group, self.group.all_reduce(x)) for x in found]
        norm = self.layers[0].input_norm
        return [ShardedResidual.begin(self.group, exchange, half, x, norm) for half, x in enumerate(found)]

    def _own_embedding(self, ids: Tensor) -> Tensor:
        """[T, hidden], of ids [T]: zeros for those that other ranks hold."""
        own = ids - self.group.rank * self._vocab
        here = (own >= 0) & (own < self._vocab)
        return F.embedding(own.masked_fill_(~here, 0), self.embedding).masked_fill_(~here[:, None], 0)

    def attend(self, stream: Stream, number: int, q: Tensor, attention: Attention) -> Tensor:
        """What attention gives for a layer's queries q [T, H, D], without those of padding: [real, H * D].

        Of the last layer, what is not wanted ends here: in the stream too.
        """
        step, plan = stream.step, stream.step.plan
        if step.ends is not None and number == len(self.layers) - 1:
            wanted = step.ends.rows
            stream.residual = ReplicatedResidual(self.group, self._padded(stream.residual.rows(wanted)))
            q = q[wanted]
            if not len(q):
                return q.flatten(1)
            plan = attention.plan(step.ends.layout)
        with span("attention"):
            return attention.attend(plan, number, q[: step.mapping.real], self.layers[number].window).flatten(1)

    def add_attended(self, stream: Stream, number: int, attended: Tensor) -> None:
        """Add o's product with what `attend` gave; there may be rows of padding behind it, or not."""
        if not len(stream.residual):
            return
        layer = self.layers[number]
        with span("o"):
            if len(attended) < len(stream.residual):
                attended = F.pad(attended, (0, 0, 0, len(stream.residual) - len(attended)))
            self._add(stream, layer.o, attended, layer.post_norm)

    def add_mlp(self, stream: Stream, number: int) -> None:
        if not len(stream.residual):
            return
        layer, behind = self.layers[number], self.layers[number + 1 : number + 2]
        with span("mlp"):
            x, norm, delta = stream.residual.input(layer.post_norm)
            hidden = apply(layer.gate_up, x, norm=norm, delta=delta, gated=True)
            self._add(stream, layer.down, hidden, behind[0].input_norm if behind else None)

    def _add(self, stream: Stream, linear: Linear, x: Tensor, following: RMSNorm | None) -> None:
        """Add the product with a weight whose columns are shared out to the residual stream. following: the norm that
        comes next, if it is within the layers."""
        if self.group.size == 1:
            stream.residual = ReplicatedResidual(self.group, apply(linear, x, add=stream.residual.whole()))
        else:
            stream.residual.add(apply(linear, x), following)

    def queries(self, stream: Stream, number: int, pool: KVPool) -> Tensor:
        """A layer's queries [T, H, D]; its keys and values go into the pool. All that was added to the stream is then
        in it."""
        layer, mapping, keys, values = self.layers[number], stream.step.mapping, pool.keys[number], pool.values[number]
        with span("qkv"):
            x, norm, delta = stream.residual.input(layer.input_norm)
            if layer.head_norm is None and _fuses(x, layer.qkv):
                rope = batch_invariant.RopeWrite(mapping, keys, values)
                return apply(layer.qkv, x, norm=norm, delta=delta, rope=rope)
            qkv = apply(layer.qkv, x, norm=norm, delta=delta)
            turned: Tensor = rope_write(qkv, mapping, keys, values, layer.head_norm)
            return turned

    def slot_mapping(self, pool: KVPool, positions: Tensor, slots: Tensor, real: int) -> SlotMapping:
        """See SlotMapping; of tokens whose keys and values go into `pool`."""
        num_kv, page_size = pool.keys.shape[2:4]
        return SlotMapping(positions, slots, self.cos, self.sin, real, num_kv, page_size)

    def products(self, mapping: SlotMapping, pool: KVPool) -> list[tuple[Linear, batch_invariant.Fused]]:
        """Each kind there is of the products of one token that stands at `mapping`, with what comes behind it."""
        layer, rope = self.layers[0], batch_invariant.RopeWrite(mapping, pool.keys[0], pool.values[0])
        stream = layer.qkv.weight.new_zeros(1, self.config.hidden_size)
        return [
            (layer.qkv, batch_invariant.Fused(rope=rope if layer.head_norm is None else None)),
            (layer.o, batch_invariant.Fused(add=stream)),
            (layer.gate_up, batch_invariant.Fused(swiglu=True)),
            (layer.down, batch_invariant.Fused(add=stream)),
            (self.lm_head, batch_invariant.Fused(out_dtype=torch.float32)),
        ]

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """float32 [R, V] of rows x [R, hidden] of what `forward` gives, in `out` where it is given; None on all ranks
        but 0."""
        if x.device.type == "cpu":
            own = self.lm_head(rms_norm(self._padded(x), self.norm.weight, self.norm.eps))[: len(x)].float()
        else:
            own = apply(self.lm_head, x, norm=self.norm, out_dtype=torch.float32)
        return self.group.gather(own, out)

    def _padded(self, x: Tensor) -> Tensor:
        """With rows of zeros behind x [T, hidden], up to a multiple of `row_tile`."""
        padding = -len(x) % self.row_tile
        return F.pad(x, (0, 0, 0, padding)) if padding else x


def checkpoint_shards(config: ModelConfig) -> dict[str, Shard]:
    """Hugging Face parameter name -> the whole tensor that a checkpoint of this model has, without any memory."""
    return Transformer(config, torch.float32, torch.device("meta"), context=1).targets()


@dataclass(frozen=True)
class _Cut:
    """`size` of `whole`, from `start` on."""

    size: int
    whole: int
    start: int


def _all(norm: RMSNorm) -> Shard:
    return Shard.whole(norm.weight)


def _rows(view: Tensor, whole: int, start: int) -> Shard:
    return Shard(view, (whole, *view.shape[1:]), 0, start)


def _by_rows(linear: Linear, prefix: str, cuts: dict[str, _Cut]) -> dict[str, Shard]:
    """The parts that a fused linear is made of, by name."""
    sizes = [cut.size for cut in cuts.values()]
    found = {}
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            for (name, cut), view in zip(cuts.items(), torch.split(fused, sizes), strict=True):
                found[f"{prefix}{name}.{kind}"] = _rows(view, cut.whole, cut.start)
    return found


def _by_columns(linear: Linear, name: str, cut: _Cut, bias: bool) -> dict[str, Shard]:
    """The part of a linear's weight; of its bias, if it has one, all or nothing."""
    outputs = linear.weight.shape[0]
    found = {name + ".weight": Shard(linear.weight, (outputs, cut.whole), 1, cut.start)}
    if bias:
        view = linear.weight.new_empty(0) if linear.bias is None else linear.bias
        found[name + ".bias"] = Shard(view, (outputs,))
    return found
