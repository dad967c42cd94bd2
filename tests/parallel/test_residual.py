"""The rows of a residual stream that ranks split, and the halves of a step. ranks_program.py compares whole answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastgen.engine import halves
from fastgen.engine.step import StepSequences
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import Exchange, ExchangeLayout, PeerMemory
from fastgen.parallel.sharded import ShardedResidual


def alone(rank: int) -> Exchange:
    """Return the exchange of one of 4 ranks, whose peers add nothing."""
    memory = torch.zeros(ExchangeLayout.of(4, 16, 8, torch.float32).end, dtype=torch.uint8)
    sides: list[Any] = [None, None]
    return Exchange(rank, PeerMemory(memory, [0] * 4, None), 16, 8, torch.float32, sides)


@pytest.mark.parametrize("count", [1, 3, 4, 10])
def test_wanted_rows_come_from_their_owners(count: int) -> None:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([0, count - 1, count // 2, 0])
    found = []
    for rank in range(4):
        made = alone(rank)
        found.append(ShardedResidual(Group(), made, 0, count, x[made.rows_of(count)]).select(rows))
    assert torch.equal(sum(found), x[rows])
    assert ShardedResidual(Group(), alone(0), 0, count, x[:1]).select(rows[:0]).shape == (0, 8)


def test_the_largest_half_is_that_of_a_step_without_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, none = np.array, np.zeros(0, dtype=np.int64)
    for tokens in range(1, 9000, 137):
        step = StepSequences(*(lengths([value]) for value in (0, tokens, tokens, 1)), none)
        parts = [int(part.query_lens.sum()) for part in halves.cut(step, 0)]
        assert (len(parts) == 2) == (tokens >= halves.CUT_TOKENS)
        assert len(parts) == 1 or parts[1] <= parts[0] == halves.largest_half(tokens)
        assert len(parts) == 2 or halves.largest_half(tokens) == 0
