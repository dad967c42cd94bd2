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

from fastgen.device.chip import Chip, current, power_of_two
from fastgen.kernels import batch_invariant, hopper_fp8, hopper_products
from fastgen.kernels.batch_invariant import Fused, ProductConfig, config, dequantized, finished, fuses_rope
from fastgen.kernels.launch import Kernel, jit, tl
from fastgen.kernels.pages import E4M3 as E4M3
from fastgen.kernels.rope import rope_write

BLOCK = 128  # rows and inputs per block with one scale
LARGEST = 448.0
LEAST_SCALE = 1 / (LARGEST * 512)  # also the scale of a row of zeros
FEW = 2  # maximum number of rows per processor for which more warps quantize each row
ALIGN = 16  # the inputs of a weight are a multiple of it, so that rows begin at multiples of 16 bytes
TOKENS, STAGES = (16, 32, 64), 4  # padded tokens and stages of the product with only the weight in fp8
ROWS = 64  # maximum number of rows of that product's tiles, and number of rows per program of `dequantize`


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


@jit()
def _quantize_kernel(
    x_ptr, values_ptr, scales_ptr, N: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Quantize one row of N numbers per program."""
    column = tl.arange(0, BLOCK)
    here = column < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * N + column, mask=here, other=0.0).to(tl.float32)
    values, scale = quantized(x, EXACT)
    tl.store(values_ptr + row * N + column, values, mask=here)
    tl.store(scales_ptr + row, scale)


@jit()
def quantized(x, EXACT: tl.constexpr = False):
    """Return x in E4M3 and its scale. x: float32 [BLOCK], a row followed by zeros. EXACT: see _quantize_twin."""
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")))  # tl.max ignores NaN
    scale = tl.maximum(tl.div_rn(largest, 448.0), 1 / (448.0 * 512))
    x = tl.div_rn(x, scale) if EXACT else x * tl.div_rn(1.0, scale)
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv), scale


def _quantize_launch(x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    assert x.is_contiguous()
    values, scales = torch.empty_like(x, dtype=E4M3), x.new_empty(rows, dtype=torch.float32)
    chip, block = Chip.of(x.device), power_of_two(size)
    pdl = chip.dependent_launch
    warps = min(max(block // 1024, 1), 8) if rows > FEW * chip.processors else 16
    _quantize_kernel[(rows,)](x, values, scales, size, block, exact, pdl, num_warps=warps, launch_pdl=pdl)
    return values, scales


def _quantize_twin(x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Return x [T, N] in E4M3, and the scale of each row, its largest magnitude / 448, float32 [T].

    exact: numbers are divided by the scale, as weights are. Otherwise they are multiplied by its reciprocal, because a
    division for each number takes twice as long as reading and writing it.
    """
    x = x.float()
    scales = _scales(x.abs().amax(1))
    return _rounded(x / scales[:, None] if exact else x * (1 / scales)[:, None]), scales


quantize = Kernel(_quantize_launch, _quantize_twin)


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


Kind = ProductConfig | int
"""A kind of kernel: tiles for few tokens (hopper_products), or rows of a tile's sides for many (hopper_fp8.SIDES)."""


def _launch(x: Tensor, x_scales: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused) -> Tensor:
    (tokens, inputs), outputs = x.shape, len(weight.values)
    return launch_as(kind_of(tokens, outputs, inputs, Chip.of(x.device)), x, x_scales, weight, bias, fused)


def kind_of(tokens: int, outputs: int, inputs: int, chip: Chip) -> Kind:
    """Return the fastest kind of kernel for a number of tokens."""
    if hopper_products.takes(tokens, outputs, E4M3.itemsize, chip):
        return config(tokens, outputs, inputs, E4M3, chip)
    return hopper_fp8.rows_of(tokens, outputs, chip)


def kinds_of(outputs: int, inputs: int, chip: Chip) -> list[Kind]:
    """Return all kinds of kernels that products with a weight may use."""
    few = (kind_of(tokens, outputs, inputs, chip) for tokens in range(1, hopper_products.MOST + 1))
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


product = Kernel(_launch, _twin)


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


def _dequantize_launch(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    words, (outputs, inputs) = _words(Quantized(values, scales)), values.shape
    out = torch.empty_like(values, dtype=dtype)
    _dequantize_kernel[(-(-outputs // ROWS), -(-inputs // BLOCK))](
        words, scales, out, outputs, inputs, scales.dim() > 1, ROWS, BLOCK, num_warps=8
    )
    return out


def _dequantize_twin(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight, [N, K] in `dtype`. values, scales: see Quantized.

    NaN stays NaN; the kernel reads it as 480.
    """
    return Quantized(values, scales).dequantized().to(dtype)


dequantize = Kernel(_dequantize_launch, _dequantize_twin)


def _weight_launch(x: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused, tokens: int = 0) -> Tensor:
    assert x.dtype.itemsize == 2
    assert max(tokens, len(x)) <= TOKENS[-1]
    padded, chip = next(each for each in TOKENS if max(tokens, len(x)) <= each), Chip.of(x.device)
    # Smaller tiles let more processors convert a narrow weight. Instructions of Hopper and B200 need 64 rows.
    narrow = len(weight.values) <= ROWS * chip.processors and chip.capability[0] in (8, 12)
    tile = ProductConfig(padded, ROWS // 2 if narrow else ROWS, BLOCK, 4, STAGES, swap=True)
    return batch_invariant.launch_as(tile, x, _words(weight), bias, fused, (None, weight.scales))


def _weight_twin(x: Tensor, weight: Quantized, bias: Tensor | None, fused: Fused, tokens: int = 0) -> Tensor:
    """Return x weight^T + bias, [T, N] in x's dtype, with the epilogue `fused`, for up to max(TOKENS) tokens.

    x: [T, K], bfloat16 or float16. bias: [N] in x's dtype. tokens: number of tokens whose kernel is used, if larger
    than T.
    """
    return finished(F.linear(x, dequantize.twin(weight.values, weight.scales, x.dtype), bias), fused)


weight_product = Kernel(_weight_launch, _weight_twin)
