"""Partial results of attention: how programs leave them for each other, and make a query's answer of them.

A partial result is of some of the keys that a query sees: acc [rows, D], the softmax over these, and what it weighs
beside others. H query heads, D head size; DIMS: D, up to a power of two; G: query heads a KV head.
"""

from __future__ import annotations

from fastgen.kernels.blocks import join, left
from fastgen.kernels.launch import jit, tl


@jit()
def leave(acc, lse, parts_ptr, lse_ptr, slot, here, D: tl.constexpr, DIMS: tl.constexpr):
    """Partial results acc [ROWS, DIMS] for who merges them, and [ROWS] the log2 of their sums (fixed: their peaks)."""
    dim = tl.arange(0, DIMS)[None, :]
    tl.store(parts_ptr + slot[:, None] * D + dim, acc, mask=here[:, None] & (dim < D))
    tl.store(lse_ptr + slot, lse, mask=here)


@jit()
def fold(
    acc, peak, total, parts_ptr, lse_ptr, part, priors, q_head, here,
    H: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Go on with a row's priors as if they were keys. Another launch wrote them: read from L2, as `merge` does."""
    dim = tl.arange(0, DIMS)[None, :]
    for prior in range(0, priors):
        slot = (part + prior) * H + q_head
        lse = tl.load(lse_ptr + slot, cache_modifier=".cg")
        value = tl.load(parts_ptr + slot[:, None] * D + dim, mask=here, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, lse)
        weight = tl.exp2(lse - higher)
        shrink = tl.exp2(peak - higher)
        acc = acc * shrink[:, None] + value * weight[:, None]
        total = total * shrink + weight
        peak = higher
    return acc, peak, total


@jit()
def merge_fixed(
    nothing, number, dim, out_ptr, parts_ptr, peak_ptr, totals_ptr, first, tokens, part, splits, head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """As `merge`, one after the other, as the program of all keys joins them. nothing: zeros [ROWS, DIMS]; number, dim:
    0 to ROWS, and to DIMS. (For Gluon too, whose tensors are made in a layout.)"""
    for first_row in range(0, tokens * G, ROWS):
        row = first_row + number
        token = row // G
        q_head = head * G + row % G
        here = token < tokens
        acc = nothing
        peak = row * 0.0 - 1e30
        total = row * 0.0
        for first_split in range(0, splits, SPLITS):
            for next_split in tl.static_range(SPLITS):  # unrolled, so that their loads are on their way together
                split = first_split + next_split
                slot = (part + split * tokens + token) * H + q_head
                next_acc, next_peak, next_total = left(
                    parts_ptr, peak_ptr, totals_ptr, slot, here & (split < splits), dim, D, False
                )
                acc, peak, total = join(acc, peak, total, next_acc, next_peak, next_total, False)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        at = ((first + token) * H + q_head)[:, None] * D + dim[None, :]
        tl.store(out_ptr + at, out, mask=here[:, None] & (dim < D)[None, :])


@jit()
def merge(
    out_ptr, parts_ptr, lse_ptr, first, tokens, part, splits, head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Other programs wrote the partial results, so that they are read from L2 (.cg), not from a stale L1."""
    dim = tl.arange(0, DIMS)[None, :]
    for first_row in range(0, tokens * G, ROWS):
        row = first_row + tl.arange(0, ROWS)
        token = row // G
        q_head = head * G + row % G
        here = token < tokens
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        peak = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for first_split in range(0, splits, SPLITS):
            split = first_split + tl.arange(0, SPLITS)
            slot = (part + split[:, None] * tokens + token[None, :]) * H + q_head[None, :]
            there = (split < splits)[:, None] & here[None, :]
            lse = tl.load(lse_ptr + slot, mask=there, other=-1e30, cache_modifier=".cg")
            at = slot[:, :, None] * D + dim[None, :, :]
            inside = there[:, :, None] & (dim < D)[None, :, :]
            parts = tl.load(parts_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(peak, tl.max(lse, 0))
            weights = tl.exp2(lse - higher[None, :])
            shrink = tl.exp2(peak - higher)
            acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            peak = higher
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        at = ((first + token) * H + q_head)[:, None] * D + dim
        tl.store(out_ptr + at, out, mask=here[:, None] & (dim < D))
