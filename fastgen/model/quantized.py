"""Linear layers in fp8 (`fastgen.kernels.fp8`). The configuration of fp8 checkpoints is read in quantization.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import fp8
from fastgen.kernels.batch_invariant import UNFUSED, Fused
from fastgen.kernels.launch import kernels_of
from fastgen.kernels.norm import RMSNorm
from fastgen.model.config import ModelConfig
from fastgen.model.linear import Linear
from fastgen.model.quantization import Quantization, SizeError
from fastgen.model.weights import Shard


@dataclass(eq=False)
class Fp8Linear(Linear):
    """A linear layer with a weight in E4M3. scales: float32 [out], or [out / 128, in / 128] for blocks."""

    scales: Tensor = field(kw_only=True)

    @classmethod
    def zeros(
        cls,
        form: Quantization,
        rows: Sequence[tuple[str, int]],
        size_in: int,
        bias: Tensor | None,
        new: Callable[..., Tensor],
        batch_invariant: bool,
    ) -> Fp8Linear:
        """Make a layer of zeros. rows: (name of a Hugging Face module that is fused into it, its outputs on this rank).
        new: makes a tensor of zeros from a shape and a dtype. batch_invariant: see Linear; products in fp8 always are.

        Raises SizeError if sizes are not multiples of the block size.
        """
        names, sizes = ", ".join(dict(rows)), [size for _, size in rows]
        if form.blocks and any(size % fp8.BLOCK for size in (size_in, *sizes)):
            raise SizeError(
                f"{names} of {size_in} inputs and {', '.join(map(str, sizes))} outputs are not whole blocks of "
                f"{fp8.BLOCK} x {fp8.BLOCK}"
            )
        size_out = sum(sizes)
        shape = (size_out // fp8.BLOCK, size_in // fp8.BLOCK) if form.blocks else (size_out,)
        weight, scales = new(size_out, size_in, dtype=fp8.E4M3), new(*shape, dtype=torch.float32)
        if weight.device.type == "cuda" and kernels_of(weight.device) != "gluon":
            return WeightOnlyFp8(weight, bias, batch_invariant, scales=scales)
        return cls(weight, bias, weight.device.type == "cuda", scales=scales)

    def apply(
        self, x: Tensor, fused: Fused = UNFUSED, norm: RMSNorm | None = None, delta: Tensor | None = None
    ) -> Tensor:
        values, scales = fp8.quantize(x) if norm is None else fp8.rms_norm_fp8(x, norm, delta)
        product = fp8.product.launch if self.batch_invariant else fp8.product
        fused = fused._replace(out_dtype=fused.out_dtype or x.dtype)
        y: Tensor = product(values, scales, fp8.Quantized(self.weight, self.scales), self.bias, fused)
        return y

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        raise AssertionError("inputs are quantized in apply")

    def shards(self, name: str, weight: Shard, rows: slice, stored: str) -> dict[str, Shard]:
        """Return the shards of a module's tensors. weight: the shard of its weight, which is `rows` of this layer.

        stored: granularity of the scales in the checkpoint; "": the shard quantizes the weights that are written.
        """
        step = len(self.weight) // len(self.scales)  # rows per scale
        scales = self.scales[rows.start // step : rows.stop // step]
        if not stored:
            return {f"{name}.weight": replace(weight, scales=scales)}
        if stored == "tensor":
            scale = Shard(scales, ())
        elif stored == "channel":
            start = weight.start if weight.dim == 0 else 0
            scale = Shard(scales[:, None], (weight.shape[0], 1), 0, start, parts=weight.parts)
        else:
            blocks = -(-weight.shape[0] // fp8.BLOCK), -(-weight.shape[1] // fp8.BLOCK)
            parts = tuple((start // fp8.BLOCK, size // fp8.BLOCK) for start, size in weight.parts)
            scale = Shard(scales, blocks, weight.dim, weight.start // fp8.BLOCK, parts=parts)
        return {f"{name}.weight": weight, f"{name}.weight_scale": scale}

    def launch_all(self, fused: Fused, dtype: torch.dtype) -> None:
        """Launch each kind of kernel that the layer's products may use, with one row. fused: see `apply`. dtype: dtype
        of the input and the result."""
        from fastgen.kernels.triton.fp8 import kinds_of, launch_as  # only on a GPU

        outputs, inputs = self.weight.shape
        x, weight = self.weight.new_zeros(1, inputs), fp8.Quantized(self.weight, self.scales)
        fused = fused._replace(out_dtype=fused.out_dtype or dtype)
        for kind in kinds_of(outputs, inputs, Chip.of(x.device)):
            launch_as(kind, x, self.scales.new_ones(1), weight, self.bias, fused)


@dataclass(eq=False)
class WeightOnlyFp8(Fp8Linear):
    """A linear layer with a weight in E4M3 and inputs that are not quantized.

    It is for GPUs for which fastgen has no products in fp8. It computes the product with the dequantized weight: for
    few tokens in one kernel, and otherwise from a copy.
    """

    apply = Linear.apply  # Fp8Linear's quantizes the inputs

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        if len(x) > max(fp8.TOKENS):
            return self.dequantized(x.dtype).product(x, fused)
        product = fp8.weight_product.launch if self.batch_invariant else fp8.weight_product
        y: Tensor = product(x, fp8.Quantized(self.weight, self.scales), self.bias, fused)
        return y

    def dequantized(self, dtype: torch.dtype) -> Linear:
        """Return a layer with a copy of the weight in `dtype`."""
        dequantize = fp8.dequantize.launch if self.batch_invariant else fp8.dequantize
        return Linear(dequantize(self.weight, self.scales, dtype), self.bias, self.batch_invariant)

    def launch_all(self, fused: Fused, dtype: torch.dtype) -> None:
        """Launch the kernels of products of few tokens, with one row. The arguments are those of Fp8Linear."""
        x = self.weight.new_zeros(1, self.weight.shape[1], dtype=dtype)
        for tokens in fp8.TOKENS:
            fp8.weight_product(x, fp8.Quantized(self.weight, self.scales), self.bias, fused, tokens)


def check_fp8(model: ModelConfig, dtype: str) -> None:
    """Raise ValueError if a GPU cannot run a model in fp8. model: config of one rank."""
    if dtype == "float32":
        raise ValueError("linear layers in fp8 need bfloat16 or float16 on a GPU; pass dtype='bfloat16'")
    sizes = model.input_sizes
    if any(size % fp8.ALIGN for size in sizes):
        raise SizeError(
            f"linear layers in fp8 need inputs in multiples of {fp8.ALIGN} on a GPU, and these have "
            f"{', '.join(map(str, sizes))}"
        )
