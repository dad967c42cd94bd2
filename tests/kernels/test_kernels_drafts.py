"""The kernels of drafts, in Triton's interpreter if there is no GPU, compared with their torch twins."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from fastgen.kernels.drafts import Drafts, StepDraws, Texts, choose, follow, recall, spread
from fastgen.kernels.lane_updates import DecodeInput

CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU
LANES, PAGE = 7, 4


def state(vocab: int, most: int) -> Drafts:
    """Return random drafts."""
    drafts = Drafts.empty(LANES + 1, most, CPU, drafters=3)
    drafts.proposals.copy_(torch.randint(0, vocab, drafts.proposals.shape))
    drafts.proposed.copy_(torch.randint(0, most + 1, drafts.proposed.shape))
    drafts.scores.copy_(torch.randint(0, 3, drafts.scores.shape))
    drafts.chosen.copy_(torch.randint(0, 3, (LANES + 1,)))
    drafts.tokens.copy_(torch.randint(0, vocab, drafts.tokens.shape))
    drafts.counts[:LANES] = torch.randint(0, most + 1, (LANES,))
    drafts.most.copy_(torch.randint(1, most + 2, (LANES + 1,)))
    return drafts


def random_texts(vocab: int) -> Texts:
    """Return texts of few different tokens, some of which are -1."""
    texts = Texts.empty(LANES + 1, 90, CPU)
    texts.tokens.copy_(torch.randint(-1, vocab, texts.tokens.shape))
    texts.starts.copy_(torch.randint(0, 30, (LANES + 1,)))
    texts.sources.copy_(torch.randint(-5, 60, texts.sources.shape))
    texts.sources[1].copy_(torch.randint(0, 8, (LANES + 1,)))
    return texts


Held = TypeVar("Held", Drafts, Texts)


def copy(held: Held, device: torch.device) -> Held:
    return type(held)(**{f.name: getattr(held, f.name).to(device, copy=True) for f in fields(held)})


def row_lanes(drafts: Drafts, lanes: Tensor, size: int) -> Tensor:
    """Return the lane of each row that `spread` has assigned, LANES for padding."""
    step = DecodeInput.empty(size, CPU)
    table = torch.zeros(LANES + 1, 30, dtype=torch.int32)
    spread.twin(lanes, drafts, torch.zeros(LANES + 1).long(), torch.zeros(LANES + 1).int(), table, step, PAGE)
    return step.lanes


@pytest.mark.parametrize("seed", range(12))
def test_follow_recall_and_choose(seed: int) -> None:
    torch.manual_seed(seed)
    most_drafts, vocab = 7, (2, 3, 12)[seed % 3]
    drafts, texts, count = state(vocab, most_drafts), random_texts(vocab), int(torch.randint(1, LANES + 1, ()))
    lanes = torch.randperm(LANES)[:count]
    size = count * (1, 2, 4, 8)[seed % 4]
    of_row = row_lanes(drafts, lanes, size)
    tokens = torch.randint(-1, vocab, (size,), dtype=torch.int32)
    positions = torch.randint(1, 50, (size,), dtype=torch.int32)
    if seed == 5:
        positions += 60  # beyond the text's room
    for lane in lanes.tolist() if size > count else ():
        rows = (of_row == lane).nonzero()[:, 0]
        right = rows[:-1][torch.rand(len(rows) - 1) < 0.8]
        tokens[right] = drafts.tokens[lane, right - rows[0]].int()
    found = []
    for follows, recalls, chooses, device in (
        (follow.launch, recall.launch, choose.launch, DEVICE),
        (follow.twin, recall.twin, choose.twin, CPU),
    ):
        own, last, kv_lens = copy(drafts, device), torch.zeros(LANES + 1).long(), torch.zeros(LANES + 1).int()
        own_texts, last, kv_lens = copy(texts, device), last.to(device), kv_lens.to(device)
        drawn: StepDraws = follows(lanes.to(device), own, last, kv_lens, tokens.to(device), positions.to(device))
        recalls(drawn.lanes, drawn, own.rows, own_texts, own.proposals[1], own.proposed[1])
        chooses(drawn.lanes, own, drawn.found, 0b011 if seed % 2 else 0b111)
        waiting = [own.tokens[lane, : own.counts[lane]] for lane in lanes.tolist()]
        results = drawn.found, last, kv_lens, own_texts.tokens, own_texts.sources, own.counts, own.chosen, own.proposed
        found.append([x.cpu() for x in (own.scores, *results, *waiting)])
        assert drawn.found[1].tolist() == [int(draft[0]) if len(draft) else -1 for draft in waiting]
    (scores, *launched), (expected_scores, *expected) = found
    torch.testing.assert_close(scores, expected_scores)
    assert all(map(torch.equal, launched, expected))


def test_the_drafter_that_was_right_more_often_drafts() -> None:
    """Drafter 0 proposes 1 2 3, drafter 1 proposes 1 2 9, drafter 2 nothing; then 1 2 3 is drawn."""
    drafts = Drafts.empty(2, 3, CPU, drafters=3)
    drafts.proposals[:, 0] = torch.tensor([[1, 2, 3], [1, 2, 9], [1, 2, 3]])
    drafts.proposed[:, 0] = torch.tensor([3, 3, 0])
    lanes, last, kv_lens = torch.tensor([0]), torch.zeros(2).long(), torch.zeros(2).int()
    found = torch.zeros(4, 1, dtype=torch.int32)
    choose(lanes, drafts, found, 0b111)
    assert (drafts.chosen[0], drafts.counts[0], drafts.tokens[0].tolist()) == (1, 3, [1, 2, 9]), "the last of equals"
    drafts.rows[:, 0] = torch.tensor([0, 4])
    drawn = follow(lanes, drafts, last, kv_lens, torch.tensor([1, 2, 3, 4]).int(), torch.tensor([5, 6, 7, 8]).int())
    assert drawn.found[:, 0].tolist() == [3, -1, 3, 1]
    assert (last[0], kv_lens[0]) == (3, 7)
    assert drafts.scores[:, 0].tolist() == [3, 2, 0]
    choose(lanes, drafts, found, 0b111)
    assert drafts.chosen[0] == 0
    choose(lanes, drafts, found, 0b110)
    assert (drafts.chosen[0], drafts.proposed[0, 0]) == (1, 0)
    choose(lanes, drafts, found, 0)
    assert (drafts.counts[0], found[1, 0]) == (0, -1)


@pytest.mark.parametrize("size", [5, 9, 16, 48])
def test_spread(size: int) -> None:
    torch.manual_seed(size)
    drafts, lanes = state(9, 7), torch.tensor([4, 0, LANES, 2, LANES])
    last, kv_lens = torch.randint(0, 9, (LANES + 1,)), torch.randint(1, 20, (LANES + 1,)).int()
    kv_lens[LANES] = 0
    table = torch.randint(0, 99, (LANES + 1, 8), dtype=torch.int32)
    rows = []
    for run, device in ((spread.launch, DEVICE), (spread.twin, CPU)):
        step = DecodeInput.empty(size, device)
        own, lane_state = copy(drafts, device), (x.to(device) for x in (last, kv_lens, table))
        run(lanes.to(device), own, *lane_state, step, PAGE)
        rows.append(DecodeInput(**{f.name: getattr(step, f.name).cpu() for f in fields(step)}))
        counts = own.rows[1, [4, 0, 2]].cpu()
        wanted = torch.minimum(drafts.most, drafts.counts + 1)[[4, 0, 2]]
        assert counts.sum() == min(size, wanted.sum())
        assert (counts <= wanted).all()
        cut = counts[counts < wanted]
        assert not len(cut) or counts.max() <= cut.min() + 1
    launched, expected = rows
    used = expected.lanes < LANES
    assert torch.equal(launched.token_ids[used], expected.token_ids[used])
    for name in ("lanes", "positions", "slots", "kv_lens"):
        assert torch.equal(getattr(launched, name), getattr(expected, name)), name
