"""The transformer. Llama, Mistral, Qwen2 and Qwen3 are flags of one model.

Shape letters: T tokens in the step, R rows whose logits are wanted, H query heads, K KV heads, D head size,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.arch import ModelConfig
from fastgen.attention import Attention, StepLayout
from fastgen.cache.host import Arrivals
from fastgen.cache.pool import KVPool
from fastgen.kernels import product
from fastgen.kernels.launch import Chip
from fastgen.kernels.norm import rms_norm
from fastgen.kernels.rope import HeadNorm, Places, rope_write
from fastgen.kernels.swiglu import swiglu
from fastgen.profiling import span
from fastgen.rope import rope_tables

ROW_TILE = 16
"""Steps and logits are padded to a multiple of so many rows: BLAS sums a row alike for all of them (promise 1)."""

ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
"""Whether torch has the float32 product that torch.compile uses on the CPU: up to twice as fast as F.linear's BLAS."""


@dataclass(frozen=True)
class Linear:
    """y = x weight^T + bias; weight [out, in], in oneDNN's own order after `packed`, bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype not in (None, x.dtype):
            assert self.bias is None
            return torch.mm(x, self.weight.t(), out_dtype=out_dtype)
        if ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)

    def packed(self) -> Linear:
        """The same with its weight laid out for the CPU's product, which otherwise lays it out anew in each call."""
        return Linear(torch.ops.mkldnn._reorder_linear_weight(self.weight, None), self.bias)


@dataclass(frozen=True)
class RMSNorm:
    weight: Tensor
    eps: float


def apply(
    linear: Linear,
    x: Tensor,
    work: product.Workspace,
    *,
    norm: RMSNorm | None = None,
    add: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A linear layer with what surrounds it: `norm` of its input x [T, in] before, SwiGLU of its output (`gated`; the
    weight holds gate, then up) or an addition to `add` [T, out], in place, behind.

    A few rows go through one kernel of our own, which reads the weights and little else; more through BLAS.
    """
    if _few(x, linear):
        scaled = None if norm is None else (norm.weight, norm.eps)
        fused = product.Fused(scaled, add, gated, out_dtype=out_dtype)
        out: Tensor = product.product(x, linear.weight, linear.bias, work, fused)
        return out
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
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
    """token_ids: int64 [T]; places: where they stand; plan: Attention.plan of the step; ends: None where all rows are
    wanted; arrivals: of pages that are being loaded, if there are any."""

    token_ids: Tensor
    places: Places
    plan: Any
    ends: Ends | None = None
    arrivals: Arrivals | None = None


def _few(x: Tensor, linear: Linear) -> bool:
    """Whether x has so few rows that a product of our own is faster."""
    outputs, inputs = linear.weight.shape
    return x.is_cuda and x.dtype != torch.float32 and product.pays(len(x), outputs, inputs, Chip.of(x.device))


def _queries(layer: Layer, x: Tensor, work: product.Workspace, places: Places, keys: Tensor, values: Tensor) -> Tensor:
    """The queries [T, H, D] of the residual stream x; its keys and values go into the pool."""
    if layer.head_norm is None and _few(x, layer.qkv):
        norm = layer.input_norm.weight, layer.input_norm.eps
        fused = product.Fused(norm, rope=product.RopeWrite(places, keys, values))
        q: Tensor = product.product(x, layer.qkv.weight, layer.qkv.bias, work, fused)
        return q
    turned: Tensor = rope_write(apply(layer.qkv, x, work, norm=layer.input_norm), places, keys, values, layer.head_norm)
    return turned


class Transformer:
    """Parameters on `device` in `dtype`, uninitialized; the loader fills `targets()`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, context: int) -> None:
        self.config = config
        self._dtype, self._device = dtype, device
        self.embedding = self._new(config.vocab_size, config.hidden_size)
        self.layers = [self._layer(window) for window in config.windows]
        self.norm = self._norm(config.hidden_size)
        head = self.embedding if config.tied else self._new(config.vocab_size, config.hidden_size)
        self.lm_head = Linear(head, None)
        self.cos, self.sin = (table.to(device) for table in rope_tables(config, context))
        self.work = product.Workspace.make(device)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _norm(self, size: int) -> RMSNorm:
        return RMSNorm(self._new(size), self.config.norm_eps)

    def _linear(self, size_in: int, size_out: int, bias: bool) -> Linear:
        return Linear(self._new(size_out, size_in), self._new(size_out) if bias else None)

    def _layer(self, window: int) -> Layer:
        c = self.config
        q_size, kv_size = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        return Layer(
            input_norm=self._norm(c.hidden_size),
            qkv=self._linear(c.hidden_size, q_size + 2 * kv_size, c.qkv_bias),
            head_norm=HeadNorm(self._new(c.head_size), self._new(c.head_size), c.norm_eps) if c.qk_norm else None,
            o=self._linear(q_size, c.hidden_size, c.o_bias),
            post_norm=self._norm(c.hidden_size),
            gate_up=self._linear(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias),
            down=self._linear(c.intermediate_size, c.hidden_size, c.mlp_bias),
            window=window,
        )

    def targets(self) -> dict[str, Tensor]:
        """Hugging Face parameter name -> the view of a fused parameter that this tensor is copied into."""
        c = self.config
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not c.tied:
            found["lm_head.weight"] = self.lm_head.weight
        q_size, kv_size = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        for number, layer in enumerate(self.layers):
            at = f"model.layers.{number}."
            found[at + "input_layernorm.weight"] = layer.input_norm.weight
            found[at + "post_attention_layernorm.weight"] = layer.post_norm.weight
            found |= _split(layer.qkv, at + "self_attn.", {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
            found |= _split(layer.o, at + "self_attn.", {"o_proj": c.hidden_size})
            found |= _split(layer.gate_up, at + "mlp.", dict.fromkeys(("gate_proj", "up_proj"), c.intermediate_size))
            found |= _split(layer.down, at + "mlp.", {"down_proj": c.hidden_size})
            if layer.head_norm:
                found[at + "self_attn.q_norm.weight"] = layer.head_norm.q
                found[at + "self_attn.k_norm.weight"] = layer.head_norm.k
        return found

    def pack(self) -> None:
        """Lay the layers' weights out for the CPU, where it pays; `targets` must have been filled before, and ends.

        One at a time, so that no more than one weight is there twice. The head stays, as the embedding may share it.
        """
        if not ONEDNN or self._device.type != "cpu" or self._dtype != torch.float32:
            return
        for number in range(len(self.layers)):
            for name in ("qkv", "o", "gate_up", "down"):
                layer = self.layers[number]
                self.layers[number] = replace(layer, **{name: getattr(layer, name).packed()})

    def forward(self, step: StepInput, pool: KVPool, attention: Attention) -> Tensor:
        """The residual stream behind the last layer: [T, hidden], or with `ends` [R, hidden], and padding.

        Writes the step's keys and values into the pool. Of a prefill the last layer's keys and values are needed, and
        all that is behind them for the last token alone.
        """
        x, plan = F.embedding(step.token_ids, self.embedding), step.plan
        for number, layer in enumerate(self.layers):
            if step.arrivals is not None:
                step.arrivals.wait(number)
            with span("qkv"):
                q = _queries(layer, x, self.work, step.places, pool.keys[number], pool.values[number])
            if step.ends is not None and number == len(self.layers) - 1:
                x, q = _padded(x[step.ends.rows]), q[step.ends.rows]
                if not len(q):
                    break
                plan = attention.plan(step.ends.layout)
            with span("attention"):
                out = attention.attend(plan, number, q[: step.places.real], layer.window).flatten(1)
                if len(out) < len(x):  # padding is not attended
                    out = F.pad(out, (0, 0, 0, len(x) - len(out)))
            with span("o"):
                x = apply(layer.o, out, self.work, add=x)
            with span("mlp"):
                hidden = apply(layer.gate_up, x, self.work, norm=layer.post_norm, gated=True)
                x = apply(layer.down, hidden, self.work, add=x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """float32 [R, V] of rows x [R, hidden] of what `forward` gives."""
        if x.device.type == "cpu":
            return self.lm_head(rms_norm(_padded(x), self.norm.weight, self.norm.eps))[: len(x)].float()
        return apply(self.lm_head, x, self.work, norm=self.norm, out_dtype=torch.float32)


def _padded(x: Tensor) -> Tensor:
    """With rows of zeros behind it on the CPU, up to a multiple of ROW_TILE."""
    return F.pad(x, (0, 0, 0, -len(x) % ROW_TILE)) if x.device.type == "cpu" else x


def _split(linear: Linear, prefix: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Names and views of the parts that a fused linear is made of, by output size."""
    parts = dict(zip(sizes, torch.split(linear.weight, list(sizes.values())), strict=True))
    found = {f"{prefix}{name}.weight": part for name, part in parts.items()}
    if linear.bias is not None:
        biases = torch.split(linear.bias, list(sizes.values()))
        found |= {f"{prefix}{name}.bias": part for name, part in zip(sizes, biases, strict=True)}
    return found
