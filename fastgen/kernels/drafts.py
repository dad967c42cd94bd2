"""Drafts on the device: the rows of a speculative decode, the draws of it that are kept, and drafts from texts.

`spread` distributes the rows of a step: each lane gets as many rows as it wants, up to a limit that is the same for
all. `follow` keeps the draws that equal the drafts, and one more. Then each Drafter
(speculation/drafting.py) proposes the next tokens, and `choose` takes the proposal of the one that has been
right more often in this lane. The drafter here, `recall`, copies tokens from a text.

The text of a lane holds the tokens of earlier outputs followed by the tokens of its sequence, separated by -1. `recall`
appends the tokens that a step draws. It then searches the text for the longest earlier match of its last tokens (up to
LONGEST_MATCH), and of equally long matches takes the latest. The draft is a copy of the tokens after the match. If the
copy reaches the end of the text, it continues with the first tokens after the match, as if the text were periodic.

An answer that copies from a source often leaves it and returns a few tokens later. Therefore a match that continues
within NEAR tokens after the last good source counts as NEAR_BONUS tokens longer. Such a match, and a match of GOOD
tokens, drafts as many tokens as there is room for. Any other match drafts as many tokens as it is long.

Shape letters: L lanes including the padding lane, S lanes of the step, R rows of the step, D maximum number of drafted
tokens per lane, K drafters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import power_of_two
from fastgen.device.pinned import upload
from fastgen.kernels.lane_updates import DecodeInput
from fastgen.kernels.launch import Kernel
from fastgen.kernels.triton.jit import jit, tl
from fastgen.request import Prefill

LONGEST_MATCH = 16
NEAR, NEAR_BONUS, GOOD = 6, 2, 5
BLOCK = 1024  # positions of a text that a program compares at a time
WINDOW = 64  # tokens over which the right proposals of a drafter are counted: older ones have less weight
DECAY = math.log2(1 - 1 / WINDOW)
ROWS = 64  # number of rows up to which all speculative steps use the same variant of a kernel


@dataclass(frozen=True)
class Drafts:
    """The drafts of all lanes.

    tokens: int64 [L, D], the drafted tokens of each lane's next decode. counts: int32 [L], number of drafted tokens.
    most: int32 [L], maximum number of rows of the next decode. rows: int32 [2, L], the first row of a lane in the last
    speculative step, and the number of its rows. proposals: int64 [K, L, D], and proposed: int32 [K, L], the tokens of
    each drafter and their number. scores: float32 [K, L], number of right proposals among the last WINDOW tokens or so.
    chosen: int32 [L], the drafter of `tokens`.
    """

    tokens: Tensor
    counts: Tensor
    most: Tensor
    rows: Tensor
    proposals: Tensor
    proposed: Tensor
    scores: Tensor
    chosen: Tensor

    @classmethod
    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def empty(cls, lanes: int, most: int, device: torch.device, drafters: int = 1) -> Drafts:
        counts, limits, chosen = (torch.zeros(lanes, dtype=torch.int32, device=device) for _ in range(3))
        return cls(
            torch.zeros(lanes, most, dtype=torch.int64, device=device),
            counts,
            limits,
            torch.zeros(2, lanes, dtype=torch.int32, device=device),
            torch.zeros(drafters, lanes, most, dtype=torch.int64, device=device),
            torch.zeros(drafters, lanes, dtype=torch.int32, device=device),
            torch.zeros(drafters, lanes, device=device),
            chosen,
        )

    def begin(self, lane: int) -> None:
        """Drop the draft of a lane, and what is known of its drafters."""
        self.counts[lane] = 0
        self.proposed[:, lane] = 0
        self.scores[:, lane] = 0


@dataclass(frozen=True)
class Texts:
    """The texts that drafts are copied from.

    tokens: int32 [L, any]. starts: int64 [L], position in the text where the lane's sequence begins. sources: int32 [3,
    L], the position in the text that a lane's draft was copied from, the length of the match including the bonus, and
    the position after the last good source.
    """

    tokens: Tensor
    starts: Tensor
    sources: Tensor

    @classmethod
    @torch.inference_mode(False)  # as above
    def empty(cls, lanes: int, length: int, device: torch.device) -> Texts:
        return cls(
            torch.zeros(lanes, length, dtype=torch.int32, device=device),
            torch.zeros(lanes, dtype=torch.int64, device=device),
            torch.zeros(3, lanes, dtype=torch.int32, device=device),
        )

    def begin(self, lane: int, start: int, tokens: Tensor) -> None:
        """Set a lane's text to `tokens`, int32 [n]. start: where its sequence begins in the text."""
        self.tokens[lane, : len(tokens)] = tokens
        self.starts[lane] = start
        self.sources[:, lane] = -LONGEST_MATCH  # near no place


@dataclass(frozen=True)
class StepDraws:
    """The draws of a step, and which of them are kept; the argument of drafters.

    lanes: int64 [S], the lanes that draw. tokens, positions: int32 [R], the draws and their positions, one per lane, or
    if R > S, one per row of `spread`. found: int32 [4, S]: the number of draws that are kept; the first token of the
    next draft, -1 if it is empty, which `choose` writes; the number of drafted tokens that the step computed; and the
    drafter that they came from. prefills: the prefill chunks of the step, which has its decodes before them.
    """

    lanes: Tensor
    tokens: Tensor
    positions: Tensor
    found: Tensor
    prefills: tuple[Prefill, ...] = ()

    def ends(self, rows: Tensor) -> Tensor:
        """Return the row of each lane's last token among the tokens that the step computed, int64 [S], without those
        that are not kept. rows: `Drafts.rows`."""
        device = self.lanes.device
        if self.spread:
            return rows[0, self.lanes].long() + self.found[0] - 1
        if not self.prefills:
            return torch.arange(len(self.lanes), device=device)
        drawing = [int(chunk.sample) + len(chunk.forks) for chunk in self.prefills]
        decodes, lengths = len(self.lanes) - sum(drawing), np.array([len(chunk.tokens) for chunk in self.prefills])
        ends = np.concatenate([np.arange(decodes), np.repeat(decodes + lengths.cumsum() - 1, drawing)])
        return upload(ends.astype(np.int64), device)

    @property
    def spread(self) -> bool:
        """Return whether the kernel `spread` has distributed the rows: there are more rows than lanes."""
        return len(self.tokens) > len(self.lanes)


@jit("padding", "table_width", "most_drafts", "lanes", "size")
def _spread_kernel(
    lanes_ptr, most_ptr, counts_ptr, drafts_ptr, rows_ptr, last_ptr, lens_ptr, table_ptr,
    row_lanes_ptr, ids_ptr, positions_ptr, slots_ptr, row_lens_ptr, padding, table_width, most_drafts, lanes, size,
    BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Fill the rows of one lane per program. The last program fills the padding."""
    s = tl.program_id(0)
    each = tl.arange(0, BLOCK_S)
    lane = tl.load(lanes_ptr + each, mask=each < lanes, other=padding)
    wanted = tl.minimum(tl.load(most_ptr + lane), tl.load(counts_ptr + lane) + 1)
    wanted = tl.where(lane == padding, 0, wanted)
    level = tl.arange(0, BLOCK_W)
    together = tl.sum(tl.minimum(wanted[:, None], level[None, :]), 0)
    share = tl.max(tl.where(together <= size, level, 0))
    rows = tl.minimum(wanted, share)
    more = (wanted > share).to(tl.int32)
    rows += tl.where(tl.cumsum(more) <= size - tl.sum(rows), more, 0)
    total = tl.sum(rows)
    first = tl.sum(tl.where(each < s, rows, 0))
    count = tl.where(s < lanes, tl.sum(tl.where(each == s, rows, 0)), size - total)

    owner = tl.load(lanes_ptr + s, mask=s < lanes, other=padding)
    tl.store(rows_ptr + owner, first)
    tl.store(rows_ptr + padding + 1 + owner, count)
    number = tl.arange(0, BLOCK_R)
    here = number < count
    drafted = tl.load(
        drafts_ptr + owner * most_drafts + number - 1, mask=here & (number > 0) & (owner != padding), other=0
    )
    position = tl.where(owner == padding, 0, tl.load(lens_ptr + owner) + number)
    page = tl.load(table_ptr + owner * table_width + position // P, mask=here, other=0).to(tl.int64)
    at = first + number
    tl.store(row_lanes_ptr + at, owner, mask=here)
    tl.store(ids_ptr + at, tl.where(number == 0, tl.load(last_ptr + owner), drafted), mask=here)
    tl.store(positions_ptr + at, position.to(tl.int64), mask=here)
    tl.store(slots_ptr + at, page * P + position % P, mask=here)
    tl.store(row_lens_ptr + at, position + 1, mask=here)


def _spread_launch(
    lanes: Tensor, drafts: Drafts, last: Tensor, kv_lens: Tensor, table: Tensor, step: DecodeInput, page: int
) -> None:
    count, size, most_drafts = len(lanes), len(step.lanes), drafts.tokens.shape[1]
    assert lanes.dtype == last.dtype == step.lanes.dtype == torch.int64
    assert kv_lens.dtype == table.dtype == torch.int32
    assert count <= size
    block = max(power_of_two(size), ROWS)
    _spread_kernel[(count + 1,)](
        lanes, drafts.most, drafts.counts, drafts.tokens, drafts.rows, last, kv_lens, table,
        step.lanes, step.token_ids, step.positions, step.slots, step.kv_lens,
        len(kv_lens) - 1, table.stride(0), most_drafts, count, size,
        block, power_of_two(most_drafts + 2), block, page, num_warps=4,
    )  # fmt: skip


def _spread_twin(
    lanes: Tensor, drafts: Drafts, last: Tensor, kv_lens: Tensor, table: Tensor, step: DecodeInput, page: int
) -> None:
    """Fill the R rows of `step` for `lanes`, int64 [S] with S <= R, and write drafts.rows.

    A lane has one row for its last token, followed by one row per drafted token; rows are in the order of `lanes`. If
    not all rows fit, all lanes get the same maximum number of rows, and the first lanes one more. The remaining rows
    are padding: rows of the last lane at position 0. last: int64 [L], last token of each lane. kv_lens: int32 [L].
    table: int32 [L, columns], the page table. page: page size.
    """
    size, padding = len(step.lanes), len(kv_lens) - 1
    wanted = torch.where(lanes == padding, 0, torch.minimum(drafts.most, drafts.counts + 1)[lanes])
    levels = torch.arange(drafts.tokens.shape[1] + 2, device=lanes.device)
    share = (torch.minimum(wanted[:, None], levels).sum(0) <= size).sum() - 1
    rows = torch.minimum(wanted, share)
    more = wanted > share
    rows += more & (more.cumsum(0) <= size - rows.sum())
    firsts = rows.cumsum(0) - rows
    drafts.rows[:, lanes] = torch.stack((firsts, rows)).int()
    ids = torch.cat((last[lanes][:, None], drafts.tokens[lanes]), 1)
    of_row = torch.repeat_interleave(rows)
    number = torch.arange(len(of_row), device=lanes.device) - firsts[of_row]
    room = (0, size - len(of_row))
    step.lanes.copy_(F.pad(lanes[of_row], room, value=padding))
    step.token_ids.copy_(F.pad(ids[of_row, number], room))
    step.positions.copy_(F.pad(kv_lens[lanes[of_row]] + number, room))
    pages = table[step.lanes, step.positions // page].long()
    step.slots.copy_(pages * page + step.positions % page)
    step.kv_lens.copy_(step.positions + 1)


@jit("lanes", "all_lanes", "most_drafts")
def _follow_kernel(
    lanes_ptr, tokens_ptr, positions_ptr, drafts_ptr, rows_ptr, chosen_ptr, proposals_ptr, proposed_ptr, scores_ptr,
    last_ptr, lens_ptr, found_ptr, lanes, all_lanes, most_drafts,
    SPREAD: tl.constexpr, BLOCK_W: tl.constexpr, DRAFTERS: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Follow one lane per program."""
    s = tl.program_id(0)
    lane = tl.load(lanes_ptr + s)
    number = tl.arange(0, BLOCK_W)
    first = s
    rows = 1
    if SPREAD:
        first = tl.load(rows_ptr + lane)
        rows = tl.load(rows_ptr + all_lanes + lane)
    drawn = tl.load(tokens_ptr + first + number, mask=number < rows, other=-1)
    waiting = tl.load(drafts_ptr + lane * most_drafts + number, mask=number < rows - 1, other=-2)
    wrong = (number >= rows - 1) | (waiting != drawn)
    kept = tl.min(tl.where(wrong, number, BLOCK_W)) + 1
    newest = tl.sum(tl.where(number == kept - 1, drawn, 0))
    tl.store(last_ptr + lane, tl.maximum(newest, 0).to(tl.int64))
    tl.store(lens_ptr + lane, tl.load(positions_ptr + first) - 1 + kept)
    tl.store(found_ptr + s, kept)
    tl.store(found_ptr + lanes + s, -1)
    tl.store(found_ptr + 2 * lanes + s, rows - 1)
    tl.store(found_ptr + 3 * lanes + s, tl.load(chosen_ptr + lane))
    for drafter in range(DRAFTERS):
        own = drafter * all_lanes + lane
        count = tl.minimum(tl.load(proposed_ptr + own), kept)
        proposal = tl.load(proposals_ptr + own * most_drafts + number, mask=number < count, other=-2)
        right = tl.min(tl.where((number >= count) | (proposal != drawn), number, BLOCK_W))
        score = tl.load(scores_ptr + own) * tl.exp2(kept.to(tl.float32) * DECAY)
        tl.store(scores_ptr + own, score + right)


def _follow_launch(
    lanes: Tensor, drafts: Drafts, last: Tensor, kv_lens: Tensor, tokens: Tensor, positions: Tensor
) -> StepDraws:
    all_lanes, most_drafts = drafts.tokens.shape
    assert lanes.dtype == last.dtype == torch.int64
    assert tokens.dtype == positions.dtype == kv_lens.dtype == torch.int32
    assert len(lanes) <= len(tokens) == len(positions)
    assert all(x.is_contiguous() for x in (lanes, tokens, positions))
    # Zeros, because the result is read even if the kernel is compiled ahead and not launched.
    found = torch.zeros(4, len(lanes), dtype=torch.int32, device=lanes.device)
    _follow_kernel[(len(lanes),)](
        lanes, tokens, positions, drafts.tokens, drafts.rows, drafts.chosen, drafts.proposals, drafts.proposed,
        drafts.scores, last, kv_lens, found, len(lanes), all_lanes, most_drafts,
        len(tokens) > len(lanes), power_of_two(most_drafts + 2), len(drafts.proposals), DECAY, num_warps=4,
    )  # fmt: skip
    return StepDraws(lanes, tokens, positions, found)


def _follow_twin(
    lanes: Tensor, drafts: Drafts, last: Tensor, kv_lens: Tensor, tokens: Tensor, positions: Tensor
) -> StepDraws:
    """Return which draws of a step are kept: those that equal the drafts, and one more. Count the right proposals of
    all drafters.

    lanes, tokens, positions: see StepDraws. last: int64 [L], and kv_lens: int32 [L], are updated for these lanes.
    """
    firsts, rows = rows_of(lanes, drafts, tokens)
    number = torch.arange(drafts.tokens.shape[1] + 1, device=lanes.device)
    drawn = tokens[(firsts[:, None] + number).clamp(max=len(tokens) - 1)].long()
    right = (drawn[:, :-1] == drafts.tokens[lanes]) & (number[:-1] < rows[:, None] - 1)
    kept = 1 + right.int().cumprod(1).sum(1)
    last[lanes] = drawn.gather(1, kept[:, None] - 1).squeeze(1).clamp(min=0)
    kv_lens[lanes] = (positions[firsts] - 1 + kept).int()
    counts = torch.minimum(drafts.proposed[:, lanes], kept)
    right = (drafts.proposals[:, lanes] == drawn[:, :-1]) & (number[:-1] < counts[..., None])
    drafts.scores[:, lanes] = drafts.scores[:, lanes] * torch.exp2(kept * DECAY) + right.int().cumprod(2).sum(2)
    results = torch.stack((kept, torch.full_like(kept, -1), rows - 1, drafts.chosen[lanes]))
    return StepDraws(lanes, tokens, positions, results.int())


def rows_of(lanes: Tensor, drafts: Drafts, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row of each lane among the draws of a step, and the number of its rows: int64 [S] each."""
    if len(tokens) > len(lanes):
        firsts, rows = drafts.rows[:, lanes].long()
        return firsts, rows
    firsts = torch.arange(len(lanes), device=lanes.device)
    return firsts, torch.ones_like(firsts)


@jit("length", "all_lanes", "most_drafts")
def _recall_kernel(
    lanes_ptr, tokens_ptr, positions_ptr, kept_ptr, texts_ptr, starts_ptr, sources_ptr, rows_ptr, drafts_ptr,
    counts_ptr, length, all_lanes, most_drafts,
    SPREAD: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr,
    MATCH: tl.constexpr, NEAR: tl.constexpr, BONUS: tl.constexpr, GOOD: tl.constexpr,
):  # fmt: skip
    """Draft for one lane per program."""
    s = tl.program_id(0)
    lane = tl.load(lanes_ptr + s)
    text = texts_ptr + lane * length
    number = tl.arange(0, BLOCK_W)
    first = s
    if SPREAD:
        first = tl.load(rows_ptr + lane)
    kept = tl.load(kept_ptr + s)
    drawn = tl.load(tokens_ptr + first + number, mask=number < kept, other=-1)
    newest = tl.sum(tl.where(number == kept - 1, drawn, 0))
    begin = tl.load(starts_ptr + lane).to(tl.int32) + tl.load(positions_ptr + first)
    end = begin + kept
    fits = end <= length
    tl.store(text + begin + number, drawn, mask=fits & (number < kept))
    source = tl.load(sources_ptr + lane) + kept - 1
    good = tl.load(sources_ptr + all_lanes + lane) + kept - 1 >= GOOD
    near = tl.where(good, source, tl.load(sources_ptr + 2 * all_lanes + lane))
    tl.debug_barrier()  # all threads of this program have written

    # The best position has the largest match * 2^32 + position.
    best = tl.zeros([], tl.int64)
    if fits & (newest >= 0):
        for block in range(0, end - 1, BLOCK):
            place = block + tl.arange(0, BLOCK)
            same = (place < end - 1) & (tl.load(text + place, mask=place < end - 1, other=-1) == newest)
            if tl.max(same.to(tl.int32)) > 0:
                found = same
                match = same.to(tl.int32)
                for back in range(1, MATCH):
                    wanted = tl.load(text + end - 1 - back, mask=end - 1 >= back, other=-1)
                    same &= place >= back
                    same &= (wanted >= 0) & (tl.load(text + place - back, mask=same, other=-2) == wanted)
                    match += same.to(tl.int32)
                match += tl.where((place >= near) & (place < near + NEAR), BONUS, 0)
                score = (match.to(tl.int64) << 32) + place
                best = tl.maximum(best, tl.max(tl.where(found, score, 0)))
    match = (best >> 32).to(tl.int32)
    after = (best & 0xFFFFFFFF).to(tl.int32) + 1
    sure = (match >= GOOD) | ((after > near) & (after <= near + NEAR))
    most = tl.where((match > 0) & sure, most_drafts, tl.minimum(match, most_drafts))
    ahead = tl.arange(0, D)
    draft = tl.load(text + after + ahead % tl.maximum(end - after, 1), mask=ahead < most, other=-1)
    count = tl.min(tl.where(draft < 0, ahead, most))
    tl.store(drafts_ptr + lane * most_drafts + ahead, draft.to(tl.int64), mask=ahead < count)
    tl.store(counts_ptr + lane, count)
    tl.store(sources_ptr + lane, after)
    tl.store(sources_ptr + all_lanes + lane, match)
    tl.store(sources_ptr + 2 * all_lanes + lane, near)


def _recall_launch(lanes: Tensor, drawn: StepDraws, rows: Tensor, texts: Texts, tokens: Tensor, counts: Tensor) -> None:
    all_lanes, most_drafts = tokens.shape
    assert tokens.dtype == torch.int64
    assert counts.dtype == drawn.found.dtype == rows.dtype == torch.int32
    assert tokens.is_contiguous()
    _recall_kernel[(len(lanes),)](
        lanes, drawn.tokens, drawn.positions, drawn.found[0], texts.tokens, texts.starts, texts.sources, rows, tokens,
        counts, texts.tokens.shape[1], all_lanes, most_drafts,
        drawn.spread, power_of_two(most_drafts), power_of_two(most_drafts + 1), BLOCK,
        LONGEST_MATCH, NEAR, NEAR_BONUS, GOOD, num_warps=4,
    )  # fmt: skip


def _recall_twin(lanes: Tensor, drawn: StepDraws, rows: Tensor, texts: Texts, tokens: Tensor, counts: Tensor) -> None:
    """Append the draws that are kept to the texts of the lanes, and draft what followed the longest earlier match.

    lanes: `drawn.lanes`. rows: `Drafts.rows`. tokens: int64 [L, D], and counts: int32 [L], the drafts, are written for
    these lanes.
    """
    state = (texts.tokens, texts.starts, texts.sources, tokens, counts)
    host = [x.cpu() for x in state]  # copies, if this runs because the kernel does not compile for a GPU
    own, starts, sources, waiting, lengths = (x.numpy() for x in host)
    firsts = rows[0, lanes].tolist() if drawn.spread else list(range(len(lanes)))
    new, positions, all_kept = drawn.tokens.tolist(), drawn.positions.tolist(), drawn.found[0].tolist()
    for lane, first, kept in zip(lanes.tolist(), firsts, all_kept, strict=True):
        source, match, near = sources[:, lane].tolist()
        if match + kept - 1 >= GOOD:
            near = source + kept - 1
        begin = int(starts[lane]) + positions[first]
        draft, source, match = own[lane, :0], 1, 0
        if begin + kept <= own.shape[1]:
            own[lane, begin : begin + kept] = new[first : first + kept]
            draft, source, match = propose(own[lane, : begin + kept], near, waiting.shape[1])
        sources[:, lane] = source, match, near
        lengths[lane] = len(draft)
        waiting[lane, : len(draft)] = draft
    for x, written in zip(state, host, strict=True):
        if written is not x:
            x.copy_(written)


def propose(text: np.ndarray, near: int, most: int) -> tuple[np.ndarray, int, int]:
    """Return up to `most` tokens that may follow a text (int32 [n]), the position in the text where they begin, and the
    length of the match before it, including the bonus. near: the position after the last good source."""
    end = len(text)
    places = np.flatnonzero((text[:-1] == text[-1]) & (text[-1] >= 0))  # position of the last token of each match
    if not len(places):
        return text[:0], 1, 0
    matches = 1 + NEAR_BONUS * ((places >= near) & (places < near + NEAR))
    longer = np.arange(len(places))
    for length in range(1, min(LONGEST_MATCH, end)):
        longer = longer[places[longer] >= length]
        longer = longer[text[places[longer] - length] == text[end - 1 - length]]
        if not len(longer) or text[end - 1 - length] < 0:
            break
        matches[longer] += 1
    match = int(matches.max())
    after = int(places[matches == match][-1]) + 1
    sure = match >= GOOD or near < after <= near + NEAR
    draft = text[after + np.arange(most if sure else min(match, most)) % (end - after)]
    ends = np.flatnonzero(draft < 0)
    return draft[: ends[0]] if len(ends) else draft, after, match


@jit("lanes", "all_lanes", "most_drafts", "active")
def _choose_kernel(
    lanes_ptr, found_ptr, proposals_ptr, proposed_ptr, scores_ptr, drafts_ptr, counts_ptr, chosen_ptr,
    lanes, all_lanes, most_drafts, active, DRAFTERS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Choose for one lane per program."""
    s = tl.program_id(0)
    lane = tl.load(lanes_ptr + s)
    best = 0
    most = 0
    largest = -1.0
    for drafter in range(DRAFTERS):
        own = drafter * all_lanes + lane
        count = tl.where((active >> drafter) % 2 == 1, tl.load(proposed_ptr + own), 0)
        tl.store(proposed_ptr + own, count)
        score = tl.load(scores_ptr + own)
        better = (count > 0) & (score >= largest)
        best = tl.where(better, drafter, best)
        most = tl.where(better, count, most)
        largest = tl.where(better, score, largest)
    number = tl.arange(0, D)
    here = number < most
    draft = tl.load(proposals_ptr + (best * all_lanes + lane) * most_drafts + number, mask=here, other=-1)
    tl.store(drafts_ptr + lane * most_drafts + number, draft, mask=here)
    tl.store(counts_ptr + lane, most)
    tl.store(chosen_ptr + lane, best)
    tl.store(found_ptr + lanes + s, tl.sum(tl.where(number == 0, draft, 0)).to(tl.int32))


def _choose_launch(lanes: Tensor, drafts: Drafts, found: Tensor, active: int) -> None:
    all_lanes, most_drafts = drafts.tokens.shape
    assert found.shape == (4, len(lanes))
    assert found.dtype == torch.int32
    _choose_kernel[(len(lanes),)](
        lanes, found, drafts.proposals, drafts.proposed, drafts.scores, drafts.tokens, drafts.counts, drafts.chosen,
        len(lanes), all_lanes, most_drafts, active, len(drafts.proposals), power_of_two(most_drafts), num_warps=1,
    )  # fmt: skip


def _choose_twin(lanes: Tensor, drafts: Drafts, found: Tensor, active: int) -> None:
    """Let the next draft of each lane be the proposal of the drafter with the highest score among those that propose
    something, and write its first token, or -1, to found[1]. Of equal scores, the last drafter counts.

    lanes: int64 [S]. found: see StepDraws. active: bit k is set if drafter k has proposed now; otherwise its last
    proposal is dropped.
    """
    proposed, scores = drafts.proposed[:, lanes], drafts.scores[:, lanes]
    number = torch.arange(len(proposed), device=lanes.device)[:, None]
    proposed = torch.where((active >> number) % 2 == 1, proposed, 0)
    drafts.proposed[:, lanes] = proposed
    scores = torch.where(proposed > 0, scores, -1.0)
    best = torch.where(scores == scores.amax(0), number, -1).amax(0)
    best = torch.where(proposed.amax(0) > 0, best, 0)
    drafts.tokens[lanes] = tokens = drafts.proposals[best, lanes]
    drafts.counts[lanes] = counts = proposed.gather(0, best[None])[0]
    drafts.chosen[lanes] = best.int()
    found[1] = torch.where(counts > 0, tokens[:, 0], -1)


spread = Kernel(_spread_twin, "fastgen.kernels.drafts:_spread_launch")
follow = Kernel(_follow_twin, "fastgen.kernels.drafts:_follow_launch")
recall = Kernel(_recall_twin, "fastgen.kernels.drafts:_recall_launch")
choose = Kernel(_choose_twin, "fastgen.kernels.drafts:_choose_launch")
