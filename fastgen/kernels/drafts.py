"""Drafts on the device: the rows of a speculative decode, what is kept of its draws, and the next drafted tokens.

A lane's text holds tokens of earlier outputs, then those of its sequence; -1 separates. `follow` appends the tokens
that a step draws. It then looks for the longest match of the text's last tokens, up to LONGEST_MATCH of them, at an
earlier place, and of equally long ones for the latest. The draft repeats the tokens behind that place, and where these
end begins with them again, since the match and the end then lie a period apart.

Shape letters: L lanes with the padding lane, S lanes of the step, W rows of each, D most drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastgen.kernels.launch import Kernel, constant, jit, power_of_two, tl
from fastgen.kernels.state import DecodeInput

LONGEST_MATCH = 16
MATCH = constant(LONGEST_MATCH)
BLOCK = 1024  # places of a text that a program compares at a time


@dataclass(frozen=True)
class Drafts:
    """texts: int32 [L, any]. starts: int64 [L], where the sequence of a lane begins in its text. tokens: int64 [L, D],
    the drafted tokens of each lane's next decode; counts: int32 [L], their number. most: int32 [L], the most rows of
    it. min_match: the fewest tokens of a match."""

    texts: Tensor
    starts: Tensor
    tokens: Tensor
    counts: Tensor
    most: Tensor
    min_match: int

    @classmethod
    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def empty(cls, lanes: int, length: int, most: int, min_match: int, device: torch.device) -> Drafts:
        return cls(
            torch.zeros(lanes, length, dtype=torch.int32, device=device),
            torch.zeros(lanes, dtype=torch.int64, device=device),
            torch.zeros(lanes, most, dtype=torch.int64, device=device),
            torch.zeros(lanes, dtype=torch.int32, device=device),
            torch.zeros(lanes, dtype=torch.int32, device=device),
            min_match,
        )

    def begin(self, lane: int, start: int, tokens: Tensor) -> None:
        """Set a lane's text, int32 [n]; its next decode has no draft."""
        self.texts[lane, : len(tokens)] = tokens
        self.starts[lane] = start
        self.counts[lane] = 0


@jit("padding", "slots", "most_drafts")
def _spread_kernel(
    lanes_ptr, most_ptr, counts_ptr, drafts_ptr, last_ptr, lens_ptr, table_ptr,
    row_lanes_ptr, ids_ptr, positions_ptr, slots_ptr, row_lens_ptr, padding, slots, most_drafts,
    W: tl.constexpr, BLOCK_W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Fill the rows of one lane a program."""
    s = tl.program_id(0)
    number = tl.arange(0, BLOCK_W)
    lane = tl.load(lanes_ptr + s)
    rows = tl.minimum(tl.load(most_ptr + lane), tl.load(counts_ptr + lane) + 1)
    here = number < W
    used = here & (number < rows)
    drafted = tl.load(drafts_ptr + lane * most_drafts + number - 1, mask=used & (number > 0), other=0)
    position = tl.where(used, tl.load(lens_ptr + lane) + number, 0)
    owner = tl.where(used, lane, padding)
    page = tl.load(table_ptr + owner * slots + position // P, mask=here, other=0).to(tl.int64)
    at = s * W + number
    tl.store(row_lanes_ptr + at, owner, mask=here)
    tl.store(ids_ptr + at, tl.where(number == 0, tl.load(last_ptr + lane), drafted), mask=here)
    tl.store(positions_ptr + at, position.to(tl.int64), mask=here)
    tl.store(slots_ptr + at, page * P + position % P, mask=here)
    tl.store(row_lens_ptr + at, position + 1, mask=here)


def _spread_launch(
    lanes: Tensor, drafts: Drafts, last: Tensor, kv_lens: Tensor, table: Tensor, step: DecodeInput, page: int
) -> None:
    width = len(step.lanes) // len(lanes)
    assert lanes.dtype == last.dtype == step.lanes.dtype == torch.int64
    assert kv_lens.dtype == table.dtype == torch.int32
    assert width <= drafts.tokens.shape[1] + 1
    _spread_kernel[(len(lanes),)](
        lanes, drafts.most, drafts.counts, drafts.tokens, last, kv_lens, table,
        step.lanes, step.token_ids, step.positions, step.slots, step.kv_lens,
        len(kv_lens) - 1, table.stride(0), drafts.tokens.shape[1], width, power_of_two(width), page, num_warps=1,
    )  # fmt: skip


def _spread_twin(
    lanes: Tensor, drafts: Drafts, last: Tensor, kv_lens: Tensor, table: Tensor, step: DecodeInput, page: int
) -> None:
    """Fill `step`, S * W rows, for lanes int64 [S].

    The rows of a lane are its last token and the drafted ones. Rows that it does not need are padding: rows of the last
    lane at position 0. last: int64 [L], last tokens; kv_lens: int32 [L]; table: int32 [L, slots]; page: tokens of a
    page.
    """
    width = len(step.lanes) // len(lanes)
    number = torch.arange(width, device=lanes.device)
    used = number < torch.minimum(drafts.most, drafts.counts + 1)[lanes][:, None]
    owners = torch.where(used, lanes[:, None], len(kv_lens) - 1)
    positions = torch.where(used, kv_lens[lanes][:, None] + number, 0)
    pages = table[owners, positions // page].long()
    step.lanes.copy_(owners.view(-1))
    step.token_ids.copy_(torch.cat((last[lanes][:, None], drafts.tokens[lanes, : width - 1]), 1).view(-1))
    step.positions.copy_(positions.view(-1))
    step.slots.copy_((pages * page + positions % page).view(-1))
    step.kv_lens.copy_((positions + 1).view(-1))


@jit("length", "lanes", "most_drafts", "min_match")
def _follow_kernel(
    lanes_ptr, tokens_ptr, positions_ptr, texts_ptr, starts_ptr, counts_ptr, drafts_ptr, last_ptr, lens_ptr, found_ptr,
    length, lanes, most_drafts, min_match,
    W: tl.constexpr, BLOCK_W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Follow one lane a program."""
    s = tl.program_id(0)
    lane = tl.load(lanes_ptr + s * W)
    text = texts_ptr + lane * length
    number = tl.arange(0, BLOCK_W)
    drawn = tl.load(tokens_ptr + s * W + number, mask=number < W, other=-1)
    kept = 1
    if W > 1:
        rows = tl.sum((tl.load(lanes_ptr + s * W + number, mask=number < W, other=-1) == lane).to(tl.int32))
        waiting = tl.load(drafts_ptr + lane * most_drafts + number, mask=number < rows - 1, other=-2)
        wrong = (number >= rows - 1) | (waiting != drawn)
        kept = tl.min(tl.where(wrong, number, BLOCK_W)) + 1
    position = tl.load(positions_ptr + s * W)
    newest = tl.sum(tl.where(number == kept - 1, drawn, 0))
    tl.store(last_ptr + lane, tl.maximum(newest, 0).to(tl.int64))
    tl.store(lens_ptr + lane, position - 1 + kept)
    begin = tl.load(starts_ptr + lane).to(tl.int32) + position
    end = begin + kept
    fits = end <= length
    tl.store(text + begin + number, drawn, mask=fits & (number < kept))
    tl.debug_barrier()  # all threads of this program have written

    # The best place has the largest match * 2^32 + place.
    best = tl.zeros([], tl.int64)
    if fits & (newest >= 0):
        for first in range(0, end - 1, BLOCK):
            place = first + tl.arange(0, BLOCK)
            same = (place < end - 1) & (tl.load(text + place, mask=place < end - 1, other=-1) == newest)
            if tl.max(same.to(tl.int32)) > 0:
                match = same.to(tl.int32)
                for back in range(1, MATCH):
                    wanted = tl.load(text + end - 1 - back, mask=end - 1 >= back, other=-1)
                    same &= place >= back
                    same &= (wanted >= 0) & (tl.load(text + place - back, mask=same, other=-2) == wanted)
                    match += same.to(tl.int32)
                score = (match.to(tl.int64) << 32) + place
                best = tl.maximum(best, tl.max(tl.where(match > 0, score, 0)))
    behind = (best & 0xFFFFFFFF).to(tl.int32) + 1
    ahead = tl.arange(0, D)
    wanted_drafts = (ahead < most_drafts) & ((best >> 32) >= min_match)
    draft = tl.load(text + behind + ahead % tl.maximum(end - behind, 1), mask=wanted_drafts, other=-1)
    count = tl.min(tl.where(draft < 0, ahead, most_drafts))
    tl.store(drafts_ptr + lane * most_drafts + ahead, draft.to(tl.int64), mask=ahead < count)
    tl.store(counts_ptr + lane, count)
    tl.store(found_ptr + s, kept)
    tl.store(found_ptr + lanes + s, tl.sum(tl.where(ahead == 0, draft, 0)))
    tl.store(found_ptr + 2 * lanes + s, count)


def _follow_launch(
    lanes: Tensor, drafts: Drafts, last: Tensor, kv_lens: Tensor, tokens: Tensor, positions: Tensor
) -> Tensor:
    width, most_drafts = tokens.shape[1], drafts.tokens.shape[1]
    assert lanes.dtype == last.dtype == torch.int64
    assert tokens.dtype == positions.dtype == kv_lens.dtype == torch.int32
    assert lanes.shape == tokens.shape == positions.shape
    assert lanes.is_contiguous()
    assert tokens.is_contiguous()
    assert positions.is_contiguous()
    # Zeros, since the results of kernels that are compiled ahead and not launched are read, too.
    found = torch.zeros(3, len(lanes), dtype=torch.int32, device=lanes.device)
    _follow_kernel[(len(lanes),)](
        lanes, tokens, positions, drafts.texts, drafts.starts, drafts.counts, drafts.tokens, last, kv_lens, found,
        drafts.texts.shape[1], len(lanes), most_drafts, drafts.min_match,
        width, power_of_two(width), power_of_two(most_drafts), BLOCK, num_warps=4,
    )  # fmt: skip
    return found


def _follow_twin(
    lanes: Tensor, drafts: Drafts, last: Tensor, kv_lens: Tensor, tokens: Tensor, positions: Tensor
) -> Tensor:
    """Keep the draws of a step that equal the drafts, and one more; append them to the texts; draft the next tokens.

    lanes: int64 [S, W], those of `spread`: a row of another lane than the first is padding. tokens, positions: int32
    [S, W], the draws. Sets the lanes' `last`, int64 [L], and kv_lens, int32 [L]. Returns int32 [3, S]: the number of
    tokens kept; the first of the tokens that are drafted now, -1 for none; and their number.
    """
    found = np.zeros((3, len(lanes)), dtype=np.int32)
    state = (drafts.texts, drafts.starts, drafts.tokens, drafts.counts, last, kv_lens)
    host = [x.cpu() for x in state]  # copies where a GPU does not compile the kernel
    texts, starts, waiting, counts, lasts, lengths = (x.numpy() for x in host)
    of_row = zip(lanes.tolist(), tokens.tolist(), positions[:, 0].tolist(), strict=True)
    for row, ((lane, *others), drawn, position) in enumerate(of_row):
        rows = 1 + others.count(lane)
        kept = 1
        while kept < rows and drawn[kept - 1] == waiting[lane, kept - 1]:
            kept += 1
        lasts[lane] = max(drawn[kept - 1], 0)
        lengths[lane] = position - 1 + kept
        begin = int(starts[lane]) + position
        draft = texts[lane, :0]
        if begin + kept <= texts.shape[1]:
            texts[lane, begin : begin + kept] = drawn[:kept]
            draft = propose(texts[lane, : begin + kept], drafts.min_match, waiting.shape[1])
        counts[lane] = len(draft)
        waiting[lane, : len(draft)] = draft
        found[:, row] = kept, draft[0] if len(draft) else -1, len(draft)
    for x, written in zip(state, host, strict=True):
        if written is not x:
            x.copy_(written)
    return torch.from_numpy(found).to(lanes.device)


def propose(text: np.ndarray, min_match: int, most: int) -> np.ndarray:
    """Return up to `most` tokens that may follow a text: int32 [n]."""
    end = len(text)
    places = np.flatnonzero(text[:-1] == text[-1])  # of the last token of each match
    length = int(len(places) > 0 and text[-1] >= 0)
    while 0 < length < min(LONGEST_MATCH, end - 1):
        matches = places[places >= length]
        matches = matches[text[matches - length] == text[end - 1 - length]]
        if not len(matches) or text[end - 1 - length] < 0:
            break
        places, length = matches, length + 1
    if length < min_match:
        return text[:0]
    behind = int(places[-1]) + 1
    draft = text[behind + np.arange(most) % (end - behind)]
    ends = np.flatnonzero(draft < 0)
    return draft[: ends[0]] if len(ends) else draft


spread = Kernel(_spread_launch, _spread_twin)
follow = Kernel(_follow_launch, _follow_twin)
