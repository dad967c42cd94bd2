"""The parameters that one rank holds, and the checkpoint tensors that fill them.

Two tables list the modules of Hugging Face's model with their shapes, the layers they are fused into, and how ranks
split them. Layers are created from these tables, and `Parameters.targets` uses them to find the place of each tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastgen.device.memory import Memory
from fastgen.device.new_memory import memory_on
from fastgen.kernels.norm import BranchEnd, RMSNorm, WideNorm
from fastgen.kernels.rope import HeadNorm
from fastgen.model.config import ModelConfig
from fastgen.model.linear import ROW_TILE, Linear
from fastgen.model.modules import COLUMNS, ROWS, Module, together
from fastgen.model.packed import pack, packing, unpack
from fastgen.model.quantization import Int4, Quantization
from fastgen.model.weights import EMBEDDING, HEAD, Part, Shard
from fastgen.parallel.group import Group

if TYPE_CHECKING:  # for adapters, hybrids and quantized models only
    from fastgen.model.adapter import AdapterBases
    from fastgen.model.quantized_layers import QuantizedLayers
    from fastgen.model.recurrent_layers import DeltaWeights

LINEARS = "qkv", "o", "gate_up", "down", "o_gate"  # the linear layers of a Layer, the last of which few models have


def model_table(c: ModelConfig) -> list[Module]:
    """Return the modules outside of the layers. Their places are attributes of Parameters. c: config of the whole
    model."""
    vocab = c.vocab_size, c.hidden_size
    head = Module(HEAD.removesuffix(".weight"), "lm_head", vocab, ROWS)
    return [
        Module("model.norm", "norm.weight", (c.hidden_size,)),
        Module(EMBEDDING.removesuffix(".weight"), "embedding", vocab, ROWS),
        *([] if c.shares_head else [head]),
    ]


def layer_table(c: ModelConfig, number: int) -> list[Module]:
    """Return the modules of layer `number`. Their places are attributes of Layer. c: config of the whole model."""
    layer = f"model.layers.{number}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    hidden, inner, head, kv_heads = c.hidden_size, c.intermediate_size, c.head_size, c.num_kv_heads
    heads = c.num_heads * head
    places = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
    if c.post_norm:
        places = {"post_attention_layernorm": "o_end.norm", "post_feedforward_layernorm": "down_end.norm"}
    if c.peri_norm:
        places |= {"post_norm1": "o_end.norm", "post_norm2": "down_end.norm"}
    if c.centered_norm and c.peri_norm:
        places = {"input_layernorm": "input_norm", "post_attention_layernorm": "o_end.norm",
                  "pre_feedforward_layernorm": "post_norm", "post_feedforward_layernorm": "down_end.norm"}  # fmt: skip
    norms = [Module(layer + name, f"{place}.weight", (hidden,)) for name, place in places.items()]
    recurrent = c.recurrent if c.recurrent and number in c.recurrent.layers else None
    if recurrent is None and ((c.qk_norm and not c.bare_norm) or c.wide_norm):
        place, sizes = ("head_norm", (head, head)) if c.qk_norm else ("wide_norm", (heads, kv_heads * head))
        of_heads = ("query_layernorm", "key_layernorm") if c.norm_after_rope else ("q_norm", "k_norm")
        for name, size in zip(of_heads, sizes, strict=True):
            norms.append(Module(attention + name, f"{place}.{name[0]}", (size,)))
    qkv = [
        Module(attention + "q_proj", "qkv", (heads * (2 if c.recurrent else 1), hidden), ROWS, c.qkv_bias),
        Module(attention + "k_proj", "qkv", (kv_heads * head, hidden), ROWS, c.qkv_bias, kv_heads),
        Module(attention + "v_proj", "qkv", (kv_heads * head, hidden), ROWS, c.qkv_bias, kv_heads),
    ]
    names = ("gate_proj", "up_proj") if c.gated else ("up_proj",)
    gate_up = [Module(mlp + name, "gate_up", (inner, hidden), ROWS, c.mlp_bias) for name in names]
    if c.qkv_tensor:
        qkv = together(layer + c.qkv_tensor, qkv)
    if c.gate_up_tensor:
        gate_up = together(layer + c.gate_up_tensor, gate_up)
    out = Module(attention + "o_proj", "o", (hidden, heads), COLUMNS, c.o_bias)
    if recurrent is not None:
        small, qkv, out = recurrent.modules(layer, hidden)
        norms += small
    return [
        *norms,
        *qkv,
        out,
        *([Module(attention + "gate_proj", "o_gate", (heads, hidden), ROWS)] if c.output_gate else []),
        *gate_up,
        Module(layer + c.down_tensor, "down", (hidden, inner), COLUMNS, c.mlp_bias),
    ]


@dataclass(eq=False)
class Layer:
    """The parameters of a layer. qkv stacks the rows of q, k and v; gate_up stacks the rows of gate and up, or has only
    those of up. o_gate: its sigmoid multiplies the output of attention. o_end, down_end: what happens to the outputs of
    o and down before they are added to the residual stream. delta: of a recurrent layer, whose qkv has all that follows
    from the layer's input; o is its out_proj."""

    input_norm: RMSNorm | None
    qkv: Linear
    head_norm: HeadNorm | None
    wide_norm: WideNorm | None
    o: Linear
    post_norm: RMSNorm | None
    gate_up: Linear
    down: Linear
    window: int
    has_other_rope: bool
    o_end: BranchEnd | None
    down_end: BranchEnd | None
    o_gate: Linear | None = None
    delta: DeltaWeights | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layers of LINEARS that it has."""
        gate = () if self.o_gate is None else (self.o_gate,)
        return self.qkv, self.o, self.gate_up, self.down, *gate


class Parameters:
    """A rank's parameters on `device` in `dtype`. They are zeros until the loader fills `targets()`.

    config: config of the whole model; the attribute `config` is this rank's part of it. deterministic: the bits of a
    row do not depend on other rows. packing: the class of packed layers on the CPU, or None. row_tile: multiple to
    which the number of rows is padded, that of `packing` or ROW_TILE, and 1 on a GPU. shared: other parameters, whose
    embedding and head these have too. changes: number of times that the weights of a running model were changed.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        group: Group | None = None,
        deterministic: bool = False,
        shared: Parameters | None = None,
    ) -> None:
        self.group = Group() if group is None else group
        self.config, self._whole = config.split(self.group.size), config
        self.dtype, self.device = dtype, device
        self.memory = memory_on(device)
        self.changes = 0
        self._batch_invariant = deterministic and device.type == "cuda"  # on the CPU, `packing` and `row_tile` suffice
        self._quantized = None if config.quantization is None else quantized_layers(config.quantization)
        plain = config.quantization is None or isinstance(config.quantization, Int4)  # dequantized on the CPU
        self.packing = packing(dtype, deterministic) if device.type == "cpu" and plain else None
        self.row_tile = 1 if device.type != "cpu" else self.packing.row_tile if self.packing else ROW_TILE
        norm, embedding, *head = model_table(config)
        self.norm = RMSNorm(self._new(*norm.shape), config.norm_eps, config.centered_norm and not config.bare_norm)
        self.bare_norm: RMSNorm | None = None  # of embeddings
        if config.bare_norm:
            self.bare_norm = RMSNorm(torch.zeros(config.hidden_size, dtype=dtype, device=device), config.norm_eps, True)
        self.embedding: Tensor = shared.embedding if shared else self._new(*self._part(embedding)[1])
        self.lm_head: Linear = shared.lm_head if shared else self._linear(head) if head else self._tied()
        self.layers = [self._layer(number) for number in range(config.num_layers)]

    @cached_property
    def bases(self) -> AdapterBases:
        """The weights without adapters, whose module loads with the first adapter or update."""
        from fastgen.model.adapter import AdapterBases

        return AdapterBases(self.memory, self.device)

    def new_memory(self) -> Memory:
        """Return further memory on the same device."""
        return memory_on(self.device)

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        return self.memory.zeros(shape, dtype or self.dtype)

    def _part(self, module: Module) -> tuple[int, tuple[int, ...]]:
        return module.part(self.group.rank, self.group.size)

    def _has_bias(self, module: Module) -> bool:
        """Return whether this rank adds the module's bias. If ranks split the columns, only rank 0 adds it."""
        return module.bias and (module.split == ROWS or self.group.rank == 0)

    def _tied(self) -> Linear:
        return Linear(self.embedding, None, self._batch_invariant)

    def _linear(self, modules: list[Module], quantized: QuantizedLayers | None = None) -> Linear:
        """Make the linear layer into which modules are fused. quantized: makes it if the model is quantized."""
        rows = [(module.name, self._part(module)[1][0]) for module in modules]
        size_out, size_in = sum(size for _, size in rows), self._part(modules[0])[1][1]
        bias = self._new(size_out) if self._has_bias(modules[0]) else None
        linear = None
        if quantized is not None:
            linear = quantized.linear(rows, size_in, bias, self._new, self._batch_invariant)
        return linear or Linear(self._new(size_out, size_in), bias, self._batch_invariant)

    def _layer(self, number: int) -> Layer:
        table, eps, centered = layer_table(self._whole, number), self.config.norm_eps, self.config.centered_norm
        norms = {
            module.place: self._new(*module.shape, dtype=torch.float32 if module.exact else None)
            for module in table
            if module.split is None
        }
        linears = {
            place: self._linear(modules, self._quantized)
            for place in LINEARS
            if (modules := [module for module in table if module.place == place])
        }
        norm = {place.removesuffix(".weight"): RMSNorm(weight, eps, centered) for place, weight in norms.items()}
        if (post_eps := self.config.post_norm_eps) is not None:
            norm |= {name: replace(each, eps=post_eps) for name, each in norm.items() if "_end." in name}
        ends = {name: BranchEnd(norm.get(f"{name}.norm"), self.config.branch_scale) for name in ("o_end", "down_end")}
        if self.config.adds_products:
            ends.clear()
        head_norm = wide_norm = delta = None
        if (recurrent := self.config.recurrent) and number in recurrent.layers:
            delta = recurrent.weights(norms)
        elif self.config.qk_norm:
            places = [f"head_norm.{name}" for name in "qk"]
            if self.bare_norm is not None:
                norms |= {place: self.bare_norm.weight.new_zeros(self.config.head_size) for place in places}
            q, k = (norms[place] for place in places)
            head_norm = HeadNorm(q, k, eps, self.config.norm_after_rope, centered)
        if self.config.wide_norm:
            wide_norm = WideNorm(norms["wide_norm.q"], norms["wide_norm.k"], eps)
        return Layer(
            input_norm=norm.get("input_norm"),
            head_norm=head_norm,
            wide_norm=wide_norm,
            post_norm=norm.get("post_norm"),
            window=self.config.windows[number],
            has_other_rope=number in self.config.other_layers,
            o_end=ends.get("o_end"),
            down_end=ends.get("down_end"),
            delta=delta,
            **linears,
        )

    def targets(self, stored: bool = False) -> dict[str, Shard]:
        """Return this rank's shard of each Hugging Face parameter, by name. Weights must not be packed.

        stored: the tensors are those of a quantized checkpoint: scales are separate tensors. Otherwise shards quantize
        the weights that are written.
        """
        form = self.config.quantization.stored if stored and self.config.quantization else ""
        shards = self._shards(self, model_table(self._whole), form)
        for number, layer in enumerate(self.layers):
            shards |= self._shards(layer, layer_table(self._whole, number), form)
        return shards

    def _shards(self, holder: Layer | Parameters, table: list[Module], form: str) -> dict[str, Shard]:
        """Return the shards of the modules in a table whose places are attributes of `holder`."""
        shards, ends = dict[str, Shard](), Counter[str]()
        for _, group in groupby(table, attrgetter("name")):
            module, *others = modules = list(group)
            place = attrgetter(module.place)(holder)
            slices = [(each.first + start, shape[0]) for each in modules for start, shape in [self._part(each)]]
            start, parts = slices[0][0], tuple(slices) if others else ()
            rows = slice(ends[module.place], ends[module.place] + sum(size for _, size in slices))
            ends[module.place] = rows.stop
            weight = place.weight if isinstance(place, Linear) else place
            whole = module.total or module.shape[0], *module.shape[1:]
            dim = module.split or 0
            part = Part(whole, dim, start, self._part(module)[1][dim])
            quantized = None
            if self._quantized is not None and module.place in LINEARS:
                quantized = self._quantized.shards(place, module.name, part, parts, rows, form)
            shards |= quantized or {
                module.name if module.bare else f"{module.name}.weight": Shard(weight[rows], *part[:3], parts=parts)
            }
            if self._has_bias(module):
                start = start if module.split == ROWS else 0
                shards[f"{module.name}.bias"] = Shard(place.bias[rows], whole[:1], 0, start, parts=parts)
            elif module.bias:
                shards[f"{module.name}.bias"] = Shard(self.norm.weight.new_empty(0), whole[:1])
        return shards

    def untie(self) -> None:
        """Give the head of a tied model its own memory, with a copy of the embedding. Weights must not be packed."""
        if self.config.shares_head:
            self._whole, self.config = replace(self._whole, own_head=True), replace(self.config, own_head=True)
            _, _, head = model_table(self._whole)
            self.lm_head = self._linear([head])
            self.lm_head.weight.copy_(self.embedding)

    def pack(self) -> None:
        """Bring weights into the form that matrix products read, after `targets` are filled: int4, and weights that are
        packed on the CPU. Earlier shards become invalid.

        Weights are packed one at a time, so that only one of them is in memory twice. A tied head is copied.
        """
        if (quantized := self._quantized) is not None:
            self._replace(lambda linear: quantized.prepare(linear, self._new))
        if self.packing is not None:
            from fastgen.device.arena import Arena

            new = Arena(self.memory).zeros
            for holder, place in self._places():
                gated = place == "gate_up" and self.config.swiglu
                setattr(holder, place, pack(getattr(holder, place), self.packing, new, gated))

    def unpack(self) -> None:
        """Undo `pack` one weight at a time, even if it failed midway, so that `targets` can be called again."""
        if self.config.shares_head:
            self.lm_head = self._tied()
        self._replace(unpack)
        if self._quantized is not None:
            self._replace(self._quantized.restore)

    def _replace(self, change: Callable[[Linear], Linear]) -> None:
        for holder, place in self._places():
            setattr(holder, place, change(getattr(holder, place)))

    def _places(self) -> Iterator[tuple[Parameters | Layer, str]]:
        """Yield the holder and the attribute of each linear layer."""
        yield self, "lm_head"
        for layer in self.layers:
            for place, _ in zip(LINEARS, layer.linears, strict=False):
                yield layer, place

    @property
    def distinct(self) -> list[int]:
        """Indices of one representative layer per kind; the other layers launch the same kernels in decodes."""
        kinds = {
            (layer.window, layer.delta is None, *map(type, layer.linears)): number
            for number, layer in enumerate(self.layers)
        }
        return sorted(kinds.values())


def quantized_layers(form: Quantization) -> QuantizedLayers:
    """Return the layers of a quantized form, whose modules load with the first quantized model."""
    from fastgen.model.quantized_layers import QuantizedLayers

    return QuantizedLayers(form)


def checkpoint_shards(config: ModelConfig) -> dict[str, Shard]:
    """Return the whole tensors of a checkpoint by Hugging Face name, as shards without memory. A tied model's are
    without a head."""
    config = replace(config, own_head=False)
    return Parameters(config, torch.float32, torch.device("meta")).targets()
