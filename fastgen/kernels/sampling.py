"""The sampler on a GPU: what fastgen.sampler says, in two kernels over the logits, three where rows are truncated.

1. scan: each chunk's largest logit and its share of the log-sum; the full variant edits the logits first (penalties,
   bias, held back stop ids, mask).
2. draw: each chunk's tickets. The program that is last of its row to be done draws the token. A row with top-k or top-p
   is instead sorted into bins, and its last program finds the bins where they cut.
3. truncate (fastgen.kernels.truncation): decides within these bins, and draws.

The plain variant is for batches without edits, top-k and top-p. A row is computed alike in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgen.kernels import columns
from fastgen.kernels.launch import Chip, jit, tl
from fastgen.kernels.lottery import (
    as_tickets,
    finish,
    fixed_sum,
    held_back,
    ids_of,
    is_edited,
    parameter,
    pick,
    read,
    scales,
    store_subs,
    top_p_of,
    weigh,
)
from fastgen.kernels.truncation import BINS, LISTED, fill_bins, find_windows, kept_kernel, truncate_kernel

# Registers a thread: so that three, two and two programs run beside each other on a processor.
SCAN_REGISTERS = 80
DRAW_REGISTERS = 128
TRUNCATE_REGISTERS = 128


class Lanes(Protocol):
    """What the kernels read and write of S lanes (fastgen.sampler.LaneState).

    table: int64 [S, 14], see fastgen.kernels.columns. token_ids, addends: int64 and float32 [S, width], a
    lane's biases and then its stop ids. last_token: int64 [S]. counts: int32 [S, V]. in_prompt: bool [S, V].
    """

    table: Tensor
    token_ids: Tensor
    addends: Tensor
    last_token: Tensor
    counts: Tensor | None
    in_prompt: Tensor | None


@dataclass(frozen=True)
class Workspace:
    """What the kernels leave for each other, of `rows` rows (fastgen.kernels.columns)."""

    rows: int
    chunks: Tensor
    tops: Tensor
    sums: Tensor
    record: Tensor

    @staticmethod
    def make(rows: int, vocab: int, device: torch.device) -> Workspace:
        chunks, subs = -(-vocab // columns.CHUNK), -(-vocab // columns.SUB)
        return Workspace(
            rows,
            torch.empty(rows, 4, chunks, dtype=torch.float32, device=device),
            torch.empty(rows, subs, dtype=torch.float32, device=device),
            torch.empty(rows, subs, dtype=torch.int64, device=device),
            torch.empty(rows, 16, dtype=torch.int64, device=device),
        )


@jit("lanes_ptr", "positions_ptr", "width", "edits")
def _scan_kernel(
    logits_ptr, chunks_ptr, record_ptr, lanes_ptr, positions_ptr, table_ptr, token_ids_ptr, addends_ptr, width,
    counts_ptr, in_prompt_ptr, mask_ptr, edits, edited_ptr, tops_ptr, bins_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BINS: tl.constexpr, FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a chunk and row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    N: tl.constexpr = (V + SUB - 1) // SUB
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    chunks = chunks_ptr + row * 4 * C + chunk
    record = record_ptr + row * columns.RECORD
    ids = ids_of(chunk, CHUNK, SUB)
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.where(x == x, x, float("inf")))
    base = tl.where(top > float("-inf"), top, 0.0)
    tl.store(chunks, top)
    tl.store(chunks + C, fixed_sum(weigh(x, base, columns.HIGH, columns.LOW)).to(tl.float32))
    if chunk == 0:
        tl.store(record + columns.DONE, 0)
        tl.store(record + columns.TOTAL, 0)
        tl.store(record + columns.KEPT, columns.NO_KEY)
    if FULL:
        lane = tl.load(lanes_ptr + row)
        position = tl.load(positions_ptr + row).to(tl.int64)
        entry = table_ptr + lane * columns.ENTRY
        if is_edited(entry, position, edits, FULL):
            edited = edited_ptr + row * V
            x = _penalized(x, ids, lane, entry, counts_ptr, in_prompt_ptr, V)
            at = lane * width
            biases = tl.load(entry + columns.BIASES)
            stops = held_back(entry, position)
            if biases + stops > 0:
                tl.store(edited + ids, x, mask=ids < V)
                _add(edited, token_ids_ptr + at, addends_ptr + at, biases, chunk, CHUNK)
                _add(edited, token_ids_ptr + at + biases, addends_ptr + at + biases, stops, chunk, CHUNK)
                x = tl.load(edited + ids, mask=ids < V, other=float("-inf"))
            if edits == 2:
                words = tl.load(mask_ptr + row * ((V + 31) // 32) + ids // 32, mask=ids < V, other=0)
                x = tl.where((words >> (ids % 32)) & 1 != 0, x, float("-inf"))
            tl.store(edited + ids, x, mask=ids < V)
        known = tl.where(x == x, x, float("inf"))
        tl.store(chunks + 2 * C, tl.max(known))
        tl.store(chunks + 3 * C, tl.min(tl.where(known > float("-inf"), known, float("inf"))))
        store_subs(tops_ptr + row * N, chunk, tl.max(known, 1), N, CHUNK, SUB)
        for part in range((2 * BINS + C * 512 - 1) // (C * 512)):
            slot = (part * C + chunk) * 512 + tl.arange(0, 512)
            tl.store(bins_ptr + row * 2 * BINS + slot, tl.zeros([512], tl.int64), mask=slot < 2 * BINS)
        if chunk == 0:
            tl.store(record + columns.CUT, 0)
            tl.store(record + columns.FOUND, 0)
            tl.store(record + columns.TRUNCATED, 0)


@jit()
def _penalized(x, ids, lane, entry, counts_ptr, in_prompt_ptr, V: tl.constexpr):
    """Logits after the penalties of a lane; as they are where it has none."""
    if tl.load(entry + columns.PENALIZED) != 0:
        at = lane * V + ids
        counts = tl.load(counts_ptr + at, mask=ids < V, other=0)
        answered = counts > 0
        seen = answered | tl.load(in_prompt_ptr + at, mask=ids < V, other=0).to(tl.int1)
        repetition = parameter(entry, columns.REPETITION)
        frequency = parameter(entry, columns.FREQUENCY)
        presence = parameter(entry, columns.PRESENCE)
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - counts.to(tl.float32) * frequency
        x = x - tl.where(answered, presence, 0.0)
    return x


@jit()
def _add(edited, token_ids, addends, count, chunk, CHUNK: tl.constexpr):
    """Add to the logits of `count` distinct tokens, as far as they are in a chunk that this program has stored."""
    tl.debug_barrier()  # other threads stored them
    first = count * 0
    while first < count:
        pair = first + tl.arange(0, 256)
        token = tl.load(token_ids + pair, mask=pair < count, other=-1)
        here = (token >= chunk * CHUNK) & (token < chunk * CHUNK + CHUNK)
        added = tl.load(edited + token, mask=here, other=0.0) + tl.load(addends + pair, mask=here, other=0.0)
        tl.store(edited + token, added, mask=here)
        first += 256
    tl.debug_barrier()


@jit("lanes_ptr", "positions_ptr", "edits")
def _draw_kernel(
    logits_ptr, chunks_ptr, record_ptr, lanes_ptr, positions_ptr, table_ptr, sums_ptr, last_token_ptr, out_ptr,
    counts_ptr, edits, edited_ptr, tops_ptr, bins_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, CHUNKS: tl.constexpr, SUBS: tl.constexpr,
    BINS: tl.constexpr, FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a chunk and row; the last rows first, which the scan has left in the cache."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    N: tl.constexpr = (V + SUB - 1) // SUB
    chunk = tl.program_id(0)
    rows = tl.num_programs(1)
    row = (rows - 1 - tl.program_id(1)).to(tl.int64)
    lane = tl.load(lanes_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int64)
    entry = table_ptr + lane * columns.ENTRY
    record, sums, chunks = record_ptr + row * columns.RECORD, sums_ptr + row * N, chunks_ptr + row * 4 * C
    number = tl.arange(0, CHUNKS)
    tops = tl.load(chunks + (2 * C if FULL else 0) + number, mask=number < C, other=float("-inf"))
    best = tl.max(tops)
    temperature = parameter(entry, columns.TEMPERATURE)
    edited = is_edited(entry, position, edits, FULL)
    mine = chunk == 0  # whether this program settles the row
    token, logprob = position * 0 - 1, best * 0 + float("nan")
    untruncated = logprob
    if (best > float("-inf")) & (best < float("inf")):
        ids = ids_of(chunk, CHUNK, SUB)
        x = read(logits_ptr, edited_ptr, edited, row, ids, V, FULL)
        if temperature == 0:
            mine = chunk == tl.min(tl.where(tops == best, number, CHUNKS))
            token = tl.min(tl.where(x == best, ids, V - 1)).to(tl.int64)
            logprob, untruncated = best - best, best - best
        else:
            high, low = scales(temperature)
            weights = weigh(x, best, high, low)
            min_p = parameter(entry, columns.MIN_P)
            possible = weights >= min_p
            truncated = False
            if FULL:
                truncated = (tl.load(entry + columns.TOP_K) < V) | (top_p_of(entry) < 1)
                possible |= truncated  # min_p comes after top-k and top-p
            tickets = as_tickets(weights)
            if min_p > 0:
                tl.atomic_add(record + columns.TOTAL, tl.sum(tickets), sem="relaxed")
            tickets = tl.where(possible, tickets, 0)
            store_subs(sums, chunk, tl.sum(tickets, 1), N, CHUNK, SUB)
            if FULL and truncated:
                least = tl.min(tl.load(chunks + 3 * C + number, mask=number < C, other=float("inf")))
                fill_bins(
                    x, tickets, best, least, entry, tops_ptr + row * N, bins_ptr + row * 2 * BINS, record, V, N,
                    SUBS, BINS,
                )  # fmt: skip
            tl.debug_barrier()  # all of this program's sums are written before it counts as done
            mine = tl.atomic_add(record + columns.DONE, 1) == C - 1
            if mine:
                if FULL and truncated:
                    mine = find_windows(entry, sums, bins_ptr + row * 2 * BINS, record, V, N, SUBS, BINS)
                if mine:
                    token, logprob, untruncated = pick(
                        logits_ptr, edited_ptr, edited, row, sums, record, entry, position, best, columns.NO_KEY, V,
                        SUB, SUBS, FULL,
                    )  # fmt: skip
    if mine:
        finish(
            logits_ptr, chunks, out_ptr, last_token_ptr, counts_ptr, row, rows, lane, entry, token, logprob,
            untruncated, V, C, CHUNKS, FULL,
        )  # fmt: skip


def draw(
    logits: Tensor,
    lanes: Lanes,
    rows: Tensor,
    positions: Tensor,
    work: Workspace,
    full: bool,
    edited: bool,
    mask: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Draw for R lanes, and note it in `lanes`.

    logits: float32 or half [R, V]. rows: int64 [R], the lanes. positions: int64 [R]. full: a row has its logits edited,
    top-k or top-p, or is asked what was kept. edited: a row has a penalty, biases or min_tokens. mask: int32
    [R, ceil(V / 32)]. keep: tell what could be drawn.

    Returns int32 [6, R]: the tokens, -1 for none, and, as the bits of float32, logprobs, untruncated logprobs, raw
    logprobs, each row's largest logit and the logarithm of its sum of exp(logit - largest); and bool [R, V] or None.
    """
    count, vocab = logits.shape
    edits = 2 if mask is not None else int(edited)
    assert logits.is_contiguous()
    assert len(rows) == len(positions) == count <= work.rows
    assert full or not (edits or keep)
    device = logits.device
    out = torch.empty(6, count, dtype=torch.int32, device=device)
    chunks, *sizes = _sizes(vocab, columns.CHUNK, columns.SUB)
    grid = (chunks, count)
    options = _options(device, columns.WARPS)
    pdl = "launch_pdl" in options
    if not full:
        _scan_kernel[grid](
            logits, work.chunks, work.record, None, None, None, None, None, 0, None, None, None, 0, None, None, None,
            *sizes[:3], BINS, False, pdl, **options,
        )  # fmt: skip
        _draw_kernel[grid](
            logits, work.chunks, work.record, rows, positions, lanes.table, work.sums, lanes.last_token, out, None, 0,
            None, None, None, *sizes, BINS, False, pdl, **options,
        )  # fmt: skip
        return out, None
    assert lanes.counts is not None
    assert lanes.in_prompt is not None
    edited_to = torch.empty(count if edits else 1, vocab, dtype=torch.float32, device=device)
    bins = torch.empty(count, 2 * BINS, dtype=torch.int64, device=device)
    listed = torch.empty(count, LISTED, dtype=torch.int64, device=device)
    _scan_kernel[grid](
        logits, work.chunks, work.record, rows, positions, lanes.table, lanes.token_ids, lanes.addends,
        lanes.token_ids.shape[1], lanes.counts, lanes.in_prompt, out if mask is None else mask, edits, edited_to,
        work.tops, bins, *sizes[:3], BINS, True, pdl, maxnreg=SCAN_REGISTERS, **options,
    )  # fmt: skip
    _draw_kernel[grid](
        logits, work.chunks, work.record, rows, positions, lanes.table, work.sums, lanes.last_token, out, lanes.counts,
        edits, edited_to, work.tops, bins, *sizes, BINS, True, pdl, maxnreg=DRAW_REGISTERS, **options,
    )  # fmt: skip
    truncate_kernel[grid](
        logits, work.chunks, work.record, rows, positions, lanes.table, work.sums, lanes.last_token, out, lanes.counts,
        edits, edited_to, listed, *sizes, BINS, LISTED, pdl, maxnreg=TRUNCATE_REGISTERS, **options,
    )  # fmt: skip
    if not keep:
        return out, None
    kept = torch.empty(count, vocab, dtype=torch.bool, device=device)
    kept_kernel[grid](
        logits, work.chunks, work.record, rows, positions, lanes.table, out, kept, edits, edited_to, *sizes[:4],
        num_warps=columns.WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out, kept


@cache
def _sizes(vocab: int, chunk: int, sub: int) -> tuple[int, ...]:
    """Chunks; then the kernels' V, CHUNK, SUB, CHUNKS and SUBS."""
    chunks, subs = -(-vocab // chunk), -(-vocab // sub)
    return chunks, vocab, chunk, sub, 1 << (chunks - 1).bit_length(), 1 << (subs - 1).bit_length()


@cache
def _options(device: torch.device, warps: int) -> dict[str, Any]:
    """How the kernels are compiled and launched. Products and sums are not fused, unless a kernel says so: the edits
    are to be torch's to the bit."""
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    if Chip.of(device).dependent_launch:
        options["launch_pdl"] = True
    return options
