"""The recurrent layers of hybrid models (Qwen3.5) in `config.json`; see fastgen/recurrent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen.model.config_fields import integer, unsupported

DELTA_HEAD, DELTA_TAPS = 128, 4
"""Sizes of recurrent layers: of a head, and of the convolution."""


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of a hybrid model: gated delta rule (arXiv 2412.06464), with heads of DELTA_HEAD.

    layers: their numbers. The outputs of the layer's first product are queries, keys, values, gates of the output, and
    two numbers for each value head. `channels` of them go through a convolution."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int

    @property
    def channels(self) -> int:
        return DELTA_HEAD * (2 * self.key_heads + self.value_heads)

    @property
    def outputs(self) -> int:
        """Number of outputs of the first product."""
        return self.channels + self.value_size + 2 * self.value_heads

    @property
    def value_size(self) -> int:
        return DELTA_HEAD * self.value_heads

    @property
    def state_bytes(self) -> int:
        """Size of the states of a sequence, in float32."""
        return 4 * len(self.layers) * self.value_size * DELTA_HEAD


def read_recurrent(config: dict[str, Any], num_layers: int) -> Recurrent | None:
    """Return the recurrent layers of a Qwen3.5 config."""
    types = config.get("layer_types")
    if types is None:
        period = integer(config, "full_attention_interval", 4)
        types = ["full_attention" if not (layer + 1) % period else "linear_attention" for layer in range(num_layers)]
    kinds = "full_attention", "linear_attention"
    if not isinstance(types, list) or len(types) != num_layers or not all(each in kinds for each in types):
        raise unsupported("layer_types", types, f"{num_layers} of full_attention or linear_attention are")
    if types[-1] != "full_attention":
        raise unsupported("layer_types", types, "those that end with full_attention are")
    if (gate := config.get("attn_output_gate")) not in (None, True):
        raise unsupported("attn_output_gate", gate, "only true is")
    if (gate := config.get("output_gate_type")) not in (None, "swish", "silu"):
        raise unsupported("output_gate_type", gate, "only swish is")
    sizes = {
        "linear_key_head_dim": DELTA_HEAD,
        "linear_value_head_dim": DELTA_HEAD,
        "linear_conv_kernel_dim": DELTA_TAPS,
    }
    for field, size in sizes.items():
        if integer(config, field, size) != size:
            raise unsupported(field, config[field], f"only {size} is")
    key_heads, value_heads = (integer(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        raise ValueError(f"linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}")
    layers = tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    return Recurrent(layers, key_heads, value_heads) if layers else None
