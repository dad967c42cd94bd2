"""The products of few tokens of fastgen.kernels.fixed, to the bit, on Hopper; in Gluon, Triton's language of layouts.

Between the kernels of a decode step memory would have nothing to do for 3 us each. No kernel of a step writes weights,
and what did has ended when a step's first product begins, since torch's embedding, which is launched in the ordinary
way, waits for all that came before: so a weight's first tiles are on their way before the kernel ahead has ended
(programmatic dependent launch), and those of x follow when it has. Triton's own pipeline loads both alike, and can only
be told to wait before the first of them.

Narrow products have a program a tile, at most as many as there are processors, each with all of a processor's memory.
More programs were slower: those of the next kernel begin where a processor is free.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastgen.kernels.finish import finish_pairs, finish_rows
from fastgen.kernels.launch import GLUON, Chip, gluon_jit, optional, tl

gl: Any = optional("triton.experimental.gluon.language") if GLUON else None
nvidia: Any = optional("triton.experimental.gluon.language.nvidia.hopper") if GLUON else None

DEPTH = 256  # of a narrow product's tile


def runs_on(chip: Chip, dtype: torch.dtype) -> bool:
    return GLUON and chip.capability == (9, 0) and dtype.itemsize == 2


@gluon_jit("T")
def _product_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, T, N,
    K: gl.constexpr, HALF: gl.constexpr, KV: gl.constexpr, P: gl.constexpr, ADD: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program a tile of the weight's rows, and all tokens. What the letters are: see fastgen.kernels.fixed."""
    PAIRS: gl.constexpr = ROWS // 2 // HEADS
    STEPS: gl.constexpr = (K + DEPTH - 1) // DEPTH
    BYTES: gl.constexpr = (ROWS + TOKENS) * DEPTH * 2  # of a stage
    head = 0
    first_row = gl.program_id(0) * ROWS
    if HALF > 0:
        TILES: gl.constexpr = (HALF + PAIRS - 1) // PAIRS  # of a head
        head = gl.program_id(0) // TILES * HEADS
        first_row = gl.program_id(0) % TILES * PAIRS
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_desc.block_type.shape, weight_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, DEPTH], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], nvidia.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        nvidia.mbarrier.init(ready.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        _load_weight(weight_desc, head, first_row, stage, weights, ready, stage, BYTES, HALF, DEPTH, stage < STEPS)
    tl.extra.cuda.gdc_wait()
    for stage in gl.static_range(STAGES):
        _load_x(x_desc, stage, xs, ready, stage, DEPTH, stage < STEPS)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    acc = nvidia.warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, layout))
    stage = 0
    phase = 0
    before = STAGES - 1
    for step in range(0, STEPS):
        nvidia.mbarrier.wait(ready.index(stage), phase)
        acc = nvidia.warpgroup_mma_wait(0, deps=[acc])  # the step before this is done, and its stage is free
        weight = weights.index(stage).reshape([ROWS, DEPTH])
        acc = nvidia.warpgroup_mma(weight, xs.index(stage).permute((1, 0)), acc, is_async=True)
        later = step - 1 + STAGES
        more = (step > 0) & (later < STEPS)
        _load_weight(weight_desc, head, first_row, later, weights, ready, before, BYTES, HALF, DEPTH, more)
        _load_x(x_desc, later, xs, ready, before, DEPTH, more)
        before = stage
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    tl.extra.cuda.gdc_launch_dependents()  # not before: the next programs would crowd on the few processors free
    acc = nvidia.warpgroup_mma_wait(0, deps=[acc])
    for stage in gl.static_range(STAGES):
        nvidia.mbarrier.invalidate(ready.index(stage))

    acc = gl.permute(acc, (1, 0))
    if HALF > 0:
        side_by_side: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
        acc = gl.permute(gl.reshape(acc, [TOKENS, HEADS, 2, PAIRS]), (0, 1, 3, 2))
        a, b = gl.split(gl.convert_layout(gl.reshape(acc, [TOKENS, ROWS // 2, 2]), side_by_side))
        number = gl.arange(0, ROWS // 2, gl.SliceLayout(0, a.type.layout))
        token = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, a.type.layout)), 1)
        finish_pairs(
            a, b, token, head + number // PAIRS, first_row + number % PAIRS, bias_ptr, out_ptr, positions_ptr,
            slots_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, T, N, HALF, KV, P,
        )  # fmt: skip
    else:
        rows: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
        acc = gl.convert_layout(acc, rows)
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, rows))
        token = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, rows)), 1)
        finish_rows(acc, token, row, bias_ptr, out_ptr, T, N, ADD)


@gluon_jit()
def _load_weight(
    weight_desc, head, first_row, step, weights, ready, stage, BYTES: gl.constexpr, HALF: gl.constexpr,
    DEPTH: gl.constexpr, wanted,
):  # fmt: skip
    """Begin to load the weight of a step of the loop into a stage, which is ready when its x is there too."""
    nvidia.mbarrier.expect(ready.index(stage), BYTES, pred=wanted)
    if HALF > 0:
        nvidia.tma.async_copy_global_to_shared(
            weight_desc, [head, 0, first_row, step * DEPTH], ready.index(stage), weights.index(stage), pred=wanted
        )
    else:
        nvidia.tma.async_copy_global_to_shared(
            weight_desc, [first_row, step * DEPTH], ready.index(stage), weights.index(stage), pred=wanted
        )


@gluon_jit()
def _load_x(x_desc, step, xs, ready, stage, DEPTH: gl.constexpr, wanted):
    nvidia.tma.async_copy_global_to_shared(x_desc, [0, step * DEPTH], ready.index(stage), xs.index(stage), pred=wanted)


def launch(
    x: Tensor, x_block: list[int], weight: Tensor, block: list[int], tiles: int, stages: int, warps: int,
    others: tuple[Tensor | None, ...], sizes: tuple[int, ...],
) -> None:  # fmt: skip
    """x: [T, K], of no more tokens than its tile has, which is [tokens, depth]; weight: tiles of it are [rows, depth],
    or [heads, 2, rows of a half, depth]; others, sizes: the kernel's arguments from bias_ptr to values_ptr, and from N
    to ADD."""
    assert len(x) <= x_block[0]
    assert stages > 1  # a step of the loop fills the stage of the one before it
    heads = block[0] if len(block) > 2 else 1
    _product_kernel[(tiles,)](
        _described(x, x_block), _described(weight, block), *others, len(x), *sizes,
        x_block[0], math.prod(block[:-1]), heads, x_block[1], stages,
        num_warps=warps, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip


def _described(tensor: Tensor, block: list[int]) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], block, _layout(*block, dtype=tensor.dtype))


@lru_cache(maxsize=256)
def _layout(*block: int, dtype: torch.dtype) -> Any:
    """Of a tile in shared memory; it takes longer to find than a small kernel to run."""
    return gl.NVMMASharedLayout.get_default_for([*block], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
