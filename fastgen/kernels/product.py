"""Matrix products of a few tokens, where the weights' bytes decide: each is read once, at the rate of the memory.

Letters: T tokens, N outputs, K inputs. A program has a tile of the weight's rows, a share of their K, and all tokens.
The weight is the left side of the tensor cores' product, so that only the tokens are padded, to 8, 16, 32 or 64. Where
the row tiles are too few to fill the chip, K is split: partial sums go through a workspace, and the last program of a
tile to arrive adds them in their order, so that the result does not depend on who came last.

What surrounds a product in a transformer would cost a launch and a gap each, so it is done here: the RMSNorm before it;
and after it bias, SiLU-multiply, the addition to the residual stream, or rope and the way of keys and values into the
pool.

From Hopper on, a product starts before the kernel ahead of it has ended (programmatic dependent launch). Weights depend
on no kernel, so it has the first of them fetched into the L2 cache meanwhile. Before it touches anything else it waits
for the end of the kernel ahead, which has itself waited for the one ahead of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.launch import Chip, Kernel, jit, tl
from fastgen.kernels.rope import SlotMapping, look_up, rope_write, turn

MOST = 64
"""Tokens that one product takes."""

PAYS = 32
"""Tokens up to which these products beat cuBLAS."""

NARROW = {1: (8, 1024, 4, 4), 8: (64, 128, 4, 6), 16: (64, 128, 4, 5), 32: (64, 128, 4, 4), 64: (64, 128, 4, 3)}
WIDE = {1: (16, 512, 4, 3), 8: (128, 128, 8, 2), 16: (128, 128, 8, 3), 32: (128, 128, 8, 2), 64: (128, 64, 8, 4)}
"""Padded tokens -> (rows, depth, warps, stages) of Config, for 2-byte weights; WIDE where 128 rows a program still fill
the chip. As measured on an H200 (scripts/tune/tune_product.py)."""

PROGRAMS = 2
"""Programs a processor that it takes to keep enough bytes on their way."""

START_STEPS = 4
"""What a program's start and end cost, in steps of its loop."""

SPLIT_MOST = 16

AHEAD = 4 << 20
"""Bytes that all programs together fetch before the kernel ahead of them has ended."""

PARTIALS = 1 << 22
"""float32 of the workspace for partial sums: 16 MiB."""

TILES = 1 << 14
"""Row tiles that a product with a split K may have."""


@dataclass(frozen=True)
class Config:
    """How a product is cut up.

    tokens: T, padded; 1 multiplies without the tensor cores. rows, depth: the tile of the weight that a step of a
    program's loop takes (with swiglu, rows of gate and of up together). split: shares of K. dependent: start before
    the kernel ahead has ended, and fetch `ahead` columns of the rows meanwhile (a power of two, or 0). early: the
    kernel behind may start as soon as all programs of this one run, and not when their loops have ended.
    """

    tokens: int
    rows: int
    depth: int
    split: int
    warps: int
    stages: int
    dependent: bool = False
    ahead: int = 0
    early: bool = True

    def shared_memory(self, item_size: int) -> int:
        """Bytes that a program needs at most: the stages in flight, or what the results pass through at the end."""
        stages = self.stages * (self.rows + self.tokens) * self.depth * item_size
        return max(stages, self.rows * self.tokens * 4) + 2048


@jit("T", "eps")
def _product_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, norm_ptr: tl.tensor, out_ptr: tl.tensor,
    partials_ptr: tl.tensor, counters_ptr: tl.tensor, positions_ptr: tl.tensor, slots_ptr: tl.tensor,
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor,
    T: tl.tensor, N: tl.tensor, eps: tl.tensor, K: tl.constexpr, HALF: tl.constexpr, KV: tl.constexpr, P: tl.constexpr,
    ADD: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """A program ROWS rows of the weight and one of SPLIT shares of K: STEPS times DEPTH. EVEN: just all of K.

    HALF: rows come in pairs that are so far apart, gate and up or what rope turns together; 0 if not. KV, P: KV heads
    and page size, for rope; 0 if there is none.
    """
    tile, share = tl.program_id(0), tl.program_id(1)
    begin = share * STEPS * DEPTH
    # Rows behind the last are read as the last: their results are not stored, and the loads need no mask.
    row = tile * ROWS + tl.arange(0, ROWS)
    if HALF > 0:  # the two of a pair, one after the other
        pair = row // 2
        row = pair // HALF * 2 * HALF + pair % HALF + row % 2 * HALF
    row = tl.minimum(row, N - 1)
    rows_ptr = weight_ptr + row.to(tl.int64)[:, None] * K
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        if AHEAD > 0:
            _fetch(rows_ptr, begin, K, AHEAD)
        tl.extra.cuda.gdc_wait()

    token, column = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    here = (token < T)[:, None]
    tokens_ptr = x_ptr + token[:, None] * K
    acc, squares, guess = _sum(tokens_ptr, rows_ptr, norm_ptr, here, column, begin, K, ROWS, STEPS, EVEN, STAGES)
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLIT == 1:
        _finish(
            acc, squares, guess, row, tile, bias_ptr, norm_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
            keys_ptr, values_ptr, T, N, eps, K, HALF, KV, P, ADD,
        )  # fmt: skip
    else:
        size: tl.constexpr = (ROWS + 1) * TOKENS
        first_ptr = partials_ptr + tile * SPLIT * size
        cell = tl.arange(0, ROWS)[:, None] * TOKENS + token[None, :]
        tl.store(first_ptr + share * size + cell, acc)
        tl.store(first_ptr + share * size + ROWS * TOKENS + token, squares)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counters_ptr + tile, 0)
            acc = tl.zeros([ROWS, TOKENS], tl.float32)
            squares = tl.zeros([TOKENS], tl.float32)
            for other in tl.static_range(SPLIT):
                acc += tl.load(first_ptr + other * size + cell, cache_modifier=".cg")
                squares += tl.load(first_ptr + other * size + ROWS * TOKENS + token, cache_modifier=".cg")
            _finish(
                acc, squares, guess, row, tile, bias_ptr, norm_ptr, out_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
                keys_ptr, values_ptr, T, N, eps, K, HALF, KV, P, ADD,
            )  # fmt: skip


@jit()
def _fetch(rows_ptr: tl.tensor, begin: tl.tensor, K: tl.constexpr, AHEAD: tl.constexpr) -> None:
    """Ask for AHEAD columns from `begin` on of rows_ptr [ROWS, 1], a cache line of 128 bytes at a time."""
    line: tl.constexpr = 1024 // rows_ptr.dtype.element_ty.primitive_bitwidth
    wanted = rows_ptr + tl.minimum(begin + tl.arange(0, AHEAD // line) * line, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [wanted.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@jit()
def _sum(
    x_ptr: tl.tensor, rows_ptr: tl.tensor, norm_ptr: tl.tensor, here: tl.tensor, column: tl.tensor, begin: tl.tensor,
    K: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
) -> Any:  # fmt: skip
    """The sums over a share of K, in float32: [ROWS, TOKENS] of products, [TOKENS] of x's squares, and by what x was
    multiplied, [TOKENS].

    The norm's weight multiplies x in the loop; its scale, which only the squares of all K give, the results.
    """
    tokens: tl.constexpr = x_ptr.shape[0]
    depth: tl.constexpr = column.shape[0]
    squares = tl.zeros([tokens, depth], tl.float32)
    guess = tl.full([tokens], 1.0, tl.float32)
    if norm_ptr is not None:
        # The loop loads the norm's weight a step ahead: it is too small for the pipeline of the other two.
        norm = tl.load(norm_ptr + begin + column, mask=begin + column < K, other=0.0)
        if rows_ptr.dtype.element_ty == tl.float16:
            # Its range is narrow: x is brought to about 1 / 64, by the look of its first columns, which leaves as much
            # room for larger numbers as for smaller ones.
            x = tl.load(x_ptr + column[None, :], mask=here & (column < K)[None, :], other=0.0).to(tl.float32)
            size = tl.sum(tl.abs(x), 1) * (64 / depth)
            guess = 1 / tl.where(size > 0, size, 1.0)
    acc = tl.zeros([ROWS, depth if tokens == 1 else tokens], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = begin + step * depth + column
        if EVEN:
            weight = tl.load(rows_ptr + at[None, :])
            x = tl.load(x_ptr + at[None, :], mask=here, other=0.0)
        else:
            weight = tl.load(rows_ptr + at[None, :], mask=(at < K)[None, :], other=0.0)
            x = tl.load(x_ptr + at[None, :], mask=here & (at < K)[None, :], other=0.0)
        if norm_ptr is not None:
            x = x.to(tl.float32)
            squares += x * x
            x *= norm.to(tl.float32)[None, :]
            if weight.dtype == tl.float16:
                x *= guess[:, None]
            norm = tl.load(norm_ptr + at + depth, mask=at + depth < K, other=0.0)
        if tokens == 1:
            acc += weight.to(tl.float32) * x.to(tl.float32)
        else:
            acc = tl.dot(weight, tl.trans(x.to(weight.dtype)), acc, input_precision="ieee")
    if tokens == 1:
        acc = tl.sum(acc, 1, keep_dims=True)
    return acc, tl.sum(squares, 1), guess


@jit()
def _finish(
    acc: tl.tensor, squares: tl.tensor, guess: tl.tensor, row: tl.tensor, tile: tl.tensor, bias_ptr: tl.tensor,
    norm_ptr: tl.tensor, out_ptr: tl.tensor, positions_ptr: tl.tensor, slots_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, T: tl.tensor, N: tl.tensor, eps: tl.tensor,
    K: tl.constexpr, HALF: tl.constexpr, KV: tl.constexpr, P: tl.constexpr, ADD: tl.constexpr,
) -> None:  # fmt: skip
    """From what _sum gives, over all K, to what is stored. row: the weight's rows [ROWS]."""
    if norm_ptr is not None:
        acc *= (tl.rsqrt(squares / K + eps) / guess)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    if HALF > 0:
        a, b = tl.split(tl.permute(tl.reshape(acc, [acc.shape[0] // 2, 2, acc.shape[1]]), (0, 2, 1)))
        if KV > 0:
            pair = (tile * a.shape[0] + tl.arange(0, a.shape[0]))[:, None]
            token = tl.arange(0, a.shape[1])[None, :]
            here = (pair < N // 2) & (token < T)
            found = look_up(token, pair % HALF, token < T, here, positions_ptr, slots_ptr, cos_ptr, sin_ptr, HALF)
            turn(
                a, b, found, token, pair // HALF, pair % HALF, here, out_ptr, keys_ptr, values_ptr,
                N // (2 * HALF) - 2 * KV, KV, HALF, P,
            )  # fmt: skip
        else:
            _store(a / (1 + tl.exp(-a)) * b, tile, out_ptr, T, N // 2, ADD)
    else:
        _store(acc, tile, out_ptr, T, N, ADD)


@jit()
def _store(
    result: tl.tensor, tile: tl.tensor, out_ptr: tl.tensor, T: tl.tensor, N: tl.tensor, ADD: tl.constexpr
) -> None:
    """Store result [ROWS, TOKENS] as columns of out [T, N], or add it to them."""
    n = (tile * result.shape[0] + tl.arange(0, result.shape[0]))[:, None]
    token = tl.arange(0, result.shape[1])[None, :]
    here = (n < N) & (token < T)
    out_ptr += token * N + n
    if ADD:
        result += tl.load(out_ptr, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr, result.to(out_ptr.dtype.element_ty), mask=here)


def pays(tokens: int, inputs: int) -> bool:
    """Whether the product of `tokens` tokens with a weight [outputs, inputs] of 2-byte numbers beats cuBLAS."""
    return tokens <= PAYS and inputs % 8 == 0


def config(outputs: int, inputs: int, tokens: int, dtype: torch.dtype, chip: Chip) -> Config:
    """How to cut up the product of `tokens` tokens with a weight [outputs, inputs].

    Depends on the tokens' padded number alone, so that a model has few kernels to compile.
    """
    assert 1 <= tokens <= MOST
    return _config(outputs, inputs, padded(tokens), dtype, chip)


def padded(tokens: int) -> int:
    """How many tokens the kernel that multiplies `tokens` of them is compiled for."""
    return 1 if tokens == 1 else max(8, 1 << (tokens - 1).bit_length())


SIZES = tuple(sorted({padded(tokens) for tokens in range(1, PAYS + 1)}))
"""Tokens to run once at the start, so that no product that pays compiles later."""


@lru_cache(maxsize=1024)
def _config(outputs: int, inputs: int, tokens: int, dtype: torch.dtype, chip: Chip) -> Config:
    rows, depth, warps, stages = (WIDE if outputs >= 128 * chip.processors else NARROW)[tokens]
    depth = min(depth, max(16, 1 << (inputs - 1).bit_length()))
    found = Config(tokens, rows, depth, 1, warps, stages)
    while found.shared_memory(dtype.itemsize) > chip.shared_memory and found.depth > 16:
        fewer, shorter = replace(found, stages=found.stages - 1), replace(found, depth=found.depth // 2)
        found = fewer if found.stages > 2 else shorter
    found = complete(found, outputs, inputs, dtype.itemsize, chip)
    # All programs at once, where a few stages less make that possible: a second wave would run half empty.
    each = -(-(-(-outputs // found.rows) * found.split) // chip.processors)
    fits = [stages for stages in range(2, found.stages + 1)
            if replace(found, stages=stages).shared_memory(dtype.itemsize) * each <= chip.shared_memory]  # fmt: skip
    return replace(found, stages=max(fits)) if fits else found


def complete(found: Config, outputs: int, inputs: int, item_size: int, chip: Chip) -> Config:
    """The same with what the chip and the shape of the weight decide: split, and how it overlaps with its neighbours.

    Where K is split, the programs of the kernel behind would be in the way of those that still merge: measured.
    """
    split = _split(outputs, inputs, found, chip)
    found = replace(found, split=split, dependent=chip.dependent_launch, early=split == 1)
    programs = -(-outputs // found.rows) * split
    ahead = _columns_ahead(programs, found.rows, inputs // split, item_size, chip) if found.dependent else 0
    return replace(found, ahead=ahead)


def _split(outputs: int, inputs: int, found: Config, chip: Chip) -> int:
    """Into how many shares K goes: where the busiest processor has the fewest steps, PROGRAMS programs at a time."""
    tiles, steps = -(-outputs // found.rows), -(-inputs // found.depth)
    room = PARTIALS // (tiles * (found.rows + 1) * found.tokens) if tiles <= TILES else 1

    def cost(split: int) -> int:
        return max(PROGRAMS, -(-tiles * split // chip.processors)) * (-(-steps // split) + START_STEPS)

    return min(range(1, max(1, min(SPLIT_MOST, steps // 2, room)) + 1), key=cost)


def _columns_ahead(programs: int, rows: int, inputs: int, item_size: int, chip: Chip) -> int:
    """Of its rows, that each program fetches ahead, so that those that run at a time fetch AHEAD bytes."""
    columns = min(AHEAD // (min(programs, PROGRAMS * chip.processors) * rows * item_size), inputs)
    return 1 << (columns.bit_length() - 1) if columns >= 128 // item_size else 0


class Workspace(NamedTuple):
    """What the programs of a product with a split K leave for each other, at addresses that CUDA graphs may hold.

    partials: float32 [PARTIALS], sums over shares of K; arrived: int32 [TILES], the programs that are done with each
    tile, 0 between products. Products that may run at the same time need one each.
    """

    partials: Tensor
    arrived: Tensor

    @staticmethod
    def make(device: torch.device) -> Workspace:
        partials = torch.empty(PARTIALS, dtype=torch.float32, device=device)
        return Workspace(partials, torch.zeros(TILES, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class RopeWrite:
    """What fastgen.kernels.rope.rope_write does behind a product with the weight of q, k and v: its arguments."""

    mapping: SlotMapping
    keys: Tensor
    values: Tensor


class Fused(NamedTuple):
    """What a product [T, N] does beside multiplying.

    norm: the weight [K] and epsilon of an RMSNorm of x before it. add: [T, N], to which the result is added in place.
    swiglu: weight and bias hold the rows of gate, then those of up, and the result is silu(gate) * up [T, N / 2].
    rope: the weight holds the rows of q, k and v; the result is what rope_write makes of the product, q [T, H, D].
    out_dtype: of the result, where it is not x's.
    """

    norm: tuple[Tensor, float] | None = None
    add: Tensor | None = None
    swiglu: bool = False
    rope: RopeWrite | None = None
    out_dtype: torch.dtype | None = None


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, work: Workspace, fused: Fused) -> Tensor:
    chosen = config(weight.shape[0], weight.shape[1], len(x), x.dtype, Chip.of(x.device))
    return launch_as(chosen, x, weight, bias, work, fused)


def launch_as(chosen: Config, x: Tensor, weight: Tensor, bias: Tensor | None, work: Workspace, fused: Fused) -> Tensor:
    """The product, cut up as a Config says."""
    norm, add, swiglu, rope, out_dtype = fused
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    assert tokens <= chosen.tokens
    assert weight.shape == (outputs, inputs)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    assert bias is None or bias.shape == (outputs,)
    assert norm is None or norm[0].shape == (inputs,)
    assert not swiglu or (outputs % 2 == 0 and add is None)
    half, width = (outputs // 2, outputs // 2) if swiglu else (0, outputs)
    turned: tuple[Any, ...] = (None,) * 6
    num_kv = page_size = 0
    if rope is not None:
        assert not swiglu
        assert add is None
        turned, (num_kv, page_size, half) = rope_arguments(rope, tokens)
        width = outputs - 4 * num_kv * half
    out = x.new_empty(tokens, width, dtype=out_dtype) if add is None else add
    assert out.shape == (tokens, width)
    assert out.is_contiguous()
    tiles = -(-outputs // chosen.rows)
    assert chosen.split == 1 or tiles * chosen.split * (chosen.rows + 1) * chosen.tokens <= PARTIALS
    steps = -(-inputs // (chosen.depth * chosen.split))
    weight_norm, eps = norm if norm is not None else (None, 0.0)
    _product_kernel[(tiles, chosen.split)](
        x, weight, bias, weight_norm, out, *work, *turned, tokens, outputs, eps, inputs, half, num_kv,
        page_size, add is not None,
        chosen.tokens, chosen.rows, chosen.depth, chosen.split, steps, inputs == steps * chosen.depth * chosen.split,
        chosen.stages, chosen.dependent, chosen.ahead, chosen.early, num_warps=chosen.warps, num_stages=chosen.stages,
        **({"launch_pdl": True} if chosen.dependent else {}),
    )  # fmt: skip
    return out if rope is None else out.view(tokens, -1, 2 * half)


def rope_arguments(rope: RopeWrite, tokens: int) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    """The kernel's pointers; and KV heads, page size, half a head."""
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


def _twin(x: Tensor, weight: Tensor, bias: Tensor | None, work: Workspace, fused: Fused) -> Tensor:
    """x [T, K] times the rows of weight [N, K], plus bias [N], and what `fused` says: [T, N] in x's dtype."""
    norm, add, swiglu, rope, out_dtype = fused
    if norm is not None:
        x = F.rms_norm(x.float(), x.shape[1:], eps=norm[1]).to(x.dtype) * norm[0]
    y = F.linear(x, weight, bias)
    if rope is not None:
        turned: Tensor = rope_write.twin(y, rope.mapping, rope.keys, rope.values)
        return turned
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.to(out_dtype or y.dtype) if add is None else add.add_(y)


product = Kernel(_launch, _twin)
