"""The kernels of drafts, in Triton's interpreter, and their torch twins."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from fastgen.kernels.drafts import Drafts, follow, spread
from fastgen.kernels.state import DecodeInput

CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU
LANES, PAGE = 7, 4


def state(vocab: int, most: int, min_match: int) -> Drafts:
    """Texts of few different tokens, some of which are -1."""
    drafts = Drafts.empty(LANES + 1, 90, most, min_match, CPU)
    drafts.texts.copy_(torch.randint(-1, vocab, drafts.texts.shape))
    drafts.starts.copy_(torch.randint(0, 30, (LANES + 1,)))
    drafts.tokens.copy_(torch.randint(0, vocab, drafts.tokens.shape))
    drafts.counts[:LANES] = torch.randint(0, most + 1, (LANES,))
    drafts.most.copy_(torch.randint(1, most + 3, (LANES + 1,)))
    return drafts


def copy(drafts: Drafts, device: torch.device) -> Drafts:
    tensors = {
        f.name: x.to(device, copy=True) for f in fields(drafts) if isinstance(x := getattr(drafts, f.name), Tensor)
    }
    return replace(drafts, **tensors)


@pytest.mark.parametrize("seed", range(12))
def test_follow(seed: int) -> None:
    torch.manual_seed(seed)
    width, most_drafts, vocab = (1, 2, 4, 8)[seed % 4], 7, (2, 3, 12)[seed % 3]
    drafts, count = state(vocab, most_drafts, 1 + seed % 2), int(torch.randint(1, LANES + 1, ()))
    lanes = torch.randperm(LANES)[:count]
    rows = torch.minimum(torch.randint(1, width + 1, (count,)), drafts.counts[lanes] + 1)
    row_lanes = torch.where(torch.arange(width) < rows[:, None], lanes[:, None], LANES)
    tokens = torch.randint(-1, vocab, (count, width), dtype=torch.int32)
    guessed = drafts.tokens[lanes, :width].int()
    right = torch.rand(guessed.shape) < 0.8
    tokens[:, :most_drafts][right] = guessed[right]
    positions = torch.randint(1, 50, (count, 1), dtype=torch.int32) + torch.arange(width, dtype=torch.int32)
    if seed == 5:
        positions += 60  # beyond the text's room
    found = []
    for run, device in ((follow.launch, DEVICE), (follow.twin, CPU)):
        own, last, kv_lens = copy(drafts, device), torch.zeros(LANES + 1).long(), torch.zeros(LANES + 1).int()
        last, kv_lens = last.to(device), kv_lens.to(device)
        result = run(row_lanes.to(device), own, last, kv_lens, tokens.to(device), positions.contiguous().to(device))
        waiting = [own.tokens[lane, : own.counts[lane]] for lane in lanes.tolist()]
        found.append([x.cpu() for x in (result, last, kv_lens, own.texts, own.counts, *waiting)])
    for launched, expected in zip(*found, strict=True):
        assert torch.equal(launched, expected)


@pytest.mark.parametrize("width", [2, 3, 8])
def test_spread(width: int) -> None:
    torch.manual_seed(width)
    drafts, lanes = state(9, 7, 1), torch.tensor([4, 0, LANES, 2, LANES])
    last, kv_lens = torch.randint(0, 9, (LANES + 1,)), torch.randint(1, 20, (LANES + 1,)).int()
    kv_lens[LANES] = 0
    table = torch.randint(0, 99, (LANES + 1, 8), dtype=torch.int32)
    rows = []
    for run, device in ((spread.launch, DEVICE), (spread.twin, CPU)):
        step = DecodeInput.empty(len(lanes) * width, device)
        lane_state = (x.to(device) for x in (last, kv_lens, table))
        run(lanes.to(device), copy(drafts, device), *lane_state, step, PAGE)
        rows.append(DecodeInput(**{f.name: getattr(step, f.name).cpu() for f in fields(step)}))
    launched, expected = rows
    used = expected.lanes < LANES
    assert used.sum() > len(lanes) - 2
    assert torch.equal(launched.token_ids[used], expected.token_ids[used])
    for name in ("lanes", "positions", "slots", "kv_lens"):
        assert torch.equal(getattr(launched, name), getattr(expected, name)), name
