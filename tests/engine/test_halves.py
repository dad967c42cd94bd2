"""Long steps in two halves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from conftest import random_ids
from handmade import make_runner, start, table

from fastgen import SamplingParams
from fastgen.engine.halves import CUT_MULTIPLE, cut
from fastgen.engine.step import StepSequences
from fastgen.parallel.rank_group import RankGroup
from fastgen.request import Batch, Prefill


@pytest.mark.parametrize("seed", range(40))
def test_two_halves_are_the_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decodes, chunks = int(rng.integers(0, 4000)), int(rng.integers(1, 6))
    query_lens = np.concatenate([np.ones(decodes, dtype=np.int64), rng.integers(500, 2000, chunks)])
    kv_lens, draws = query_lens + rng.integers(0, 99, len(query_lens)), rng.integers(0, 4, len(query_lens))
    step = StepSequences(np.arange(len(query_lens)), query_lens, kv_lens, draws, np.zeros(0, dtype=np.int64))
    parts = cut(step, decodes)
    assert tokens_of(parts) == tokens_of([step])
    drawing = [
        (part.kv_lens[part.num_draws > 0].tolist(), part.num_draws[part.num_draws > 0].tolist()) for part in parts
    ]
    assert [kv for lens, _ in drawing for kv in lens] == kv_lens[draws > 0].tolist()
    assert [count for _, counts in drawing for count in counts] == draws[draws > 0].tolist()
    assert parts[0].lanes[:decodes].tolist() == [*range(decodes)]
    assert len(parts) == 1 or int(parts[0].query_lens.sum()) % CUT_MULTIPLE == 0


def tokens_of(parts: list[StepSequences]) -> list[tuple[int, int]]:
    """Return the lane and the position of each token."""
    return [
        (lane, position)
        for part in parts
        for lane, count, end in zip(part.lanes.tolist(), part.query_lens.tolist(), part.kv_lens.tolist(), strict=True)
        for position in range(end - count, end)
    ]


def test_only_the_first_half_of_a_step_has_the_decodes_that_share_prefixes(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention identifies them by their rows, from 0; the rows of the second half belong to other sequences."""
    runner = make_runner(llama)
    monkeypatch.setattr("fastgen.engine.halves.CUT_TOKENS", 32)
    monkeypatch.setattr("fastgen.engine.halves.CUT_MULTIPLE", 16)
    lanes = [Prefill(lane, 0, tuple(random_ids(20 + lane)), sample=True) for lane in range(4)]
    starts = tuple(start(lane, SamplingParams(temperature=0), (), 20 + lane) for lane in range(4))
    pages = tuple(entry for lane in range(4) for entry in table(lane, [4 + 3 * lane, 5 + 3 * lane]))
    runner.collect(runner.launch(Batch(prefills=tuple(lanes[:2]), starts=starts, page_updates=pages)))
    # The model stays that of one rank, but steps are cut.
    runner.group = RankGroup(cast(Any, SimpleNamespace(rank=lambda: 0, size=lambda: 2)))
    runner.group.exchange = cast(Any, object())
    monkeypatch.setattr(runner.group, "broadcast", lambda x: None)
    runner.prefixes = cast(Any, SimpleNamespace(update=lambda *_: True))
    plan, seen = runner.attention.plan, []
    monkeypatch.setattr(
        runner.attention, "plan", lambda layout: seen.append((layout.lanes.tolist(), layout.shared)) or plan(layout)
    )
    runner.collect(runner.launch(Batch(decodes=(0, 1), prefills=tuple(lanes[2:]))))
    assert seen[:2] == [([0, 1, 2, 3], True), ([3], False)]
