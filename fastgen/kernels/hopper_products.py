"""Batch-invariant products of few tokens on Hopper, in Gluon; the same to the bit as batch_invariant's in Triton.

One warp of a program has the tiles loaded (by TMA) that four others multiply. Between the kernels of a decode step
memory would have nothing to do for 3 us each. No kernel of a step writes weights, and what did has ended when a step's
first product begins, since torch's embedding, which is launched in the ordinary way, waits for all that came before: so
a weight's first tiles are on their way before the kernel ahead has ended (programmatic dependent launch), and those of
x follow when it has. Triton's own pipeline loads both alike, and can only be told to wait before the first of them.

Narrow products have a program a tile, at most as many as there are processors, each with all of a processor's memory.
With long rows fewer, larger tiles are faster: the next kernel's programs begin where a processor is free.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastgen.kernels.epilogue import finish_pairs, finish_rows, read_pairs, read_rows
from fastgen.kernels.gluon import HALVES, gl, gluon_jit, load_tile, nvidia, side_of
from fastgen.kernels.launch import GLUON, Chip, tl

SIDE = 64  # rows of the instruction's left side, at least
PIECE = 64  # numbers of K in a row of shared memory
WIDE = {8: (128, 128), 16: (128, 128), 32: (128, 64), 64: (64, 128)}
"""Padded tokens -> rows and depth of a tile, of weights that have one for each processor or more."""

NARROW = {8: 256, 16: 256, 32: 128, 64: 128}
"""Padded tokens -> depth, of weights that have no more tiles of SIDE rows than there are processors."""

BETWEEN, HALVED = 128, 256  # depth of other weights, and of tiles with half of SIDE's rows
SPARE = 1.5  # of the shared memory: what a halved tile, of all of K, may take
WARPS, REGISTERS, LOADING_REGISTERS = 4, 128, 40  # registers: two programs fit on a processor; of the warp that loads


def runs_on(chip: Chip, dtype: torch.dtype) -> bool:
    return GLUON and chip.capability == (9, 0) and dtype.itemsize == 2


def cut(tokens: int, outputs: int, inputs: int, chip: Chip) -> tuple[int, int, int, int, int]:
    """How a product of up to 64 tokens is cut up: a tile's tokens, rows and depth, its warps, and stages.

    Where the weight has so few rows that half of the processors would do, and half a tile's rows nearly fit into shared
    memory, tiles are halved: all of it is then on its way before the kernel ahead has ended. (The instruction's other
    rows are whatever is there.) Of longer rows that was slower, as x is read by twice as many programs.
    """
    padded = next(each for each in WIDE if tokens <= each)
    rows, depth = WIDE[padded]
    wide = outputs >= rows * chip.processors
    if not wide:
        tiles, half_bytes = -(-outputs // SIDE), SIDE // 2 * inputs * 2
        rows, depth = SIDE, NARROW[padded] if tiles <= chip.processors else BETWEEN
        if HALVES and 2 * tiles <= chip.processors and padded < 64 and half_bytes <= SPARE * chip.shared_memory:
            rows, depth = SIDE // 2, HALVED
    programs = 1 if -(-outputs // rows) <= chip.processors else 2
    room = chip.shared_memory // programs - 3072 - max(SIDE - rows, 0) * PIECE * 2
    return padded, rows, depth, WARPS, min(room // ((padded + rows) * depth * 2), 12)


@gluon_jit("T")
def _product_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, T, N,
    K: gl.constexpr, HALF: gl.constexpr, KV: gl.constexpr, P: gl.constexpr, ADD: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    SIDE: gl.constexpr, PIECES: gl.constexpr, EARLY: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """A program a tile of the weight's rows, and all tokens. What the letters are: see fastgen.kernels.batch_invariant.

    SIDE: rows that are multiplied, of which those from ROWS on are not the program's; PIECES: in which a stage's weight
    is loaded; EARLY: the next kernel's programs may begin when this one's have, and the kernel ahead has ended."""
    PAIRS: gl.constexpr = ROWS // 2 // HEADS
    head = 0
    first_row = gl.program_id(0) * ROWS
    if HALF > 0:
        TILES: gl.constexpr = (HALF + PAIRS - 1) // PAIRS  # of a head
        head = gl.program_id(0) // TILES * HEADS
        first_row = gl.program_id(0) % TILES * PAIRS
    slots: gl.constexpr = [STAGES * PIECES + (SIDE - ROWS) // ROWS]  # of which the last ones' other rows are
    weights = gl.allocate_shared_memory(weight_desc.dtype, slots + weight_desc.block_type.shape, weight_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, DEPTH], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], nvidia.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], nvidia.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        nvidia.mbarrier.init(ready.index(stage), count=1)
        nvidia.mbarrier.init(free.index(stage), count=1)
    side_by_side: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    blocked: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    spread: gl.constexpr = gl.SliceLayout(2, side_by_side) if HALF > 0 else blocked  # of what is stored
    token = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, spread)), 1)
    if HALF > 0:
        number = gl.arange(0, SIDE // 2, gl.SliceLayout(0, spread))
        places = (token, head + number // PAIRS, gl.where(number < ROWS // 2, first_row + number % PAIRS, HALF))
    else:
        number = gl.arange(0, SIDE, gl.SliceLayout(0, spread))
        places = (token, gl.where(number < ROWS, first_row + number, N))  # type: ignore[assignment]
    ring = (weights, xs, ready, free)
    tables = (bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr)
    STEPS: gl.constexpr = (K + DEPTH - 1) // DEPTH
    acc, read = gl.warp_specialize(
        [
            (_multiply, (ring, places, tables, out_ptr, T, N, STEPS, HALF, KV, ADD, SIDE, PIECES, EARLY)),
            (_load_tiles, (x_desc, weight_desc, ring, head, first_row, STEPS, HALF, ROWS, PIECES, EARLY)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip
    acc = gl.permute(acc, (1, 0))
    if HALF > 0:
        acc = gl.permute(gl.reshape(acc, [TOKENS, SIDE // 2 // PAIRS, 2, PAIRS]), (0, 1, 3, 2))
        a, b = gl.split(gl.convert_layout(gl.reshape(acc, [TOKENS, SIDE // 2, 2]), side_by_side))
        finish_pairs(a, b, read, *places, bias_ptr, out_ptr, keys_ptr, values_ptr, T, N, HALF, KV, P)
    else:
        finish_rows(gl.convert_layout(acc, spread), read, *places, bias_ptr, out_ptr, T, N, ADD)


@gluon_jit()
def _load_tiles(
    x_desc, weight_desc, ring, head, first_row,
    STEPS: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Have the tiles of all steps loaded, each when a stage is free: the first weights at once."""
    _weights, xs, _ready, free = ring
    STAGES: gl.constexpr = xs.shape[0]
    for stage in gl.static_range(min(STAGES, STEPS)):
        _load_weight(weight_desc, ring, stage, stage, head, first_row, HALF, ROWS, PIECES)
    tl.extra.cuda.gdc_wait()
    for stage in gl.static_range(min(STAGES, STEPS)):
        _load_x(x_desc, ring, stage, stage)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    stage = 0
    phase = 0
    for step in range(STAGES, STEPS):
        nvidia.mbarrier.wait(free.index(stage), phase)
        _load_weight(weight_desc, ring, stage, step, head, first_row, HALF, ROWS, PIECES)
        _load_x(x_desc, ring, stage, step)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)


@gluon_jit()
def _load_weight(
    weight_desc, ring, stage, step, head, first_row, HALF: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Begin to load the weight of a step into a stage, which is ready when its x is there too."""
    weights, xs, ready, _free = ring
    DEPTH: gl.constexpr = xs.shape[2]
    nvidia.mbarrier.expect(ready.index(stage), 2 * (ROWS + xs.shape[1]) * DEPTH)
    for piece in gl.static_range(PIECES):
        column = step * DEPTH + piece * (DEPTH // PIECES)
        at = [head, 0, first_row, column] if HALF > 0 else [first_row, column]
        to = weights.index(stage * PIECES + piece)
        load_tile(weight_desc, at, ready.index(stage), to)


@gluon_jit()
def _load_x(x_desc, ring, stage, step):
    _weights, xs, ready, _free = ring
    load_tile(x_desc, [0, step * xs.shape[2]], ready.index(stage), xs.index(stage))


@gluon_jit()
def _multiply(
    ring, places, tables, out_ptr, T, N,
    STEPS: gl.constexpr, HALF: gl.constexpr, KV: gl.constexpr, ADD: gl.constexpr, SIDE: gl.constexpr,
    PIECES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The product [SIDE, TOKENS], of the tiles as they come; and what is read for its end, meanwhile."""
    weights, xs, ready, free = ring
    bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr = tables
    STAGES: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    LONG: gl.constexpr = xs.shape[2] // PIECES
    tl.extra.cuda.gdc_wait()
    if HALF > 0:
        read = read_pairs(*places, bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, T, N, HALF, KV)
    else:
        read = read_rows(*places, bias_ptr, out_ptr, T, N, ADD)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    acc = gl.zeros([SIDE, TOKENS], gl.float32, layout)
    stage = 0
    phase = 0
    before = STAGES - 1
    for step in range(0, STEPS):
        nvidia.mbarrier.wait(ready.index(stage), phase)
        for piece in gl.static_range(PIECES):
            weight = side_of(weights, stage, piece, STAGES, PIECES, SIDE, LONG)
            x = xs.index(stage).slice(piece * LONG, LONG, 1)
            acc = nvidia.warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
            acc = nvidia.warpgroup_mma_wait(PIECES, deps=[acc])
        nvidia.mbarrier.arrive(free.index(before), pred=step > 0)  # the step before this is done
        before = stage
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    if not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    return nvidia.warpgroup_mma_wait(0, deps=[acc]), read


def launch(
    x: Tensor, x_block: list[int], weight: Tensor, block: list[int], tiles: int, stages: int, warps: int,
    others: tuple[Tensor | None, ...], sizes: tuple[int, ...], chip: Chip,
) -> None:  # fmt: skip
    """x: [T, K], of no more tokens than its tile has, which is [tokens, depth]; weight: tiles of it are [rows, depth],
    or [heads, 2, rows of a half, depth]; others, sizes: the kernel's arguments from bias_ptr to values_ptr, and from N
    to ADD."""
    assert len(x) <= x_block[0]
    assert stages > 1
    rows, heads = math.prod(block[:-1]), block[0] if len(block) > 2 else 1
    pieces = 1 if rows >= SIDE else block[-1] // PIECE
    # Where a quarter of the processors or more have no tile, the next kernel's first programs do not crowd there.
    early = 4 * tiles <= 3 * chip.processors
    _product_kernel[(tiles,)](
        described(x, x_block), described(weight, [*block[:-1], block[-1] // pieces]), *others, len(x), *sizes,
        x_block[0], rows, heads, x_block[1], stages, max(rows, SIDE), pieces, early, LOADING_REGISTERS,
        num_warps=warps, maxnreg=REGISTERS, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip


def described(tensor: Tensor, block: list[int]) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], block, _layout(*block, dtype=tensor.dtype))


@lru_cache(maxsize=256)
def _layout(*block: int, dtype: torch.dtype) -> Any:
    """Of a tile in shared memory; it takes longer to find than a small kernel to run."""
    return gl.NVMMASharedLayout.get_default_for([*block], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
