"""Hopper's decode kernel on the CPU (see gluon_on_cpu.py), compared with attention in float32. Unwritten values are
NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import gluon_on_cpu
import pytest
import torch
from ragged import KV_HEADS, LAYER, Ragged
from test_kernels_attention import close, make
from test_kernels_batch_invariant import H200
from torch import Tensor

from fastgen.device.chip import power_of_two
from fastgen.kernels import fp8_pages, work_tiles
from fastgen.kernels.attention import PartialResults
from fastgen.kernels.hopper import decode as hopper_decode
from fastgen.kernels.hopper import gluon
from fastgen.kernels.triton import fp8_pages as fp8_page_kernels
from fastgen.kernels.triton import softmax
from fastgen.kernels.triton import work_tiles as work_tile_kernels

Attend = Callable[..., Tensor]


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Attend:
    gluon_on_cpu.put(monkeypatch, "_decode_kernel", hopper_decode, gluon, softmax, work_tile_kernels, fp8_page_kernels)
    monkeypatch.setattr(hopper_decode, "Chip", SimpleNamespace(of=lambda device: replace(H200, processors=3)))

    def run(case: Ragged, window: int, shared: int = 0) -> Tensor:
        count, heads, head_size = case.q.shape
        lens, pool = torch.tensor(case.kv_lens, dtype=torch.int32), case.pool(garbage=torch.nan)
        tiles = torch.zeros(1, work_tiles.HEADER + count * work_tiles.FIELDS, dtype=torch.int32)
        windows = torch.tensor([window], dtype=torch.int32)
        work_tiles.plan_decode.twin(case.lanes, lens, windows, tiles, work_tiles.WHOLE, None)
        partial = PartialResults.empty(count, heads, KV_HEADS, head_size, torch.device("cpu"))
        if shared:
            put_partial_results(case, shared, partial)
            found = tiles[0, work_tiles.HEADER :].view(-1, work_tiles.FIELDS)
            found[:, work_tiles.BEGIN], found[:, work_tiles.PART] = shared, found[:, work_tiles.FIRST]
            found[:, work_tiles.TOKENS] += work_tiles.SPLITS  # a partial result
        memory = partial.parts, partial.peaks, partial.totals, partial.arrivals
        out = torch.full_like(case.q, 7.0)
        hopper_decode.launch(
            case.q, out, pool.keys, pool.values, case.table, tiles[0], count, False, True, shared > 0, memory, LAYER,
            window, head_size**-0.5 / math.log(2),
        )  # fmt: skip
        return out

    return run


def put_partial_results(case: Ragged, keys: int, partial: PartialResults) -> None:
    """Write the softmax of each sequence over its first `keys` keys."""
    for number, lane in enumerate(case.lanes):
        own = case.table[lane].long()
        k, v = (x[LAYER][own].transpose(1, 2).flatten(0, 1)[:keys] for x in (case.clean.keys, case.clean.values))
        q = case.q[number].float().unflatten(0, (k.shape[1], -1))  # [K, G, D]
        scores = torch.einsum("kgd,nkd->kgn", q, k) * q.shape[-1] ** -0.5 / math.log(2)
        peak = scores.amax(-1)
        weights = torch.exp2(scores - peak[..., None])
        partial.parts[number] = torch.einsum("kgn,nkd->kgd", weights, v).flatten(0, 1)
        partial.peaks[number], partial.totals[number] = peak.flatten(), weights.sum(-1).flatten()


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("group", "head_size", "page_size"), [(4, 128, 64), (1, 64, 128), (5, 96, 64), (16, 128, 64)])
def test_all_shapes(group: int, head_size: int, page_size: int, fp8: bool, window: int, attend: Attend) -> None:
    lens = [1, 16, 17, 63, 64, 65, 200, 384]
    case = make([1] * len(lens), lens, head_size, group, page_size, torch.bfloat16, fp8=fp8)
    close(attend(case, window), case.expected(window)[0])


def test_queries_and_keys_of_all_magnitudes(attend: Attend) -> None:
    case = make([1] * 3, [64, 130, 83], 128, 4, 64, torch.bfloat16, fp8=True)
    case.q *= torch.tensor([1e-30, 1.0, 1e-3])[:, None, None]
    close(attend(case, 0), case.expected(0)[0])


@pytest.mark.parametrize("fp8", [False, True])
def test_partial_results_of_shared_keys(fp8: bool, attend: Attend) -> None:
    case = make([1] * 3, [65, 130, 183], 96, 4, 64, torch.bfloat16, fp8=fp8)
    close(attend(case, 0, shared=64), case.expected(0)[0])


@pytest.mark.parametrize(
    ("splits", "head_size", "fp8"), [(2, 128, False), (64, 64, False), (150, 96, False), (97, 80, True)]
)
def test_splits_are_combined_in_order(splits: int, head_size: int, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few splits, and more than are loaded at once, with partial results of others next to them."""
    gluon_on_cpu.put(monkeypatch, "_decode_kernel", hopper_decode, gluon, softmax, work_tile_kernels, fp8_page_kernels)
    heads, dims, own = 3, power_of_two(head_size), slice(4, 4 + splits)
    partial = PartialResults.empty(splits + 9, heads, 1, head_size, torch.device("cpu"))
    for each, values in ((partial.parts, 1.0), (partial.peaks, 5.0), (partial.totals, 1.0)):
        each.fill_(torch.nan)
        each[own] = torch.randn(each[own].shape).abs() * values
    out = torch.full((2, heads, head_size), 7.0)
    ks = gluon_on_cpu.allocate(fp8_pages.E4M3 if fp8 else torch.bfloat16, [3, 1, hopper_decode.KEYS, dims], None)
    tensors = out, partial.parts, partial.peaks, partial.totals
    results = *(gluon_on_cpu.Pointer(each.view(-1)) for each in tensors), None
    for head, dim in itertools.product(range(heads), range(0, dims, hopper_decode.SPAN)):
        hopper_decode._combine_span(results, ks, 1, 4, splits, head, dim, heads, head_size, hopper_decode.SPAN, fp8)
    found = torch.zeros(heads, head_size), torch.full([heads], -1e30), torch.zeros(heads)
    for slot in range(4, 4 + splits):
        found = softmax.combine(*found, *(each[slot] for each in (partial.parts, partial.peaks, partial.totals)), False)
    assert torch.equal(out[1], found[0] / found[2][:, None])
    assert (out[0] == 7).all()
