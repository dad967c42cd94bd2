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
from fastgen.attention import Attention
from fastgen.cache.pool import KVPool
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

    def __call__(self, x: Tensor) -> Tensor:
        if ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)

    def packed(self) -> Linear:
        """The same with its weight laid out for the CPU's product, which otherwise lays it out anew in each call."""
        return Linear(torch.ops.mkldnn._reorder_linear_weight(self.weight, None), self.bias)


@dataclass(frozen=True)
class RMSNorm:
    """https://arxiv.org/abs/1910.07467, in float32 over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


@dataclass(frozen=True)
class Layer:
    """Fused weights: qkv holds the rows of q, k and v, gate_up those of gate and up."""

    input_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int


@dataclass(frozen=True)
class StepInput:
    """token_ids, positions: int64 [T]; kv_rows: int64 [T', K], the pool rows (KVPool.rows) of the T' <= T tokens that
    are not padding; plan: Attention.plan of the step."""

    token_ids: Tensor
    positions: Tensor
    kv_rows: Tensor
    plan: Any


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
            q_norm=self._norm(c.head_size) if c.qk_norm else None,
            k_norm=self._norm(c.head_size) if c.qk_norm else None,
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
            if layer.q_norm and layer.k_norm:
                found[at + "self_attn.q_norm.weight"] = layer.q_norm.weight
                found[at + "self_attn.k_norm.weight"] = layer.k_norm.weight
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
        """The last hidden states [T, hidden], normed; writes the step's keys and values into the pool."""
        x = F.embedding(step.token_ids, self.embedding)
        cos, sin = self.cos[step.positions, None], self.sin[step.positions, None]
        for number, layer in enumerate(self.layers):
            x += self._attention(number, layer, layer.input_norm(x), cos, sin, step, pool, attention)
            x += self._mlp(layer, layer.post_norm(x))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of hidden [R, hidden]."""
        rows = len(hidden)
        return self.lm_head(F.pad(hidden, (0, 0, 0, -rows % ROW_TILE)))[:rows].float()

    def _attention(
        self,
        number: int,
        layer: Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: StepInput,
        pool: KVPool,
        attention: Attention,
    ) -> Tensor:
        c, real = self.config, len(step.kv_rows)
        heads = layer.qkv(x).view(len(x), -1, c.head_size)
        qk, v = torch.split(heads, [c.num_heads + c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.q_norm and layer.k_norm:
            qk = torch.cat([layer.q_norm(qk[:, : c.num_heads]), layer.k_norm(qk[:, c.num_heads :])], dim=1)
        q, k = torch.split(rotate(qk, cos, sin), [c.num_heads, c.num_kv_heads], dim=1)
        pool.write(number, step.kv_rows, k[:real], v[:real])
        out = attention.attend(step.plan, number, q[:real], layer.window)
        return layer.o(F.pad(out.flatten(1), (0, 0, 0, len(x) - real)))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(silu(gate).mul_(up))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x).

    On the CPU in float32 from exp: F.silu rounds otherwise where a thread's share of a tensor ends within a vector.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.silu(x)
    return x / x.neg().exp_().add_(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (https://arxiv.org/abs/2104.09864) of x [T, heads, D]; cos, sin float32 [T, 1, D / 2].

    Dimension i turns with i + D / 2, as in the Hugging Face checkpoints. Computed in float32.
    """
    a, b = x.chunk(2, dim=-1)
    turned = (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _split(linear: Linear, prefix: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Names and views of the parts that a fused linear is made of, by output size."""
    parts = dict(zip(sizes, torch.split(linear.weight, list(sizes.values())), strict=True))
    found = {f"{prefix}{name}.weight": part for name, part in parts.items()}
    if linear.bias is not None:
        biases = torch.split(linear.bias, list(sizes.values()))
        found |= {f"{prefix}{name}.bias": part for name, part in zip(sizes, biases, strict=True)}
    return found
