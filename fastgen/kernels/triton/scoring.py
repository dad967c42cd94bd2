"""Logprobs of given tokens, and of the most likely tokens: see the twins in fastgen.kernels.scoring."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import power_of_two
from fastgen.kernels.scoring import MAX_LISTED, ids_of_keys, rank_keys_of
from fastgen.kernels.triton import sampler_rows as layout
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.triton.sampler_rows import NO_KEY, chunk_sum, key_ids, key_logits, log_sum, rank_keys, scale_of

SORTED_BYTES = 64 << 20  # size of the rank keys that torch sorts at a time


@jit("targets_ptr", "temperature")
def _score_kernel(
    logits_ptr, targets_ptr, temperature, found_ptr, V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Score the target of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    scale = scale_of(temperature)
    number = tl.arange(0, CHUNKS)
    tops = tl.full([CHUNKS], float("-inf"), tl.float32)
    sums = tl.zeros([CHUNKS], tl.float32)
    for chunk in range((V + CHUNK - 1) // CHUNK):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        top, total = chunk_sum(x, scale)
        tops = tl.where(number == chunk, top, tops)
        sums = tl.where(number == chunk, total, sums)
    best, log_total = log_sum(tops, sums, scale)
    x = tl.load(logits_ptr + row * V + tl.load(targets_ptr + row)).to(tl.float32)
    logprob = tl.div_rn(x - best, temperature) - log_total
    rows = tl.num_programs(0)
    tl.store(found_ptr + row, tl.where(best < float("inf"), logprob, float("nan")))
    tl.store(found_ptr + rows + row, best)
    tl.store(found_ptr + 2 * rows + row, log_total)


@jit("most")
def _list_kernel(logits_ptr, listed_ptr, most, V: tl.constexpr, CHUNK: tl.constexpr, MAX_LISTED: tl.constexpr):
    """List the largest rank keys of one chunk of one row per program."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    keys = tl.where(ids < V, rank_keys(x, ids), NO_KEY)
    listed = listed_ptr + (row * tl.num_programs(0) + chunk) * MAX_LISTED
    place = most * 0
    while place < most:
        key = tl.max(keys)
        tl.store(listed + place, key)
        keys = tl.where(keys == key, NO_KEY, keys)
        place += 1


@jit("totals_ptr", "most")
def _merge_kernel(
    listed_ptr, totals_ptr, ids_ptr, logprobs_ptr, most, C: tl.constexpr, SLOTS: tl.constexpr, MAX_LISTED: tl.constexpr
):
    """Find the largest keys that the chunks of a row have listed, with one program per row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    listed = (slot < C * MAX_LISTED) & (slot % MAX_LISTED < most)
    keys = tl.load(listed_ptr + row * C * MAX_LISTED + slot, mask=listed, other=NO_KEY)
    best, log_total = tl.load(totals_ptr + row), tl.load(totals_ptr + tl.num_programs(0) + row)
    place = most * 0
    while place < most:
        key = tl.max(keys)
        tl.store(ids_ptr + row * most + place, key_ids(key))
        tl.store(logprobs_ptr + row * most + place, key_logits(key) - best - log_total)
        keys = tl.where(keys == key, NO_KEY, keys)
        place += 1


def score(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor | None]:
    rows, vocab = logits.shape
    assert logits.is_contiguous()
    assert targets.shape == (rows,)
    results = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _score_kernel[(rows,)](
        logits, targets, temperature, results, vocab, layout.CHUNK,
        power_of_two(-(-vocab // layout.CHUNK)), num_warps=layout.WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return results[0], results[1:]


def alternatives(logits: Tensor, most: int, totals: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    chunks = -(-vocab // layout.CHUNK)
    device = logits.device
    if totals is None:
        _, totals = score(logits, torch.zeros(rows, dtype=torch.int64, device=device))
    assert totals is not None
    assert logits.is_contiguous()
    assert totals.shape == (2, rows)
    assert totals.is_contiguous()
    assert 0 < most <= vocab
    if most > MAX_LISTED:
        return _sort_alternatives(logits, most, totals)
    listed = torch.empty(rows, chunks, MAX_LISTED, dtype=torch.int64, device=device)
    ids = torch.empty(rows, most, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, most, dtype=torch.float32, device=device)
    _list_kernel[(chunks, rows)](logits, listed, most, vocab, layout.CHUNK, MAX_LISTED, num_warps=layout.WARPS)
    _merge_kernel[(rows,)](
        listed, totals, ids, logprobs, most, chunks, power_of_two(chunks * MAX_LISTED), MAX_LISTED, num_warps=4
    )
    return ids, logprobs


def _sort_alternatives(logits: Tensor, most: int, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `alternatives` does, by torch."""
    vocab = logits.shape[1]
    parts = logits.split(max(SORTED_BYTES // (8 * vocab), 1))
    ids = torch.cat([ids_of_keys(rank_keys_of(part.float()).topk(most).values, vocab) for part in parts])
    best, log_total = totals[:, :, None]
    return ids, logits.gather(1, ids).float() - best - log_total
