"""Products of many tokens in fp8 on Hopper, in Gluon, with the same bits as products of few tokens in
fastgen.kernels.hopper.products.

Hopper's tensor cores add fp8 products in an accumulator of about 14 bits. Therefore they sum each 128 inputs from zero
(with four instructions of 32 inputs), and these sums are added in float32, in order. If the weight has one scale per
block of 128 x 128, the addition multiplies by the scale; other scales multiply the result.

Two groups of four warps each have 64 tokens of a tile: while one group adds, the products of the other keep the tensor
cores busy. A ninth warp loads (by TMA). A program computes several tiles: loads continue while results are made, and
results leave through shared memory (by TMA) while the next tile is summed.
"""

from __future__ import annotations

from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.hopper.gluon import gl, gluon_jit, load_tile, next_stage, nvidia, store_tile
from fastgen.kernels.hopper.products import described
from fastgen.kernels.triton.batch_invariant import GROUP
from fastgen.kernels.triton.epilogue import added, gated, read_rows
from fastgen.kernels.triton.jit import constant, tl

CHUNK = 128
"""Number of inputs that the tensor cores sum; also rows and inputs per block with one scale."""

TOKENS = 128  # tokens of a tile: two groups of warps with 64 each
SIDES = (128, 64)  # choices of rows of each of a tile's two sides
WARPS = 4  # warps of a group
REGISTERS, LOADING_REGISTERS = constant(240), constant(24)  # per thread of a group, and of the loading warp
LAUNCHED = 168  # registers per thread at the launch: a processor's registers, distributed over three groups


@gluon_jit()
def _place(
    tile, T, N, HALF: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Return the first token of a tile, and the first row in the weight of each of its two sides."""
    tiles_n = gl.cdiv(N, 2 * ROWS)
    if HALF > 0:
        tiles_n = gl.cdiv(HALF, ROWS)
    width = GROUP * tiles_n
    first = tile // width * GROUP
    within = tile % width
    tiles = gl.minimum(gl.cdiv(T, TOKENS) - first, GROUP)
    first_token = (first + within % tiles) * TOKENS
    if HALF > 0:
        row = within // tiles * ROWS
        other = row + HALF
    else:
        row = within // tiles * (2 * ROWS)
        other = row + ROWS
    return first_token, row, other


@gluon_jit("T", "tiles")
def _product_kernel(
    x_desc, weight_desc, out_desc, bias_ptr, out_ptr, x_scales_ptr, scales_ptr, T, N, tiles,
    K: gl.constexpr, HALF: gl.constexpr, ADD: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute tiles of TOKENS tokens and two sides of ROWS rows, which are neighbours, or gate and up.

    HALF: number of rows of gate and of up, or 0 without SwiGLU. BLOCKS: whether the weight has one scale per block of
    128 x 128 instead of one per row.
    """
    DEPTH: gl.constexpr = x_desc.block_type.shape[1]
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, DEPTH], x_desc.layout)
    weights = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, DEPTH], weight_desc.layout)
    results = gl.allocate_shared_memory(out_desc.dtype, [2, TOKENS // 2, ROWS], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], nvidia.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], nvidia.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        nvidia.mbarrier.init(ready.index(stage), count=1)
        nvidia.mbarrier.init(free.index(stage), count=2)
    ring = (xs, weights, ready, free)
    pointers = (bias_ptr, out_ptr, x_scales_ptr, scales_ptr)
    gl.warp_specialize(
        [
            (_multiply, (ring, results, out_desc, pointers, T, N, tiles, K, HALF, ADD, BLOCKS, GROUP, 0)),
            (_multiply, (ring, results, out_desc, pointers, T, N, tiles, K, HALF, ADD, BLOCKS, GROUP, 1)),
            (_load_tiles, (x_desc, weight_desc, ring, T, N, tiles, K, HALF, GROUP)),
        ],
        [4, 1],
        [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon_jit()
def _load_tiles(
    x_desc, weight_desc, ring, T, N, tiles, K: gl.constexpr, HALF: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Load the steps of all tiles of the program, each as soon as both groups of warps have left a stage."""
    xs, weights, ready, free = ring
    STAGES: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    DEPTH: gl.constexpr = xs.shape[2]
    ROWS: gl.constexpr = weights.shape[1]
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    stage = 0
    phase = 1  # the phase of `free`, since waiting for phase 1 of a new barrier returns at once
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_token, row, other = _place(tile, T, N, HALF, TOKENS, ROWS, GROUP)
        for at in range(0, K, DEPTH):
            nvidia.mbarrier.wait(free.index(stage), phase)
            nvidia.mbarrier.expect(ready.index(stage), (TOKENS + 2 * ROWS) * DEPTH)
            load_tile(x_desc, [first_token, at], ready.index(stage), xs.index(stage))
            load_tile(weight_desc, [row, at], ready.index(stage), weights.index(2 * stage))
            load_tile(weight_desc, [other, at], ready.index(stage), weights.index(2 * stage + 1))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon_jit()
def _multiply(
    ring, results, out_desc, pointers, T, N, tiles, K: gl.constexpr, HALF: gl.constexpr, ADD: gl.constexpr,
    BLOCKS: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Compute and store 64 tokens of each tile of the program, the first (PART 0) or the last (PART 1)."""
    xs, weights, ready, free = ring
    bias_ptr, out_ptr, x_scales_ptr, scales_ptr = pointers
    STAGES: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    SIDE: gl.constexpr = xs.shape[1] // 2
    DEPTH: gl.constexpr = xs.shape[2]
    ROWS: gl.constexpr = weights.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 32])
    part = gl.zeros([SIDE, ROWS], gl.float32, layout)
    tl.extra.cuda.gdc_wait()
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_token, row, other = _place(tile, T, N, HALF, TOKENS, ROWS, GROUP)
        first_token += PART * SIDE
        token = first_token + gl.arange(0, SIDE, gl.SliceLayout(1, layout))
        x_scales = gl.load(x_scales_ptr + token, mask=token < T, other=0.0)  # they arrive while the tile is summed
        scales_a = _row_scales(scales_ptr, row, N, ROWS, BLOCKS)
        scales_b = _row_scales(scales_ptr, other, N, ROWS, BLOCKS)
        a = gl.zeros([SIDE, ROWS], gl.float32, layout)
        b = gl.zeros([SIDE, ROWS], gl.float32, layout)
        for step in range(0, (K + DEPTH - 1) // DEPTH):
            if BLOCKS:
                scale_a = gl.load(scales_ptr + row // DEPTH * ((K + DEPTH - 1) // DEPTH) + step)
                scale_b = gl.load(scales_ptr + gl.minimum(other, N - 1) // DEPTH * ((K + DEPTH - 1) // DEPTH) + step)
            nvidia.mbarrier.wait(ready.index(stage), phase)
            x = xs.index(stage).slice(PART * SIDE, SIDE, 0)
            product = nvidia.warpgroup_mma(
                x, weights.index(2 * stage).permute((1, 0)), part, use_acc=False, is_async=True
            )
            part = nvidia.warpgroup_mma_wait(0, deps=[product])
            a = gl.fma(part, gl.full_like(part, scale_a), a) if BLOCKS else a + part
            product = nvidia.warpgroup_mma(
                x, weights.index(2 * stage + 1).permute((1, 0)), part, use_acc=False, is_async=True
            )
            part = nvidia.warpgroup_mma_wait(0, deps=[product])
            nvidia.mbarrier.arrive(free.index(stage))
            b = gl.fma(part, gl.full_like(part, scale_b), b) if BLOCKS else b + part
            stage, phase = next_stage(stage, phase, STAGES)
        rows_a = row + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
        rows_b = other + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
        read_a = read_rows(gl.expand_dims(token, 1), rows_a, bias_ptr, out_ptr, T, N, ADD)
        read_b = read_rows(gl.expand_dims(token, 1), rows_b, bias_ptr, out_ptr, T, N, ADD)
        a = added(_scaled(a, x_scales, scales_a, BLOCKS), read_a, bias_ptr, ADD)
        if HALF == 0:  # the store of a overlaps with finishing b
            _store(a, results.index(PART), out_desc, first_token, row)
        b = added(_scaled(b, x_scales, scales_b, BLOCKS), read_b, bias_ptr, ADD)
        if HALF > 0:
            _store(gated(a, b), results.index(PART), out_desc, first_token, row)
        else:
            _store(b, results.index(PART), out_desc, first_token, other)
    nvidia.tma.store_wait(0)


@gluon_jit()
def _row_scales(scales_ptr, row, N, ROWS: gl.constexpr, BLOCKS: gl.constexpr):
    """Return the scales of ROWS rows, one row per thread; if BLOCKS, return numbers that are not used."""
    row += gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return row if BLOCKS else gl.load(scales_ptr + row, mask=row < N, other=0.0)


@gluon_jit()
def _scaled(acc, x_scales, scales, BLOCKS: gl.constexpr):
    """Return the sums [SIDE, ROWS] multiplied by the scales of their tokens and rows."""
    acc *= gl.expand_dims(x_scales, 1)
    if not BLOCKS:
        acc *= gl.expand_dims(gl.convert_layout(scales, gl.SliceLayout(0, acc.type.layout)), 0)
    return acc


@gluon_jit()
def _store(acc, result, out_desc, token, row):
    """Begin to store acc float32 [SIDE, ROWS] from row `token` and column `row` on, through shared memory."""
    nvidia.tma.store_wait(0)  # the previous result has left shared memory
    result.store(acc.to(out_desc.dtype))
    nvidia.fence_async_shared()
    store_tile(out_desc, [token, row], result)


def rows_of(tokens: int, outputs: int, chip: Chip) -> int:
    """Return the rows of a tile's sides, 64 or 128, that take the busiest processor less time for a weight of `outputs`
    rows. Both give the same bits."""

    def cost(rows: int) -> int:
        tiles = -(-tokens // TOKENS) * -(-outputs // (2 * rows))
        return -(-tiles // chip.processors) * (2 * rows + TOKENS // 2)  # a token costs half as much as a row

    return min(SIDES, key=cost)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, x_scales: Tensor, scales: Tensor,
    swiglu: bool, add: bool, rows: int,
) -> None:  # fmt: skip
    """Multiply x [T, K] by a weight [N, K], both float8_e4m3fn; see fastgen.kernels.fp8.product.

    out: [T, N], or [T, N / 2] with swiglu; with `add` the result is added to it. rows: one of SIDES.
    """
    (tokens, inputs), outputs, chip = x.shape, len(weight), Chip.of(x.device)
    half = outputs // 2 if swiglu else 0
    assert out.stride(0) * out.element_size() % 16 == 0
    stage = (TOKENS + 2 * rows) * CHUNK
    stages = (chip.shared_memory - 2048 - TOKENS * rows * out.element_size()) // stage
    tiles = -(-tokens // TOKENS) * (-(-half // rows) if swiglu else -(-outputs // (2 * rows)))
    _product_kernel[(min(tiles, chip.processors),)](
        described(x, [TOKENS, CHUNK]), described(weight, [rows, CHUNK]), described(out, [TOKENS // 2, rows]),
        bias, out, x_scales, scales,
        tokens, outputs, tiles, inputs, half, add, scales.dim() > 1, TOKENS, rows, stages, GROUP // TOKENS,
        num_warps=WARPS, maxnreg=LAUNCHED, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
