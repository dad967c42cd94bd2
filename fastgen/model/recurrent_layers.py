"""The recurrent layers of hybrid models (Qwen3.5): what `config.json` says of them, and their parameters. What computes
them is fastgen/recurrent. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fastgen.model.config_fields import integer, unsupported
from fastgen.model.modules import COLUMNS, ROWS, Module

if TYPE_CHECKING:
    from torch import Tensor

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

    def num_parameters(self, hidden: int) -> int:
        """Return the number of weights of all of the layers' products, without the MLP. hidden: size of the residual
        stream."""
        return len(self.layers) * hidden * (self.outputs + self.value_size)

    def modules(self, layer: str, hidden: int) -> tuple[list[Module], list[Module], Module]:
        """Return the modules of a layer without its MLP: those of DeltaWeights, of the first product, and the last one.

        layer: beginning of their names. hidden: size of the residual stream.
        """
        name = layer + "linear_attn."
        small = [
            Module(name + "conv1d", "delta.taps", (self.channels, 1, DELTA_TAPS)),
            Module(name + "dt_bias", "delta.step", (self.value_heads,), bare=True),
            Module(name + "A_log", "delta.decay", (self.value_heads,), bare=True, exact=True),
            Module(name + "norm", "delta.norm", (DELTA_HEAD,), exact=True),
        ]
        outputs = {"qkv": self.channels, "z": self.value_size, "b": self.value_heads, "a": self.value_heads}
        first = [Module(f"{name}in_proj_{part}", "qkv", (size, hidden), ROWS) for part, size in outputs.items()]
        return small, first, Module(name + "out_proj", "o", (hidden, self.value_size), COLUMNS)

    def weights(self, tensors: Mapping[str, Tensor]) -> DeltaWeights:
        """Return the small parameters among the tensors of a layer, by place."""
        return DeltaWeights(*(tensors[f"delta.{each.name}"] for each in fields(DeltaWeights)))


@dataclass(eq=False)
class DeltaWeights:
    """The small parameters of a recurrent layer with C channels and H value heads (see `Recurrent`): taps [C, 1, 4] of
    the convolution, step [H] (dt_bias), decay [H] (A_log), norm [D] of its output. The last two are in float32, as
    Qwen3.5 publishes them: a decay is applied at every token, so its rounding would change how long a state lasts."""

    taps: Tensor
    step: Tensor
    decay: Tensor
    norm: Tensor


def read_recurrent(config: dict[str, Any], num_layers: int) -> Recurrent:
    """Return the recurrent layers of a Qwen3.5 config."""
    types = config.get("layer_types")
    if types is None:
        period = integer(config, "full_attention_interval", 4)
        types = ["full_attention" if not (layer + 1) % period else "linear_attention" for layer in range(num_layers)]
    kinds = "full_attention", "linear_attention"
    if not isinstance(types, list) or len(types) != num_layers or not all(each in kinds for each in types):
        raise unsupported("layer_types", types, f"it must list {num_layers} layers, each {' or '.join(kinds)}")
    if types[-1] != "full_attention" or "linear_attention" not in types:
        raise unsupported("layer_types", types, "it must have linear_attention, and end with full_attention")
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
    return Recurrent(layers, key_heads, value_heads)
