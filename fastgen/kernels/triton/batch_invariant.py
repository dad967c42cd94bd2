"""Batch-invariant matrix products, in which the bits of a row of the result do not depend on the number of other rows.

Shape letters: T tokens, N outputs, K inputs. Each element of the result is summed by one program over K in order, in
one accumulator, with 16 inputs per tensor core instruction. The size of the tile does not change this order, so it may
depend on T, as long as all tiles use the same instruction. On Hopper this is wgmma, which needs at least 64 rows on the
left side, 16 columns on the right side in Triton (8 in Gluon), and 4 or 8 warps; for other tiles Triton uses mma.sync,
which sums differently. Therefore the weight is the left side of products of few tokens.

On Hopper, fastgen.kernels.hopper.products computes the products of up to 256 tokens, and sums in the same order.

The epilogue of a product works on the sums before they are rounded. Rope is an exception: it rotates rounded numbers,
because its separate kernel, which follows products of many tokens, does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.batch_invariant import ALIGN, FEW_IN_GLUON, Fused
from fastgen.kernels.hopper import products as hopper_products
from fastgen.kernels.launch import gluon_runs_on
from fastgen.kernels.rope import rope_write
from fastgen.kernels.triton.epilogue import finish_pairs, finish_rows, read_pairs, read_rows
from fastgen.kernels.triton.jit import jit, tl

GROUP = 2176
"""Tokens whose tiles share the weight's tiles in the L2 cache, about a quarter of a large step. Measured on an H200,
whose L2 cache has 50 MB; no GPU with a smaller one was measured."""

FLOAT32 = (32, 32, 32, 4, 2)  # tokens, rows, depth, warps, stages of ProductConfig at any number of tokens
FEW = {16: (128, 128), 32: (128, 64), 64: (64, 128)}
"""Padded tokens -> rows and depth for weights with many rows."""

NARROW = (64, 128)  # rows and depth for other weights
MANY = ((128, 256, 64, 8), (128, 128, 64, 4), (128, 64, 64, 4))
"""Choices of tokens, rows, depth and warps for more tokens than FEW has. The one that takes the busiest processor the
least time is used."""

MAX_PROGRAMS, MIN_STAGES, MAX_STAGES = 2, 3, 12  # programs per processor, and stages, for 2-byte weights
SIDES, TILE = 16, 4096  # the cost, in multiplications, of a row or column of a tile, and of a tile itself

MAX_TOKENS = max(*FEW, FEW_IN_GLUON)  # tokens up to which these products can be faster than cuBLAS

SIZES = (1, 16, 32, 64, 65, 128, 129, 192, 256, 257, 512, 1024, 2048, 4096)
"""Numbers of tokens whose products are compiled at the start."""


@dataclass(frozen=True)
class ProductConfig:
    """The tiles of a product.

    tokens, rows, depth: sizes of the tiles of x [tokens, depth] and of the weight [rows, depth] in a step of a
    program's loop. stages: number of steps whose tiles load at the same time. swap: whether the weight is the left side
    of the product. token_tiles: maximum number of tiles of tokens of a product in Gluon.
    """

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    token_tiles: int = 1

    @property
    def group(self) -> int:
        """Return the number of tiles of tokens that share the weight's tiles while they are in the L2 cache."""
        return max(GROUP // self.tokens, 1)


@jit("T")
def _product_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr,
    scales_ptr, T, N, K: tl.constexpr, HALF: tl.constexpr, KV: tl.constexpr, P: tl.constexpr, ADD: tl.constexpr,
    BLOCKS: tl.constexpr, POINTERS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the result per program. Rows and columns beyond T, N and K are read as zeros.

    HALF: distance between the rows of a pair (gate and up, or the halves of a head for rope), or 0 without pairs. With
    pairs, a tile has all or some pairs of HEADS heads, each of 2 * HALF rows. KV, P: number of KV heads and page size
    for rope, or 0 without rope. POINTERS: whether x_desc and weight_desc are pointers instead of descriptors, whose
    loads are not asynchronous on Ampere and Ada. scales_ptr, BLOCKS: scales of a weight in fp8, see `dequantized`.
    """
    PAIRS: tl.constexpr = ROWS // 2 // HEADS  # pairs of a head in a tile
    tiles_n = tl.cdiv(N, ROWS)
    if HALF > 0:
        tiles_n = tl.cdiv(N // 2 // HALF, HEADS) * tl.cdiv(HALF, PAIRS)
    width = GROUP * tiles_n
    within = tl.program_id(0) % width
    first_tile = tl.program_id(0) // width * GROUP
    tiles = tl.minimum(tl.cdiv(T, TOKENS) - first_tile, GROUP)
    first_token = (first_tile + within % tiles) * TOKENS
    first_row = within // tiles * ROWS
    head = 0
    if HALF > 0:
        head = within // tiles // tl.cdiv(HALF, PAIRS) * HEADS
        first_row = within // tiles % tl.cdiv(HALF, PAIRS) * PAIRS
    row, number = first_row + tl.arange(0, ROWS), tl.arange(0, ROWS // 2)
    if HALF > 0:
        row = tl.arange(0, ROWS)
        row = ((head + row // (2 * PAIRS)) * 2 + row // PAIRS % 2) * HALF + first_row + row % PAIRS
    if PDL:
        if not SWAP:  # for few tokens, see after the loop
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)
    for at in tl.range(0, K, DEPTH, num_stages=STAGES):
        if POINTERS:
            token, column = first_token + tl.arange(0, TOKENS)[:, None], at + tl.arange(0, DEPTH)[None, :]
            x = tl.load(x_desc + token.to(tl.int64) * K + column, mask=(token < T) & (column < K), other=0.0)
            if scales_ptr is not None:
                weight = dequantized(weight_desc, scales_ptr, row, at, N, K, BLOCKS, DEPTH, x.dtype)
            else:
                place = row.to(tl.int64)[:, None] * K + column
                weight = tl.load(weight_desc + place, mask=(row < N)[:, None] & (column < K), other=0.0)
        else:
            x = x_desc.load([first_token, at])
            if HALF > 0:
                weight = weight_desc.load([head, 0, first_row, at]).reshape([ROWS, DEPTH])
            else:
                weight = weight_desc.load([first_row, at])
        if SWAP:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if PDL and SWAP:  # not earlier, or the next programs would crowd on the few processors that are free by then
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP:
        acc = tl.trans(acc)
    token = first_token + tl.arange(0, TOKENS)[:, None]
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


@jit()
def dequantized(
    words_ptr, scales_ptr, row, at, N, K: tl.constexpr, BLOCKS: tl.constexpr, DEPTH: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Return rows `row` [ROWS], and DEPTH columns from column `at` on, of a weight in fp8: its numbers times their
    scales, computed in float32 and rounded to `dtype`. Rows from N on and columns from K on are zeros.
    NaN (all 7 bits set) is read as 480; the twins in fastgen.kernels.fp8 keep it.

    words_ptr: int32 [N, K / 4], because Triton has no E4M3 on Ampere. BLOCKS: whether there is one scale per block of
    128 x 128 instead of one per row.
    """
    word, here = at // 4 + tl.arange(0, DEPTH // 4)[None, :], (row < N)[:, None]
    words = tl.load(words_ptr + row.to(tl.int64)[:, None] * (K // 4) + word, mask=here & (word < K // 4), other=0)
    scale = tl.load(scales_ptr + (row // 128 * tl.cdiv(K, 128) + at // 128 if BLOCKS else row), mask=row < N, other=0.0)
    even = tl.join(_number(words << 24, scale, dtype), _number(words << 8, scale, dtype))
    odd = tl.join(_number(words << 16, scale, dtype), _number(words, scale, dtype))
    # This sum of one number hides tl.join, after which tl.dot would add in another order on Ampere.
    return tl.sum(tl.reshape(tl.join(even, odd), [row.shape[0], DEPTH, 1]), 2)


@jit()
def _number(word, scale, dtype: tl.constexpr):
    """Return the number in E4M3 in the highest byte of each word, times the scale of its row."""
    bits = (word >> 4) & -0x78100000  # the sign, and the other 7 bits as the lower exponent bits and the mantissa
    # The exponent bits of E4M3 mean 7 less, and those of float32 127 less. 2**120 corrects that, and is exact.
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale[:, None]).to(dtype)


@lru_cache(maxsize=4096)
def config(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, chip: Chip) -> ProductConfig:
    """Return the tiles for the product of `tokens` tokens and a weight [outputs, inputs]. All choices give the same
    bits."""
    if dtype == torch.float32:
        return ProductConfig(*FLOAT32)
    padded = next((each for each in FEW if tokens <= each), None)
    if gluon_runs_on(chip, dtype) and hopper_products.takes(tokens, outputs, dtype.itemsize, chip):
        shape = hopper_products.tile_of(tokens, outputs, inputs, dtype.itemsize, chip)
        return ProductConfig(*shape, swap=True, token_tiles=-(-tokens // shape[0]))
    if padded:
        wide = outputs >= FEW[padded][0] * chip.processors
        rows, depth = FEW[padded] if wide else NARROW
        candidate = ProductConfig(padded, rows, depth, 4, 1, swap=True)
        return staged(candidate, _tiles(candidate, tokens, outputs), dtype.itemsize, chip)
    several = [
        replace(each, stages=_stages(each, 1, dtype.itemsize, chip)) for each in (ProductConfig(*x, 1) for x in MANY)
    ]
    several = [each for each in several if each.stages >= MIN_STAGES] or several[-1:]
    return min(several, key=lambda each: _cost(each, tokens, outputs, chip))


def _tiles(config: ProductConfig, tokens: int, outputs: int) -> int:
    return -(-tokens // config.tokens) * -(-outputs // config.rows)


def _cost(config: ProductConfig, tokens: int, outputs: int, chip: Chip) -> int:
    """Return the time that the busiest processor takes, in multiplications."""
    tile = config.tokens * config.rows + SIDES * (config.tokens + config.rows) + TILE
    return -(-_tiles(config, tokens, outputs) // chip.processors) * tile


def staged(config: ProductConfig, tiles: int, item_size: int, chip: Chip) -> ProductConfig:
    """Return the configuration with as many stages as fit into shared memory.

    If all tiles can run at the same time, they fit for one program per processor, otherwise for as many programs as
    there is room for with MIN_STAGES each.
    """
    stages = [_stages(config, programs, item_size, chip) for programs in range(1, MAX_PROGRAMS + 1)]
    several = [each for each in stages if each >= MIN_STAGES]
    chosen = several[-1] if several and tiles > chip.processors else stages[0]
    return replace(config, stages=max(chosen, 1))


def _stages(config: ProductConfig, programs: int, item_size: int, chip: Chip) -> int:
    """Return the number of stages that fit into shared memory if a processor runs `programs` programs."""
    step = (config.tokens + config.rows) * config.depth * item_size
    return min((chip.shared_memory // programs - 3072) // step, MAX_STAGES)


def fuses_rope(tokens: int, dtype: torch.dtype, chip: Chip) -> bool:
    """Return whether the product's kernel computes rope. For many tokens a separate kernel is faster; both give the
    same bits."""
    return tokens <= (hopper_products.ROPE if gluon_runs_on(chip, dtype) else max(FEW))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, fused: Fused) -> Tensor:
    chip = Chip.of(x.device)
    chosen = config(len(x), *weight.shape, x.dtype, chip)
    if fused.rope is None or fuses_rope(len(x), x.dtype, chip):
        return launch_as(chosen, x, weight, bias, fused)
    qkv = launch_as(chosen, x, weight, bias, fused._replace(rope=None))
    turned: Tensor = rope_write.launch(qkv, fused.rope.mapping, fused.rope.keys, fused.rope.values)
    return turned


@dataclass(frozen=True)
class Epilogue:
    """The arguments of a kernel that depend on the epilogue of a product.

    half, heads: number of pairs of a head, or 0 without pairs, and heads of a tile. out: the tensor that receives the
    result. others: the kernel's arguments from bias_ptr to values_ptr. sizes: from HALF to ADD. tiles: number of tiles.
    """

    half: int
    heads: int
    out: Tensor
    others: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    tiles: int

    @classmethod
    def of(cls, x: Tensor, outputs: int, bias: Tensor | None, fused: Fused, rows: int) -> Epilogue:
        """Check the arguments of a product. rows: rows of a tile."""
        half, heads = outputs // 2 if fused.swiglu else 0, 1
        width = half if fused.swiglu else outputs
        turned: tuple[Tensor | None, ...] = (None,) * 6
        num_kv = page_size = 0
        if fused.rope is not None:
            mapping, keys, values = fused.rope.mapping, fused.rope.keys, fused.rope.values
            mapping.check(len(x), keys, values)
            turned = mapping.positions, mapping.slots, mapping.cos, mapping.sin, keys, values
            _, num_kv, page_size, head_size = keys.shape
            half = head_size // 2
            width = outputs - 2 * num_kv * head_size
            if half & (half - 1) == 0:
                heads = max(rows // (2 * half), 1)
        out = fused.out if fused.add is None else fused.add
        if out is None:
            out = x.new_empty(len(x), width, dtype=fused.out_dtype)
        assert out.shape == (len(x), width)
        assert out.is_contiguous()
        assert bias is None or bias.shape == (outputs,)
        pairs = rows // 2 // heads
        tiles = -(-outputs // (2 * half * heads)) * -(-half // pairs) if half else -(-outputs // rows)
        return cls(half, heads, out, (bias, out, *turned), (half, num_kv, page_size, fused.add is not None), tiles)


def launch_as(
    chosen: ProductConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fused: Fused,
    scales: tuple[Tensor | None, Tensor] | None = None,
) -> Tensor:
    """Compute the product with the tiles of a ProductConfig; see the twin for the arguments.

    scales: scales of the tokens and of the weight, for products of few tokens in fp8 on Hopper (fastgen.kernels.fp8).
    None instead of the tokens' scales: only the weight is in fp8, and is given as int32 [N, K / 4].
    """
    from triton.tools.tensor_descriptor import TensorDescriptor as Described

    (tokens, inputs), outputs = x.shape, len(weight)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    weight_only = scales is not None and scales[0] is None
    assert weight.shape == (outputs, inputs // 4 if weight_only else inputs)
    assert weight.dtype == (torch.int32 if weight_only else x.dtype)
    assert inputs % ALIGN == 0
    # `tile_of` does not know of rope: a weight of q, k and v may get 160 to 224 rows. A tile has whole heads, so a
    # power of two; the smaller tile fits, too.
    rows = chosen.rows if fused.rope is None else 1 << (chosen.rows.bit_length() - 1)
    ends, block = Epilogue.of(x, outputs, bias, fused, rows), [rows, chosen.depth]
    if ends.half:
        weight = weight.view(-1, 2, ends.half, weight.shape[1])
        block = [ends.heads, 2, rows // 2 // ends.heads, chosen.depth]
    chip, few = Chip.of(x.device), chosen.swap and tokens <= chosen.tokens * chosen.token_tiles
    sizes = outputs, inputs, *ends.sizes, scales is not None and scales[1].dim() > 1
    if few and not weight_only and gluon_runs_on(chip, x.dtype):
        x_block, how = [chosen.tokens, chosen.depth], (chosen.token_tiles, chosen.stages, chosen.warps)
        others = *ends.others, *(scales or (None, None))
        hopper_products.launch(x, x_block, weight, block, ends.tiles, *how, others, sizes, chip)
    else:
        assert weight_only or scales is None
        pdl, of_weight = chip.dependent_launch, scales[1] if scales else None
        pointers = weight_only or chip.capability < (9, 0)
        # Without fused multiply-adds, which the compiler might use in the epilogues of some tiles and not of others.
        _product_kernel[(-(-tokens // chosen.tokens) * ends.tiles,)](
            x if pointers else Described(x, [tokens, inputs], [inputs, 1], [chosen.tokens, chosen.depth]),
            weight if pointers else Described(weight, [*weight.shape], [*weight.stride()], block),
            *ends.others, of_weight, tokens, *sizes, pointers, chosen.tokens, rows, ends.heads, chosen.depth,
            chosen.stages, chosen.swap, chosen.group, pdl,
            num_warps=chosen.warps, enable_fp_fusion=False, launch_pdl=pdl,
        )  # fmt: skip
    return ends.out if fused.rope is None else ends.out.view(tokens, -1, 2 * ends.half)
