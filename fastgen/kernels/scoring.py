"""Logprobs and ranks of given tokens, and logprobs of the most likely tokens.

The arithmetic is the same as in the draw (fastgen.kernels.triton.sampling, fastgen.model.sampler). Therefore the score
of a token has the bits of its untruncated logprob, or at temperature 1, of its raw logprob.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.kernels.launch import Kernel

MAX_LISTED = 32  # maximum number of alternatives that the kernels list; for more, torch sorts


def _score_twin(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Return the logprobs, float32 [R], of targets, int64 [R], for logits [R, V] and a temperature > 0.

    The kernel also returns float32 [2, R]: the largest logit of each row, and the logarithm of its sum of
    exp((logit - largest) / temperature). The twin returns None for these.
    """
    logits = logits.float()
    if temperature != 1:
        logits = (logits - logits.amax(1, keepdim=True)).div_(temperature)
    return logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1), None


def _alternatives_twin(logits: Tensor, most: int, totals: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the token ids of the `most` largest logits of each row of logits [R, V], int64 [R, most], and their
    logprobs, float32 [R, most]. The largest come first, and equal ones are ordered by id.

    totals: float32 [2, R], the largest logit of each row and the logarithm of its sum of exp(logit - largest), or None
    if they are unknown.
    """
    logits = logits.float()
    ids = ids_of_keys(rank_keys_of(logits).topk(most).values, logits.shape[1])
    return ids, logits.log_softmax(1).gather(1, ids)


def rank_keys_of(logits: Tensor) -> Tensor:
    """Return distinct int64 keys of logits, float32 [R, V]. Larger logits have larger keys, and among equal logits,
    lower ids do."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))  # negative floats are in reverse order
    return ordered.long().mul_(2**32).add_(torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device))


def ids_of_keys(keys: Tensor, vocab: int) -> Tensor:
    """Return the token ids of rank keys."""
    return vocab - 1 - (keys & 0xFFFFFFFF)


def ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the ranks of targets, both int64 [R], for logits [R, V]: the number of tokens whose logit is not below the
    target's."""
    return (logits >= logits.gather(1, targets[:, None])).sum(1)


score = Kernel(_score_twin, "fastgen.kernels.triton.scoring:score")
alternatives = Kernel(_alternatives_twin, "fastgen.kernels.triton.scoring:alternatives")
