"""Top-k and top-p without a sort, for the sampler's kernels (fastgen.kernels.triton.sampling says when they run).

Both keep the tokens whose rank key is at least a certain key: the k-th largest key, or the largest key for which the
kept tokens hold top_p of the probability mass. Both also drop tokens whose probability is more than a factor of
exp(REACH) below the largest. The mass of a token is an integer, int(2**44 * probability / largest probability), because
sums of integers are exact in any order.

bin_kernel sorts the tokens that might be kept into bins of equal width by their logits, and computes the mass and the
number of tokens of each bin. The sums show which bin holds the key. cut_kernel lists the tokens of that bin, at most a
few hundred in typical rows, and finds the key among them by bisection. If the list overflows, because of many equal
logits, the bisection reads the row instead.

Top-p keeps a share of the mass that top-k has kept. The bins show this mass only up to the bin in which top-k cuts.
Therefore top-p may cut in any of a few bins, and the tokens of all of these are listed, too.
"""

from __future__ import annotations

from fastgen.kernels.triton import sampler_rows as layout
from fastgen.kernels.triton.jit import constant, jit, tl
from fastgen.kernels.triton.sampler_rows import (
    NO_KEY,
    as_mass,
    is_cut,
    is_edited,
    key_logits,
    last_of_row,
    parameter,
    rank_keys,
    read,
    scale_of,
    top_p_of,
    weigh,
)

BINS = 2048
LISTED = 2048
REACH = constant(30.5)  # log(2**44); a less likely token has no mass


@jit()
def find_best(tops, N: tl.constexpr, SUBS: tl.constexpr):
    """Return the largest logit of a row, given the largest logits of its sub-blocks."""
    sub = tl.arange(0, SUBS)
    return tl.max(tl.load(tops + sub, mask=sub < N, other=float("-inf")))


@jit()
def find_floor(best, least, entry, tops, V: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr):
    """Return a lower bound of the logits that top-k and top-p keep, as high as is cheap to compute."""
    top_k, top_p = tl.load(entry + layout.TOP_K), top_p_of(entry)
    temperature = parameter(entry, layout.TEMPERATURE)
    floor = tl.maximum(best - REACH * temperature, least)
    if (top_k >= V) & (top_p < 1):  # together, tokens of less than (1 - top_p) / V each hold less than 1 - top_p
        floor = tl.maximum(floor, best - tl.log(1.01 * V / (1 - top_p)).to(tl.float32) * temperature)
    if top_k <= N:  # find a bound that at least k sub-blocks reach
        sub = tl.arange(0, SUBS)
        above = tl.load(tops + sub, mask=sub < N, other=float("-inf"))
        high = best
        for _ in range(12):
            middle = floor + (high - floor) * 0.5
            enough = tl.sum((above >= middle).to(tl.int32)) >= top_k
            floor, high = tl.where(enough, middle, floor), tl.where(enough, high, middle)
    return floor


@jit()
def bin_of(x, best, floor, BINS: tl.constexpr):
    """Return the bins of logits from `floor` to `best`, with `best` in bin 0."""
    span = tl.maximum(best - floor, 1e-30)
    scale = tl.div_rn(span * 0 + BINS, span)  # rounded in the same way in all kernels, which "/" does not guarantee
    return tl.minimum((best - x) * scale, BINS - 1).to(tl.int32)


@jit("lanes_ptr", "positions_ptr", "edits")
def bin_kernel(
    logits_ptr, edited_ptr, edits, lanes_ptr, positions_ptr, table_ptr, record_ptr, tops_ptr, lows_ptr, bins_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, CHUNKS: tl.constexpr, SUBS: tl.constexpr,
    BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the tokens of one chunk to the bins of its row, with one program per chunk and row.

    The masses are in the first BINS numbers, and for top-k, the numbers of tokens follow in the next BINS. The last
    program of a row finds the bins in which top-k and top-p cut.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    N: tl.constexpr = (V + SUB - 1) // SUB
    chunk = tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)  # the last rows are still in the cache
    entry = table_ptr + tl.load(lanes_ptr + row) * layout.ENTRY
    record, tops, bins = record_ptr + row * layout.RECORD, tops_ptr + row * N, bins_ptr + row * 2 * BINS
    best = find_best(tops, N, SUBS)
    if is_cut(entry, V) & (best > float("-inf")) & (best < float("inf")):
        number = tl.arange(0, CHUNKS)
        least = tl.min(tl.load(lows_ptr + row * C + number, mask=number < C, other=float("inf")))
        floor = find_floor(best, least, entry, tops, V, N, SUBS)
        edited = is_edited(entry, tl.load(positions_ptr + row).to(tl.int64), edits)
        x = read(logits_ptr, edited_ptr, edited, row, chunk * CHUNK + tl.arange(0, CHUNK), V)
        mass = as_mass(weigh(x, best, scale_of(parameter(entry, layout.TEMPERATURE))))
        within = x >= floor
        own = bins + bin_of(x, best, floor, BINS)
        tl.atomic_add(record + layout.TOTAL, tl.sum(mass), sem="relaxed")
        tl.atomic_add(own, mass, mask=within, sem="relaxed")
        if tl.load(entry + layout.TOP_K) < V:
            tl.atomic_add(own + BINS, tl.full(x.shape, 1, tl.int64), mask=within, sem="relaxed")
        if last_of_row(record + layout.DONE, C):
            bits = floor.to(tl.int32, bitcast=True)
            tl.store(record + layout.FLOOR, bits.to(tl.int64))
            find_windows(entry, bins, record, V, BINS)


@jit()
def find_windows(entry, bins, record, V: tl.constexpr, BINS: tl.constexpr):
    """Write the bins in which top-k and top-p cut to the record, given the filled bins."""
    number = tl.arange(0, BINS)
    total = tl.load(record + layout.TOTAL, cache_modifier=".cg")
    held = tl.load(bins + number, cache_modifier=".cg")
    top_k, top_p = tl.load(entry + layout.TOP_K), top_p_of(entry)
    k_bin = BINS
    low, high, k_count = total, total, total * 0  # bounds of the mass that top-k keeps; tokens before its bin
    if top_k < V:
        counts = tl.load(bins + BINS + number, cache_modifier=".cg")
        if tl.sum(counts) >= top_k:  # otherwise top-k keeps all tokens within reach
            k_bin = tl.sum((tl.cumsum(counts) < top_k).to(tl.int32))
            k_count = tl.sum(tl.where(number < k_bin, counts, 0))
            low = tl.sum(tl.where(number < k_bin, held, 0))
            high = tl.sum(tl.where(number <= k_bin, held, 0))
    first, last = k_bin, k_bin
    if top_p < 1:
        ends = tl.cumsum(held).to(tl.float64)
        first = tl.minimum(tl.sum((ends < low.to(tl.float64) * top_p).to(tl.int32)), BINS - 1)
        last = tl.minimum(tl.sum((ends < high.to(tl.float64) * top_p).to(tl.int32)), BINS - 1)
    tl.store(record + layout.K_BIN, k_bin)
    tl.store(record + layout.K_COUNT, k_count)
    tl.store(record + layout.K_MASS, low)
    tl.store(record + layout.P_FIRST, first)
    tl.store(record + layout.P_LAST, last)
    tl.store(record + layout.P_MASS, tl.sum(tl.where(number < first, held, 0)))


@jit("lanes_ptr", "positions_ptr", "edits")
def cut_kernel(
    logits_ptr, edited_ptr, edits, lanes_ptr, positions_ptr, table_ptr, record_ptr, tops_ptr, listed_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, SUBS: tl.constexpr, BINS: tl.constexpr,
    LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the tokens of a chunk in the bins where top-k and top-p cut, with one program per chunk and row.

    The last program of a row finds the smallest key that they keep.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    N: tl.constexpr = (V + SUB - 1) // SUB
    row = tl.program_id(1).to(tl.int64)
    entry = table_ptr + tl.load(lanes_ptr + row) * layout.ENTRY
    record, listed = record_ptr + row * layout.RECORD, listed_ptr + row * LISTED
    best = find_best(tops_ptr + row * N, N, SUBS)
    if is_cut(entry, V) & (best > float("-inf")) & (best < float("inf")):
        floor = tl.load(record + layout.FLOOR).to(tl.int32).to(tl.float32, bitcast=True)
        edited = is_edited(entry, tl.load(positions_ptr + row).to(tl.int64), edits)
        ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        x = read(logits_ptr, edited_ptr, edited, row, ids, V)
        own = tl.where(x >= floor, bin_of(x, best, floor, BINS), BINS)
        in_p = (own >= tl.load(record + layout.P_FIRST)) & (own <= tl.load(record + layout.P_LAST))
        in_question = (in_p | (own == tl.load(record + layout.K_BIN))) & (own < BINS)
        found = record + layout.FOUND + ids * 0
        slot = tl.atomic_add(found, tl.full(x.shape, 1, tl.int64), mask=in_question, sem="relaxed")
        tl.store(listed + slot, rank_keys(x, ids), mask=in_question & (slot < LISTED))
        if last_of_row(record + layout.DONE, C):
            key = find_key(
                record, listed, entry, logits_ptr, edited_ptr, edited, row, best, floor, V, CHUNK, BINS, LISTED
            )
            tl.store(record + layout.LEAST_KEY, key)


@jit()
def find_key(
    record, listed, entry, logits_ptr, edited_ptr, edited, row, best, floor,
    V: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Return the smallest key that top-k and top-p keep, by bisection among the keys of the bins in question."""
    scale = scale_of(parameter(entry, layout.TEMPERATURE))
    found = tl.load(record + layout.FOUND, cache_modifier=".cg")
    number = tl.arange(0, LISTED)
    keys = tl.load(listed + number, mask=number < found, other=NO_KEY, cache_modifier=".cg")
    x = key_logits(keys)
    own = tl.where(number < found, bin_of(x, best, floor, BINS), -1)
    mass = as_mass(weigh(x, best, scale))
    k_bin = tl.load(record + layout.K_BIN)
    top_p = top_p_of(entry)
    held = tl.load(record + layout.TOTAL)
    highest = rank_keys(best, 0)
    threshold = rank_keys(floor, 0xFFFFF)
    stage = tl.where(k_bin < BINS, 0, 1)
    while stage < tl.where(top_p < 1, 2, 1):  # first top-k, then top-p
        counted = stage == 0
        first = tl.where(counted, k_bin, tl.load(record + layout.P_FIRST))
        last = tl.where(counted, k_bin, tl.load(record + layout.P_LAST))
        before = tl.where(counted, tl.load(record + layout.K_COUNT), tl.load(record + layout.P_MASS))
        needed = tl.where(counted, tl.load(entry + layout.TOP_K).to(tl.float64), held.to(tl.float64) * top_p)
        inside = (own >= first) & (own <= last)
        measure = tl.where(inside, tl.where(counted, tl.full(keys.shape, 1, tl.int64), mass), 0)
        beyond = highest + 1  # keys of at least `threshold` hold enough, those of at least `beyond` do not
        if found <= LISTED:
            threshold = tl.maximum(threshold, tl.min(tl.where(inside, keys, highest)))
            beyond = tl.max(tl.where(inside, keys, NO_KEY)) + 1
        while beyond - threshold > 1:
            trial = threshold + ((beyond - threshold) >> 1)
            if found <= LISTED:
                above = tl.sum(tl.where(keys >= trial, measure, 0))
            else:
                above = row_sum(
                    trial, first, last, counted, logits_ptr, edited_ptr, edited, row, best, floor, scale, V, CHUNK, BINS
                )
            enough = (before + above).to(tl.float64) >= needed
            threshold, beyond = tl.where(enough, trial, threshold), tl.where(enough, beyond, trial)
        if counted:
            if found <= LISTED:
                above = tl.sum(tl.where(inside & (keys >= threshold), mass, 0))
            else:
                above = row_sum(
                    threshold, first, last, False, logits_ptr, edited_ptr, edited, row, best, floor, scale, V, CHUNK,
                    BINS,
                )  # fmt: skip
            held = tl.load(record + layout.K_MASS) + above
        stage += 1
    return threshold


@jit()
def row_sum(
    least_key, first, last, counted, logits_ptr, edited_ptr, edited, row, best, floor, scale,
    V: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Return the mass (or if `counted`, the number) of a row's tokens in the bins from `first` to `last` whose keys are
    at least `least_key`."""
    total = row * 0
    for chunk in range((V + CHUNK - 1) // CHUNK):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = read(logits_ptr, edited_ptr, edited, row, ids, V)
        own = bin_of(x, best, floor, BINS)
        wanted = (x >= floor) & (own >= first) & (own <= last) & (rank_keys(x, ids) >= least_key)
        mass = as_mass(weigh(x, best, scale))
        total += tl.sum(tl.where(wanted, tl.where(counted, tl.full(x.shape, 1, tl.int64), mass), 0))
    return total
