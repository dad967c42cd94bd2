"""Linear layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device import mkl
from fastgen.device.chip import Chip
from fastgen.device.threads import at_most
from fastgen.kernels import batch_invariant, epilogue, fp8
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import RMSNorm, rms_norm, rms_norm_fp8

PACKING_THREADS = 8
"""The most threads that pack a weight. Products of few rows take as many threads at most."""

UNFUSED = Fused()


@dataclass(eq=False)
class Linear:
    """A linear layer, y = x weight^T + bias; weight: [out, in], bias: [out] or None.

    batch_invariant: on a GPU, the bits of a row of y do not depend on the number of rows. packed: on the CPU, the
    weight in MKL's own order; `weight` then has a shape, and no memory. scales: of a weight in fp8
    (fastgen.kernels.fp8).
    """

    weight: Tensor
    bias: Tensor | None
    batch_invariant: bool = False
    packed: Tensor | None = None
    scales: Tensor | None = None

    def apply(
        self, x: Tensor, fused: Fused = UNFUSED, norm: RMSNorm | None = None, delta: Tensor | None = None
    ) -> Tensor:
        """Return the layer of x [T, in], fused with the operations around it.

        delta: [T, in], added to x in place first. norm: the RMSNorm of x. fused: at most one of add, swiglu and rope;
        rope only where `fuses` is true. A batch-invariant layer, and few rows of another layer, go through fastgen's
        own kernel; many rows go through BLAS.
        """
        if self.scales is not None:
            values, scales = fp8.quantize(x) if norm is None else rms_norm_fp8(x, norm.weight, norm.eps, delta)
            weight = fp8.Quantized(self.weight, self.scales)
            fused = fused._replace(out_dtype=fused.out_dtype or x.dtype)
            product = fp8.product.launch if self.batch_invariant else fp8.product
            y: Tensor = product(values, scales, weight, self.bias, fused)
            return y
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps, delta)
        if self.fuses(x):
            # The torch twin of the kernel would have other bits, so a batch-invariant layer has no fallback.
            multiply = batch_invariant.product.launch if self.batch_invariant else batch_invariant.product
            out: Tensor = multiply(x, self.weight, self.bias, fused)
            return out
        assert fused.rope is None
        if fused.add is not None:
            return self.add_to(fused.add, x)
        y = self._by_blas(x, fused.out_dtype)
        if fused.out is not None:
            return fused.out.copy_(y)
        return epilogue.swiglu(y) if fused.swiglu else y

    def fuses(self, x: Tensor) -> bool:
        """Return whether fastgen's own kernel multiplies x [T, in] and fuses the operations around the product."""
        ours = batch_invariant.product.runs_on(x.device)
        return self.batch_invariant or (ours and batch_invariant.pays(len(x), x.shape[1], x.dtype, Chip.of(x.device)))

    def _by_blas(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return the layer of x [T, in] by BLAS."""
        if out_dtype not in (None, x.dtype):
            assert self.bias is None
            if x.device.type == "cpu":
                return F.linear(x, self.weight).to(out_dtype)
            return torch.mm(x, self.weight.t(), out_dtype=out_dtype)
        if self.packed is not None:
            return self._multiply(x)
        return F.linear(x, self.weight, self.bias)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the layer of x [T, in] to y [T, out] in place; return y."""
        if self.packed is not None and len(self.weight) == mkl.packed_outputs(len(self.weight)):
            return mkl.multiply_packed(x, self.packed, y if self.bias is None else y.add_(self.bias), keep=1)
        if self.bias is None and x.device.type != "cpu":
            return y.addmm_(x, self.weight.t())  # cuBLAS adds it in the product
        return y.add_(self._by_blas(x))

    def _multiply(self, x: Tensor) -> Tensor:
        """Return the layer of x [T, in] with the packed weight."""
        assert self.packed is not None
        outputs = len(self.weight)
        y = mkl.multiply_packed(x, self.packed, x.new_empty(len(x), mkl.packed_outputs(outputs)), keep=0)
        y = y if y.shape[1] == outputs else y[:, :outputs].contiguous()
        return y if self.bias is None else y.add_(self.bias)

    def pack(self) -> None:
        """Pack the weight."""
        if self.packed is None:
            packed = self.weight.new_empty(mkl.pack_size(*self.weight.shape))
            with at_most(PACKING_THREADS):
                mkl.pack(self.weight, packed)
            self.packed = packed
            self.weight = self.weight.new_empty(()).expand(self.weight.shape)

    def unpack(self) -> None:
        """Make the weight a plain one: the product with the identity matrix, which rounds nothing."""
        if self.packed is not None:
            transposed = replace(self, bias=None)._by_blas(torch.eye(self.weight.shape[1], dtype=torch.float32))
            self.weight = transposed.t().contiguous()
            self.packed = None
