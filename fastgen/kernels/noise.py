"""Gumbel noise from a counter, in Triton and in torch.

The noise of a token is a function of the seed, the sample index, the position and the token id alone: token t takes
word t % 4 that Philox4x32-7 gives for the key `seed` and the counter (low word of the position, t // 4, sample index,
high word of the position). Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), find no fault in seven
rounds.

A word w becomes u = (w + 1/2) / 2**32 and then the noise -log(-log(1 - u)). Large noise decides a draw. It comes from
small u, where float32 resolves all 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.kernels import sampler_layout as layout
from fastgen.kernels.launch import INTERPRETED, constant, jit, tl
from fastgen.kernels.rows import LOG2E

ROUNDS = constant(7)
LARGEST = constant(1 - 2**-24)  # below 1, to which the largest words round
IN_SOFTWARE = constant(INTERPRETED)
WORD = 0xFFFFFFFF
BLOCK = 8192  # counters that torch computes at a time, so that they stay in the processor's cache


@jit()
def log2(x):
    """Return log2(x) with an error below 2**-22, near 1 absolute, else relative. tl.log2 takes twenty instructions."""
    if IN_SOFTWARE:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit()
def noise(entry, position, first, COUNT: tl.constexpr):
    """Return the Gumbel noise of `COUNT` tokens from `first` on, a multiple of 4, for a lane and a position.

    The noise is divided by log(2) and lacks a constant that does not change which token is the largest.
    """
    groups = first // 4 + tl.arange(0, COUNT // 4)
    words = tl.philox(
        tl.load(entry + layout.SEED), position.to(tl.uint32), groups.to(tl.uint32),
        tl.load(entry + layout.SAMPLE_INDEX).to(tl.uint32), (position >> 32).to(tl.uint32), ROUNDS,
    )  # fmt: skip
    word = tl.interleave(tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3]))
    u = tl.minimum(tl.fma(word.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10), LARGEST)
    # The logarithm of a number near 1 has few correct bits; the first terms of its series have them all.
    series = u * LOG2E * tl.fma(u, tl.fma(u, tl.fma(u, 0.25, 0.3333333333), 0.5), 1.0)
    return -log2(tl.where(u < 0.03125, series, -log2(1.0 - u)))


def gumbel(seed: Tensor, index: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Return the Gumbel noise [R, vocab] float32 of rows with these seeds (bits), sample indices and positions, int64
    [R, 1]."""
    rows, count = len(seed), -(-vocab // 4)
    u = torch.empty(rows, count, 4, device=seed.device)
    width = max(BLOCK // rows, 1)
    for first in range(0, count, width):
        groups = torch.arange(first, min(first + width, count), device=seed.device)[None]
        counter = (position & WORD, groups, index & WORD, (position >> 32) & WORD)
        for place, word in enumerate(philox(counter, (seed & WORD, (seed >> 32) & WORD))):
            u[:, first : first + width, place] = word
    u = u.flatten(1)[:, :vocab].mul_(2**-32).add_(2**-33).clamp_(max=1 - 2**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int = 7) -> tuple[Tensor, ...]:
    """Return the four random words of Philox4x32 for counters of four words and keys of two.

    Words are int64 from 0 to 2**32 - 1. Their shapes need only match as in arithmetic, which saves work: a word of the
    counter that all tokens of a row share stays one number until it meets one that differs.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wrap around as int64, with the bits of the unsigned product
        c0 = ((odd >> 32) ^ (c1 ^ k0)).bitwise_and_(WORD)
        c2 = ((even >> 32) ^ (c3 ^ k1)).bitwise_and_(WORD)
        c1, c3 = odd, even  # only their low words count
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1 & WORD, c2, c3 & WORD
