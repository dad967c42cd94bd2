"""The parameters of recurrent layers (Qwen3.5), and their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch import Tensor

from fastgen.model.modules import COLUMNS, ROWS, Module
from fastgen.model.recurrent_config import DELTA_HEAD, DELTA_TAPS, Recurrent


@dataclass(eq=False)
class DeltaWeights:
    """The small parameters of a recurrent layer with C channels and H value heads (see `Recurrent`): taps [C, 1, 4] of
    the convolution, step [H] (dt_bias), decay [H] (A_log), norm [D] of its output. The last two are in float32, as
    Qwen3.5 publishes them: a decay is applied at every token, so its rounding would change how long a state lasts."""

    taps: Tensor
    step: Tensor
    decay: Tensor
    norm: Tensor

    @classmethod
    def among(cls, tensors: Mapping[str, Tensor]) -> DeltaWeights:
        """Return the parameters among the tensors of a layer, by place."""
        return cls(*(tensors[f"delta.{each.name}"] for each in fields(cls)))


def delta_table(layer: str, hidden: int, sizes: Recurrent) -> tuple[list[Module], list[Module], Module]:
    """Return the modules of a recurrent layer: those of DeltaWeights, of the first product, and the last product.

    layer: beginning of their names. hidden: size of the residual stream.
    """
    name = layer + "linear_attn."
    small = [
        Module(name + "conv1d", "delta.taps", (sizes.channels, 1, DELTA_TAPS)),
        Module(name + "dt_bias", "delta.step", (sizes.value_heads,), bare=True),
        Module(name + "A_log", "delta.decay", (sizes.value_heads,), bare=True, exact=True),
        Module(name + "norm", "delta.norm", (DELTA_HEAD,), exact=True),
    ]
    outputs = {"qkv": sizes.channels, "z": sizes.value_size, "b": sizes.value_heads, "a": sizes.value_heads}
    first = [Module(f"{name}in_proj_{part}", "qkv", (size, hidden), ROWS) for part, size in outputs.items()]
    return small, first, Module(name + "out_proj", "o", (hidden, sizes.value_size), COLUMNS)
