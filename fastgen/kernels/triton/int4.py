"""Batch-invariant products with weights of 4 bits: see the twins in fastgen.kernels.int4, which describes a weight's
forms."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.hopper import int4 as hopper_int4
from fastgen.kernels.hopper import products as hopper_products
from fastgen.kernels.int4 import ROWS, check
from fastgen.kernels.rope import rope_write
from fastgen.kernels.triton import batch_invariant
from fastgen.kernels.triton.batch_invariant import Epilogue, ProductConfig
from fastgen.kernels.triton.epilogue import finish_pairs, finish_rows, read_pairs, read_rows
from fastgen.kernels.triton.jit import constant, jit, tl

COPIED, DEPTH = 64, 128  # rows of a tile that is dequantized, and columns of a tile
FEW, FEW_ROWS, FEW_STAGES = (16, 32, 64), 64, 4  # padded tokens, rows and stages of the kernel in Triton
MAGIC = constant(0x4B000000)
"""Bits of the float32 number 2**23. Its lowest bits replaced by q are the number 2**23 + q."""


@jit()
def _unpacked(
    words_ptr, scales_ptr, zeros_ptr, row, here, at, dtype: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return DEPTH columns of the weight from column `at` on, [ROWS, DEPTH] in a dtype.

    row: [ROWS], of which each 16 are a block, and here: [ROWS], whether they are loaded. Other rows are zeros, and
    columns from K on are any finite numbers. The numbers stay with the threads that load their words until the end.
    """
    BLOCKS: tl.constexpr = ROWS // 16
    PARTS: tl.constexpr = DEPTH // 64
    HALVES: tl.constexpr = 2 if GROUP < 64 else 1  # groups of 64 columns, if they have several
    GROUPS: tl.constexpr = DEPTH // GROUP // HALVES if GROUP < DEPTH else 1
    block = tl.max(tl.where(tl.reshape(here, [BLOCKS, 16]), tl.reshape(row, [BLOCKS, 16]) // 16, -1), 1)
    block = block[:, None, None]
    part = at // 64 + tl.arange(0, PARTS)[None, :, None]
    offset = (block.to(tl.int64) * (K // 64) + part) * 128 + tl.arange(0, 128)[None, None, :]
    words = tl.load(words_ptr + offset, mask=(block >= 0) & (part < K // 64), other=0)
    words = tl.reshape(words, [BLOCKS, GROUPS, PARTS // GROUPS, 32, HALVES, 4 // HALVES])
    group = HALVES * tl.arange(0, GROUPS)[None, :, None, None] + tl.arange(0, HALVES)[None, None, None, :]
    group += at // GROUP
    block = block[:, :, :, None]
    offset = (block * (K // GROUP) + group) * 16 + (tl.arange(0, 32) // 4)[None, None, :, None]
    there = (block >= 0) & (group < K // GROUP)
    a, b = _factors(scales_ptr, zeros_ptr, offset, there), _factors(scales_ptr, zeros_ptr, offset + 8, there)
    first = tl.join(_nibble(words, 0, a, dtype), _nibble(words, 1, b, dtype))
    second = tl.join(_nibble(words, 2, a, dtype), _nibble(words, 3, b, dtype))
    even = tl.join(first, second)
    first = tl.join(_nibble(words, 4, a, dtype), _nibble(words, 5, b, dtype))
    second = tl.join(_nibble(words, 6, a, dtype), _nibble(words, 7, b, dtype))
    found = tl.reshape(tl.join(even, tl.join(first, second)), [BLOCKS, PARTS, 8, 4, 4, 2, 2, 2, 1])
    # This sum of one number hides tl.join, after which tl.dot would add in another order on Ampere.
    found = tl.sum(found, 8)  # block part row t j i0 i1 h
    return tl.reshape(tl.permute(found, (0, 5, 2, 1, 4, 6, 3, 7)), [ROWS, DEPTH])


@jit()
def _factors(scales_ptr, zeros_ptr, offset, there):
    """Load the scales at `offset`, and 2**23 + their zeros."""
    scale = tl.load(scales_ptr + offset, mask=there, other=0.0).to(tl.float32)
    zero = 8388616.0
    if zeros_ptr is not None:
        # Loaded as 4 bytes: for loads of one byte, tl.dot would add in another order on Ampere.
        four = tl.load(zeros_ptr.to(tl.pointer_type(tl.int32)) + offset // 4, mask=there, other=0)
        zero = (((four >> offset % 4 * 8) & 255) | MAGIC).to(tl.float32, bitcast=True)[:, :, None, :, :, None]
    return scale[:, :, None, :, :, None], zero


@jit()
def _nibble(words, NUMBER: tl.constexpr, factors, dtype: tl.constexpr):
    """Return the weights of one nibble of each word."""
    scale, zero = factors
    q = (((words >> 4 * NUMBER) & 15) | MAGIC).to(tl.float32, bitcast=True)
    return ((q - zero) * scale).to(dtype)


@jit()
def _dequantize_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, N,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Dequantize ROWS rows and DEPTH columns per program."""
    row, first = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * DEPTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = _unpacked(words_ptr, scales_ptr, zeros_ptr, row, row < N, first, dtype, K, GROUP, ROWS, DEPTH)
    column = first + tl.arange(0, DEPTH)[None, :]
    here = (row < N)[:, None] & (column < K)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * K + column, weight, mask=here)


def dequantize(words: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    outputs, inputs, group = _sizes(words, scales, zeros)
    out, pdl = words.new_empty(outputs, inputs, dtype=dtype), Chip.of(words.device).dependent_launch
    grid = -(-outputs // COPIED), -(-inputs // DEPTH)
    _dequantize_kernel[grid](
        words, scales, zeros, out, outputs, inputs, group, COPIED, DEPTH, pdl, num_warps=8, launch_pdl=pdl
    )
    return out


@jit("T")
def _product_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, keys_ptr,
    values_ptr, T, N, K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, KV: tl.constexpr, P: tl.constexpr,
    ADD: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the weight for all tokens per program. See batch_invariant's kernel for the arguments."""
    PAIRS: tl.constexpr = ROWS // 2 // HEADS  # pairs of a head in a tile
    first_row, head = tl.program_id(0) * ROWS, 0
    row, number = first_row + tl.arange(0, ROWS), tl.arange(0, ROWS // 2)
    here = row < N
    if HALF > 0:
        head = tl.program_id(0) // tl.cdiv(HALF, PAIRS) * HEADS
        first_row = tl.program_id(0) % tl.cdiv(HALF, PAIRS) * PAIRS
        row = tl.arange(0, ROWS)
        here = first_row + row % PAIRS < HALF
        row = ((head + row // (2 * PAIRS)) * 2 + row // PAIRS % 2) * HALF + first_row + row % PAIRS
        here = here & (row < N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc, token = tl.zeros([ROWS, TOKENS], tl.float32), tl.arange(0, TOKENS)[:, None]
    for at in tl.range(0, K, DEPTH, num_stages=STAGES):
        column = at + tl.arange(0, DEPTH)[None, :]
        x = tl.load(x_ptr + token * K + column, mask=(token < T) & (column < K), other=0.0)
        weight = _unpacked(words_ptr, scales_ptr, zeros_ptr, row, here, at, x.dtype, K, GROUP, ROWS, DEPTH)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.trans(acc)
    if HALF > 0:
        acc = tl.permute(tl.reshape(acc, [TOKENS, HEADS, 2, PAIRS]), (0, 1, 3, 2))
        a, b = tl.split(tl.reshape(acc, [TOKENS, ROWS // 2, 2]))
        head += number // PAIRS
        at = first_row + number % PAIRS
        read = read_pairs(token, head, at, bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, T, N, HALF, KV)
        finish_pairs(a, b, read, token, head, at, bias_ptr, out_ptr, keys_ptr, values_ptr, T, N, HALF, KV, P)
    else:
        read = read_rows(token, row, bias_ptr, out_ptr, T, N, ADD)
        finish_rows(acc, read, token, row, bias_ptr, out_ptr, T, N, ADD)


def _sizes(words: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[int, int, int]:
    """Check the tensors of a weight, and return N, K and the columns of a group."""
    outputs, inputs = len(words), 8 * words.shape[1]
    group = inputs // scales.shape[1]
    check(outputs, inputs, group)
    assert words.dtype == torch.int32
    assert len(scales) == outputs
    assert zeros is None or (zeros.shape == scales.shape and zeros.dtype == torch.uint8)
    assert all(each is None or each.is_contiguous() for each in (words, scales, zeros))
    return outputs, inputs, group


def int4_product(
    x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, fused: Fused
) -> Tensor:
    return launch_for(len(x), x, words, scales, zeros, bias, fused)


def launch_for(
    tokens: int, x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, fused: Fused
) -> Tensor:
    """Compute the product with the kernels for `tokens` tokens, of which x may have fewer. See the twin for the other
    arguments."""
    if fused.rope is None or batch_invariant.fuses_rope(tokens, x.dtype, Chip.of(x.device)):
        return _multiply(tokens, x, words, scales, zeros, bias, fused)
    qkv = _multiply(tokens, x, words, scales, zeros, bias, fused._replace(rope=None))
    turned: Tensor = rope_write.launch(qkv, fused.rope.mapping, fused.rope.keys, fused.rope.values)
    return turned


def _multiply(
    tokens: int, x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, fused: Fused
) -> Tensor:
    kernel = _kernel_of(tokens, x, words, scales, fused)
    if not isinstance(kernel, ProductConfig):
        return launch_as(kernel, x, words, scales, zeros, bias, fused, tokens)
    return batch_invariant.launch_as(kernel, x, dequantize(words, scales, zeros, x.dtype), bias, fused)


def _kernel_of(
    tokens: int, x: Tensor, words: Tensor, scales: Tensor, fused: Fused
) -> hopper_int4.Tile | ProductConfig | None:
    """Return the tile of a product in Gluon, the tiles of a product with a scratch copy, or None for a product in
    Triton without one."""
    half = fused.rope.keys.shape[-1] // 2 if fused.rope else len(words) // 2 if fused.swiglu else 0
    if x.dtype.itemsize == 2 and half % ROWS == 0:
        tile = _tile_of(tokens, x, words, scales, fused)
        if tile or tokens <= max(FEW):
            return tile
    # Not by hopper_products, which loads weights before the previous kernel, here `dequantize`, has written them.
    tokens = max(tokens, hopper_products.MAX_TOKENS + 1)
    return batch_invariant.config(tokens, len(words), x.shape[1], x.dtype, Chip.of(x.device))


def _tile_of(tokens: int, x: Tensor, words: Tensor, scales: Tensor, fused: Fused) -> hopper_int4.Tile | None:
    """Return the tile for a product in Gluon, or None if it is not for Gluon."""
    chip, inputs, add = Chip.of(x.device), x.shape[1], fused.add is not None
    if tokens > hopper_int4.max_tokens(add) or not hopper_int4.runs_on(chip, x.dtype, scales.dtype):
        return None
    group = inputs // scales.shape[1]
    tile = hopper_int4.tile_of(tokens, len(words), inputs, chip, add, group, fused.swiglu)
    return tile if hopper_int4.fits(tile, inputs, group) else None


def sizes_of(x: Tensor, words: Tensor, scales: Tensor, fused: Fused) -> list[int]:
    """Return numbers of tokens whose products run all kernels, also those that make and multiply scratch copies, for up
    to the last of batch_invariant.SIZES; see the twin."""
    sizes, most = dict[object, int](), max(FEW)
    # Larger tiles have a multiple of `most` tokens, and so have the limits of kernels: the choice changes only there.
    for tokens in (*range(1, most + 1), *range(most + 1, batch_invariant.SIZES[-1] + 1, most)):
        fuses = batch_invariant.fuses_rope(tokens, x.dtype, Chip.of(x.device))
        kernel = _kernel_of(tokens, x, words, scales, fused if fuses else fused._replace(rope=None))
        sizes.setdefault((kernel, fuses), tokens)
    return [*FEW, *sizes.values()]


def launch_as(
    tile: hopper_int4.Tile | None, x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    fused: Fused, tokens: int = 0,
) -> Tensor:  # fmt: skip
    """Compute the product without a scratch copy of the weight, in Gluon with a tile, or in Triton for at most 64
    tokens, with the kernel for `tokens` (by default those of x). The other arguments are those of the twin."""
    outputs, inputs, group = _sizes(words, scales, zeros)
    assert x.shape[1] == inputs
    assert x.is_contiguous()
    chip, rows = Chip.of(x.device), tile.rows if tile else FEW_ROWS
    ends = Epilogue.of(x, outputs, bias, fused, rows)
    if tile:
        hopper_int4.launch(
            tile, x, words, scales, zeros, ends.half, ends.heads, ends.tiles, ends.others, ends.sizes, chip
        )
    else:
        _launch_triton(tokens or len(x), x, words, scales, zeros, group, ends, chip)
    return ends.out if fused.rope is None else ends.out.view(len(x), -1, 2 * ends.half)


def _launch_triton(
    most: int, x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, group: int, ends: Epilogue, chip: Chip
) -> None:
    (tokens, inputs), outputs, pdl = x.shape, len(words), chip.dependent_launch
    padded = next(each for each in FEW if most <= each)
    _product_kernel[(ends.tiles,)](
        x, words, scales, zeros, *ends.others, tokens, outputs, inputs, group, *ends.sizes, padded, FEW_ROWS,
        ends.heads, DEPTH, FEW_STAGES, pdl,
        num_warps=4, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
