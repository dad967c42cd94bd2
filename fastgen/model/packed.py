"""Linear layers on the CPU whose bits depend neither on the number of rows, from 2 on, nor on the number of threads.

On most x86 processors these are oneDNN's, which torch includes, with weights in its blocked format: a product takes
down to a third of the time of F.linear. Intel's processors are different: in float32, and with AMX in bfloat16, oneDNN
sums rows in an order that depends on their number. There MKL computes the products in float32 (`mkl_linear`); in
bfloat16 with AMX they are oneDNN's, and not deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.device.processor import is_intel
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.native.calls import LANES, function, swiglu
from fastgen.model.few_rows import FEW_ROWS, FewRows, few_rows
from fastgen.model.linear import Linear, PackedLinear, finish

PACKED_ROW_TILE = 4
"""`ROW_TILE` for packed layers. A single row is summed in another order, and 4 rows take no more time than 2."""

_ROWS = 16  # number of rows that oneDNN chooses a format for; the formats for 2 and more rows are the same


@dataclass(eq=False)
class OneDnnLinear(PackedLinear):
    """A linear layer with a packed weight. packed: opaque tensor with torch's layout `torch._mkldnn`. few: computes
    products of few rows faster, with the same bits; None: oneDNN computes them too. `weight` has a shape but no
    memory."""

    packed: Tensor = field(kw_only=True)
    few: FewRows | None = field(kw_only=True)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        y = self.multiply(x)
        return finish(y if fused.out_dtype is None else y.to(fused.out_dtype), fused)

    def multiply(self, x: Tensor) -> Tensor:
        """Return the layer of x [T, in], [T, out] in its dtype."""
        if self.few is not None and len(x) <= FEW_ROWS:
            return self.few.product(x)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    @classmethod
    def pack(cls, linear: Linear) -> OneDnnLinear:
        """Return a linear layer with its weight packed."""
        with torch.inference_mode():
            packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, _ROWS)
            few = few_rows(packed, linear.bias, *linear.weight.shape)
        weight = linear.weight.new_empty(()).expand(linear.weight.shape)
        return cls(weight, linear.bias, packed=packed, few=few)

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
        if len(self.gate.weight) % LANES == 0 and function("swiglu", x.dtype) is not None:
            return swiglu(self.gate.multiply(x), self.up.multiply(x))
        gate = torch.ops.mkldnn._linear_pointwise(x, self.gate.packed, self.gate.bias, "swish", [], "")
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self.up.packed, self.up.bias, "mul")
        return y

    @classmethod
    def pack(cls, linear: Linear) -> OneDnnGatedLinear:
        """Return a linear layer with its weight packed in two halves."""
        biases = (None, None) if linear.bias is None else linear.bias.chunk(2)
        halves = zip(linear.weight.chunk(2), biases, strict=True)
        gate, up = (OneDnnLinear.pack(Linear(weight, bias)) for weight, bias in halves)
        weight = linear.weight.new_empty(()).expand(linear.weight.shape)
        return cls(weight, linear.bias, gate=gate, up=up)

    def unpack(self) -> Linear:
        return Linear(torch.cat((self.gate.packed.to_dense(), self.up.packed.to_dense())), self.bias)


def packing(dtype: torch.dtype) -> type[PackedLinear] | None:
    """Return the class of packed layers for a dtype on this processor, or None if none has been tested on it. The
    modules for Intel's processors load on these only."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return None
    if dtype == torch.float32 and is_intel():
        from fastgen.device.mkl_packed import PACKS
        from fastgen.model.mkl_linear import MklLinear

        return MklLinear if PACKS else None
    if dtype == torch.bfloat16:
        return OneDnnLinear if torch.ops.mkldnn._is_mkldnn_bf16_supported() else None
    built_in: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return OneDnnLinear if dtype == torch.float32 and built_in else None


def pack(linear: Linear, gated: bool = False) -> Linear:
    """Return a packed form of a linear layer. There must be a `packing` for its dtype. gated: the layer is only applied
    with SwiGLU."""
    if isinstance(linear, PackedLinear):
        return linear
    kind = packing(linear.weight.dtype)
    assert kind is not None
    return (OneDnnGatedLinear if gated and kind is OneDnnLinear else kind).pack(linear)


def unpack(linear: Linear) -> Linear:
    """Return a linear layer with a plain weight."""
    return linear.unpack() if isinstance(linear, PackedLinear) else linear
