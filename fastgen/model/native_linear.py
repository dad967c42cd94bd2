"""Linear layers on the CPU that native.cpp computes, with the same bits for any number of rows and of threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.native.calls import LANES, function, swiglu
from fastgen.model.linear import Linear, NewTensor, PackedLinear, finish, halves

BLOCK = 64  # outputs that are packed together, as in native.cpp


@dataclass(eq=False)
class NativeLinear(PackedLinear):
    """A linear layer with a packed weight. packed: [ceil(out / BLOCK), words, BLOCK], float32, or int32 for pairs of
    bfloat16; the last block and pair are padded with zeros. `weight` has a shape but no memory."""

    row_tile: ClassVar[int] = 1

    packed: Tensor = field(kw_only=True)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        y = self.multiply(x)
        return finish(y if fused.out_dtype is None else y.to(fused.out_dtype), fused)

    def multiply(self, x: Tensor) -> Tensor:
        """Return the layer of x [T, in], [T, out] in its dtype."""
        compute, outputs = function("multiply", x.dtype), len(self.weight)
        assert compute is not None
        inputs = self.packed.shape[1] * 4 // x.dtype.itemsize
        x = (F.pad(x, (0, 1)) if inputs > x.shape[1] else x).contiguous()
        y, bias = x.new_empty(len(x), outputs), None if self.bias is None else self.bias.data_ptr()
        compute(x.data_ptr(), self.packed.data_ptr(), bias, len(x), inputs, outputs, y.data_ptr())
        return y

    @classmethod
    def pack(cls, linear: Linear, new: NewTensor) -> NativeLinear:
        weight = linear.weight
        (outputs, inputs), pair = weight.shape, 4 // weight.dtype.itemsize
        more = 0, -inputs % pair, 0, -outputs % BLOCK
        padded = F.pad(weight, more) if any(more) else weight.contiguous()  # F.pad always copies
        numbers = padded.view(torch.float32 if pair == 1 else torch.int32)
        words = numbers.view(-1, BLOCK, numbers.shape[1]).transpose(1, 2)
        packed = new(words.shape, words.dtype).copy_(words)
        return cls(weight.new_empty(()).expand(weight.shape), linear.bias, packed=packed)

    @classmethod
    def pack_gated(cls, linear: Linear, new: NewTensor) -> NativeGatedLinear:
        return NativeGatedLinear.pack(linear, new)

    def unpack(self) -> Linear:
        words = self.packed.transpose(1, 2).flatten(0, 1)
        outputs, inputs = self.weight.shape
        return Linear(words.contiguous().view(self.weight.dtype)[:outputs, :inputs].contiguous(), self.bias)


@dataclass(eq=False)
class NativeGatedLinear(PackedLinear):
    """The linear layer of gate and up with packed weights, with SwiGLU. gate, up: the two layers, whose outputs are
    padded to a multiple of LANES. `weight` has a shape but no memory."""

    gate: NativeLinear = field(kw_only=True)
    up: NativeLinear = field(kw_only=True)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        assert fused.swiglu
        y = swiglu(self.gate.multiply(x), self.up.multiply(x))
        return y[:, : len(self.weight) // 2].contiguous()

    @classmethod
    def pack(cls, linear: Linear, new: NewTensor) -> NativeGatedLinear:
        gate, up = (NativeLinear.pack(_padded(each), new) for each in halves(linear))
        return cls(linear.weight.new_empty(()).expand(linear.weight.shape), linear.bias, gate=gate, up=up)

    def unpack(self) -> Linear:
        weights = (each.unpack().weight[: len(self.weight) // 2] for each in (self.gate, self.up))
        return Linear(torch.cat(tuple(weights)), self.bias)


def _padded(linear: Linear) -> Linear:
    more = -len(linear.weight) % LANES
    if not more:
        return linear
    return Linear(F.pad(linear.weight, (0, 0, 0, more)), None if linear.bias is None else F.pad(linear.bias, (0, more)))
