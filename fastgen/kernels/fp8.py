"""Quantization to fp8 (E4M3) with float32 scales, and batch-invariant products with weights in fp8.

A weight has one scale per row, or one per block of 128 x 128. The input of a product has one scale per token, the
largest magnitude of its row / 448: a scale for several tokens would make a token's bits depend on its neighbours.
Products are summed over each 128 inputs, and these sums are added in float32, in order, for any number of tokens.

GPUs without such products only have the weight in fp8. Few tokens are multiplied by `weight_product`, with the bits
that fastgen.kernels.batch_invariant gives for the dequantized weight, which many tokens use.

Shape letters: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import Chip, current
from fastgen.kernels.batch_invariant import Fused, finished
from fastgen.kernels.fp8_pages import E4M3 as E4M3
from fastgen.kernels.launch import Kernel
from fastgen.kernels.norm import RMSNorm, rms_norm

BLOCK = 128  # rows and inputs per block with one scale
LARGEST = 448.0
LEAST_SCALE = 1 / (LARGEST * 512)  # also the scale of a row of zeros
ALIGN = 16  # the inputs of a weight are a multiple of it, so that rows begin at multiples of 16 bytes
TOKENS = 16, 32, 64  # padded tokens of the product with only the weight in fp8


@dataclass(frozen=True)
class Quantized:
    """A weight in fp8, the product of values and scales.

    values: float8_e4m3fn [N, K]. scales: float32 [N], or [ceil(N / 128), ceil(K / 128)] with one scale per block.
    """

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """Return the weight, float32 [N, K]."""
        if self.scales.dim() == 1:
            return self.values.float() * self.scales[:, None]
        rows, columns = self.values.shape
        spread = self.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return self.values.float() * spread


def _quantize_twin(x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Return x [T, N] in E4M3, and the scale of each row, its largest magnitude / 448, float32 [T].

    exact: numbers are divided by the scale, as weights are. Otherwise they are multiplied by its reciprocal, because a
    division for each number takes twice as long as reading and writing it.
    """
    x = x.float()
    scales = _scales(x.abs().amax(1))
    return _rounded(x / scales[:, None] if exact else x * (1 / scales)[:, None]), scales


quantize = Kernel(_quantize_twin, "fastgen.kernels.triton.quantize:quantize")


def quantize_weight(weight: Tensor, blocks: bool = False) -> Quantized:
    """Return a weight [N, K] of any dtype in fp8, with one scale per row, or if `blocks`, per block of 128 x 128.

    With blocks, N and K have to be multiples of 128.
    """
    if not blocks:
        with current(weight.device):  # it may be another GPU than that of the thread that updates weights
            # Triton has E4M3 from Ada on.
            kernel = quantize if Chip.of(weight.device).capability >= (8, 9) else quantize.twin
            return Quantized(*kernel(weight.contiguous(), exact=True))
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = _scales(tiles.abs().amax(dim=(1, 3), keepdim=True))
    return Quantized(_rounded(tiles / scales).reshape(weight.shape), scales[:, 0, :, 0])


def _scales(largest: Tensor) -> Tensor:
    """Return the scales, in float32, for the given largest magnitudes."""
    # Divided by a tensor, because a GPU multiplies by the reciprocal of a Python number, which has other bits.
    return (largest / torch.full_like(largest, LARGEST)).clamp_(min=LEAST_SCALE)


def _rounded(x: Tensor) -> Tensor:
    return x.clamp_(-LARGEST, LARGEST).to(E4M3)


def _rms_norm_twin(x: Tensor, norm: RMSNorm, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of `rms_norm` in fp8, float8_e4m3fn [T, N], and the scales of its rows, float32 [T]."""
    values, scales = quantize.twin(rms_norm.twin(x, norm, delta))
    return values, scales


rms_norm_fp8 = Kernel(_rms_norm_twin, "fastgen.kernels.triton.norm:rms_norm_fp8")


def _twin(x: Tensor, x_scales: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused) -> Tensor:
    """Return x weight^T + bias, [T, N], with the epilogue `fused`.

    x: float8_e4m3fn [T, K]. x_scales: float32 [T], the scales of its rows. weight: [N, K]. bias: [N]. The result has
    the dtype of `fused.add` or else `fused.out_dtype`; one of them is required. K is a multiple of ALIGN.
    """
    if weight.scales.dim() == 1:
        y = F.linear(x.float(), weight.values.float()) * x_scales[:, None] * weight.scales
    else:
        y = F.linear(x.float(), weight.dequantized()) * x_scales[:, None]
    y = y if bias is None else y + bias
    return finished(y, fused)


product = Kernel(_twin, "fastgen.kernels.triton.fp8:product")


def _dequantize_twin(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight, [N, K] in `dtype`. values, scales: see Quantized.

    NaN stays NaN; the kernel reads it as 480.
    """
    return Quantized(values, scales).dequantized().to(dtype)


dequantize = Kernel(_dequantize_twin, "fastgen.kernels.triton.fp8:dequantize")


def _weight_twin(x: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused, tokens: int = 0) -> Tensor:
    """Return x weight^T + bias, [T, N] in x's dtype, with the epilogue `fused`, for up to max(TOKENS) tokens.

    x: [T, K], bfloat16 or float16. bias: [N] in x's dtype. tokens: number of tokens whose kernel is used, if larger
    than T.
    """
    return finished(F.linear(x, dequantize.twin(weight.values, weight.scales, x.dtype), bias), fused)


weight_product = Kernel(_weight_twin, "fastgen.kernels.triton.fp8:weight_product")
