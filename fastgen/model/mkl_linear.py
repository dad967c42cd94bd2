"""Linear layers in float32 on the CPU that MKL computes (`device/mkl_packed.py`), with the same bits for any number of
rows, from 2 on, and any number of threads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fastgen.device import mkl_packed
from fastgen.device.threads import at_most
from fastgen.kernels.batch_invariant import Fused
from fastgen.model.linear import Linear, NewTensor, PackedLinear, finish

PACKING_THREADS = 8
"""Maximum number of threads that pack a weight. Later products of few rows use at most this number of threads."""


@dataclass(eq=False)
class MklLinear(PackedLinear):
    """A linear layer in float32 with a packed weight. packed: see `mkl_packed.pack`. `weight` has a shape but no
    memory."""

    packed: Tensor = field(kw_only=True)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        outputs = len(self.weight)
        width = mkl_packed.packed_outputs(outputs)
        if fused.add is not None and width == outputs:
            y = fused.add if self.bias is None else fused.add.add_(self.bias)
            return mkl_packed.multiply_packed(x, self.packed, y, keep=1)
        y = mkl_packed.multiply_packed(x, self.packed, x.new_empty(len(x), width), keep=0)
        y = y if width == outputs else y[:, :outputs].contiguous()
        return finish(y if self.bias is None else y.add_(self.bias), fused)

    @classmethod
    def pack(cls, linear: Linear, new: NewTensor) -> MklLinear:
        packed = new([mkl_packed.pack_size(*linear.weight.shape)], torch.float32)
        with at_most(PACKING_THREADS):
            mkl_packed.pack(linear.weight, packed)
        return cls(linear.weight.new_empty(()).expand(linear.weight.shape), linear.bias, packed=packed)

    def unpack(self) -> Linear:
        # The product with the identity matrix, which is exact.
        transposed = replace(self, bias=None).apply(torch.eye(self.weight.shape[1], dtype=torch.float32))
        return Linear(transposed.t().contiguous(), self.bias)
