"""The parameters of a model as one rank holds them, and the slices of a checkpoint's tensors that they are.

The tables say which modules Hugging Face's model has, what their shapes are, where their weights go, and how ranks
split them. Layers are made from the tables, and `Parameters.targets` finds the place of each tensor with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from fastgen.device import mkl
from fastgen.device.memory import memory_on
from fastgen.kernels.norm import RMSNorm
from fastgen.kernels.rope import HeadNorm
from fastgen.model.adapter import AdapterBases
from fastgen.model.config import ModelConfig
from fastgen.model.linear import ROW_TILE, Linear
from fastgen.model.packed import PACKED_ROW_TILE, pack, unpack
from fastgen.model.quantization import Quantization
from fastgen.model.quantized import Fp8Linear
from fastgen.model.weights import Shard
from fastgen.parallel.group import Group

ROWS, COLUMNS = 0, 1  # of a weight [outputs, inputs]
LINEARS = "qkv", "o", "gate_up", "down"  # the linear layers of a Layer


@dataclass(frozen=True)
class Module:
    """A module of Hugging Face's model: a weight, and a bias of as many numbers as the weight has rows.

    name: of the module; its tensors are `name`.weight and `name`.bias. place: the linear layer or the tensor that holds
    it, as an attribute of a Layer or of Parameters. Modules of one linear layer are stacked row by row, in the order of
    the table. shape: of the whole weight, [outputs, inputs], or [size] of a norm. split: the dimension of the weight
    that ranks split into equal parts, ROWS or COLUMNS; None: each rank holds all of it. parts: the maximum number of
    parts, for KV heads; with more ranks than that, neighbours hold the same part. 0: as many as ranks.
    """

    name: str
    place: str
    shape: tuple[int, ...]
    split: int | None = None
    bias: bool = False
    parts: int = 0

    def part(self, rank: int, ranks: int) -> tuple[int, tuple[int, ...]]:
        """Return the part of the weight that a rank holds: its start in dimension `split`, and its shape."""
        if self.split is None:
            return 0, self.shape
        shape, parts = list(self.shape), min(ranks, self.parts or ranks)
        shape[self.split] //= parts
        return rank * parts // ranks * shape[self.split], tuple(shape)


def model_table(c: ModelConfig) -> list[Module]:
    """Return the modules outside of the layers; the places are attributes of Parameters. c: of the whole model."""
    vocab = c.vocab_size, c.hidden_size
    head = Module("lm_head", "lm_head", vocab, ROWS)
    return [
        Module("model.norm", "norm.weight", (c.hidden_size,)),
        Module("model.embed_tokens", "embedding", vocab, ROWS),
        *([] if c.tied else [head]),
    ]


def layer_table(c: ModelConfig, number: int) -> list[Module]:
    """Return the modules of layer `number`; the places are attributes of Layer. c: of the whole model."""
    layer = f"model.layers.{number}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    hidden, inner, head, kv_heads = c.hidden_size, c.intermediate_size, c.head_size, c.num_kv_heads
    heads = c.num_heads * head
    norms = [
        Module(layer + "input_layernorm", "input_norm.weight", (hidden,)),
        Module(layer + "post_attention_layernorm", "post_norm.weight", (hidden,)),
    ]
    if c.qk_norm:
        norms += [
            Module(attention + "q_norm", "head_norm.q", (head,)),
            Module(attention + "k_norm", "head_norm.k", (head,)),
        ]
    return [
        *norms,
        Module(attention + "q_proj", "qkv", (heads, hidden), ROWS, c.qkv_bias),
        Module(attention + "k_proj", "qkv", (kv_heads * head, hidden), ROWS, c.qkv_bias, kv_heads),
        Module(attention + "v_proj", "qkv", (kv_heads * head, hidden), ROWS, c.qkv_bias, kv_heads),
        Module(attention + "o_proj", "o", (hidden, heads), COLUMNS, c.o_bias),
        Module(mlp + "gate_proj", "gate_up", (inner, hidden), ROWS, c.mlp_bias),
        Module(mlp + "up_proj", "gate_up", (inner, hidden), ROWS, c.mlp_bias),
        Module(mlp + "down_proj", "down", (hidden, inner), COLUMNS, c.mlp_bias),
    ]


@dataclass(eq=False)
class Layer:
    """The parameters of a layer: qkv holds the rows of q, k and v, gate_up the rows of gate and up."""

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


class Parameters:
    """A rank's parameters on `device` in `dtype`, zeros until the loader fills `targets()`.

    config: of the whole model; the attribute `config` is the part of this rank. deterministic: the bits of a row do not
    depend on the other rows; for one rank. row_tile: the multiple to which rows are padded (`ROW_TILE`).
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        group: Group | None = None,
        deterministic: bool = False,
    ) -> None:
        self.group = Group() if group is None else group
        self.config, self._whole = config.split(self.group.size), config
        self.dtype, self.device = dtype, device
        self.memory = memory_on(device)
        self.bases = AdapterBases(self.memory, device)
        self._batch_invariant = deterministic and device.type == "cuda"  # on the CPU rows are padded for it
        self._packs = mkl.PACKS and device.type == "cpu" and dtype == torch.float32 and not config.quantization
        self.row_tile = 1 if device.type != "cpu" else PACKED_ROW_TILE if self._packs else ROW_TILE
        norm, embedding, *head = model_table(config)
        self.norm = RMSNorm(self._new(*norm.shape), config.norm_eps)
        self.embedding = self._new(*self._part(embedding)[1])
        self.lm_head = self._linear(head) if head else self._tied()
        self.layers = [self._layer(number) for number in range(config.num_layers)]

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        return self.memory.zeros(shape, dtype or self.dtype)

    def _part(self, module: Module) -> tuple[int, tuple[int, ...]]:
        return module.part(self.group.rank, self.group.size)

    def _has_bias(self, module: Module) -> bool:
        """Return whether this rank adds the bias: of a layer whose columns the ranks split, one rank does."""
        return module.bias and (module.split == ROWS or self.group.rank == 0)

    def _tied(self) -> Linear:
        return Linear(self.embedding, None, self._batch_invariant)

    def _linear(self, modules: list[Module], form: Quantization | None = None) -> Linear:
        """Make the linear layer of some modules. form: if it is in fp8."""
        rows = {module.name: self._part(module)[1][0] for module in modules}
        size_out, size_in = sum(rows.values()), self._part(modules[0])[1][1]
        bias = self._new(size_out) if self._has_bias(modules[0]) else None
        if form is not None and any(map(form.covers, rows)):
            return Fp8Linear.zeros(form, rows, size_in, bias, self._new)
        return Linear(self._new(size_out, size_in), bias, self._batch_invariant)

    def _layer(self, number: int) -> Layer:
        table, eps = layer_table(self._whole, number), self.config.norm_eps
        norms = {module.place: self._new(*module.shape) for module in table if module.split is None}
        linears = {
            place: self._linear([module for module in table if module.place == place], self.config.quantization)
            for place in LINEARS
        }
        return Layer(
            input_norm=RMSNorm(norms["input_norm.weight"], eps),
            head_norm=HeadNorm(norms["head_norm.q"], norms["head_norm.k"], eps) if self.config.qk_norm else None,
            post_norm=RMSNorm(norms["post_norm.weight"], eps),
            window=self.config.windows[number],
            **linears,
        )

    def targets(self, stored: bool = False) -> dict[str, Shard]:
        """Return this rank's shard of each Hugging Face parameter, by name. Weights must not be packed.

        stored: with the scales of a checkpoint that is in fp8, which are tensors of their own; else shards quantize
        what is written.
        """
        form = self.config.quantization.stored if stored and self.config.quantization else ""
        found = self._shards(self, model_table(self._whole), form)
        for number, layer in enumerate(self.layers):
            found |= self._shards(layer, layer_table(self._whole, number), form)
        return found

    def _shards(self, holder: Layer | Parameters, table: list[Module], form: str) -> dict[str, Shard]:
        """Return the shards of the modules of a table, whose places are attributes of `holder`."""
        found, ends = dict[str, Shard](), Counter[str]()
        for module in table:
            held = attrgetter(module.place)(holder)
            start, shape = self._part(module)
            rows = slice(ends[module.place], ends[module.place] + shape[0])
            ends[module.place] = rows.stop
            weight = held.weight if isinstance(held, Linear) else held
            shard = Shard(weight[rows], module.shape, module.split or 0, start)
            if isinstance(held, Fp8Linear):
                found |= held.shards(module.name, shard, rows, form)
            else:
                found[f"{module.name}.weight"] = shard
            if self._has_bias(module):
                start = start if module.split == ROWS else 0
                found[f"{module.name}.bias"] = Shard(held.bias[rows], module.shape[:1], 0, start)
            elif module.bias:
                found[f"{module.name}.bias"] = Shard(self.norm.weight.new_empty(0), module.shape[:1])
        return found

    def pack(self) -> None:
        """Pack the weights of products on the CPU, after `targets` are filled; earlier shards are void then.

        Weights are packed one at a time, so that only one is in memory twice, and a head that is the embedding.
        """
        if self._packs:
            self._replace(pack)

    def unpack(self) -> None:
        """Undo `pack`, one weight at a time, also after a `pack` that failed midway. `targets` can be called then."""
        if self.config.tied:
            self.lm_head = self._tied()
        self._replace(unpack)

    def _replace(self, change: Callable[[Linear], Linear]) -> None:
        self.lm_head = change(self.lm_head)
        for layer in self.layers:
            for place in LINEARS:
                setattr(layer, place, change(getattr(layer, place)))

    @property
    def distinct(self) -> list[int]:
        """Indices of one representative layer per kind; the other layers launch the same kernels in decodes."""
        kinds = {(layer.window, *map(type, layer.linears)): number for number, layer in enumerate(self.layers)}
        return sorted(kinds.values())


def checkpoint_shards(config: ModelConfig) -> dict[str, Shard]:
    """Return the whole tensors of a checkpoint by Hugging Face name, as shards without memory."""
    return Parameters(config, torch.float32, torch.device("meta")).targets()
