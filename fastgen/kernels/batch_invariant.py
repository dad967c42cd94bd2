"""Matrix products each of whose rows is the same, to the bit, however many other rows there are.

Letters: T tokens, N outputs, K inputs. A number of the result is summed over K in order, by one program and in one
accumulator, 16 inputs an instruction of the tensor cores, whatever the tile: so the tile may follow the number of
tokens. It may do so only among those for which a chip takes the same instruction. On Hopper the left side of the
product has 64 rows or more and, in Triton, the right side 16 (in Gluon 8), and there are 4 warps or 8, or the
instruction is another (mma.sync and not wgmma), which sums otherwise: of few tokens the weight is the left side.

On Hopper the products of few tokens are those of fastgen.kernels.hopper_products, which has to sum in the same order.

What comes behind a product is done here as well, for any number of tokens, from the sums before they are rounded; but
rope turns rounded numbers, as its own kernel does behind many tokens.

Deterministic mode multiplies with these kernels alone. Ordinary mode does so where they beat cuBLAS: see `pays`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels import hopper_products
from fastgen.kernels.epilogue import finish_pairs, finish_rows, read_pairs, read_rows
from fastgen.kernels.launch import Chip, Kernel, jit, tl
from fastgen.kernels.rope import SlotMapping, rope_write

ALIGN = 8  # inputs of a weight are a multiple, so that its rows begin at multiples of 16 bytes
GROUP = 2048  # tokens of tiles that share the weight's

FLOAT32 = (32, 32, 32, 4, 2)  # tokens, rows, depth, warps, stages of ProductConfig at any number of tokens
FEW = {16: (128, 128), 32: (128, 64), 64: (64, 128)}
"""Padded tokens -> rows and depth for weights that have many rows; for others these are NARROW."""

NARROW = (64, 128)
MANY = ((128, 256, 64, 8), (128, 128, 64, 4), (128, 64, 64, 4))
"""Tokens, rows, depth and warps beyond FEW: the one is taken that keeps the busiest processor for the shortest time."""

MOST_PROGRAMS, LEAST_STAGES, MOST_STAGES = 2, 3, 12  # of 2-byte weights: programs a processor
SIDES, TILE = 16, 4096  # multiplications in the time that a row of a tile's sides takes, and a tile whatever its size

FEW_IN_TRITON = 32
"""Tokens up to which these products beat cuBLAS in Triton; in Gluon they do for all of FEW."""

SIZES = (1, 16, 32, 64, 128, 129, 256, 257, 512, 1024, 2048, 4096)
"""Tokens whose products are compiled at the start, so that few are later."""


@dataclass(frozen=True)
class ProductConfig:
    """tokens, rows, depth: the tiles of x [tokens, depth] and of the weight [rows, depth] that a step of a program's
    loop takes, `stages` of them on their way. swap: the weight is the left side of the product."""

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int
    swap: bool = False

    @property
    def group(self) -> int:
        """Tiles of tokens that share the weight's tiles while these are in the L2 cache."""
        return max(GROUP // self.tokens, 1)

    def shared_memory(self, item_size: int) -> int:
        """Bytes that a program needs at most: the stages, or what the results pass through at the end."""
        return max(self.stages * (self.tokens + self.rows) * self.depth * item_size, self.tokens * self.rows * 4) + 2048


@jit("T")
def _product_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr,
    T, N, K: tl.constexpr, HALF: tl.constexpr, KV: tl.constexpr, P: tl.constexpr, ADD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    SWAP: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a tile of the result. What is behind T, N and K is read as zeros.

    HALF: rows come in pairs that are so far apart, gate and up or what rope turns together; 0 if not. A tile then has
    pairs of HEADS times 2 * HALF rows, all or some of them. KV, P: KV heads and page size, for rope; 0 if there is
    none.
    """
    PAIRS: tl.constexpr = ROWS // 2 // HEADS  # of a head
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
    if HALF > 0:  # the first of each pair
        row = (head + number // PAIRS) * 2 * HALF + first_row + number % PAIRS
    if PDL:
        if not SWAP:  # of few tokens: see behind the loop
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)
    for at in tl.range(0, K, DEPTH, num_stages=STAGES):
        x = x_desc.load([first_token, at])
        if HALF > 0:
            weight = weight_desc.load([head, 0, first_row, at]).reshape([ROWS, DEPTH])
        else:
            weight = weight_desc.load([first_row, at])
        if SWAP:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if PDL and SWAP:  # not before: as long as there are few free processors, the next programs crowd on these
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


@lru_cache(maxsize=4096)
def config(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, chip: Chip) -> ProductConfig:
    """How to cut up the product of `tokens` tokens with a weight [outputs, inputs]; all choices give the same bits."""
    if dtype == torch.float32:
        return ProductConfig(*FLOAT32)
    padded = next((each for each in FEW if tokens <= each), None)
    if padded and hopper_products.runs_on(chip, dtype):
        return ProductConfig(*hopper_products.cut(tokens, outputs, inputs, chip), swap=True)
    if padded:
        wide = outputs >= FEW[padded][0] * chip.processors
        rows, depth = FEW[padded] if wide else NARROW
        found = ProductConfig(padded, rows, depth, 4, 1, swap=True)
        return staged(found, _tiles(found, tokens, outputs), dtype.itemsize, chip)
    several = [
        replace(each, stages=_stages(each, 1, dtype.itemsize, chip)) for each in (ProductConfig(*x, 1) for x in MANY)
    ]
    several = [each for each in several if each.stages >= LEAST_STAGES] or several[-1:]
    return min(several, key=lambda each: _cost(each, tokens, outputs, chip))


def _tiles(found: ProductConfig, tokens: int, outputs: int) -> int:
    return -(-tokens // found.tokens) * -(-outputs // found.rows)


def _cost(found: ProductConfig, tokens: int, outputs: int, chip: Chip) -> int:
    """How long the busiest processor works, in multiplications of one."""
    tile = found.tokens * found.rows + SIDES * (found.tokens + found.rows) + TILE
    return -(-_tiles(found, tokens, outputs) // chip.processors) * tile


def staged(found: ProductConfig, tiles: int, item_size: int, chip: Chip) -> ProductConfig:
    """The same with as many stages as shared memory holds: of one program a processor, if all tiles then run at once;
    else of as many programs as leave each LEAST_STAGES."""
    stages = [_stages(found, programs, item_size, chip) for programs in range(1, MOST_PROGRAMS + 1)]
    several = [each for each in stages if each >= LEAST_STAGES]
    chosen = several[-1] if several and tiles > chip.processors else stages[0]
    return replace(found, stages=max(chosen, 1))


def _stages(found: ProductConfig, programs: int, item_size: int, chip: Chip) -> int:
    """That shared memory holds of so many programs."""
    step = (found.tokens + found.rows) * found.depth * item_size
    return min((chip.shared_memory // programs - 3072) // step, MOST_STAGES)


def pays(tokens: int, inputs: int, dtype: torch.dtype, chip: Chip) -> bool:
    """Return whether the product of `tokens` tokens with a weight [outputs, inputs] beats cuBLAS."""
    most = max(FEW) if hopper_products.runs_on(chip, dtype) else FEW_IN_TRITON
    return tokens <= most and dtype.itemsize == 2 and inputs % ALIGN == 0


def turns(tokens: int) -> bool:
    """Whether rope, where it is wanted, is part of the kernel: behind a tile of many tokens it takes longer than its
    own kernel does. It is the same to the bit."""
    return tokens <= max(FEW)


@dataclass(frozen=True)
class RopeWrite:
    """The arguments of fastgen.kernels.rope.rope_write, for a product with the weight of q, k and v."""

    mapping: SlotMapping
    keys: Tensor
    values: Tensor


class Fused(NamedTuple):
    """What a product [T, N] does beside multiplying.

    add: [T, N], to which the result is added in place. swiglu: weight and bias hold the rows of gate, then those of up,
    and the result is silu(gate) * up [T, N / 2]. rope: the weight holds the rows of q, k and v; the result is what
    rope_write makes of the product, q [T, H, D]. out_dtype: of the result, where it is not x's.
    """

    add: Tensor | None = None
    swiglu: bool = False
    rope: RopeWrite | None = None
    out_dtype: torch.dtype | None = None


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, fused: Fused) -> Tensor:
    chosen = config(len(x), *weight.shape, x.dtype, Chip.of(x.device))
    if fused.rope is None or turns(len(x)):
        return launch_as(chosen, x, weight, bias, fused)
    qkv = launch_as(chosen, x, weight, bias, fused._replace(rope=None))
    turned: Tensor = rope_write.launch(qkv, fused.rope.mapping, fused.rope.keys, fused.rope.values)
    return turned


def launch_as(chosen: ProductConfig, x: Tensor, weight: Tensor, bias: Tensor | None, fused: Fused) -> Tensor:
    """The product, cut up as a ProductConfig says."""
    from triton.tools.tensor_descriptor import TensorDescriptor as Described

    (tokens, inputs), outputs = x.shape, len(weight)
    assert weight.shape == (outputs, inputs)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    assert inputs % ALIGN == 0
    assert bias is None or bias.shape == (outputs,)
    half, heads, width, block = outputs // 2 if fused.swiglu else 0, 1, outputs, [chosen.rows, chosen.depth]
    turned: tuple[Any, ...] = (None,) * 6
    num_kv = page_size = 0
    if fused.rope is not None:
        turned, (num_kv, page_size, half) = _rope_arguments(fused.rope, tokens)
        width -= 4 * num_kv * half
        if half & (half - 1) == 0:
            heads = max(chosen.rows // (2 * half), 1)
    if half:
        width = half if fused.swiglu else width
        weight = weight.view(-1, 2, half, inputs)
        block = [heads, 2, chosen.rows // 2 // heads, chosen.depth]
    out = x.new_empty(tokens, width, dtype=fused.out_dtype) if fused.add is None else fused.add
    assert out.shape == (tokens, width)
    assert out.is_contiguous()
    tiles = -(-len(weight) // heads) * -(-half // block[2]) if half else -(-outputs // chosen.rows)
    others, sizes = (bias, out, *turned), (outputs, inputs, half, num_kv, page_size, fused.add is not None)
    chip = Chip.of(x.device)
    pdl = chip.dependent_launch
    # No multiplication is fused with an addition behind the sums: one tile's compilation might, and another's not.
    if chosen.swap and tokens <= chosen.tokens and hopper_products.runs_on(chip, x.dtype):
        x_block = [chosen.tokens, chosen.depth]
        hopper_products.launch(x, x_block, weight, block, tiles, chosen.stages, chosen.warps, others, sizes, chip)
    else:
        _product_kernel[(-(-tokens // chosen.tokens) * tiles,)](
            Described(x, [tokens, inputs], [inputs, 1], [chosen.tokens, chosen.depth]),
            Described(weight, [*weight.shape], [*weight.stride()], block), *others, tokens, *sizes,
            chosen.tokens, chosen.rows, heads, chosen.depth, chosen.stages, chosen.swap, chosen.group, pdl,
            num_warps=chosen.warps, enable_fp_fusion=False, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out if fused.rope is None else out.view(tokens, -1, 2 * half)


def _rope_arguments(rope: RopeWrite, tokens: int) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    """Return the kernel's pointers; and KV heads, page size, half a head."""
    mapping, keys, values = rope.mapping, rope.keys, rope.values
    _, num_kv, page_size, head_size = keys.shape
    assert keys.shape == values.shape
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert mapping.positions.shape == mapping.slots.shape == (tokens,)
    assert mapping.positions.dtype == mapping.slots.dtype == torch.int64
    assert mapping.cos.shape[1] == head_size // 2
    pointers = mapping.positions, mapping.slots, mapping.cos, mapping.sin, keys, values
    return pointers, (num_kv, page_size, head_size // 2)


def _twin(x: Tensor, weight: Tensor, bias: Tensor | None, fused: Fused) -> Tensor:
    """Return x [T, K] times the rows of weight [N, K], plus bias [N], and what `fused` says: [T, N] in x's dtype."""
    add, swiglu, rope, out_dtype = fused
    y = F.linear(x, weight, bias)
    if rope is not None:
        turned: Tensor = rope_write.twin(y, rope.mapping, rope.keys, rope.values)
        return turned
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.to(out_dtype or y.dtype) if add is None else add.add_(y)


product = Kernel(_launch, _twin)
