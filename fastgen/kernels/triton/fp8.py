"""Products with weights in fp8: see the twins in fastgen.kernels.fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.fp8 import ALIGN, BLOCK, E4M3, TOKENS, Quantized
from fastgen.kernels.hopper import fp8 as hopper_fp8
from fastgen.kernels.hopper import products as hopper_products
from fastgen.kernels.rope import rope_write
from fastgen.kernels.triton import batch_invariant
from fastgen.kernels.triton.batch_invariant import ProductConfig, config, dequantized, fuses_rope
from fastgen.kernels.triton.jit import jit, tl

STAGES = 4  # stages of the product with only the weight in fp8
ROWS = 64  # maximum number of rows of that product's tiles, and number of rows per program of `dequantize`

Kind = ProductConfig | int
"""A kind of kernel: tiles for few tokens (hopper_products), or rows of a tile's sides for many (hopper_fp8.SIDES)."""


def product(x: Tensor, x_scales: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused) -> Tensor:
    (tokens, inputs), outputs = x.shape, len(weight.values)
    return launch_as(kind_of(tokens, outputs, inputs, Chip.of(x.device)), x, x_scales, weight, bias, fused)


def kind_of(tokens: int, outputs: int, inputs: int, chip: Chip) -> Kind:
    """Return the fastest kind of kernel for a number of tokens."""
    if hopper_products.takes(tokens, outputs, E4M3.itemsize, chip):
        return config(tokens, outputs, inputs, E4M3, chip)
    return hopper_fp8.rows_of(tokens, outputs, chip)


def kinds_of(outputs: int, inputs: int, chip: Chip) -> list[Kind]:
    """Return all kinds of kernels that products with a weight may use."""
    few = (kind_of(tokens, outputs, inputs, chip) for tokens in range(1, hopper_products.MAX_TOKENS + 1))
    return [*dict.fromkeys((*few, *hopper_fp8.SIDES))]


def launch_as(kind: Kind, x: Tensor, x_scales: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused) -> Tensor:
    """Compute the product with a kind of kernel that can take as many tokens; see the twin for the other arguments."""
    assert x.shape[1] == weight.values.shape[1]
    assert x.dtype == weight.values.dtype == E4M3
    assert x.is_contiguous()
    assert weight.values.is_contiguous()
    assert weight.scales.is_contiguous()
    assert x.shape[1] % ALIGN == 0
    if isinstance(kind, int):
        y = _launch_many(kind, x, x_scales, weight, bias, fused)
    else:
        most = kind.tokens * kind.token_tiles
        inside = fused if fuses_rope(most, E4M3, Chip.of(x.device)) else fused._replace(rope=None)
        y = batch_invariant.launch_as(kind, x, weight.values, bias, inside, (x_scales, weight.scales))
        if inside.rope is not None:
            return y
    if fused.rope is not None:
        y = rope_write.launch(y, fused.rope.mapping, fused.rope.keys, fused.rope.values)
    return y


def _launch_many(
    rows: int, x: Tensor, x_scales: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused
) -> Tensor:
    """Compute the product, without rope, in tiles of many tokens. rows: one of hopper_fp8.SIDES."""
    width = len(weight.values) // 2 if fused.swiglu else len(weight.values)
    out = x.new_empty(len(x), width, dtype=fused.out_dtype) if fused.add is None else fused.add
    assert out.shape == (len(x), width)
    assert out.is_contiguous()
    add = fused.add is not None
    hopper_fp8.launch(x, weight.values, bias, out, x_scales, weight.scales, fused.swiglu, add, rows)
    return out


@jit()
def _dequantize_kernel(
    words_ptr, scales_ptr, out_ptr, N, K: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Dequantize ROWS rows and DEPTH columns per program."""
    row, first = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * DEPTH
    weight = dequantized(words_ptr, scales_ptr, row, first, N, K, BLOCKS, DEPTH, out_ptr.dtype.element_ty)
    column = first + tl.arange(0, DEPTH)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * K + column, weight, mask=(row < N)[:, None] & (column < K))


def _words(weight: Quantized) -> Tensor:
    """Check a weight, and return its values as int32 [N, K / 4]."""
    outputs, inputs = weight.values.shape
    assert weight.values.dtype == E4M3
    assert weight.scales.dtype == torch.float32
    assert weight.values.is_contiguous()
    assert weight.scales.is_contiguous()
    assert inputs % ALIGN == 0
    assert weight.scales.shape in ((outputs,), (-(-outputs // BLOCK), -(-inputs // BLOCK)))
    return weight.values.view(torch.int32)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    words, (outputs, inputs) = _words(Quantized(values, scales)), values.shape
    out = torch.empty_like(values, dtype=dtype)
    _dequantize_kernel[(-(-outputs // ROWS), -(-inputs // BLOCK))](
        words, scales, out, outputs, inputs, scales.dim() > 1, ROWS, BLOCK, num_warps=8
    )
    return out


def weight_product(x: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused, tokens: int = 0) -> Tensor:
    assert x.dtype.itemsize == 2
    assert max(tokens, len(x)) <= TOKENS[-1]
    padded, chip = next(each for each in TOKENS if max(tokens, len(x)) <= each), Chip.of(x.device)
    # Smaller tiles let more processors convert a narrow weight. Instructions of Hopper and B200 need 64 rows.
    narrow = len(weight.values) <= ROWS * chip.processors and chip.capability[0] in (8, 12)
    tile = ProductConfig(padded, ROWS // 2 if narrow else ROWS, BLOCK, 4, STAGES, swap=True)
    return batch_invariant.launch_as(tile, x, _words(weight), bias, fused, (None, weight.scales))
