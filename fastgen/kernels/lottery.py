"""What the sampler's kernels have in common: tickets, rank keys, random numbers and the draw itself (fastgen.sampler
says what they mean, fastgen.kernels.columns where they are kept)."""

from __future__ import annotations

from fastgen.kernels import columns
from fastgen.kernels.launch import jit, tl


@jit()
def parameter(entry, column):
    """A parameter of a lane as float32."""
    return tl.load(entry + column).to(tl.float64, bitcast=True).to(tl.float32)


@jit()
def top_p_of(entry):
    """A lane's top_p, as float64."""
    return tl.load(entry + columns.TOP_P).to(tl.float64, bitcast=True)


@jit()
def scales(temperature):
    """log2(e) / temperature as a float32 and what that leaves."""
    factor = 1.4426950408889634 / temperature.to(tl.float64)
    high = factor.to(tl.float32)
    return high, (factor - high.to(tl.float64)).to(tl.float32)


@jit()
def weigh(x, best, high, low):
    """exp((x - best) / temperature) for x <= best, within a few units in the last place; 0 below 2**-64.

    The whole part of the exponent and the rest go apart: exp2 of a large number lacks the bits that the rest needs.
    """
    distance = x - best
    exponent = distance * high
    whole = tl.maximum(tl.floor(exponent + 0.5), -126.0)
    rest = tl.fma(distance, low, tl.fma(distance, high, -whole))
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent > -64.0, tl.exp2(rest) * power, 0.0)


@jit()
def as_tickets(weights):
    """int64(weights * 2**44) of weights from 0 to 1, by shifts: many GPUs convert to 64-bit integers slowly."""
    bits = weights.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << 21
    return mantissa >> tl.minimum(127 - (bits >> 23), 63).to(tl.int64)


@jit()
def rank_keys(x, ids):
    """Distinct int64 of 51 bits: the larger logit has the larger; among equals, the lower id."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is the equal of 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats run backwards
    return (ordered.to(tl.int64) << 18) | (0x3FFFF - ids)


@jit()
def key_logits(keys):
    ordered = (keys >> 18).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def key_ids(keys):
    return 0x3FFFF - (keys & 0x3FFFF)


@jit()
def uniform(entry, position):
    """A float64 in [0, 1) of 53 random bits, for a lane and a position: Philox4x32-10."""
    index = tl.load(entry + columns.SAMPLE_INDEX)
    third = (position >> 32).to(tl.uint32)
    words = tl.philox(tl.load(entry + columns.SEED), index.to(tl.uint32), position.to(tl.uint32), third, third ^ third)
    bits = ((words[0] >> 5).to(tl.int64) << 26) + (words[1] >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@jit()
def held_back(entry, position):
    """How many stop ids a row must not say yet."""
    early = position - tl.load(entry + columns.PROMPT_LEN) < tl.load(entry + columns.MIN_TOKENS)
    return tl.where(early, tl.load(entry + columns.STOPS), 0)


@jit()
def is_edited(entry, position, edits, FULL: tl.constexpr):
    """Whether a row's logits are edited before the draw; edits: 0 where no row's are, 2 where all are (masks)."""
    edited = edits == 2
    if FULL:
        own = tl.load(entry + columns.PENALIZED) | tl.load(entry + columns.BIASES) | held_back(entry, position)
        edited |= (edits != 0) & (own != 0)
    return edited


@jit()
def read(logits_ptr, edited_ptr, edited, row, ids, V: tl.constexpr, FULL: tl.constexpr):
    """A row's logits at `ids`, as they were edited: float32, -inf beyond V."""
    here = ids < V
    at = row * V + ids
    if FULL:
        untouched = tl.load(logits_ptr + at, mask=here & (edited == 0), other=float("-inf")).to(tl.float32)
        return tl.where(edited, tl.load(edited_ptr + at, mask=here & edited, other=float("-inf")), untouched)
    else:
        return tl.load(logits_ptr + at, mask=here, other=float("-inf")).to(tl.float32)


@jit()
def ids_of(chunk, CHUNK: tl.constexpr, SUB: tl.constexpr):
    """The ids of a chunk: a row for each sub-block."""
    return chunk * CHUNK + tl.arange(0, CHUNK // SUB)[:, None] * SUB + tl.arange(0, SUB)[None, :]


@jit()
def store_subs(ptr, chunk, values, N: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr):
    """Write a value for each sub-block of a chunk."""
    sub = chunk * (CHUNK // SUB) + tl.arange(0, CHUNK // SUB)
    tl.store(ptr + sub, values, mask=sub < N)


@jit()
def fixed_sum(weights):
    """The sum of weights from 0 to 1, in units of 2**-30, as int64: it does not depend on the order, which is the
    compiler's to choose."""
    return tl.sum(tl.fma(weights, 1073741824.0, 0.5).to(tl.int32).to(tl.int64))


@jit()
def log_sum(tops, totals, high, low):
    """The largest logit of a row, and the logarithm of its sum of exp((logit - largest) / temperature), from those of
    its chunks, the sums in units of 2**-30."""
    top = tl.max(tops)
    shares = tl.where(totals > 0, totals * weigh(tops, top, high, low), 0.0)
    total = tl.sum((shares + 0.5).to(tl.int64)).to(tl.float64) * 9.313225746154785e-10
    return top, tl.log(total).to(tl.float32)


@jit()
def pick(
    logits_ptr, edited_ptr, edited, row, sums, record, entry, position, best, least_key,
    V: tl.constexpr, SUB: tl.constexpr, SUBS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Draw from what has a rank key of at least `least_key` and min_p of the best weight, and whose tickets are summed
    in `sums`: the token, its logprob, and what that is without truncation."""
    last: tl.constexpr = (V + SUB - 1) // SUB - 1
    sub = tl.arange(0, SUBS)
    held = tl.load(sums + sub, mask=sub <= last, other=0, cache_modifier=".cg")  # other programs wrote them
    total = tl.sum(held)
    winner = (uniform(entry, position) * total.to(tl.float64)).to(tl.int64)
    chosen = tl.minimum(tl.sum((tl.cumsum(held) <= winner).to(tl.int32)), last)
    before = tl.sum(tl.where(sub < chosen, held, 0))
    ids = chosen * SUB + tl.arange(0, SUB)
    x = read(logits_ptr, edited_ptr, edited, row, ids, V, FULL)
    temperature = parameter(entry, columns.TEMPERATURE)
    high, low = scales(temperature)
    weights = weigh(x, best, high, low)
    kept = weights >= parameter(entry, columns.MIN_P)
    if FULL:
        kept &= rank_keys(x, ids) >= least_key
    ends = before + tl.cumsum(tl.where(kept, as_tickets(weights), 0))
    token = tl.minimum(chosen * SUB + tl.sum((ends <= winner).to(tl.int32)), V - 1)
    chosen_x = tl.sum(tl.where(ids == token, x, 0.0))
    weight = tl.div_rn(chosen_x - best, temperature).to(tl.float64)
    whole = tl.load(record + columns.TOTAL, cache_modifier=".cg")
    whole = tl.where(whole > 0, whole, total)
    logprob = weight - tl.log(total.to(tl.float64) * 5.684341886080802e-14)  # 2**-44
    untruncated = weight - tl.log(whole.to(tl.float64) * 5.684341886080802e-14)
    return token.to(tl.int64), logprob.to(tl.float32), untruncated.to(tl.float32)


@jit()
def finish(
    logits_ptr, chunks, out_ptr, last_token_ptr, counts_ptr, row, rows, lane, entry, token, logprob, untruncated,
    V: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Note what a row drew, -1 for nothing: in `out`, int32 [6, rows] (token, the bits of logprob, untruncated and raw
    logprob, and of the row's largest logit and its log-sum), as its lane's last token, and in its counts."""
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(chunks + chunk, mask=chunk < C, other=float("-inf"))
    top, log_total = log_sum(tops, tl.load(chunks + C + chunk, mask=chunk < C, other=0.0), columns.HIGH, columns.LOW)
    known = tl.maximum(token, 0)
    raw = tl.load(logits_ptr + row * V + known).to(tl.float32) - top - log_total
    raw = tl.where((token >= 0) & (top < float("inf")), raw, float("nan"))
    tl.store(out_ptr + row, token.to(tl.int32))
    tl.store(out_ptr + rows + row, logprob.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * rows + row, untruncated.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3 * rows + row, raw.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 4 * rows + row, top.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 5 * rows + row, log_total.to(tl.int32, bitcast=True))
    tl.store(last_token_ptr + lane, known)
    if FULL and tl.load(entry + columns.PENALIZED) != 0:
        tl.atomic_add(counts_ptr + lane * V + known, 1, sem="relaxed")
