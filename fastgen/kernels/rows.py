"""Operations on a row of logits that the kernels of sampling and scoring share: weights, sums and rank keys."""

from __future__ import annotations

from fastgen.kernels.launch import constant, jit, tl

LOG2E = constant(1.4426950216293335)  # log2(e) as a float32
NO_KEY = constant(-(2**63))  # below all rank keys


@jit()
def scale_of(temperature):
    """Return log2(e) / temperature; a greedy row, whose temperature is 0, gets log2(e)."""
    return tl.div_rn(tl.full([], LOG2E, tl.float32), tl.where(temperature == 0, 1.0, temperature))


@jit()
def weigh(x, best, scale):
    """Return exp((x - best) / temperature) for x <= best, given the scale of the temperature."""
    return tl.exp2((x - best) * scale)


@jit()
def fixed_sum(weights):
    """Return the sum of weights from 0 to 1 in units of 2**-30, as float32.

    It is a sum of integers, because the compiler chooses the order of a sum, which may differ between kernels.
    """
    return tl.sum(tl.fma(weights, 1073741824.0, 0.5).to(tl.int32).to(tl.int64)).to(tl.float32)


@jit()
def chunk_sum(x, scale):
    """Return the largest of x and the fixed_sum of exp((x - largest) / temperature). A NaN counts as infinite."""
    top = tl.max(tl.where(x == x, x, float("inf")))
    return top, fixed_sum(weigh(x, tl.where(top > float("-inf"), top, 0.0), scale))


@jit()
def log_sum(tops, sums, scale):
    """Return the largest logit of a row, and the logarithm of its sum of exp((logit - largest) / temperature), given
    the chunk_sum of each chunk."""
    top = tl.max(tops)
    shares = tl.where(sums > 0, sums * weigh(tops, top, scale), 0.0)
    total = tl.sum((shares + 0.5).to(tl.int64)).to(tl.float32) * 9.313225746154785e-10  # 2**-30
    return top, tl.log(total)


@jit()
def as_mass(weights):
    """Return int64(weights * 2**44) of weights from 0 to 1, by shifts: many GPUs convert to 64-bit integers slowly."""
    bits = weights.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << 21
    return mantissa >> tl.minimum(127 - (bits >> 23), 63).to(tl.int64)


@jit()
def rank_keys(x, ids):
    """Return distinct int64 of 51 bits: the larger logit has the larger key; among equals, the lower id."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is the equal of 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats run backwards
    return (ordered.to(tl.int64) << 18) | (0x3FFFF - ids)


@jit()
def key_logits(keys):
    """Return the logits of rank keys."""
    ordered = (keys >> 18).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def key_ids(keys):
    """Return the token ids of rank keys."""
    return 0x3FFFF - (keys & 0x3FFFF)


@jit()
def read(logits_ptr, edited_ptr, edited, row, ids, V: tl.constexpr):
    """Return a row's logits at `ids` after the edits: float32, -inf beyond V."""
    here = ids < V
    at = row * V + ids
    untouched = tl.load(logits_ptr + at, mask=here & (edited == 0), other=float("-inf")).to(tl.float32)
    return tl.where(edited, tl.load(edited_ptr + at, mask=here & edited, other=float("-inf")), untouched)


@jit()
def last_of_row(done, C: tl.constexpr):
    """Count this program's chunk as done; return whether it is the row's last, which then reads what the others wrote.

    done: a counter that is 0 before the first chunk and after the last.
    """
    tl.debug_barrier()  # all threads of this program have written
    last = tl.atomic_add(done, 1) == C - 1
    if last:
        tl.store(done, 0)
    return last
