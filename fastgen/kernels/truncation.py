"""top-k and top-p without a sort, for the sampler's kernels (fastgen.kernels.sampling says how they follow each other).

Both keep the tokens whose rank key is at least some key, the k-th largest, or the largest so that what it keeps holds
top_p of the tickets. To find it, tokens that might be kept are sorted into bins of equal width by their logit, of
which the tickets and the number are summed; the sums tell the bin that holds the key. The tokens of that bin, a few
hundred at most in a natural row, are listed; the key is found among them by bisection. Where the list overflows (many
equal logits), the bisection reads the row instead.

Top-p keeps a share of what top-k has kept, and that is only known up to the bin in which top-k cuts; so top-p's cut
may be in any of a few bins, and these are listed too.
"""

from __future__ import annotations

from fastgen.kernels import columns
from fastgen.kernels.launch import jit, tl
from fastgen.kernels.lottery import (
    as_tickets,
    finish,
    ids_of,
    is_edited,
    key_ids,
    key_logits,
    parameter,
    pick,
    rank_keys,
    read,
    scales,
    store_subs,
    top_p_of,
    weigh,
)

BINS = 2048
LISTED = 2048


@jit()
def find_floor(best, least, entry, tops, V: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr):
    """A logit that all tokens which top-k and top-p keep have at least, as high as is easy to say. (Of tokens without
    tickets some are below it.)"""
    top_k, top_p = tl.load(entry + columns.TOP_K), top_p_of(entry)
    reach = 30.6  # log(TICKETS) = 30.5
    if (top_k >= V) & (top_p < 1):  # tokens of less than (1 - top_p) / V each hold less than 1 - top_p together
        reach = tl.minimum(reach, tl.log(1.01 * V / (1 - top_p)).to(tl.float32))
    floor = tl.maximum(best - reach * parameter(entry, columns.TEMPERATURE), least)
    if top_k <= N:  # k sub-blocks have a token of at least this
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
    """The bins of logits from `floor` to `best`: the best is in bin 0."""
    span = tl.maximum(best - floor, 1e-30)
    scale = tl.div_rn(span * 0 + BINS, span)  # rounded alike in all kernels, which "/" is not bound to be
    return tl.minimum((best - x) * scale, BINS - 1).to(tl.int32)


@jit()
def fill_bins(
    x, tickets, best, least, entry, tops, bins, record,
    V: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Add a chunk's tokens to the bins of its row: the tickets, and for top-k their number, BINS further on."""
    floor = find_floor(best, least, entry, tops, V, N, SUBS)
    bits = floor.to(tl.int32, bitcast=True)
    tl.store(record + columns.FLOOR, bits.to(tl.int64))  # each program of the row writes the same
    within = x >= floor
    own = bins + bin_of(x, best, floor, BINS)
    tl.atomic_add(own, tickets, mask=within, sem="relaxed")
    if tl.load(entry + columns.TOP_K) < V:
        tl.atomic_add(own + BINS, tl.full(x.shape, 1, tl.int64), mask=within, sem="relaxed")


@jit()
def find_windows(entry, sums, bins, record, V: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, BINS: tl.constexpr):
    """Find the bins in which top-k and top-p cut, once all are filled. Returns whether nothing is to be cut."""
    sub, number = tl.arange(0, SUBS), tl.arange(0, BINS)
    total = tl.sum(tl.load(sums + sub, mask=sub < N, other=0, cache_modifier=".cg"))
    held = tl.load(bins + number, cache_modifier=".cg")
    top_k, top_p = tl.load(entry + columns.TOP_K), top_p_of(entry)
    k_bin = BINS
    low, high, k_count = total, total, total * 0  # top-k keeps tickets from low to high
    if top_k < V:
        counts = tl.load(bins + BINS + number, cache_modifier=".cg")
        if tl.sum(counts) >= top_k:  # or all that have tickets are kept
            k_bin = tl.sum((tl.cumsum(counts) < top_k).to(tl.int32))
            k_count = tl.sum(tl.where(number < k_bin, counts, 0))
            low = tl.sum(tl.where(number < k_bin, held, 0))
            high = tl.sum(tl.where(number <= k_bin, held, 0))
    first, last = k_bin, k_bin
    if top_p < 1:
        ends = tl.cumsum(held).to(tl.float64)
        first = tl.minimum(tl.sum((ends < low.to(tl.float64) * top_p).to(tl.int32)), BINS - 1)
        last = tl.minimum(tl.sum((ends < high.to(tl.float64) * top_p).to(tl.int32)), BINS - 1)
    tl.store(record + columns.TOTAL, total)
    tl.store(record + columns.K_BIN, k_bin)
    tl.store(record + columns.K_COUNT, k_count)
    tl.store(record + columns.K_HELD, low)
    tl.store(record + columns.P_FIRST, first)
    tl.store(record + columns.P_LAST, last)
    tl.store(record + columns.P_HELD, tl.sum(tl.where(number < first, held, 0)))
    uncut = (k_bin == BINS) & (top_p >= 1) & (parameter(entry, columns.MIN_P) == 0)
    tl.store(record + columns.TRUNCATED, tl.where(uncut, 0, 1))
    return uncut


@jit()
def row_sum(
    least_key, first, last, counted, logits_ptr, edited_ptr, edited, row, best, floor, high, low,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The tickets (or, if `counted`, the number) of a row's tokens in bins from `first` to `last` with keys of at least
    `least_key`."""
    total = row * 0
    for chunk in range((V + CHUNK - 1) // CHUNK):
        ids = ids_of(chunk, CHUNK, SUB)
        x = read(logits_ptr, edited_ptr, edited, row, ids, V, True)
        own = bin_of(x, best, floor, BINS)
        wanted = (x >= floor) & (own >= first) & (own <= last) & (rank_keys(x, ids) >= least_key)
        tickets = as_tickets(weigh(x, best, high, low))
        total += tl.sum(tl.where(wanted, tl.where(counted, tl.full(x.shape, 1, tl.int64), tickets), 0))
    return total


@jit()
def row_range(
    first, last, logits_ptr, edited_ptr, edited, row, best, floor,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The least and the largest key of a row's tokens in bins from `first` to `last`."""
    least, largest = row * 0 - columns.NO_KEY - 1, row * 0 + columns.NO_KEY
    for chunk in range((V + CHUNK - 1) // CHUNK):
        ids = ids_of(chunk, CHUNK, SUB)
        x = read(logits_ptr, edited_ptr, edited, row, ids, V, True)
        own = bin_of(x, best, floor, BINS)
        wanted = (x >= floor) & (own >= first) & (own <= last)
        keys = rank_keys(x, ids)
        least = tl.minimum(least, tl.min(tl.where(wanted, keys, -columns.NO_KEY - 1)))
        largest = tl.maximum(largest, tl.max(tl.where(wanted, keys, columns.NO_KEY)))
    return least, largest


@jit()
def find_key(
    record, listed, entry, logits_ptr, edited_ptr, edited, row, best, floor, high, low,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BINS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The least key that top-k and top-p keep, by bisection among the keys of the bins in question."""
    found = tl.load(record + columns.FOUND, cache_modifier=".cg")
    fits = found <= LISTED
    number = tl.arange(0, LISTED)
    keys = tl.load(listed + number, mask=number < found, other=columns.NO_KEY, cache_modifier=".cg")
    x = key_logits(keys)
    own = tl.where(number < found, bin_of(x, best, floor, BINS), -1)
    tickets = as_tickets(weigh(x, best, high, low))
    k_bin = tl.load(record + columns.K_BIN)
    top_k, top_p = tl.load(entry + columns.TOP_K), top_p_of(entry)
    held = tl.load(record + columns.TOTAL)
    threshold = held * 0 + columns.NO_KEY
    stage = tl.where(k_bin < BINS, 0, 1)
    while stage < tl.where(top_p < 1, 2, 1):  # first top-k, then top-p
        counted = stage == 0
        first = tl.where(counted, k_bin, tl.load(record + columns.P_FIRST))
        last = tl.where(counted, k_bin, tl.load(record + columns.P_LAST))
        before = tl.where(counted, tl.load(record + columns.K_COUNT), tl.load(record + columns.P_HELD))
        needed = tl.where(counted, top_k.to(tl.float64), held.to(tl.float64) * top_p)
        inside = (own >= first) & (own <= last)
        measure = tl.where(inside, tl.where(counted, tl.full(keys.shape, 1, tl.int64), tickets), 0)
        if fits:
            threshold = tl.min(tl.where(inside, keys, -columns.NO_KEY - 1))
            highest = tl.max(tl.where(inside, keys, columns.NO_KEY))
        else:
            threshold, highest = row_range(
                first, last, logits_ptr, edited_ptr, edited, row, best, floor, V, CHUNK, SUB, BINS
            )
        reach = highest - threshold
        step = held * 0 + 2**50
        while step > reach:
            step = step >> 1
        while step > 0:
            trial = threshold + step
            if fits:
                above = tl.sum(tl.where(keys >= trial, measure, 0))
            else:
                above = row_sum(
                    trial, first, last, counted, logits_ptr, edited_ptr, edited, row, best, floor, high, low, V,
                    CHUNK, SUB, BINS,
                )  # fmt: skip
            threshold = tl.where((before + above).to(tl.float64) >= needed, trial, threshold)
            step = step >> 1
        if counted:
            if fits:
                above = tl.sum(tl.where(inside & (keys >= threshold), tickets, 0))
            else:
                above = row_sum(
                    threshold, first, last, False, logits_ptr, edited_ptr, edited, row, best, floor, high, low, V,
                    CHUNK, SUB, BINS,
                )  # fmt: skip
            held = tl.load(record + columns.K_HELD) + above
        stage += 1
    return threshold


@jit("lanes_ptr", "positions_ptr", "edits")
def truncate_kernel(
    logits_ptr, chunks_ptr, record_ptr, lanes_ptr, positions_ptr, table_ptr, sums_ptr, last_token_ptr, out_ptr,
    counts_ptr, edits, edited_ptr, listed_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, CHUNKS: tl.constexpr, SUBS: tl.constexpr,
    BINS: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a chunk and row: sum what is kept for certain, and list what is in question; the program that is last
    of its row to be done decides about these, and draws."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    N: tl.constexpr = (V + SUB - 1) // SUB
    chunk, rows = tl.program_id(0), tl.num_programs(1)
    row = tl.program_id(1).to(tl.int64)
    record = record_ptr + row * columns.RECORD
    if tl.load(record + columns.TRUNCATED) != 0:
        lane = tl.load(lanes_ptr + row)
        position = tl.load(positions_ptr + row).to(tl.int64)
        entry, sums, chunks = table_ptr + lane * columns.ENTRY, sums_ptr + row * N, chunks_ptr + row * 4 * C
        listed = listed_ptr + row * LISTED
        edited = is_edited(entry, position, edits, True)
        number = tl.arange(0, CHUNKS)
        best = tl.max(tl.load(chunks + 2 * C + number, mask=number < C, other=float("-inf")))
        floor = tl.load(record + columns.FLOOR).to(tl.int32).to(tl.float32, bitcast=True)
        high, low = scales(parameter(entry, columns.TEMPERATURE))
        min_p = parameter(entry, columns.MIN_P)
        ids = ids_of(chunk, CHUNK, SUB)
        x = read(logits_ptr, edited_ptr, edited, row, ids, V, True)
        weights = weigh(x, best, high, low)
        own = tl.where(x >= floor, bin_of(x, best, floor, BINS), BINS)
        first, last = tl.load(record + columns.P_FIRST), tl.load(record + columns.P_LAST)
        tickets = tl.where((own < first) & (weights >= min_p), as_tickets(weights), 0)
        store_subs(sums, chunk, tl.sum(tickets, 1), N, CHUNK, SUB)
        open_bin = ((own >= first) & (own <= last)) | (own == tl.load(record + columns.K_BIN))
        open_bin &= own < BINS
        found = record + columns.FOUND + ids * 0
        slot = tl.atomic_add(found, tl.full(x.shape, 1, tl.int64), mask=open_bin, sem="relaxed")
        tl.store(listed + slot, rank_keys(x, ids), mask=open_bin & (slot < LISTED))
        tl.debug_barrier()  # all of this program's sums and keys are written before it counts as done
        if tl.atomic_add(record + columns.CUT, 1) == C - 1:
            key = find_key(
                record, listed, entry, logits_ptr, edited_ptr, edited, row, best, floor, high, low, V, CHUNK, SUB,
                BINS, LISTED,
            )  # fmt: skip
            tl.store(record + columns.KEPT, key)
            add_kept(
                key, record, listed, sums, logits_ptr, edited_ptr, edited, row, best, floor, high, low, min_p, V,
                CHUNK, SUB, LISTED,
            )  # fmt: skip
            token, logprob, untruncated = pick(
                logits_ptr, edited_ptr, edited, row, sums, record, entry, position, best, key, V, SUB, SUBS, True
            )
            finish(
                logits_ptr, chunks, out_ptr, last_token_ptr, counts_ptr, row, rows, lane, entry, token, logprob,
                untruncated, V, C, CHUNKS, True,
            )  # fmt: skip


@jit()
def add_kept(
    least_key, record, listed, sums, logits_ptr, edited_ptr, edited, row, best, floor, high, low, min_p,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Complete the sums with those listed that are kept; where not all are listed, sum the row anew."""
    found = tl.load(record + columns.FOUND, cache_modifier=".cg")
    if found <= LISTED:
        number = tl.arange(0, LISTED)
        keys = tl.load(listed + number, mask=number < found, other=columns.NO_KEY, cache_modifier=".cg")
        weights = weigh(key_logits(keys), best, high, low)
        kept = (number < found) & (keys >= least_key) & (weights >= min_p)
        tl.atomic_add(sums + key_ids(keys) // SUB, as_tickets(weights), mask=kept, sem="relaxed")
    else:
        for chunk in range((V + CHUNK - 1) // CHUNK):
            ids = ids_of(chunk, CHUNK, SUB)
            x = read(logits_ptr, edited_ptr, edited, row, ids, V, True)
            weights = weigh(x, best, high, low)
            kept = (rank_keys(x, ids) >= least_key) & (weights >= min_p)
            tickets = tl.where(kept, as_tickets(weights), 0)
            store_subs(sums, chunk, tl.sum(tickets, 1), (V + SUB - 1) // SUB, CHUNK, SUB)
    tl.debug_barrier()  # other threads of this program read them


@jit("lanes_ptr", "positions_ptr", "edits")
def kept_kernel(
    logits_ptr, chunks_ptr, record_ptr, lanes_ptr, positions_ptr, table_ptr, out_ptr, kept_ptr, edits, edited_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A program a chunk and row: which tokens the row could have drawn; after the draw, but for its counts."""
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    entry = table_ptr + tl.load(lanes_ptr + row) * columns.ENTRY
    position = tl.load(positions_ptr + row).to(tl.int64)
    number = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(chunks_ptr + (row * 4 + 2) * C + number, mask=number < C, other=float("-inf")))
    ids = ids_of(chunk, CHUNK, SUB)
    x = read(logits_ptr, edited_ptr, is_edited(entry, position, edits, True), row, ids, V, True)
    temperature = parameter(entry, columns.TEMPERATURE)
    token = tl.load(out_ptr + row)
    if temperature == 0:
        kept = ids == token
    else:
        high, low = scales(temperature)
        weights = weigh(x, best, high, low)
        kept = (x > float("-inf")) & (weights >= parameter(entry, columns.MIN_P)) & (token >= 0)
        if (tl.load(entry + columns.TOP_K) < V) | (top_p_of(entry) < 1):
            least_key = tl.load(record_ptr + row * columns.RECORD + columns.KEPT)
            kept &= (rank_keys(x, ids) >= least_key) & (as_tickets(weights) > 0)
    tl.store(kept_ptr + row * V + ids, kept, mask=ids < V)
