"""Linear layers on the CPU that oneDNN computes, which torch includes, with weights in its blocked format: a product
takes down to a third of the time of F.linear. Except with AMX, the bits do not depend on the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.model.linear import Linear, NewTensor, PackedLinear, finish, halves

_ROWS = 16  # number of rows that oneDNN chooses a format for; the formats for 2 and more rows are the same


@dataclass(eq=False)
class OneDnnLinear(PackedLinear):
    """A linear layer with a packed weight. packed: opaque tensor with torch's layout `torch._mkldnn`. `weight` has a
    shape but no memory."""

    packed: Tensor = field(kw_only=True)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return finish(y if fused.out_dtype is None else y.to(fused.out_dtype), fused)

    @classmethod
    def pack(cls, linear: Linear, new: NewTensor) -> OneDnnLinear:
        with torch.inference_mode():
            packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, _ROWS)
        return cls(linear.weight.new_empty(()).expand(linear.weight.shape), linear.bias, packed=packed)

    @classmethod
    def pack_gated(cls, linear: Linear, new: NewTensor) -> OneDnnGatedLinear:
        return OneDnnGatedLinear.pack(linear, new)

    def unpack(self) -> Linear:
        return Linear(self.packed.to_dense(), self.bias)


@dataclass(eq=False)
class OneDnnGatedLinear(PackedLinear):
    """The linear layer of gate and up with packed weights, with SwiGLU. gate, up: the two layers. `weight` has a shape
    but no memory."""

    gate: OneDnnLinear = field(kw_only=True)
    up: OneDnnLinear = field(kw_only=True)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        assert fused.swiglu
        gate = torch.ops.mkldnn._linear_pointwise(x, self.gate.packed, self.gate.bias, "swish", [], "")
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self.up.packed, self.up.bias, "mul")
        return y

    @classmethod
    def pack(cls, linear: Linear, new: NewTensor) -> OneDnnGatedLinear:
        gate, up = (OneDnnLinear.pack(each, new) for each in halves(linear))
        return cls(linear.weight.new_empty(()).expand(linear.weight.shape), linear.bias, gate=gate, up=up)

    def unpack(self) -> Linear:
        return Linear(torch.cat((self.gate.packed.to_dense(), self.up.packed.to_dense())), self.bias)
