"""The sequences of a step and their tokens, as arrays on the host, and the parts that ranks cut a step in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fastgen.model.attention.interface import StepLayout
from fastgen.request import Batch

CUT_TOKENS = 2048
"""Ranks cut a step of at least so many tokens in two: one part is summed over the ranks while the other computes."""

CUT_MULTIPLE = 128
"""The number of tokens in the first part is a multiple of this."""


def largest_half(tokens: int) -> int:
    """Return the most tokens, with padding, in a part of a step of up to `tokens` tokens that is cut in two, if less
    than half of its tokens are decodes; 0 if no step is cut."""
    return 0 if tokens < CUT_TOKENS else -(-tokens // (2 * CUT_MULTIPLE)) * CUT_MULTIPLE


@dataclass(frozen=True)
class StepSequences:
    """The sequences of a step, decodes first, as int64 numpy arrays."""

    lanes: np.ndarray  # [S]
    query_lens: np.ndarray  # [S]
    kv_lens: np.ndarray  # [S], with the query tokens
    num_draws: np.ndarray  # [S], number of lanes that draw from its last query token
    forks: np.ndarray  # [F], lanes that draw from another's last token

    @classmethod
    def of(cls, batch: Batch, known: np.ndarray) -> StepSequences:
        """Return the lengths of a batch, and add its tokens to `known`, the KV lengths of all lanes. A fork's length
        becomes the end of its chunk."""
        decodes = len(batch.decodes)
        lanes = np.array([*batch.decodes, *(chunk.lane for chunk in batch.prefills)], dtype=np.int64)
        query_lens = np.array([1] * decodes + [len(chunk.tokens) for chunk in batch.prefills], dtype=np.int64)
        known[lanes[:decodes]] += 1
        known[lanes[decodes:]] = [chunk.start + len(chunk.tokens) for chunk in batch.prefills]
        draws = np.array([1] * decodes + [chunk.sample + len(chunk.forks) for chunk in batch.prefills], dtype=np.int64)
        forks = np.array([lane for chunk in batch.prefills for lane in chunk.forks], dtype=np.int64)
        assert all(chunk.sample for chunk in batch.prefills if chunk.forks)
        kv_lens = known[lanes]
        known[forks] = np.repeat(kv_lens[decodes:], [len(chunk.forks) for chunk in batch.prefills])
        return cls(lanes, query_lens, kv_lens, draws, forks)

    def parts(self, decodes: int) -> list[StepSequences]:
        """Cut the step in two parts of about as many tokens, if it is large enough. All decodes are in the first part;
        a sequence may have tokens in both. Forks are in neither."""
        total = int(self.query_lens.sum())
        at = max(-(-total // (2 * CUT_MULTIPLE)), -(-decodes // CUT_MULTIPLE)) * CUT_MULTIPLE
        if total < CUT_TOKENS or total - at < CUT_TOKENS // 4:
            return [self]
        first = np.clip(at - (self.query_lens.cumsum() - self.query_lens), 0, self.query_lens)
        rest = self.query_lens - first
        none, begun, left = self.forks[:0], first > 0, rest > 0
        kv_lens, draws = self.kv_lens - rest, np.where(left, 0, self.num_draws)
        return [
            StepSequences(self.lanes[begun], first[begun], kv_lens[begun], draws[begun], none),
            StepSequences(self.lanes[left], rest[left], self.kv_lens[left], self.num_draws[left], none),
        ]

    @property
    def ends(self) -> StepSequences:
        """The sequences that draw, with their last query tokens alone."""
        drawing = self.num_draws > 0
        ones = np.ones_like(self.lanes[drawing])
        return StepSequences(self.lanes[drawing], ones, self.kv_lens[drawing], ones, self.forks[:0])

    def layout(self, page_table: Tensor, decodes: int, shared: bool) -> StepLayout:
        """Return the layout for attention. The arguments are its fields."""
        return StepLayout(self.query_lens, self.kv_lens, decodes, self.lanes, page_table, shared)

    @property
    def rows(self) -> np.ndarray:
        """The last rows of the sequences that draw: int64 [R]."""
        last: np.ndarray = self.query_lens.cumsum() - 1
        drawing: np.ndarray = last[self.num_draws > 0]
        return drawing

    def positions(self) -> np.ndarray:
        """Return the positions of the query tokens in their sequences: int64 [T]."""
        first = self.kv_lens - self.query_lens.cumsum()  # the position that token 0 of the step would have in each
        positions: np.ndarray = np.repeat(first, self.query_lens) + np.arange(self.query_lens.sum())
        return positions

    def token_ids(self, batch: Batch, padding: int) -> np.ndarray:
        """Return the tokens of the step: int64 [T]; 0 for decodes, whose tokens are on the device, and for padding."""
        zeros = np.zeros(len(batch.decodes) + padding, dtype=np.int64)
        known = [chunk.tokens for chunk in batch.prefills]
        return np.concatenate([zeros[padding:], *known, zeros[:padding]])
