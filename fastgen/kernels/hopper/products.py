"""Products of up to 256 tokens on Hopper, in Gluon, with the same bits as the kernels for many tokens: those of
fastgen.kernels.triton.batch_invariant, and of fastgen.kernels.hopper.fp8.

One warp of a program loads the tiles (by TMA) that four other warps multiply. Otherwise memory would be idle for 3 us
between each two kernels of a decode step. Therefore the first tiles of a weight load before the previous kernel has
ended (programmatic dependent launch), and the tiles of x load afterwards. This is safe because no kernel of a step
writes weights, and earlier writes have ended when a step's first product begins: the embedding waits for all of them
(see fastgen.kernels.triton.embedding). The next kernel may start before this one has waited (EARLY = 2); each kernel
ends after the one ahead of it, so waiting for one is waiting for all. Triton's pipeline cannot treat the two sides
differently: it can only wait before loading either.

Narrow products have one program per tile, at most one per processor, and each can use all of the processor's shared
memory. So have wide products of up to 32 tokens, if one tile per processor suffices. For long rows, fewer and larger
tiles are faster, because the programs of the next kernel start on the processors that are free.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.batch_invariant import FEW_IN_GLUON
from fastgen.kernels.hopper.gluon import (
    ANY_BOXES,
    EVICTS,
    HALVES,
    ONCE,
    gl,
    gluon_jit,
    load_tile,
    next_stage,
    nvidia,
    side_of,
)
from fastgen.kernels.triton.epilogue import finish_pairs, finish_rows, read_pairs, read_rows
from fastgen.kernels.triton.jit import constant, tl

SIDE = 64  # minimum number of rows of the instruction's left side
PIECE = 128  # bytes of a row of shared memory
CHUNK = constant(128)
"""Number of fp8 inputs that the tensor cores sum before a float32 addition; also rows and inputs per block with one
scale."""

WIDE = {8: (128, 128), 16: (128, 128), 32: (128, 64), 64: (64, 128)}
"""Padded tokens -> rows and depth of a tile of 2-byte numbers, for weights with at least one such tile per processor,
unless they have one larger tile per processor (see ONE_EACH). The depth of fp8 tiles, here and below, is twice as
large."""

NARROW = {8: 256, 16: 256, 32: 128, 64: 128}
"""Padded tokens -> depth, for weights with at most one tile of SIDE rows per processor."""

LONG = 8192  # inputs from which on fp8 tiles for 32 tokens are as deep as tiles for 16 tokens
BETWEEN, HALVED = 128, 256  # depth for other weights, and for tiles with SIDE / 2 rows
STEP, ONE_EACH = 32, 128
"""For up to 32 tokens, a weight with at least one WIDE tile per processor, which is not that of q, k and v, has one
tile per processor, if this tile has fewer than twice the rows of WIDE: a multiple of STEP. Its depth is ONE_EACH."""

TILES = ((32, 64), (64, 64), (64, 128), (128, 64), (128, 128))
"""Choices of tokens and rows of a tile for more tokens than WIDE has. A tile of x loads for each tile of the weight."""

MAX_TOKENS = 256  # tokens up to which some products are faster here than in the kernels for many tokens
ALL = {1: 64, 2: FEW_IN_GLUON}  # ... and up to which all are, by bytes per input
AT_ONCE = {1: 2, 2: 1}  # maximum number of programs per processor for more than ALL tokens, by bytes per input
ROPE = 32  # tokens up to which rope inside a product is faster than a kernel of its own
EVEN = 0.95  # number of programs, in units of two per processor, from which all processors have about equal work
SPARE = 1.5  # maximum bytes of weight per halved tile, in units of the shared memory
WARPS, REGISTERS = 4, 128  # registers per thread at the start, for two programs per processor
LOADING_REGISTERS = constant(40)  # registers per thread of the loading warp's group; the others get the rest
AHEAD, AHEAD_ROPE = 64, 32  # sums per thread up to which the epilogue's inputs load before the product
LEAST = 3  # the larger depth is taken if more stages than this fit


def takes(tokens: int, outputs: int, item_size: int, chip: Chip) -> bool:
    """Return whether a product of `tokens` tokens is faster here than in the kernels for many tokens, which are in
    Triton or, for fp8, in fastgen.kernels.hopper.fp8.

    It is for up to ALL tokens, and for up to MAX_TOKENS if all tiles run at the same time, AT_ONCE per processor.
    item_size: bytes per input.
    """
    if tokens <= ALL[item_size]:
        return True
    tile, rows = _shape(tokens, outputs, item_size, chip)
    programs = -(-tokens // tile) * -(-outputs // rows)
    return tokens <= MAX_TOKENS and programs <= AT_ONCE[item_size] * chip.processors


def _shape(tokens: int, outputs: int, item_size: int, chip: Chip) -> tuple[int, int]:
    """Return the tokens and rows of a tile that take the busiest processor the least time, for more tokens than WIDE
    has.

    In a cycle, a processor loads 64 bytes, and its tensor cores multiply 2048 pairs of numbers. Therefore a tile's
    multiplications take tokens * rows / 128 cycles per 16 inputs, and its loads (tokens + rows) / 2 cycles.
    """
    if item_size == 1:  # larger tiles were no faster, since a chunk's sums take as many registers as the tile's
        return SIDE, SIDE

    def cost(shape: tuple[int, int]) -> tuple[int, int]:
        tile, rows = shape
        programs = -(-tokens // tile) * -(-outputs // rows)
        return -(-programs // chip.processors) * max(tile * rows, 64 * (tile + rows)), programs

    return min(TILES, key=cost)


def tile_of(tokens: int, outputs: int, inputs: int, item_size: int, chip: Chip) -> tuple[int, int, int, int, int]:
    """Return the tokens, rows and depth of a tile, the warps and the stages, for a product of up to MAX_TOKENS tokens.

    item_size: bytes per input, 1 or 2.

    Processors have uneven work if there are more programs than processors, but not nearly twice as many: of 224 tiles
    of 128 rows, 92 of 132 processors compute two. With 224 rows there are 128 tiles.

    Tiles are halved if the weight would otherwise occupy at most half of the processors, and the weight of half a
    tile's rows nearly fits into shared memory: the whole weight then loads before the previous kernel has ended. (The
    other rows of the instruction are undefined.) With longer rows this was slower, because twice as many programs read
    x. Tiles are halved anyway if the weight would occupy at most a quarter of the processors, which cannot use the full
    memory bandwidth. In fp8 the weight of a whole tile nearly fits.
    """
    if tokens > max(WIDE):
        tile, rows = _shape(tokens, outputs, item_size, chip)
        programs = -(-tokens // tile) * -(-outputs // rows)
        room = chip.shared_memory // (1 if programs <= chip.processors else 2) - 3072
        depth = next((each for each in (128, 64) if room // ((tile + rows) * each * 2) > LEAST), 64)
        return tile, rows, depth * 2 // item_size, WARPS, min(room // ((tile + rows) * depth * 2), 12)
    padded = next(each for each in WIDE if tokens <= each)
    rows, depth = WIDE[padded]
    wide = outputs >= rows * chip.processors
    one_each = -(-outputs // (chip.processors * STEP)) * STEP
    heads = outputs <= 3 * inputs  # maybe q, k and v, whose tiles are whole heads or equal parts of one
    if wide and not heads and ANY_BOXES and padded < 64 and one_each < 2 * rows:
        # In fp8 there are no registers for the sums of more than one CHUNK of 32 tokens.
        rows, depth = one_each, ONE_EACH // 2 if item_size == 1 and padded == 32 else ONE_EACH
    if not wide:
        tiles, half_bytes = -(-outputs // SIDE), SIDE // 2 * inputs * item_size
        long = item_size == 1 and inputs >= LONG
        rows, depth = SIDE, NARROW[max(padded // 2, 8) if long else padded] if tiles <= chip.processors else BETWEEN
        early = item_size == 2 and half_bytes <= SPARE * chip.shared_memory
        if HALVES and padded < 64 and (4 * tiles <= chip.processors or (early and 2 * tiles <= chip.processors)):
            rows, depth = SIDE // 2, HALVED
    programs = 1 if -(-outputs // rows) <= chip.processors else 2
    room = chip.shared_memory // programs - 3072 - (_side(rows) - rows) * PIECE
    return padded, rows, depth * 2 // item_size, WARPS, min(room // ((padded + rows) * depth * 2), 12)


def _side(rows: int) -> int:
    """Return the number of rows that are multiplied for a tile of some rows."""
    return max(power_of_two(rows), SIDE)


@gluon_jit("T")
def _product_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr,
    x_scales_ptr, scales_ptr, T, N,
    K: gl.constexpr, HALF: gl.constexpr, KV: gl.constexpr, P: gl.constexpr, ADD: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    SIDE: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr, CUT: gl.constexpr, AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Compute the product of one tile of the weight's rows with one tile of tokens per program.

    Shape letters: see fastgen.kernels.batch_invariant. x_scales_ptr, scales_ptr: scales of fp8 inputs, else None.
    BLOCKS: whether the weight has a scale per block instead of one per row. SIDE: number of rows that are multiplied,
    of which only the first ROWS belong to the program. PIECES, BOXES: numbers of parts in which a stage's weight loads,
    of its columns and of its rows. CUT: whether there may be several tiles of tokens; programs with the same tile of
    the weight are then neighbours. AHEAD: whether the epilogue's inputs load before the sums. EARLY: when the next
    kernel may start: after the sums (0), as soon as this one has started and the previous one has ended (1), or as soon
    as this one has started (2).
    """
    PAIRS: gl.constexpr = ROWS // BOXES // 2 // HEADS
    first_token, head, first_row = origin(T, HALF, TOKENS, ROWS, HEADS, CUT)
    MORE: gl.constexpr = (SIDE - ROWS) * BOXES // ROWS  # room after the last tile for its other rows
    slots: gl.constexpr = [STAGES * PIECES * BOXES + MORE]
    weights = gl.allocate_shared_memory(weight_desc.dtype, slots + weight_desc.block_type.shape, weight_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, DEPTH], x_desc.layout)
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
        number = gl.arange(0, SIDE // 2, gl.SliceLayout(0, spread))
        SPAN: gl.constexpr = BOXES * PAIRS  # pairs of a head in the tile
        places = (token, head + number // SPAN, gl.where(number < ROWS // 2, first_row + number % SPAN, HALF))
    else:
        number = gl.arange(0, SIDE, gl.SliceLayout(0, spread))
        places = (token, gl.where(number < ROWS, first_row + number, N))  # type: ignore[assignment]
    ring = (weights, xs, ready, free)
    tables = (bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr)
    STEPS: gl.constexpr = (K + DEPTH - 1) // DEPTH
    scales = (x_scales_ptr, scales_ptr)
    tile = (first_token, head, first_row)  # no constants, which Triton 3.9 cannot pass in a tuple
    acc, read = gl.warp_specialize(
        [
            (
                _multiply,
                (ring, places, tables, out_ptr, scales, tile, T, N, K, HALF, KV, ADD, BLOCKS, SIDE, ROWS, PAIRS,
                 PIECES, BOXES, AHEAD, EARLY),
            ),
            (_load_tiles, (
                x_desc, weight_desc, ring, first_token, head, first_row, STEPS, HALF, ROWS, PIECES, BOXES, CUT, EARLY,
            )),
        ],
        [1],
        [LOADING_REGISTERS],
    )  # fmt: skip
    if not AHEAD:
        read = read_ahead(places, tables, out_ptr, T, N, HALF, KV, ADD)
    acc = gl.permute(acc, (1, 0))
    if HALF > 0:
        acc = gl.permute(gl.reshape(acc, [TOKENS, SIDE // 2 // PAIRS, 2, PAIRS]), (0, 1, 3, 2))
        a, b = gl.split(gl.convert_layout(gl.reshape(acc, [TOKENS, SIDE // 2, 2]), side_by_side))
        finish_pairs(a, b, read, *places, bias_ptr, out_ptr, keys_ptr, values_ptr, T, N, HALF, KV, P)
    else:
        finish_rows(gl.convert_layout(acc, spread), read, *places, bias_ptr, out_ptr, T, N, ADD)


@gluon_jit()
def origin(
    T, HALF: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Return the first token, head and row of the program's tile."""
    tile = gl.program_id(0)
    first_token = tile * 0
    if CUT:
        token_tiles = gl.cdiv(T, TOKENS)
        first_token = tile % token_tiles * TOKENS
        tile = tile // token_tiles
    head = tile * 0
    first_row = tile * ROWS
    if HALF > 0:
        PAIRS: gl.constexpr = ROWS // 2 // HEADS
        TILES: gl.constexpr = (HALF + PAIRS - 1) // PAIRS  # tiles of a head
        head = tile // TILES * HEADS
        first_row = tile % TILES * PAIRS
    return first_token, head, first_row


@gluon_jit()
def _load_tiles(
    x_desc, weight_desc, ring, first_token, head, first_row,
    STEPS: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr,
    CUT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Load the tiles of all steps, each as soon as a stage is free, and the first tiles of the weight at once."""
    _weights, xs, _ready, free = ring
    STAGES: gl.constexpr = xs.shape[0]
    for stage in gl.static_range(min(STAGES, STEPS)):
        _load_weight(weight_desc, ring, stage, stage, head, first_row, HALF, ROWS, PIECES, BOXES, CUT)
    if EARLY == 2:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    for stage in gl.static_range(min(STAGES, STEPS)):
        _load_x(x_desc, ring, stage, stage, first_token)
    if EARLY == 1:
        tl.extra.cuda.gdc_launch_dependents()
    stage = 0
    phase = 0
    for step in range(STAGES, STEPS):
        nvidia.mbarrier.wait(free.index(stage), phase)
        _load_weight(weight_desc, ring, stage, step, head, first_row, HALF, ROWS, PIECES, BOXES, CUT)
        _load_x(x_desc, ring, stage, step, first_token)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon_jit()
def _load_weight(
    weight_desc, ring, stage, step, head, first_row, HALF: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr,
    BOXES: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Begin to load the weight of a step to a stage, which is ready when x has arrived there, too."""
    weights, xs, ready, _free = ring
    DEPTH: gl.constexpr = xs.shape[2]
    nvidia.mbarrier.expect(ready.index(stage), (ROWS + xs.shape[1]) * DEPTH * xs.dtype.primitive_bitwidth // 8)
    for piece in gl.static_range(PIECES):
        column = step * DEPTH + piece * (DEPTH // PIECES)
        for box in gl.static_range(BOXES):
            row = first_row + box * (ROWS // BOXES // (2 if HALF > 0 else 1))
            at = [head, 0, row, column] if HALF > 0 else [row, column]
            to = weights.index((stage * PIECES + piece) * BOXES + box)
            # Steps of up to 64 tokens are shorter with the hint. At 128, `down` was slower; fp8 was not measured.
            if EVICTS and not CUT and xs.shape[1] <= 64 and weights.dtype.primitive_bitwidth == 16:
                load_tile(weight_desc, at, ready.index(stage), to, cache_policy=ONCE)
            else:
                load_tile(weight_desc, at, ready.index(stage), to)


@gluon_jit()
def _load_x(x_desc, ring, stage, step, first_token):
    _weights, xs, ready, _free = ring
    load_tile(x_desc, [first_token, step * xs.shape[2]], ready.index(stage), xs.index(stage))


@gluon_jit()
def read_ahead(places, tables, out_ptr, T, N, HALF: gl.constexpr, KV: gl.constexpr, ADD: gl.constexpr):
    """Load the inputs of the epilogue."""
    bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr = tables
    if HALF > 0:
        read = read_pairs(*places, bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, T, N, HALF, KV)
    else:
        read = read_rows(*places, bias_ptr, out_ptr, T, N, ADD)
    return read


@gluon_jit()
def _multiply(
    ring, places, tables, out_ptr, scales, tile, T, N,
    K: gl.constexpr, HALF: gl.constexpr, KV: gl.constexpr, ADD: gl.constexpr, BLOCKS: gl.constexpr,
    SIDE: gl.constexpr, ROWS: gl.constexpr, PAIRS: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr,
    AHEAD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Multiply the tiles as they arrive. Return the product [SIDE, TOKENS], and if AHEAD the inputs of the epilogue."""
    tl.extra.cuda.gdc_wait()
    read = places
    if AHEAD:
        read = read_ahead(places, tables, out_ptr, T, N, HALF, KV, ADD)
    if scales[0] is None:
        acc = _sum(ring, K, SIDE, PIECES, BOXES)
    else:
        acc = _sum_chunks(ring, tile, scales, T, N, K, HALF, BLOCKS, SIDE, ROWS, PAIRS, PIECES, BOXES)
    if EARLY == 0:
        tl.extra.cuda.gdc_launch_dependents()
    return nvidia.warpgroup_mma_wait(0, deps=[acc]), read


@gluon_jit()
def _sum(ring, K: gl.constexpr, SIDE: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr):
    """Return the sums [SIDE, TOKENS] for 2-byte inputs. The caller has to wait for the last products."""
    weights, xs, ready, free = ring
    STAGES: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    LONG: gl.constexpr = xs.shape[2] // PIECES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    acc = gl.zeros([SIDE, TOKENS], gl.float32, layout)
    stage = 0
    phase = 0
    before = STAGES - 1
    for step in range(0, (K + xs.shape[2] - 1) // xs.shape[2]):
        nvidia.mbarrier.wait(ready.index(stage), phase)
        for piece in gl.static_range(PIECES):
            weight = side_of(weights, stage, piece, STAGES, PIECES, SIDE, LONG, BOXES)
            x = xs.index(stage).slice(piece * LONG, LONG, 1)
            acc = nvidia.warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
            acc = nvidia.warpgroup_mma_wait(PIECES, deps=[acc])
        nvidia.mbarrier.arrive(free.index(before), pred=step > 0)  # the previous step has ended
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
    return acc


@gluon_jit()
def _sum_chunks(
    ring, tile, scales, T, N,
    K: gl.constexpr, HALF: gl.constexpr, BLOCKS: gl.constexpr, SIDE: gl.constexpr, ROWS: gl.constexpr,
    PAIRS: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Return the sums [SIDE, TOKENS] for fp8 inputs, times their scales.

    The tensor cores, whose accumulators have few bits, sum each CHUNK of inputs from zero. These sums are added in
    float32.
    """
    weights, xs, ready, free = ring
    first_token, head, first_row = tile
    x_scales_ptr, scales_ptr = scales
    STAGES: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    LONG: gl.constexpr = xs.shape[2] // PIECES
    CHUNKS: gl.constexpr = xs.shape[2] // CHUNK
    COLUMNS: gl.constexpr = (K + CHUNK - 1) // CHUNK  # columns of blocks
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 32])
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    number = gl.arange(0, SIDE, gl.SliceLayout(1, layout))
    row = first_row + number
    if HALF > 0:
        row = head * 2 * HALF + number // PAIRS % 2 * HALF + first_row + number % PAIRS
        row += number // (2 * PAIRS) * (PAIRS if BOXES > 1 else 2 * HALF)
    here = (number < ROWS) & (row < N)
    x_scale = gl.load(x_scales_ptr + token, mask=token < T, other=0.0)
    if not BLOCKS:
        scale = gl.load(scales_ptr + row, mask=here, other=0.0)
    acc = gl.zeros([SIDE, TOKENS], gl.float32, layout)
    nothing = gl.zeros([SIDE, TOKENS], gl.float32, layout)
    stage = 0
    phase = 0
    for step in range(0, (COLUMNS + CHUNKS - 1) // CHUNKS):
        factors = ()
        for chunk in gl.static_range(CHUNKS if BLOCKS else 0):
            column = step * CHUNKS + chunk
            factor = gl.load(scales_ptr + row // CHUNK * COLUMNS + column, mask=here & (column < COLUMNS), other=0.0)
            factors = factors + (factor,)  # type: ignore[assignment]
        nvidia.mbarrier.wait(ready.index(stage), phase)
        parts = ()
        for chunk in gl.static_range(CHUNKS):
            if PIECES == 1:
                weight = side_of(weights, stage, 0, STAGES, PIECES, SIDE, LONG, BOXES)
                weight = weight.slice(chunk * CHUNK, CHUNK, 1)
            else:
                weight = side_of(weights, stage, chunk, STAGES, PIECES, SIDE, LONG, BOXES)
            x = xs.index(stage).slice(chunk * CHUNK, CHUNK, 1)
            part = nvidia.warpgroup_mma(weight, x.permute((1, 0)), nothing, use_acc=False, is_async=True)
            parts = parts + (part,)  # type: ignore[assignment]
        for chunk in gl.static_range(CHUNKS):
            part = nvidia.warpgroup_mma_wait(CHUNKS - 1 - chunk, deps=[parts[chunk]])
            acc = gl.fma(part, gl.expand_dims(factors[chunk], 1), acc) if BLOCKS else acc + part
        nvidia.mbarrier.arrive(free.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    acc *= gl.expand_dims(x_scale, 0)
    if not BLOCKS:
        acc *= gl.expand_dims(scale, 1)
    return acc


def launch(
    x: Tensor, x_block: list[int], weight: Tensor, block: list[int], tiles: int, token_tiles: int, stages: int,
    warps: int, others: tuple[Tensor | None, ...], sizes: tuple[int, ...], chip: Chip,
) -> None:  # fmt: skip
    """Multiply x [T, K] by a weight, whose dtype has 1 or 2 bytes. The caller has checked the arguments.

    x_block: [tokens, depth] of a tile of x. block: [rows, depth] of a tile of the weight, or [heads, 2, rows of a half,
    depth]. tiles, token_tiles: number of tiles of the weight, and maximum number of tiles of tokens. others, sizes: the
    kernel's arguments from bias_ptr to scales_ptr, and from N to BLOCKS.
    """
    assert stages > 1
    rows, heads = math.prod(block[:-1]), block[0] if len(block) > 2 else 1
    side, (tile, depth) = _side(rows), x_block
    boxes = rows // (rows & -rows)  # since the rows of a box are a power of two
    pieces = 1 if rows >= SIDE and boxes == 1 else depth * x.element_size() // PIECE
    block = [*block[:-2], block[-2] // boxes, depth // pieces]
    assert len(x) <= token_tiles * tile
    # If at least a quarter of the processors are free, the next kernel's first programs do not crowd on a few; nor do
    # they if all processors have two programs, which end at about the same time (measured on an H200). With several
    # tiles of tokens, one program per processor is enough: on an H200, Llama 1B's step with 128 lanes is 2.5 % shorter.
    # If the whole weight of halved tiles nearly fits into shared memory, memory has little to do until this kernel has
    # ended. Therefore the next kernels start at once, and load their weights.
    programs = token_tiles * tiles
    even = 2 * EVEN * chip.processors <= programs <= 2 * chip.processors
    early = even or 4 * programs <= 3 * chip.processors or (token_tiles > 1 and programs <= chip.processors)
    at_once = rows < SIDE and rows * sizes[1] * weight.element_size() <= SPARE * chip.shared_memory
    start = 2 if at_once else int(early)
    ahead = tile * side <= (AHEAD_ROPE if others[2] is not None else AHEAD) * 32 * warps
    _product_kernel[(-(-len(x) // tile) * tiles,)](
        described(x, x_block), described(weight, block), *others, len(x), *sizes,
        tile, rows, heads, depth, stages, side, pieces, boxes, token_tiles > 1, ahead, start,
        num_warps=warps, maxnreg=REGISTERS, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip


def described(tensor: Tensor, block: list[int]) -> object:
    """Return the TMA descriptor that loads a tensor in tiles of shape `block`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], block, _layout(*block, dtype=tensor.dtype))


@lru_cache(maxsize=256)
def _layout(*block: int, dtype: torch.dtype) -> Any:
    """Return the layout of a tile in shared memory. It is cached, since making it takes longer than a small kernel."""
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
    return gl.NVMMASharedLayout.get_default_for([*block], kinds[dtype])
