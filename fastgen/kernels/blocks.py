"""A softmax over keys that is the same to the bit whoever computes which of its blocks, for deterministic mode.

Each block of keys is a softmax of its own, and these are joined in the order of their positions. A decode's few rows
are on the right side of its products (swapped), a prefill's many on the left, where Hopper's instruction wants 64: a
number is summed over the same dimension in the same order either way. That holds for products, and so a block's weights
are summed by one as well: after they are rounded, as they weigh the values.

D head size; DIMS: D, up to a power of two.
"""

from __future__ import annotations

from fastgen.kernels.launch import constant, jit, tl

LEAST = constant(64)  # rows of a product's left side
FEWEST = constant(16)  # columns of its right side


@jit()
def softmax_block(q, k, v, seen, SCALE: tl.constexpr):
    """The softmax of q [ROWS, DIMS] over the keys k [KEYS, DIMS] of which they have `seen` [ROWS, KEYS] (None: all):
    acc [ROWS, DIMS], of values v [KEYS, DIMS], not yet divided by total [ROWS]; that in units of 2**peak [ROWS].

    Of a row that has seen none all weights are 0, for which its peak must not be as low as its scores.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if seen is not None:
        scores = tl.where(seen, scores, -1e30)
    peak = tl.maximum(tl.max(scores, 1) * SCALE, -1e20)
    weights = tl.exp2(tl.fma(scores, SCALE, -peak[:, None])).to(v.dtype)
    ones = tl.full([k.shape[0], FEWEST], 1.0, tl.float32).to(v.dtype)
    total = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)  # of equal numbers
    return tl.dot(weights, v, input_precision="ieee"), peak, total


@jit()
def softmax_block_swapped(q, k, v, seen, SCALE: tl.constexpr):
    """As `softmax_block`, of seen [KEYS, ROWS]: acc [DIMS, ROWS], peak [ROWS], and total [LEAST, ROWS], the same in
    each of its rows."""
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    if seen is not None:
        scores = tl.where(seen, scores, -1e30)
    peak = tl.maximum(tl.max(scores, 0) * SCALE, -1e20)
    weights = tl.exp2(tl.fma(scores, SCALE, -peak[None, :])).to(v.dtype)
    ones = tl.full([LEAST, k.shape[0]], 1.0, tl.float32).to(v.dtype)
    total = tl.dot(ones, weights, input_precision="ieee")
    return tl.dot(tl.trans(v), weights, input_precision="ieee"), peak, total


@jit()
def nothing(ROWS: tl.constexpr, DIMS: tl.constexpr, SWAP: tl.constexpr):
    """The softmax over no keys."""
    acc = tl.zeros([DIMS, ROWS] if SWAP else [ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], -1e30, tl.float32)  # finite, so that a row that has seen nothing gives no NaN
    total = tl.zeros([LEAST, ROWS] if SWAP else [ROWS], tl.float32)
    return acc, peak, total


@jit()
def left(parts_ptr, peak_ptr, totals_ptr, slot, here, dim, D: tl.constexpr, SWAP: tl.constexpr):
    """The softmax over the keys that another program has gone through, of the rows [ROWS] that are `here`; of others,
    nothing. It was left at `slot` [ROWS]. dim: 0 to DIMS."""
    peak = tl.load(peak_ptr + slot, mask=here, other=-1e30, cache_modifier=".cg")
    total = tl.load(totals_ptr + slot, mask=here, other=0.0, cache_modifier=".cg")
    if SWAP:
        at = slot[None, :] * D + dim[:, None]
        inside = here[None, :] & (dim < D)[:, None]
        total = tl.broadcast_to(total[None, :], [LEAST, slot.shape[0]])
    else:
        at = slot[:, None] * D + dim[None, :]
        inside = here[:, None] & (dim < D)[None, :]
    return tl.load(parts_ptr + at, mask=inside, other=0.0, cache_modifier=".cg"), peak, total


@jit()
def join(acc, peak, total, next_acc, next_peak, next_total, SWAP: tl.constexpr):
    """The softmax over some keys and the next ones, from what `softmax_block` gives of both."""
    higher = tl.maximum(peak, next_peak)
    weight = tl.exp2(peak - higher)
    next_weight = tl.exp2(next_peak - higher)
    if SWAP:
        acc = tl.fma(next_acc, next_weight[None, :], acc * weight[None, :])
        total = tl.fma(next_total, next_weight[None, :], total * weight[None, :])
    else:
        acc = tl.fma(next_acc, next_weight[:, None], acc * weight[:, None])
        total = tl.fma(next_total, next_weight, total * weight)
    return acc, higher, total
