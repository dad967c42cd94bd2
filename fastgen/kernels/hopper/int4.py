"""Products with weights of 4 bits (fastgen.kernels.int4) on Hopper, in Gluon, with the same bits as products with the
dequantized weight in fastgen.kernels.hopper.products, whose structure this kernel has.

One warp of a program loads tiles of packed words and of x (by TMA). The other warps dequantize in registers, which hold
the left side of the tensor core instructions: a prepared word has the 8 weights that a thread holds of 16 x 16 weights.
While the products of one chunk of columns are computed, the next chunk is dequantized. The rows of an instruction do
not affect each other: where warps have only 8 of their 16 rows, the registers of the others are undefined.

With few tokens, the products of a narrow weight are no faster than a processor's instructions, of which each adds 16
columns to a sum. Two sums at the same time on a processor are no faster than one of twice the length.

A nibble becomes a number without a conversion: in the lowest bits of the mantissa of 128 it is bf16's 128 + q. From
this, 128 + zero is subtracted, which is exact. The difference times the scale is rounded once: a float16 scale is the
sum of two numbers in bf16, high and low, and (q - zero) * low is exact in bf16, so that one multiply-add rounds the
whole sum. Where x is float16, the number is 1024 + q, and a float16 scale has one part. The mantissa of 1024 also has
room for a nibble 4 bits higher, which is then not shifted: (1024 + 16 q) / 16 - (64 + zero) is exact in one
multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.hopper.gluon import gl, gluon_jit, load_tile, next_stage, nvidia, reinterpret
from fastgen.kernels.hopper.products import described, origin, read_ahead
from fastgen.kernels.launch import GLUON
from fastgen.kernels.triton.epilogue import finish_pairs, finish_rows
from fastgen.kernels.triton.jit import constant, tl

FEW = (8, 16, 32, 64)  # tokens of a tile for few tokens
WIDE = (128, 256, 4, 64, 2)  # the other sizes of a Tile, for weights with at least one such tile per processor
NARROW = (64, 512, 4, 128, 1)  # the other sizes for other weights and few tokens
WIDE_64, NARROW_64 = (128, 128, 4, 64, 2), (64, 256, 4, 128, 1)
"""WIDE and NARROW for tiles of 64 tokens: with as many columns as those have, x leaves room for two steps only."""

HALVED = (32, 512, 4, 128)
"""The other sizes but for `programs`, for few tokens and weights with at most one such tile per processor."""

HALVED_TOKENS, SHARED_TOKENS = 32, 16  # tokens up to which HALVED is used, and two of its programs share a processor
EXCESS_TOKENS, EXCESS_GROUP = 8, 128  # tokens up to which, and columns per group from which, a tile `exceeds` its share
EXCESS_MEMORY, EXCESS_REGISTERS = 1.05, 8
"""The share of memory of a `memory` program in units of half a processor's, and how many registers per thread more than
half a `registers` program has. A `memory` program has as many fewer, so that it shares with a `registers` program."""

MANY = (256, 128, 128, 8, 64, 1), (128, 64, 128, 4, 64, 2), (64, 64, 256, 4, 64, 1)
"""Choices for more tokens. The first whose tiles occupy two thirds of the processors is used."""

MANY_NARROW = (128, 64, 256, 4, 128, 1)  # instead of the second of MANY, if all tiles can run at the same time
MAX_TOKENS, MAX_TOKENS_ADD = 2048, 1024
"""Tokens up to which this kernel is faster than a product with a scratch copy of the weight. The second is for results
that are added to other numbers: they have no tiles of the first size in MANY."""
COLUMNS = 64  # columns of a part of a block of 16 rows, 512 bytes
LOADING_REGISTERS = constant(40)  # registers per thread of the loading warp's group; the others get the rest
AHEAD, AHEAD_ROPE = 64, 16  # sums per thread up to which the epilogue's inputs load before the product


def _instructions(low: bool, kind: str, rows: int = 2) -> str:
    """Return PTX that makes 8 pairs of numbers, in registers $0 to $7, of the words $8 and $9.

    A word has pairs of row 0, row 1, row 0 and row 1. If rows is 1, those of row 1 remain undefined. $10 and, for 2
    rows, $12: `_middle` of a row, twice. The next 2 * rows registers: the scales, twice. low: whether 2 * rows more
    have the low parts of the scales. In float16 and for 1 row, 4 more have the mask of the row's nibbles, twice, and
    what the numbers are multiplied by before the subtraction, 1 or 1/16, twice.
    """
    magic, last = {"bf16": 0x43004300, "f16": 0x64006400}[kind], 10 + 4 * rows
    lines = [".reg .b32 q, d, p, s;", "mov.b32 s, 0x2c002c00;"]
    for number in range(0, 8, 3 - rows):
        word, pair = 8 + number // 4, number % 4
        zero, scale, lowest = (10 + 2 * (rows * part + pair % 2) for part in range(3))
        # The mantissa of float16 has room for two nibbles, so the nibbles of row 1 count 16 times.
        shift, mask, factor = 4 * pair, "0x000f000f", None
        if kind == "f16":
            shift, mask, factor = pair // 2 * 8, "0x00f000f0" if pair % 2 else mask, "s" if pair % 2 else None
            if rows == 1:
                mask, factor = f"${last}", f"${last + 2}"
        if shift:
            lines.append(f"shr.b32 p, ${word}, {shift};")
        lines.append(f"lop3.b32 q, {'p' if shift else f'${word}'}, {mask}, {magic:#x}, 0xea;")
        lines.append(f"fma.rn.{kind}x2 d, q, {factor}, ${zero};" if factor else f"add.{kind}x2 d, q, ${zero};")
        if low:
            lines.append(f"mul.{kind}x2 p, d, ${lowest};")
            lines.append(f"fma.rn.{kind}x2 ${number}, d, ${scale}, p;")
        else:
            lines.append(f"mul.{kind}x2 ${number}, d, ${scale};")
    return "{" + " ".join(lines) + "}"


def _registers(low: bool, rows: int = 2, masked: bool = False) -> str:
    """Return the constraints of the registers that `_instructions` names."""
    return ",".join(["=&r"] * 8 + ["r"] * (2 + 4 * rows + 2 * rows * low + 4 * masked))


BF16, BF16_LOW, F16 = (constant(_instructions(*each)) for each in ((False, "bf16"), (True, "bf16"), (False, "f16")))
BF16_ROW, BF16_LOW_ROW, F16_ROW = (
    constant(_instructions(*each, 1)) for each in ((False, "bf16"), (True, "bf16"), (False, "f16"))
)
REGISTERS, REGISTERS_LOW = constant(_registers(False)), constant(_registers(True))
REGISTERS_ROW, REGISTERS_LOW_ROW = constant(_registers(False, 1)), constant(_registers(True, 1))
REGISTERS_MASKED = constant(_registers(False, 1, True))
BF16_PAIRS, F16_PAIRS = (
    constant((kind,) * 8) for kind in (getattr(gl, "bfloat16", None), getattr(gl, "float16", None))
)


@dataclass(frozen=True)
class Tile:
    """The tiles of a product, all of which give the same bits.

    tokens, rows, depth: sizes of the tiles of x [tokens, depth] and of the weight [rows, depth] in a step. A warp has a
    multiple of 16 rows, or 8 rows. chunk: number of columns that are dequantized at a time. programs: number of
    programs for which a processor has room. exceeds: "memory" or "registers", if a program takes a little more than its
    share of these, so that a processor has room for it and for a program of another kernel, but not for two of its own.
    A `memory` program has EXCESS_REGISTERS fewer registers, so that it shares with a `registers` program.
    """

    tokens: int
    rows: int
    depth: int
    warps: int
    chunk: int
    programs: int
    exceeds: str = ""

    def groups(self, group: int) -> int:
        """Return the number of groups of a step, for groups of `group` columns."""
        return max(self.depth // group, 1)

    def apart(self, group: int) -> int:
        """Return the distance between the zeros of two stages, in tiles: TMA writes to multiples of 128 bytes."""
        return max(128 // (self.rows * self.groups(group)), 1)

    def stages(self, chip: Chip, group: int) -> int:
        """Return the number of steps whose tiles fit into the shared memory of a program."""
        room = int(chip.shared_memory * (EXCESS_MEMORY if self.exceeds == "memory" else 1) / self.programs) - 3072
        factors = 3 * self.rows * self.groups(group) * self.apart(group)  # a scale and a zero per row and group
        return min(room // ((4 * self.tokens + self.rows) * self.depth // 2 + factors), 12)

    @property
    def registers(self) -> int:
        """Return the registers per thread at the start."""
        share = 65536 // self.programs // (32 * (self.warps + 4)) // 8 * 8
        return share + {"": 0, "memory": -EXCESS_REGISTERS, "registers": EXCESS_REGISTERS}[self.exceeds]


def tile_of(
    tokens: int, outputs: int, inputs: int, chip: Chip, add: bool = False, group: int = 128, swiglu: bool = False
) -> Tile:
    """Return the tile for a product of `tokens` tokens and a weight of `outputs` rows.

    add: whether the result is added to other numbers, for which the registers of the largest tile do not suffice.
    group: columns per group. swiglu: whether the weight is gate_up.

    The instructions that add to one sum wait for each other, which takes longer than to load a narrow weight. In tiles
    of HALVED rows, a warp has only 8 rows instead of 16 to dequantize meanwhile, and more processors take part. If
    weights are small, a processor has room for two programs, and most of one's weight loads while the previous kernel
    runs. Larger weights with HALVED tiles (down), and those that read their results (q, k and v), leave room for each
    other's programs, and down also for those of a gate_up with WIDE tiles. (NARROW ones take the whole memory.) But two
    programs of down, or of q, k and v, on a processor that has become free early, would take longer than one on each:
    their tiles `exceed` a half, see Tile.
    """

    def programs(size: int, rows: int) -> int:
        return -(-tokens // size) * -(-outputs // rows)

    if tokens <= max(FEW):
        padded = next(each for each in FEW if tokens <= each)
        if programs(padded, WIDE[0]) >= chip.processors:
            return Tile(padded, *(WIDE_64 if padded == max(FEW) else WIDE))
        exceeds = padded <= EXCESS_TOKENS and group >= EXCESS_GROUP
        if padded <= HALVED_TOKENS and programs(padded, HALVED[0]) <= chip.processors:
            # small: a program's rows of the weight take at most a third of the shared memory
            small = padded <= SHARED_TOKENS and 3 * HALVED[0] * inputs // 2 <= chip.shared_memory
            if exceeds and not small:
                return Tile(padded, *HALVED, 2, "memory")
            return Tile(padded, *HALVED, 2 if small else 1)
        before = inputs // HALVED[0]  # programs of the same model's down, whose outputs are these inputs
        if exceeds and not swiglu and max(programs(padded, NARROW[0]), before) <= chip.processors:
            return Tile(padded, *NARROW[:-1], 2, "registers")
        if padded > 32 and programs(32, NARROW[0]) <= chip.processors:
            padded = 32
        return Tile(padded, *(NARROW_64 if padded == max(FEW) else NARROW))
    several = [each for each in MANY[add:] if each[0] < 2 * tokens and 3 * programs(*each[:2]) >= 2 * chip.processors]
    chosen = several[0] if several else MANY[-1]
    narrow = chosen == MANY[1] and programs(*chosen[:2]) <= chip.processors
    return Tile(*(MANY_NARROW if narrow else chosen))


def max_tokens(add: bool) -> int:
    """Return the tokens up to which this kernel is the fastest. add: see `tile_of`."""
    return MAX_TOKENS_ADD if add else MAX_TOKENS


def fits(tile: Tile, inputs: int, group: int) -> bool:
    """Return whether the steps of a tile have whole groups of `group` columns, or are within one."""
    return tile.depth % group == 0 or group % tile.depth == 0 or inputs == group >= tile.depth


def runs_on(chip: Chip, dtype: torch.dtype, scales: torch.dtype) -> bool:
    """Return whether the kernel runs on a chip, for a dtype of x and of the weight's scales."""
    exact = {torch.bfloat16: (torch.float16, torch.bfloat16), torch.float16: (torch.float16,)}
    return GLUON and chip.capability == (9, 0) and scales in exact.get(dtype, ())


@gluon_jit("T")
def _product_kernel(
    x_desc, words_desc, scales_desc, zeros_desc, bias_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
    keys_ptr, values_ptr, T, N, K: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, KV: gl.constexpr,
    P: gl.constexpr, ADD: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    DEPTH: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, APART: gl.constexpr, AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Compute the product of one tile of the weight's rows with one tile of tokens per program.

    Shape letters: see fastgen.kernels.batch_invariant; GROUP: columns per group. CHUNK: see Tile. APART: see
    Tile.apart. AHEAD, EARLY: see hopper.products. Programs with the same tile of the weight are neighbours.
    """
    PAIRS: gl.constexpr = ROWS // 2 // HEADS
    first_token, head, first_row = origin(T, HALF, TOKENS, ROWS, HEADS, True)
    words = gl.allocate_shared_memory(gl.int32, [STAGES] + words_desc.block_type.shape, words_desc.layout)
    # A step's x loads at once, as its parts of 64 columns, of which a tile [TOKENS, DEPTH] consists in shared memory.
    parts = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    tiled: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, DEPTH], x_desc.dtype)
    xs = reinterpret(parts, x_desc.dtype, [STAGES, TOKENS, DEPTH], tiled)
    scales = gl.allocate_shared_memory(
        scales_desc.dtype, [STAGES * APART] + scales_desc.block_type.shape, scales_desc.layout
    )
    zeros = scales
    if zeros_desc is not None:
        zeros = gl.allocate_shared_memory(gl.uint8, [STAGES * APART] + zeros_desc.block_type.shape, zeros_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], nvidia.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], nvidia.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        nvidia.mbarrier.init(ready.index(stage), count=1)
        nvidia.mbarrier.init(free.index(stage), count=1)
    side_by_side: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    blocked: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    spread: gl.constexpr = gl.SliceLayout(2, side_by_side) if HALF > 0 else blocked  # the layout of stores
    token = gl.expand_dims(first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, spread)), 1)
    if HALF > 0:
        number = gl.arange(0, ROWS // 2, gl.SliceLayout(0, spread))
        places = (token, head + number // PAIRS, first_row + number % PAIRS)
    else:
        places = (token, first_row + gl.arange(0, ROWS, gl.SliceLayout(0, spread)))  # type: ignore[assignment]
    ring = (words, xs, scales, zeros, ready, free)
    tables = (bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr)
    described = (x_desc, words_desc, scales_desc, zeros_desc)
    at = (first_token, head, first_row)
    acc, read = gl.warp_specialize(
        [
            (
                _multiply,
                (ring, zeros_desc, places, tables, out_ptr, T, N, K, GROUP, HALF, KV, ADD, ROWS, CHUNK, APART, AHEAD,
                 EARLY),
            ),
            (_load_tiles, (described, ring, at, K, GROUP, HALF, EARLY)),
        ],
        [1],
        [LOADING_REGISTERS],
    )  # fmt: skip
    if not AHEAD:
        read = read_ahead(places, tables, out_ptr, T, N, HALF, KV, ADD)
    SIDE: gl.constexpr = acc.shape[0]
    if SIDE > ROWS:  # only 8 of each 16 rows are the program's
        acc = gl.reshape(acc, [SIDE // 16, 2, 8, TOKENS])
        acc, _ = gl.split(gl.permute(acc, (0, 2, 3, 1)))
        acc = gl.reshape(acc, [ROWS, TOKENS])
    acc = gl.permute(acc, (1, 0))
    if HALF > 0:
        acc = gl.permute(gl.reshape(acc, [TOKENS, HEADS, 2, PAIRS]), (0, 1, 3, 2))
        a, b = gl.split(gl.convert_layout(gl.reshape(acc, [TOKENS, ROWS // 2, 2]), side_by_side))
        finish_pairs(a, b, read, *places, bias_ptr, out_ptr, keys_ptr, values_ptr, T, N, HALF, KV, P)
    else:
        finish_rows(gl.convert_layout(acc, spread), read, *places, bias_ptr, out_ptr, T, N, ADD)


@gluon_jit()
def _load_tiles(
    described, ring, at, K: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Load the tiles of all steps, each as soon as a stage is free, and the first tiles of the weight at once."""
    _words, xs, _scales, _zeros, _ready, free = ring
    STAGES: gl.constexpr = xs.shape[0]
    STEPS: gl.constexpr = (K + xs.shape[2] - 1) // xs.shape[2]
    for stage in gl.static_range(min(STAGES, STEPS)):
        _load_weight(described, ring, stage, stage, at, GROUP, HALF)
    tl.extra.cuda.gdc_wait()
    for stage in gl.static_range(min(STAGES, STEPS)):
        _load_x(described, ring, stage, stage, at)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    stage = 0
    phase = 0
    for step in range(STAGES, STEPS):
        nvidia.mbarrier.wait(free.index(stage), phase)
        _load_weight(described, ring, stage, step, at, GROUP, HALF)
        _load_x(described, ring, stage, step, at)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon_jit()
def _load_weight(described, ring, stage, step, at, GROUP: gl.constexpr, HALF: gl.constexpr):
    """Begin to load the words, scales and zeros of a step to a stage, which is ready when x has arrived there, too."""
    _x_desc, words_desc, scales_desc, zeros_desc = described
    words, xs, scales, zeros, ready, _free = ring
    DEPTH: gl.constexpr = xs.shape[2]
    APART: gl.constexpr = scales.shape[0] // xs.shape[0]
    SIZE: gl.constexpr = words_desc.block_type.nbytes + scales_desc.block_type.nbytes + xs.shape[1] * DEPTH * 2
    if zeros_desc is not None:
        nvidia.mbarrier.expect(ready.index(stage), SIZE + zeros_desc.block_type.nbytes)
    else:
        nvidia.mbarrier.expect(ready.index(stage), SIZE)
    _first_token, head, first_row = at
    block = first_row // 16
    part = step * (DEPTH // 64)
    group = step * DEPTH // GROUP
    load_tile(words_desc, _place(head, block, part, HALF), ready.index(stage), words.index(stage))
    load_tile(scales_desc, _place(head, block, group, HALF), ready.index(stage), scales.index(APART * stage))
    if zeros_desc is not None:
        load_tile(zeros_desc, _place(head, block, group, HALF), ready.index(stage), zeros.index(APART * stage))


@gluon_jit()
def _place(head, block, column, HALF: gl.constexpr):
    """Return the coordinates of a tile whose first block of rows is `block` of `head`."""
    return [head, 0, block, column, 0] if HALF > 0 else [block, column, 0]


@gluon_jit()
def _load_x(described, ring, stage, step, at):
    xs = ring[1]
    parts = reinterpret(xs, xs.dtype, [xs.shape[0]] + described[0].block_type.shape, described[0].layout)
    load_tile(described[0], [step * (xs.shape[2] // 64), at[0], 0], ring[4].index(stage), parts.index(stage))


@gluon_jit()
def _multiply(
    ring, zeros_desc, places, tables, out_ptr, T, N,
    K: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, KV: gl.constexpr, ADD: gl.constexpr,
    ROWS: gl.constexpr, CHUNK: gl.constexpr, APART: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Multiply the tiles as they arrive. Return the product, and if AHEAD the inputs of the epilogue.

    The product is [ROWS, TOKENS], or [2 * ROWS, TOKENS] if only the first 8 of each 16 rows are multiplied.
    """
    words, xs, scales, zeros, ready, free = ring
    STAGES: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    DEPTH: gl.constexpr = xs.shape[2]
    BLOCKS: gl.constexpr = ROWS // 16
    PARTS: gl.constexpr = CHUNK // 64
    CHUNKS: gl.constexpr = DEPTH // CHUNK
    HALVES: gl.constexpr = 2 if GROUP < 64 else 1  # groups of 64 columns, if they have several
    GROUPS: gl.constexpr = scales.shape[len(scales.shape) - 2] // HALVES
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [6, 5, 4, 3, 2, 1, 0])
    WARPS: gl.constexpr = gl.num_warps()
    SPLIT: gl.constexpr = max(WARPS // BLOCKS, 1)  # warps that share a block of 16 rows: 2 have 8 rows each
    SIDE: gl.constexpr = ROWS * SPLIT
    threads: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0]] + [[0, 0, 1, 0, 0, 0, 0]] * (PARTS // 2)
        + [[WARPS, 0, 0, 0, 0, 0, 0]] * (BLOCKS // WARPS - 1),
        [[0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 2, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 2, 0, 0, 0],
         [0, 0, 0, 4, 0, 0, 0]],
        [[0, 1, 0, 0, 0, 0, 0]] * (SPLIT - 1) + [[1, 0, 0, 0, 0, 0, 0]]
        + [[2, 0, 0, 0, 0, 0, 0]] * min(WARPS // SPLIT // 4, 1) + [[4, 0, 0, 0, 0, 0, 0]] * (WARPS // SPLIT // 8), [],
        [BLOCKS, SPLIT, PARTS, 8, 4, 2, 2],
    )  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    words = reinterpret(words, gl.int32, [STAGES, BLOCKS, 1, DEPTH // 64, 8, 4, 2, 2], LINEAR)
    scales = reinterpret(scales, scales.dtype, [STAGES * APART, BLOCKS, GROUPS, HALVES, 2, 8, 1, 1], LINEAR)
    zeros = reinterpret(zeros, zeros.dtype, [STAGES * APART, BLOCKS, GROUPS, HALVES, 2, 8, 1, 1], LINEAR)
    side = 0
    if SPLIT > 1:  # the second warp's rows, 8 to 15 of a block, are in every second nibble
        sides: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, gl.SliceLayout(6, threads))))
        side = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, sides)))
        side = gl.expand_dims(gl.expand_dims(gl.expand_dims(side, 0), 2), 3)
        side = gl.expand_dims(gl.expand_dims(gl.expand_dims(side, 4), 5), 6)
    tl.extra.cuda.gdc_wait()
    read = places
    if AHEAD:
        read = read_ahead(places, tables, out_ptr, T, N, HALF, KV, ADD)
    acc = gl.zeros([SIDE, TOKENS], gl.float32, layout)
    last = gl.zeros([SIDE, CHUNK], xs.dtype, left)
    stage = 0
    phase = 0
    before = STAGES - 1
    for step in range(0, (K + DEPTH - 1) // DEPTH):
        nvidia.mbarrier.wait(ready.index(stage), phase)
        memory = (words.index(stage), scales, zeros, APART * stage)
        packed, factors = _loaded(memory, zeros_desc is not None, CHUNK, SPLIT, threads)
        for chunk in gl.static_range(CHUNKS):
            weight = _dequantized(packed[chunk], factors[chunk], side, zeros_desc is not None, xs.dtype)
            weight = gl.convert_layout(weight, left, assert_trivial=True)
            x = xs.index(stage).slice(chunk * CHUNK, CHUNK, 1)
            acc = nvidia.warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
            # The registers of the previous chunk's weights were read until now, which the compiler has to know.
            acc, _ = nvidia.warpgroup_mma_wait(1, deps=[acc, last])
            last = weight
            if chunk == 0:
                nvidia.mbarrier.arrive(free.index(before), pred=step > 0)  # the previous step has ended
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
    if not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    return nvidia.warpgroup_mma_wait(0, deps=[acc]), read


@gluon_jit()
def _loaded(memory, ZEROS: gl.constexpr, CHUNK: gl.constexpr, SPLIT: gl.constexpr, threads: gl.constexpr):
    """Load the words of a step, and the scales and zeros of each chunk. Return one tensor and one pair per chunk.

    memory: words of the step, scales and zeros of all stages, and the number of the stage among these.
    """
    words, scales, zeros, at = memory
    PARTS: gl.constexpr = CHUNK // 64
    CHUNKS: gl.constexpr = words.shape[2] // PARTS
    GROUPS: gl.constexpr = scales.shape[2]
    CHUNK_GROUPS: gl.constexpr = max(GROUPS // CHUNKS, 1)
    packed = ()
    factors = ()
    for chunk in gl.static_range(CHUNKS):
        packed = packed + (words.slice(chunk * PARTS, PARTS, 2).load(threads),)  # type: ignore[assignment]
        if chunk % (CHUNKS // max(GROUPS // CHUNK_GROUPS, 1)) == 0:
            scale = _factors(scales.index(at).slice(chunk * GROUPS // CHUNKS, CHUNK_GROUPS, 1), threads, SPLIT)
            zero = scale
            if ZEROS:
                zero = _factors(zeros.index(at).slice(chunk * GROUPS // CHUNKS, CHUNK_GROUPS, 1), threads, SPLIT)
        factors = factors + ((scale, zero),)  # type: ignore[assignment]
    return packed, factors


@gluon_jit()
def _factors(memory, threads: gl.constexpr, SPLIT: gl.constexpr):
    """Return the scales or zeros of a thread's rows, one or two times [BLOCKS, SPLIT, groups, 8, 1, HALVES, 1]."""
    found = ()
    for row in gl.static_range(2 // SPLIT):
        rows = memory.slice(row, SPLIT, 3).permute((0, 3, 1, 4, 5, 2, 6))
        found = found + (rows.load(threads),)  # type: ignore[assignment]
    return found


@gluon_jit()
def _dequantized(packed, factors, side, ZEROS: gl.constexpr, dtype: gl.constexpr):
    """Return the weights of words [BLOCKS, 1, PARTS, 8, 4, 2, 2] as [16 * BLOCKS * SPLIT, 64 * PARTS].

    side: 0, or if SPLIT is 2, 0 for the first and 1 for the second of the warps that share a block. Rows 8 to 15 of
    each 16 are then undefined.
    """
    scales, zeros = factors
    LOW: gl.constexpr = scales[0].dtype != dtype
    MASKED: gl.constexpr = dtype == gl.float16
    SPLIT: gl.constexpr = 2 // len(scales)
    if SPLIT > 1:
        packed = packed >> (0 if MASKED else 4) * side
    BLOCKS: gl.constexpr = packed.shape[0]
    PARTS: gl.constexpr = packed.shape[2]
    nothing = packed * 0
    middles = ()
    highs = ()
    lows = ()
    for row in gl.static_range(2 // SPLIT):
        zero = nothing + 8
        if ZEROS:
            zero = zeros[row].to(gl.int32) + nothing
        middles = middles + (_middle(zero, row if SPLIT == 1 else side, dtype),)  # type: ignore[assignment]
        if LOW:
            high, low = _split(scales[row])
            lows = lows + (low + nothing,)  # type: ignore[assignment]
        else:
            high = _twice(scales[row].to(gl.int16, bitcast=True).to(gl.int32) << 16)
        highs = highs + (high + nothing,)  # type: ignore[assignment]
    given = (packed,) + middles + highs + lows
    if SPLIT > 1 and MASKED:
        mask, factor = _masked(side)
        given = given + (mask + nothing, factor + nothing)  # type: ignore[assignment]
    BF: gl.constexpr = (BF16_LOW if LOW else BF16) if SPLIT == 1 else (BF16_LOW_ROW if LOW else BF16_ROW)
    F: gl.constexpr = F16 if SPLIT == 1 else F16_ROW
    text: gl.constexpr = BF if dtype == gl.bfloat16 else F
    TWO: gl.constexpr = REGISTERS_LOW if LOW else REGISTERS
    ONE: gl.constexpr = REGISTERS_MASKED if MASKED else REGISTERS_LOW_ROW if LOW else REGISTERS_ROW
    registers: gl.constexpr = TWO if SPLIT == 1 else ONE
    kinds: gl.constexpr = BF16_PAIRS if dtype == gl.bfloat16 else F16_PAIRS
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(text, registers, given, kinds, True, 2)
    found = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    return gl.reshape(gl.permute(found, (0, 1, 7, 3, 2, 5, 9, 8, 4, 6)), [16 * BLOCKS * SPLIT, 64 * PARTS])


@gluon_jit()
def _middle(zero, odd, dtype: gl.constexpr):
    """Return -(128 + zero) in bf16, twice in a register; in float16 -(1024 + zero), or if odd is 1 instead of 0,
    -(64 + zero)."""
    if dtype == gl.bfloat16:
        middle = zero * 0x10001 - 1023360256
    else:
        middle = zero * (0x10001 + 0xF000F * odd) - 469703680 - 268439552 * odd
    return middle


@gluon_jit()
def _masked(side):
    """Return what F16_ROW takes for a warp: the mask of its nibbles, and 1 or 1/16, both twice in a register."""
    return 0xF000F + 0xE100E1 * side, 0x3C003C00 - 0x10001000 * side


@gluon_jit()
def _split(scale):
    """Return the high part of a scale in float16, which is its first 8 significant bits, and the rest, both in bf16 and
    twice in a register."""
    scale = scale.to(gl.float32)
    high = scale.to(gl.int32, bitcast=True) & -65536
    low = scale - high.to(gl.float32, bitcast=True)
    return _twice(high), _twice(low.to(gl.int32, bitcast=True))


@gluon_jit()
def _twice(x):
    """Return registers with two copies of their high halves."""
    return (x & -65536) | ((x >> 16) & 0xFFFF)


def launch(
    tile: Tile, x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, half: int, heads: int, tiles: int,
    others: tuple[Tensor | None, ...], sizes: tuple[int, ...], chip: Chip,
) -> None:  # fmt: skip
    """Multiply x [T, K] by a weight in the prepared form. The caller has checked the arguments.

    half, heads, tiles, others, sizes: see fastgen.kernels.triton.batch_invariant.Epilogue.
    """
    (tokens, inputs), outputs = x.shape, len(words)
    group, token_tiles = inputs // scales.shape[1], -(-tokens // tile.tokens)

    def blocks(tensor: Tensor, columns: int, width: int) -> Any:
        """Return the descriptor that loads tiles of `columns` parts of blocks, which have a size of `width`."""
        if half:
            view, block = (
                tensor.view(-1, 2, half // 16, tensor[0].numel() * 16 // width, width),
                [heads, 2, tile.rows // 32 // heads],
            )
        else:
            view, block = tensor.view(outputs // 16, -1, width), [tile.rows // 16]
        return _described(view, [*block, columns, width])

    assert tile.depth > tile.chunk  # or registers of two chunks in flight would be the same
    assert tile.rows >= 8 * tile.warps
    groups, x_parts = tile.groups(group), x.view(tokens, -1, 64).transpose(0, 1)
    early = tile.tokens <= max(FEW)
    ahead = tile.tokens * tile.rows <= (AHEAD_ROPE if others[2] is not None else AHEAD) * 32 * tile.warps
    _product_kernel[(token_tiles * tiles,)](
        described(x_parts, [tile.depth // 64, tile.tokens, 64]), blocks(words, tile.depth // COLUMNS, 128),
        blocks(scales, groups, 16), None if zeros is None else blocks(zeros, groups, 16), *others, tokens, outputs,
        inputs, group, *sizes, tile.tokens, tile.rows, heads, tile.depth, tile.chunk,
        tile.stages(chip, group), tile.apart(group), ahead, early,
        num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip


def _described(blocks: Tensor, block: list[int]) -> Any:
    """Return the TMA descriptor that loads tiles of shape `block` in the order that they have in memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(0, 8 * blocks.element_size(), len(block))
    return TensorDescriptor(blocks, [*blocks.shape], [*blocks.stride()], block, layout)
