"""Layout of the memory that the sampler's kernels share: a lane's parameters, and scratch memory of a row.

A row of V logits is cut into C chunks, one program each. Top-k also needs the largest logit of each of N sub-blocks.
Scratch memory of R rows:

- chunks: float32 [R, 7, C], results of each chunk, see below.
- tops: float32 [R, N], the largest logit of each sub-block after the edits. A NaN counts as infinite.
- lows: float32 [R, C], the least finite logit of each chunk after the edits.
- record: int64 [R, 12], see below.

A program adds to what programs of other chunks add to as well only by integers, and chunks are combined in a fixed
order. So a row gets the same bits in any batch and from each variant of the kernels.
"""

from __future__ import annotations

from fastgen.kernels.launch import constant, jit, tl

CHUNK = 4096
SUB = 512
WARPS = 8

# Rows of `chunks`. A sum is of exp((logit - largest logit of the chunk) / temperature), in units of 2**-30.
RESULTS = constant(7)
RAW_TOP = constant(0)  # the largest untouched logit
RAW_SUM = constant(1)  # its sum, at temperature 1
TOP = constant(2)  # the largest logit after the edits
SUM = constant(3)
KEPT_SUM = constant(4)  # the sum over the tokens that truncation kept
SCORE = constant(5)  # the largest score of a kept token
WINNER = constant(6)  # the token with this score, as the bits of an int32

# Columns of `record`.
RECORD = constant(12)
DONE = constant(0)  # chunks that the current kernel is done with; 0 between kernels
FOUND = constant(1)  # candidates listed: tokens of the bins in which top-k and top-p cut
LEAST_KEY = constant(2)  # the least rank key that top-k and top-p keep
TOTAL = constant(3)  # mass of the row
FLOOR = constant(4)  # bits of the least logit that is in a bin
K_BIN = constant(5)  # the bin in which top-k cuts; BINS where it does not
K_COUNT = constant(6)  # tokens in the bins before that, and their mass
K_MASS = constant(7)
P_FIRST = constant(8)  # the bins in which top-p may cut
P_LAST = constant(9)
P_MASS = constant(10)  # mass of the bins before these

# Columns of a lane's row in the table: int64, and float64 as bits.
ENTRY = constant(14)
SEED = constant(0)
SAMPLE_INDEX = constant(1)
PROMPT_LEN = constant(2)
MIN_TOKENS = constant(3)
TOP_K = constant(4)  # V where there is none
PENALIZED = constant(5)
BIASES = constant(6)  # pairs in the token table, then stop ids behind them
STOPS = constant(7)
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
    """Return the number of stop ids that the token at `position` must not be."""
    early = position - tl.load(entry + PROMPT_LEN) < tl.load(entry + MIN_TOKENS)
    return tl.where(early, tl.load(entry + STOPS), 0)


@jit()
def is_edited(entry, position, edits):
    """Return whether a row's logits are edited before the draw. edits: 0: no row is edited; 2: every row is (masks)."""
    own = tl.load(entry + PENALIZED) | tl.load(entry + BIASES) | held_back(entry, position)
    return (edits == 2) | ((edits != 0) & (own != 0))


@jit()
def is_cut(entry, V: tl.constexpr):
    """Return whether a row has top-k or top-p, which a greedy row ignores."""
    cut = (tl.load(entry + TOP_K) < V) | (top_p_of(entry) < 1)
    return cut & (parameter(entry, TEMPERATURE) > 0)
