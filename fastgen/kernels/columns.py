"""Where the sampler's kernels find what they keep of a row and of a lane.

A row's vocabulary V is cut into C chunks, a program each, and these into N sub-blocks. What is kept of R rows:

- chunks: float32 [R, 4, C]: a chunk's largest logit and its sum of exp(logit - largest), in units of 2**-30; then of
  the edited logits the largest and the least finite one. A NaN counts as infinite.
- tops: float32 [R, N]: the largest edited logit of each sub-block.
- sums: int64 [R, N]: the tickets of each sub-block, so that a draw finds its sub-block first and its token within that.
- record: int64 [R, 16], see below.

All sums are of integers, so that nothing depends on who adds first, nor on how a compiler arranges a sum: a row comes
to the same bits in any company and in all variants of the kernels.
"""

from __future__ import annotations

from fastgen.kernels.launch import constant

CHUNK = 4096
SUB = 512
WARPS = 8


# Columns of `record`.
RECORD = constant(16)
DONE = constant(0)  # chunks that are done with the draw
CUT = constant(1)  # chunks that are done with the truncation
FOUND = constant(2)  # candidates listed: tokens whose bin does not tell whether they are kept
TRUNCATED = constant(3)  # 1: the draw is left to the truncation
KEPT = constant(4)  # the least rank key that is kept
TOTAL = constant(5)  # tickets before truncation; 0 where there is none
FLOOR = constant(6)  # bits of the least logit that is in a bin
K_BIN = constant(7)  # the bin in which top-k cuts; BINS where it does not
K_COUNT = constant(8)  # tokens in the bins before that, and their tickets
K_HELD = constant(9)
P_FIRST = constant(10)  # the bins in which top-p may cut
P_LAST = constant(11)
P_HELD = constant(12)  # tickets in the bins before these

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

HIGH = constant(1.4426950216293335)  # log2(e), the scales of temperature 1
LOW = constant(1.925963033500011e-08)
NO_KEY = constant(-(2**63))  # below all rank keys
