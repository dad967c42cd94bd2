"""A linear layer whose weights have the dtype that the model computes in. Other kinds of weights have subclasses:
`Fp8Linear`, `WeightOnlyFp8` (quantized.py), `Int4Linear` (int4_linear.py) and, on the CPU, the classes in packed.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import epilogue
from fastgen.kernels.batch_invariant import UNFUSED, Fused, pays, product
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.rope import rope_write

ROW_TILE = 16
"""Multiple to which steps and logits are padded on the CPU: BLAS then sums all rows in one order."""

NewTensor = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor of zeros of a shape and a dtype."""


@dataclass(eq=False)
class Linear:
    """A linear layer, y = x weight^T + bias; weight: [out, in], bias: [out] or None.

    batch_invariant: on a GPU, the bits of a row of y do not depend on the number of rows.
    """

    weight: Tensor
    bias: Tensor | None
    batch_invariant: bool = False

    def apply(
        self, x: Tensor, fused: Fused = UNFUSED, norm: RMSNorm | None = None, delta: Tensor | None = None
    ) -> Tensor:
        """Return the layer of x [T, in], with the operations around it.

        delta: [T, in], added to x in place first. norm: the RMSNorm of x. fused: the operations on the result, at most
        one of add, swiglu and rope. They are fused with the product where fastgen's own kernel computes it: in a
        batch-invariant layer, and in others where few rows make it faster than BLAS.
        """
        return self.product(x if norm is None else rms_norm(x, norm, delta), fused)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        """Return the layer of x, without a norm; see `apply`. Subclasses override it; Fp8Linear overrides `apply`."""
        if self.batch_invariant:  # the torch twin of the kernel would have other bits, so there is no fallback
            y: Tensor = product.launch(x, self.weight, self.bias, fused)
        elif product.runs_on(x.device) and pays(len(x), x.shape[1], x.dtype, Chip.of(x.device)):
            y = product(x, self.weight, self.bias, fused)
        elif fused.add is not None and self.bias is None and x.device.type != "cpu":
            y = fused.add.addmm_(x, self.weight.t())  # cuBLAS adds it in the product
        else:
            y = finish(self._by_blas(x, fused.out_dtype or x.dtype), fused)
        return y

    def _by_blas(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        if x.device.type == "cpu" or out_dtype == x.dtype:
            return F.linear(x, self.weight, self.bias).to(out_dtype)
        assert self.bias is None
        return torch.mm(x, self.weight.t(), out_dtype=out_dtype)


class PackedLinear(Linear, ABC):
    """A linear layer on the CPU whose weight is kept in the order in which its products read it; see packed.py."""

    row_tile: ClassVar[int] = 4
    """Multiple to which steps and logits are padded. Libraries sum a single row in another order, and take no more time
    for 4 rows than for 2."""

    @classmethod
    @abstractmethod
    def pack(cls, linear: Linear, new: NewTensor) -> PackedLinear:
        """Return a linear layer with its weight packed. new: may make the memory of the packed weight."""

    @classmethod
    def pack_gated(cls, linear: Linear, new: NewTensor) -> PackedLinear:
        """Return the layer of gate and up with its weight packed, to be applied with SwiGLU only."""
        return cls.pack(linear, new)

    @abstractmethod
    def unpack(self) -> Linear:
        """Return a linear layer with a plain weight."""


def halves(linear: Linear) -> list[Linear]:
    """Return the layers of gate and up, as views."""
    biases = (None, None) if linear.bias is None else linear.bias.chunk(2)
    return [Linear(*each) for each in zip(linear.weight.chunk(2), biases, strict=True)]


def finish(y: Tensor, fused: Fused) -> Tensor:
    """Return the result of a product y [T, out], with the operations that its kernel has not fused."""
    if fused.rope is not None:
        turned: Tensor = rope_write(y, fused.rope.mapping, fused.rope.keys, fused.rope.values)
        return turned
    if fused.add is not None:
        return fused.add.add_(y)
    if fused.out is not None:
        return fused.out.copy_(y)
    return epilogue.swiglu(y) if fused.swiglu else y
