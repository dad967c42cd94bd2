"""The linear layers of a quantized model: how they are made, filled and brought into the order of their kernels. The
kinds of layers are in quantized.py (fp8) and int4_linear.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fastgen.model.int4_linear import Int4Linear, prepared, restored, rounded_shard
from fastgen.model.linear import Linear
from fastgen.model.quantization import Int4, Quantization
from fastgen.model.quantized import Fp8Linear
from fastgen.model.weights import Part, Shard


@dataclass(frozen=True)
class QuantizedLayers:
    """The linear layers of a model with a quantized form."""

    form: Quantization

    def linear(
        self,
        rows: Sequence[tuple[str, int]],
        size_in: int,
        bias: Tensor | None,
        new: Callable[..., Tensor],
        batch_invariant: bool,
    ) -> Linear | None:
        """Return a layer of zeros, or None for one that the form leaves as it is. rows: (name of a module that is fused
        into it, its outputs on this rank). new: makes a tensor of zeros from a shape and a dtype. batch_invariant: see
        Linear."""
        if not any(self.form.covers(name) for name, _ in rows):
            return None
        self.form.check_fused(dict(rows))
        if isinstance(self.form, Int4):
            return Int4Linear.zeros_of(self.form, rows, size_in, bias, new, batch_invariant)
        return Fp8Linear.zeros(self.form, rows, size_in, bias, new, batch_invariant)

    def shards(
        self, linear: Linear, name: str, part: Part, parts: tuple[tuple[int, int], ...], rows: slice, stored: str
    ) -> dict[str, Shard] | None:
        """Return the shards of the tensors of a module, or None for one that the form leaves as it is. part: the part
        of its weight that is in `rows` of the layer. parts: see Shard. stored: see `Fp8Linear.shards`."""
        if isinstance(linear, Int4Linear):
            return linear.shards(name, part, rows, stored)
        if isinstance(self.form, Int4) and self.form.covers(name):  # dequantized, on the CPU
            return {f"{name}.weight": rounded_shard(self.form, linear.weight[rows], part)}
        if isinstance(linear, Fp8Linear):
            return linear.shards(name, Shard(linear.weight[rows], *part[:3], parts=parts), rows, stored)
        return None

    def prepare(self, linear: Linear, new: Callable[..., Tensor]) -> Linear:
        """Return a linear layer that steps can use, after its shards are filled; see `prepared`."""
        return prepared(linear, new)

    def restore(self, linear: Linear) -> Linear:
        """Return a linear layer whose shards can be written, after `prepare`."""
        return restored(linear)
