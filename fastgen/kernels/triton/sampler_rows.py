"""Common parts of the sampler's kernels: the layout of their memory, operations on a row of logits, and the noise of
fastgen.kernels.noise.

A row of V logits is divided into C chunks, with one program each. Top-k also needs the largest logit of each of N
sub-blocks. The scratch memory of R rows:

- chunks: float32 [R, 7, C], the results of each chunk, see below.
- tops: float32 [R, N], the largest logit of each sub-block after the edits. A NaN counts as infinite.
- lows: float32 [R, C], the smallest finite logit of each chunk after the edits.
- record: int64 [R, 12], see below.

Programs of different chunks only add integers to the same number, and chunks are combined in a fixed order. Therefore a
row gets the same bits in any batch and from every variant of the kernels.
"""

from __future__ import annotations

from fastgen.kernels.launch import INTERPRETED
from fastgen.kernels.triton.jit import constant, jit, tl

CHUNK = 4096
SUB = 512
WARPS = 8

# Rows of `chunks`. A sum adds exp((logit - largest logit of the chunk) / temperature), in units of 2**-30.
RESULTS = constant(7)
RAW_TOP = constant(0)  # the largest untouched logit
RAW_SUM = constant(1)  # the sum over the untouched logits, at temperature 1
TOP = constant(2)  # the largest logit after the edits
SUM = constant(3)
KEPT_SUM = constant(4)  # the sum over the tokens that truncation kept
SCORE = constant(5)  # the largest score of a kept token
WINNER = constant(6)  # the token with this score, as the bits of an int32

# Columns of `record`.
RECORD = constant(12)
DONE = constant(0)  # number of chunks that the current kernel has finished; 0 between kernels
FOUND = constant(1)  # number of candidates in the list: tokens of the bins in which top-k and top-p cut
LEAST_KEY = constant(2)  # the smallest rank key that top-k and top-p keep
TOTAL = constant(3)  # mass of the row
FLOOR = constant(4)  # bits of the smallest logit that is in a bin
K_BIN = constant(5)  # the bin in which top-k cuts; BINS if it does not cut
K_COUNT = constant(6)  # number of tokens in the bins before K_BIN
K_MASS = constant(7)  # mass of these tokens
P_FIRST = constant(8)  # the first bin in which top-p may cut
P_LAST = constant(9)  # the last bin in which top-p may cut
P_MASS = constant(10)  # mass of the bins before P_FIRST

# Columns of a lane's row in the table: int64, or the bits of float64.
ENTRY = constant(14)
SEED = constant(0)
SAMPLE_INDEX = constant(1)
PROMPT_LEN = constant(2)
MIN_TOKENS = constant(3)
TOP_K = constant(4)  # V if there is no top-k
PENALIZED = constant(5)
BIASES = constant(6)  # number of biased tokens in the token table
STOPS = constant(7)  # number of stop ids, which follow the biased tokens
TEMPERATURE = constant(8)
MIN_P = constant(9)
REPETITION = constant(10)
PRESENCE = constant(11)
FREQUENCY = constant(12)
TOP_P = constant(13)


@jit()
def parameter(entry, column):
    """Return a lane's parameter as float32."""
    return tl.load(entry + column).to(tl.float64, bitcast=True).to(tl.float32)


@jit()
def top_p_of(entry):
    """Return a lane's top_p as float64."""
    return tl.load(entry + TOP_P).to(tl.float64, bitcast=True)


@jit()
def held_back(entry, position):
    """Return the number of stop ids that are forbidden at `position`, because of min_tokens."""
    early = position - tl.load(entry + PROMPT_LEN) < tl.load(entry + MIN_TOKENS)
    return tl.where(early, tl.load(entry + STOPS), 0)


@jit()
def is_edited(entry, position, edits):
    """Return whether a row's logits are edited before the draw. edits: 0 if no row is edited, 2 if all are (by
    masks)."""
    own = tl.load(entry + PENALIZED) | tl.load(entry + BIASES) | held_back(entry, position)
    return (edits == 2) | ((edits != 0) & (own != 0))


@jit()
def is_cut(entry, V: tl.constexpr):
    """Return whether top-k or top-p applies to a row; a greedy row ignores them."""
    cut = (tl.load(entry + TOP_K) < V) | (top_p_of(entry) < 1)
    return cut & (parameter(entry, TEMPERATURE) > 0)


LOG2E = constant(1.4426950216293335)  # log2(e) as a float32
NO_KEY = constant(-(2**63))  # below all rank keys


@jit()
def scale_of(temperature):
    """Return log2(e) / temperature, or log2(e) for a greedy row, whose temperature is 0."""
    return tl.div_rn(tl.full([], LOG2E, tl.float32), tl.where(temperature == 0, 1.0, temperature))


@jit()
def weigh(x, best, scale):
    """Return exp((x - best) / temperature) for x <= best, given the scale of the temperature."""
    return tl.exp2((x - best) * scale)


@jit()
def fixed_sum(weights):
    """Return the sum of weights from 0 to 1 in units of 2**-30, as float32.

    Integers are added, because the compiler chooses the order of a sum, which may differ between kernels.
    """
    return tl.sum(tl.fma(weights, 1073741824.0, 0.5).to(tl.int32).to(tl.int64)).to(tl.float32)


@jit()
def chunk_sum(x, scale):
    """Return the largest of x and the fixed_sum of exp((x - largest) / temperature). A NaN counts as infinite."""
    top = tl.max(tl.where(x == x, x, float("inf")))
    return top, fixed_sum(weigh(x, tl.where(top > float("-inf"), top, 0.0), scale))


@jit()
def log_sum(tops, sums, scale):
    """Return the largest logit of a row and the logarithm of its sum of exp((logit - largest) / temperature), given the
    chunk_sum of each chunk."""
    top = tl.max(tops)
    shares = tl.where(sums > 0, sums * weigh(tops, top, scale), 0.0)
    total = tl.sum((shares + 0.5).to(tl.int64)).to(tl.float32) * 9.313225746154785e-10  # 2**-30
    return top, tl.log(total)


@jit()
def as_mass(weights):
    """Return int64(weights * 2**44) for weights from 0 to 1, by shifts, since many GPUs are slow at converting to
    int64.
    """
    bits = weights.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << 21
    return mantissa >> tl.minimum(127 - (bits >> 23), 63).to(tl.int64)


@jit()
def rank_keys(x, ids):
    """Return distinct int64 keys, whose last 20 bits are for the id. Larger logits have larger keys, and among equal
    logits, lower ids do."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats are in reverse order
    return (ordered.to(tl.int64) << 20) | (0xFFFFF - ids)


@jit()
def key_logits(keys):
    """Return the logits of rank keys."""
    ordered = (keys >> 20).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def key_ids(keys):
    """Return the token ids of rank keys."""
    return 0xFFFFF - (keys & 0xFFFFF)


@jit()
def read(logits_ptr, edited_ptr, edited, row, ids, V: tl.constexpr):
    """Return a row's logits at `ids` after the edits, in float32, -inf beyond V."""
    here = ids < V
    at = row * V + ids
    untouched = tl.load(logits_ptr + at, mask=here & (edited == 0), other=float("-inf")).to(tl.float32)
    return tl.where(edited, tl.load(edited_ptr + at, mask=here & edited, other=float("-inf")), untouched)


@jit()
def last_of_row(done, C: tl.constexpr):
    """Count this program's chunk as done, and return whether it is the last of its row.

    The last program can read what the others have written. done: a counter that is 0 before the first chunk and after
    the last one.
    """
    tl.debug_barrier()  # all threads of this program have written
    last = tl.atomic_add(done, 1) == C - 1
    if last:
        tl.store(done, 0)
    return last


ROUNDS = constant(7)
LARGEST = constant(1 - 2**-24)  # the largest u; the largest words would round to 1
IN_SOFTWARE = constant(INTERPRETED)


@jit()
def log2(x):
    """Return log2(x) with an error below 2**-22 (absolute near 1, else relative). tl.log2 takes twenty instructions."""
    if IN_SOFTWARE:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit()
def noise(entry, position, first, COUNT: tl.constexpr):
    """Return the Gumbel noise of COUNT tokens from `first` on, a multiple of 4, for a lane and a position.

    The noise is divided by log(2), and lacks a constant that does not change which score is the largest.
    """
    groups = first // 4 + tl.arange(0, COUNT // 4)
    words = tl.philox(
        tl.load(entry + SEED), position.to(tl.uint32), groups.to(tl.uint32),
        tl.load(entry + SAMPLE_INDEX).to(tl.uint32), (position >> 32).to(tl.uint32), ROUNDS,
    )  # fmt: skip
    word = tl.interleave(tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3]))
    u = tl.minimum(tl.fma(word.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10), LARGEST)
    # The logarithm of a number near 1 has few correct bits, but the first terms of its series are exact enough.
    series = u * LOG2E * tl.fma(u, tl.fma(u, tl.fma(u, 0.25, 0.3333333333), 0.5), 1.0)
    return -log2(tl.where(u < 0.03125, series, -log2(1.0 - u)))
