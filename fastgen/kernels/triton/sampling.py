"""The sampler on a GPU, in three parts. fastgen.model.sampler says what it computes.

1. edit applies penalties, biases, min_tokens (by forbidding stop ids) and masks, and stores each row's largest logits.
   It runs for batches that are edited or truncated.
2. bin and cut (fastgen.kernels.triton.truncation) find the smallest rank key that top-k and top-p keep. They run for
   batches with top-k or top-p.
3. draw reads the logits once. Each chunk finds its largest score, logit / temperature + noise, among the tokens that
   are kept, and its sums. The last program of a row combines the chunks.

Batches that are neither edited nor truncated use the plain variant of the draw, which gives a row the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.triton import sampler_rows as layout
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.triton.sampler_rows import (
    LOG2E,
    NO_KEY,
    chunk_sum,
    fixed_sum,
    held_back,
    is_cut,
    is_edited,
    last_of_row,
    log_sum,
    noise,
    parameter,
    rank_keys,
    scale_of,
    weigh,
)
from fastgen.kernels.triton.truncation import BINS, LISTED, bin_kernel, cut_kernel, find_best

EDIT_REGISTERS = 80  # per thread, so that three programs fit on a processor
DRAW_REGISTERS = 128  # so that two programs fit
PLAIN_REGISTERS = 64  # per thread in the plain variant, so that four programs fit
CUT_REGISTERS = 128  # so that two programs of each of bin and cut fit


class SamplerLanes(Protocol):
    """The state of L lanes that the kernels read and write (fastgen.model.sampler.LaneState).

    table: int64 [L, 14], see fastgen.kernels.triton.sampler_rows. token_ids: int64 [L, width], a lane's biased tokens
    followed by its stop ids. addends: float32 [L, width], what is added to their logits. last_token: int64 [L].
    counts: int32 [L, V], how often each token is in the answer. in_prompt: bool [L, V].
    """

    table: Tensor
    token_ids: Tensor
    addends: Tensor
    last_token: Tensor
    counts: Tensor
    in_prompt: Tensor


@dataclass(frozen=True)
class Scratch:
    """The scratch memory of the kernels for up to `rows` rows (fastgen.kernels.triton.sampler_rows)."""

    rows: int
    chunks: Tensor
    tops: Tensor
    lows: Tensor
    record: Tensor

    @staticmethod
    def make(rows: int, vocab: int, device: torch.device) -> Scratch:
        chunks, subs = -(-vocab // layout.CHUNK), -(-vocab // layout.SUB)
        return Scratch(
            rows,
            torch.empty(rows, 7, chunks, device=device),
            torch.empty(rows, subs, device=device),
            torch.empty(rows, chunks, device=device),
            torch.zeros(rows, 12, dtype=torch.int64, device=device),
        )


@jit("lanes_ptr", "positions_ptr", "width", "edits")
def _edit_kernel(
    logits_ptr, edited_ptr, edits, lanes_ptr, positions_ptr, table_ptr, token_ids_ptr, addends_ptr, width, counts_ptr,
    in_prompt_ptr, mask_ptr, record_ptr, tops_ptr, lows_ptr, bins_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Edit one chunk of one row per program. Rows without edits and truncation are skipped."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    N: tl.constexpr = (V + SUB - 1) // SUB
    SUBS: tl.constexpr = CHUNK // SUB
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int64)
    entry, record = table_ptr + lane * layout.ENTRY, record_ptr + row * layout.RECORD
    edited = is_edited(entry, position, edits)
    cut = is_cut(entry, V)
    if edited | cut | (parameter(entry, layout.MIN_P) > 0):
        ids = chunk * CHUNK + tl.arange(0, SUBS)[:, None] * SUB + tl.arange(0, SUB)[None, :]
        x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        if edited:
            changed = edited_ptr + row * V
            x = _penalized(x, ids, lane, entry, counts_ptr, in_prompt_ptr, V)
            at = lane * width
            biases = tl.load(entry + layout.BIASES)
            stops = held_back(entry, position)
            if biases + stops > 0:
                tl.store(changed + ids, x, mask=ids < V)
                _add(changed, token_ids_ptr + at, addends_ptr + at, biases, chunk, CHUNK)
                _add(changed, token_ids_ptr + at + biases, addends_ptr + at + biases, stops, chunk, CHUNK)
                x = tl.load(changed + ids, mask=ids < V, other=float("-inf"))
            if edits == 2:
                words = tl.load(mask_ptr + row * ((V + 31) // 32) + ids // 32, mask=ids < V, other=0)
                x = tl.where((words >> (ids % 32)) & 1 != 0, x, float("-inf"))
            tl.store(changed + ids, x, mask=ids < V)
        known = tl.where(x == x, x, float("inf"))
        sub = chunk * SUBS + tl.arange(0, SUBS)
        tl.store(tops_ptr + row * N + sub, tl.max(known, 1), mask=sub < N)
        tl.store(lows_ptr + row * C + chunk, tl.min(tl.where(known > float("-inf"), known, float("inf"))))
        if cut:
            for part in range((2 * BINS + C * 512 - 1) // (C * 512)):
                slot = (part * C + chunk) * 512 + tl.arange(0, 512)
                tl.store(bins_ptr + row * 2 * BINS + slot, tl.zeros([512], tl.int64), mask=slot < 2 * BINS)
        if chunk == 0:
            tl.store(record + layout.FOUND, 0)
            tl.store(record + layout.TOTAL, 0)
            tl.store(record + layout.LEAST_KEY, NO_KEY)


@jit()
def _penalized(x, ids, lane, entry, counts_ptr, in_prompt_ptr, V: tl.constexpr):
    """Apply the penalties of a lane to logits and return them."""
    if tl.load(entry + layout.PENALIZED) != 0:
        at = lane * V + ids
        counts = tl.load(counts_ptr + at, mask=ids < V, other=0)
        answered = counts > 0
        seen = answered | tl.load(in_prompt_ptr + at, mask=ids < V, other=0).to(tl.int1)
        repetition = parameter(entry, layout.REPETITION)
        frequency = parameter(entry, layout.FREQUENCY)
        presence = parameter(entry, layout.PRESENCE)
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - counts.to(tl.float32) * frequency
        x = x - tl.where(answered, presence, 0.0)
    return x


@jit()
def _add(edited, token_ids, addends, count, chunk, CHUNK: tl.constexpr):
    """Add `addends` to the logits of `count` distinct tokens, as far as they are in the chunk that this program has
    stored."""
    tl.debug_barrier()  # other threads have stored them
    first = count * 0
    while first < count:
        pair = first + tl.arange(0, 256)
        token = tl.load(token_ids + pair, mask=pair < count, other=-1)
        here = (token >= chunk * CHUNK) & (token < chunk * CHUNK + CHUNK)
        added = tl.load(edited + token, mask=here, other=0.0) + tl.load(addends + pair, mask=here, other=0.0)
        tl.store(edited + token, added, mask=here)
        first += 256
    tl.debug_barrier()


@jit("lanes_ptr", "positions_ptr", "edits", "keep")
def _draw_kernel(
    logits_ptr, edited_ptr, edits, lanes_ptr, positions_ptr, table_ptr, record_ptr, tops_ptr, chunks_ptr,
    last_token_ptr, counts_ptr, out_ptr, host_ptr, keep, kept_ptr,
    V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, CHUNKS: tl.constexpr, SUBS: tl.constexpr,
    FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw from one chunk of one row per program, last rows first, which the previous kernel has left in the cache."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    C: tl.constexpr = (V + CHUNK - 1) // CHUNK
    N: tl.constexpr = (V + SUB - 1) // SUB
    chunk, rows = tl.program_id(0), tl.num_programs(1)
    row = (rows - 1 - tl.program_id(1)).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    # First, since the other loads depend on each other; this one takes the longest.
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    lane = tl.load(lanes_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int64)
    entry, record = table_ptr + lane * layout.ENTRY, record_ptr + row * layout.RECORD
    temperature = parameter(entry, layout.TEMPERATURE)
    scale = scale_of(temperature)
    raw_top, raw_sum = chunk_sum(x, LOG2E)
    top, total = raw_top, raw_sum
    edited = False
    changed = scale != LOG2E
    if FULL:
        edited = is_edited(entry, position, edits)
        changed |= edited
        if edited:
            x = tl.load(edited_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
    if changed:
        top, total = chunk_sum(x, scale)
    base = tl.where(top > float("-inf"), top, 0.0)
    kept_total = total
    scores = (x - base) * scale
    if temperature > 0:
        scores += noise(entry, position, chunk * CHUNK, CHUNK)
    if FULL:
        min_p = parameter(entry, layout.MIN_P)
        if (temperature > 0) & ((min_p > 0) | is_cut(entry, V)):
            best = find_best(tops_ptr + row * N, N, SUBS)
            kept = (x > float("-inf")) & (x >= best + tl.log(min_p) * temperature)
            kept &= rank_keys(x, ids) >= tl.load(record + layout.LEAST_KEY)
            scores = tl.where(kept, scores, float("-inf"))
            kept_total = fixed_sum(tl.where(kept, weigh(x, base, scale), 0.0))
        if keep != 0:
            tl.store(kept_ptr + row * V + ids, scores > float("-inf"), mask=ids < V)
    score = tl.max(scores)
    winner = tl.min(tl.where(scores == score, ids, V - 1))
    chunks = chunks_ptr + row * layout.RESULTS * C
    own = chunks + chunk
    tl.store(own + layout.RAW_TOP * C, raw_top)
    tl.store(own + layout.RAW_SUM * C, raw_sum)
    tl.store(own + layout.TOP * C, top)
    tl.store(own + layout.SUM * C, total)
    tl.store(own + layout.KEPT_SUM * C, kept_total)
    tl.store(own + layout.SCORE * C, score)
    tl.store(own + layout.WINNER * C, winner.to(tl.float32, bitcast=True))
    if last_of_row(record + layout.DONE, C):
        token = _combine(
            logits_ptr, edited_ptr, edited, chunks, out_ptr, host_ptr, row, rows, temperature, V, C, CHUNKS, FULL
        )
        tl.store(last_token_ptr + lane, token)
        if FULL and tl.load(entry + layout.PENALIZED) != 0:
            tl.atomic_add(counts_ptr + lane * V + token, 1, sem="relaxed")


@jit()
def _combine(
    logits_ptr, edited_ptr, edited, chunks, out_ptr, host_ptr, row, rows, temperature,
    V: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Combine a row's chunks and write the outcome to `out` (see draw). Return the token, or 0 if there is none."""
    number = tl.arange(0, CHUNKS)
    real = number < C
    at = chunks + number
    scale = scale_of(temperature)
    raw_tops = tl.load(at + layout.RAW_TOP * C, mask=real, other=float("-inf"), cache_modifier=".cg")
    raw_sums = tl.load(at + layout.RAW_SUM * C, mask=real, other=0.0, cache_modifier=".cg")
    tops = tl.load(at + layout.TOP * C, mask=real, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(at + layout.SUM * C, mask=real, other=0.0, cache_modifier=".cg")
    kept_sums = tl.load(at + layout.KEPT_SUM * C, mask=real, other=0.0, cache_modifier=".cg")
    scores = tl.load(at + layout.SCORE * C, mask=real, other=float("-inf"), cache_modifier=".cg")
    winners = tl.load(at + layout.WINNER * C, mask=real, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
    raw_top, raw_total = log_sum(raw_tops, raw_sums, LOG2E)
    best, total = log_sum(tops, sums, scale)
    _, kept_total = log_sum(tops, kept_sums, scale)
    scores = tl.where(scores > float("-inf"), scores + (tops - best) * scale, float("-inf"))
    first = tl.min(tl.where(scores == tl.max(scores), number, CHUNKS))
    token = tl.sum(tl.where(number == first, winners, 0)).to(tl.int64)
    raw = tl.load(logits_ptr + row * V + token).to(tl.float32)
    x = raw
    if FULL and edited:
        x = tl.load(edited_ptr + row * V + token)
    share = tl.div_rn(x - best, temperature)
    possible = (best > float("-inf")) & (best < float("inf"))
    logprob = tl.where(temperature == 0, 0.0, share - kept_total)
    untruncated = tl.where(temperature == 0, 0.0, share - total)
    logprob = tl.where(possible, logprob, float("nan"))
    untruncated = tl.where(possible, untruncated, float("nan"))
    raw_logprob = tl.where(possible & (raw_top < float("inf")), raw - raw_top - raw_total, float("nan"))
    out = out_ptr + row
    drawn = tl.where(possible, token, -1).to(tl.int32)
    _store(out, rows, drawn, logprob, untruncated, raw_logprob)
    tl.store(out + 4 * rows, raw_top.to(tl.int32, bitcast=True))
    tl.store(out + 5 * rows, raw_total.to(tl.int32, bitcast=True))
    _store(host_ptr + row, rows, drawn, logprob, untruncated, raw_logprob)
    return tl.where(possible, token, 0)


@jit()
def _store(out, rows, token, logprob, untruncated, raw_logprob):
    """Store the first four results of a row."""
    tl.store(out, token)
    tl.store(out + rows, logprob.to(tl.int32, bitcast=True))
    tl.store(out + 2 * rows, untruncated.to(tl.int32, bitcast=True))
    tl.store(out + 3 * rows, raw_logprob.to(tl.int32, bitcast=True))


def draw(
    logits: Tensor,
    state: SamplerLanes,
    lanes: Tensor,
    positions: Tensor,
    work: Scratch,
    *,
    edited: bool,
    truncated: bool,
    cut: bool,
    mask: Tensor | None,
    keep: bool,
    host: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Draw a token for each of R rows, and store it in `state`.

    logits: float32, bfloat16 or float16 [R, V]. lanes: int64 [R]. positions: int32 or int64 [R]. edited: whether any
    row has a penalty, biases or min_tokens. truncated: whether any row has top-k, top-p or min-p. cut: whether any row
    has top-k or top-p. mask: int32 [R, ceil(V / 32)], or None. keep: whether to return the tokens that could be drawn.
    host: int32 [4, R] in pinned memory, to which the first four rows of the result are written as well, or None.

    Returns int32 [6, R]: the tokens (-1 for none), and, as the bits of float32, logprobs, untruncated logprobs, raw
    logprobs, the largest logit of each row, and the logarithm of its sum of exp(logit - largest). Also returns the
    tokens that could be drawn, bool [R, V], or None.
    """
    (count, vocab), device = logits.shape, logits.device
    edits = 2 if mask is not None else int(edited)
    assert logits.is_contiguous()
    assert len(lanes) == len(positions) == count <= work.rows
    assert truncated or not cut
    out = torch.empty(6, count, dtype=torch.int32, device=device)
    written = out, out if host is None else host
    chunk, sub = layout.CHUNK, layout.SUB
    chunks = -(-vocab // chunk)
    padded_chunks, padded_subs = power_of_two(chunks), power_of_two(-(-vocab // sub))
    grid, options, known = (chunks, count), _options(device), (lanes, positions, state.table)
    pdl = "launch_pdl" in options
    if not (edits or truncated or keep):
        _draw_kernel[grid](
            logits, None, 0, *known, work.record, None, work.chunks, state.last_token, None, *written, 0, None, vocab,
            chunk, sub, padded_chunks, padded_subs, False, pdl, maxnreg=PLAIN_REGISTERS, **options,
        )  # fmt: skip
        return out, None
    changed = torch.empty(count if edits else 1, vocab, dtype=torch.float32, device=device)
    read_from = logits, changed, edits
    bins = torch.empty(count if cut else 1, 2 * BINS, dtype=torch.int64, device=device)
    if edits or truncated:
        _edit_kernel[grid](
            *read_from, *known, state.token_ids, state.addends, state.token_ids.shape[1], state.counts,
            state.in_prompt, out if mask is None else mask, work.record, work.tops, work.lows, bins, vocab, chunk,
            sub, BINS, pdl, maxnreg=EDIT_REGISTERS, **options,
        )  # fmt: skip
    if cut:
        listed = torch.empty(count, LISTED, dtype=torch.int64, device=device)
        bin_kernel[grid](
            *read_from, *known, work.record, work.tops, work.lows, bins, vocab, chunk, sub, padded_chunks, padded_subs,
            BINS, pdl, maxnreg=CUT_REGISTERS, **options,
        )  # fmt: skip
        cut_kernel[grid](
            *read_from, *known, work.record, work.tops, listed, vocab, chunk, sub, padded_subs, BINS, LISTED, pdl,
            maxnreg=CUT_REGISTERS, **options,
        )  # fmt: skip
    # Zeros, or the host would list millions of chance tokens while kernels are only compiled.
    kept = torch.zeros(count, vocab, dtype=torch.bool, device=device) if keep else None
    _draw_kernel[grid](
        *read_from, *known, work.record, work.tops, work.chunks, state.last_token, state.counts, *written, int(keep),
        out if kept is None else kept, vocab, chunk, sub, padded_chunks, padded_subs, True, pdl,
        maxnreg=DRAW_REGISTERS, **options,
    )  # fmt: skip
    return out, kept


@cache
def _options(device: torch.device) -> dict[str, Any]:
    """Return the options of compilation and launch. Products and sums are fused only where a kernel says so, because
    edited logits have the same bits as torch's."""
    options: dict[str, Any] = {"num_warps": layout.WARPS, "enable_fp_fusion": False}
    if Chip.of(device).dependent_launch:
        options["launch_pdl"] = True
    return options
