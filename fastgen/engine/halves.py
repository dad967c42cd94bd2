"""Halves of long steps, for tensor parallelism: one half is summed over the ranks while the other one computes."""

from __future__ import annotations

import numpy as np

from fastgen.engine.step import StepSequences

CUT_TOKENS = 2048
"""A step of at least this number of tokens is cut in two, unless the second half would be too small; see `cut`."""

CUT_MULTIPLE = 128
"""The number of tokens in the first half is a multiple of this."""


def largest_half(tokens: int) -> int:
    """Return the maximum number of tokens, with padding, in a half of a step of up to `tokens` tokens, if less than
    half of its tokens are decodes; 0 if no step is cut."""
    return 0 if tokens < CUT_TOKENS else -(-tokens // (2 * CUT_MULTIPLE)) * CUT_MULTIPLE


def cut(step: StepSequences, decodes: int) -> list[StepSequences]:
    """Cut a step in two halves of about equally many tokens, if it is large enough.

    All decodes are in the first half, and a sequence may have tokens in both. `forks` is empty in both halves, since
    the runner takes them from the whole step.
    """
    total = int(step.query_lens.sum())
    at = max(-(-total // (2 * CUT_MULTIPLE)), -(-decodes // CUT_MULTIPLE)) * CUT_MULTIPLE
    if total < CUT_TOKENS or total - at < CUT_TOKENS // 4:
        return [step]
    first = np.clip(at - (step.query_lens.cumsum() - step.query_lens), 0, step.query_lens)
    rest = step.query_lens - first
    none, begun, left = step.forks[:0], first > 0, rest > 0
    kv_lens, draws = step.kv_lens - rest, np.where(left, 0, step.num_draws)
    return [
        StepSequences(step.lanes[begun], first[begun], kv_lens[begun], draws[begun], none),
        StepSequences(step.lanes[left], rest[left], step.kv_lens[left], step.num_draws[left], none),
    ]
