"""The softmax over blocks of keys, and the partial results of attention that programs exchange and combine.

A partial result covers some of the keys that a query sees: acc [rows, D], the weighted sum of the values; peak, the
maximum of their scores; and total, the sum of their weights in units of 2**peak. Shape letters: H query heads, G query
heads per KV head, D head size, DIMS: D rounded up to a power of two.

Results have the same bits, whichever programs compute their blocks. Each block of keys has its own softmax, and these
are combined in the order of their positions. Query rows are the left side of products, where Hopper's instruction needs
at least 64 rows. In fastgen.kernels.hopper.decode they are the right side (SWAP), since a decode has few rows. Either
way a product sums over the same dimension in the same order. For the same reason the weights of a block, rounded to the
dtype of the values, are summed by a product too.
"""

from __future__ import annotations

from fastgen.kernels.triton.jit import constant, jit, tl

LEAST = constant(64)  # minimum number of rows of a product's left side
FEWEST = constant(16)  # minimum number of columns of its right side


@jit()
def softmax_block(q, k, v, seen, SCALE: tl.constexpr):
    """Compute the softmax of q [ROWS, DIMS] over the keys k [KEYS, DIMS] that are `seen` [ROWS, KEYS] (None: all).

    Return a partial result: acc [ROWS, DIMS], the weighted sum of the values v [KEYS, DIMS], not divided by total; peak
    [ROWS]; and total [ROWS]. If a row sees no key, all of its weights are 0, because its peak exceeds its scores.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if seen is not None:
        scores = tl.where(seen, scores, -1e30)
    peak = tl.maximum(tl.max(scores, 1) * SCALE, -1e20)
    weights = tl.exp2(tl.fma(scores, SCALE, -peak[:, None])).to(v.dtype)
    ones = tl.full([k.shape[0], FEWEST], 1.0, tl.float32).to(v.dtype)
    total = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)  # the maximum of equal numbers
    return tl.dot(weights, v, input_precision="ieee"), peak, total


@jit()
def no_keys(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Return the partial result over no keys."""
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], -1e30, tl.float32)  # finite, so that a row that sees no key gives no NaN
    total = tl.zeros([ROWS], tl.float32)
    return acc, peak, total


@jit()
def load_partial(parts_ptr, peaks_ptr, totals_ptr, slot, here, dim, D: tl.constexpr, SWAP: tl.constexpr):
    """Load the partial results that other programs stored at `slot` [ROWS], for the rows where `here` [ROWS] is true.

    Other rows get the result of `no_keys`. dim: the numbers from 0 to DIMS - 1.
    """
    peak = tl.load(peaks_ptr + slot, mask=here, other=-1e30, cache_modifier=".cg")
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
def combine(acc, peak, total, next_acc, next_peak, next_total, SWAP: tl.constexpr):
    """Combine the partial results over some keys and over the keys that follow."""
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


@jit()
def store_partial(acc, peak, total, parts_ptr, peaks_ptr, totals_ptr, slot, here, D: tl.constexpr, DIMS: tl.constexpr):
    """Store partial results acc [ROWS, DIMS], peak [ROWS] and total [ROWS] at `slot` [ROWS]."""
    dim = tl.arange(0, DIMS)[None, :]
    tl.store(parts_ptr + slot[:, None] * D + dim, acc, mask=here[:, None] & (dim < D))
    tl.store(peaks_ptr + slot, peak, mask=here)
    tl.store(totals_ptr + slot, total, mask=here)


@jit()
def combine_splits(
    out_ptr, parts_ptr, peaks_ptr, totals_ptr, first, tokens, part, splits, head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a tile, in the order in which one program would combine their keys, and write the result.

    Other programs wrote the partial results, so loads bypass the L1 cache (.cg), which may be stale.
    """
    dim = tl.arange(0, DIMS)
    for first_row in range(0, tokens * G, ROWS):
        row = first_row + tl.arange(0, ROWS)
        token = row // G
        q_head = head * G + row % G
        here = token < tokens
        acc, peak, total = no_keys(ROWS, DIMS)
        for first_split in range(0, splits, SPLITS):
            for next_split in tl.static_range(SPLITS):  # unrolled, so that the loads overlap
                split = first_split + next_split
                slot = (part + split * tokens + token) * H + q_head
                next_acc, next_peak, next_total = load_partial(
                    parts_ptr, peaks_ptr, totals_ptr, slot, here & (split < splits), dim, D, False
                )
                acc, peak, total = combine(acc, peak, total, next_acc, next_peak, next_total, False)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        at = ((first + token) * H + q_head)[:, None] * D + dim[None, :]
        tl.store(out_ptr + at, out, mask=here[:, None] & (dim < D)[None, :])
