"""The Gumbel noise of the sampler.

The noise of a token depends only on the seed, the sample index, the position and the token id: token t uses word
t % 4 of the output of Philox4x32-7 for the key `seed` and the counter (low word of the position, t // 4, sample index,
high word of the position). Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), find no fault in seven
rounds.

A word w is converted to u = (w + 1/2) / 2**32 and then to the noise -log(-log(1 - u)). Large noise decides a draw, and
comes from small u, for which float32 resolves all 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
BLOCK = 8192  # number of counters that torch computes at a time, so that they stay in the processor's cache


def gumbel(seed: Tensor, index: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Return the Gumbel noise, float32 [R, vocab], of rows with these seeds (as bits), sample indices and positions.

    seed, index, position: int64 [R, 1].
    """
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
    """Return the four random words of Philox4x32 for counters of four words and keys of two words.

    Words are int64 from 0 to 2**32 - 1, and their shapes are broadcast. This saves work: a word of the counter that is
    the same for all tokens of a row remains one number until it is combined with one that differs.
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
