"""Hopper's prefill kernel on the CPU (see gluon_on_cpu.py), compared with attention in float32. Unwritten values are
NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import gluon_on_cpu
import numpy as np
import pytest
import torch
from ragged import KV_HEADS, LAYER, Ragged, assert_within
from test_kernels_batch_invariant import H200
from torch import Tensor

from fastgen.kernels import work_tiles
from fastgen.kernels.hopper import gluon
from fastgen.kernels.hopper import prefill as hopper_prefill
from fastgen.kernels.triton import softmax
from fastgen.kernels.triton import work_tiles as work_tile_kernels

Attend = Callable[..., Tensor]
EDGES = [31, 32, 33, 127, 130, 2]


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Attend:
    gluon_on_cpu.put(monkeypatch, "_prefill_kernel", hopper_prefill, gluon, softmax, work_tile_kernels)
    monkeypatch.setattr(hopper_prefill, "Chip", SimpleNamespace(of=lambda device: replace(H200, processors=3)))

    def run(case: Ragged, window: int) -> Tensor:
        _, heads, head_size = case.q.shape
        lens = np.array(case.query_lens)
        chunks = work_tiles.Chunks(lens.cumsum() - lens, lens, case.lanes.numpy(), np.array(case.kv_lens))
        tokens = hopper_prefill.tokens_of(heads // KV_HEADS)
        tiles = work_tiles.prefill_tiles(chunks, window, tokens, hopper_prefill.KEYS)
        pool, out, scale = case.pool(garbage=torch.nan), torch.full_like(case.q, 7.0), head_size**-0.5 / math.log(2)
        hopper_prefill.launch(
            case.q, out, pool.keys, pool.values, case.table, torch.from_numpy(work_tiles.list_of(tiles)), len(tiles),
            LAYER, window, scale,
        )  # fmt: skip
        return out

    return run


@pytest.mark.parametrize(
    ("group", "head_size", "page_size", "window"),
    [
        (4, 128, 64, 0),
        (4, 128, 64, 1),
        (4, 128, 64, 100),
        (1, 64, 128, 100),
        (5, 96, 64, 0),
        (6, 128, 192, 1),
        (16, 80, 64, 100),
    ],
)
def test_all_shapes(group: int, head_size: int, page_size: int, window: int, attend: Attend) -> None:
    case = Ragged(head_size, group, page_size, torch.bfloat16, window, EDGES)
    assert_within(attend(case, window), case.expected(window))


def test_float16(attend: Attend) -> None:
    case = Ragged(128, 4, 64, torch.float16, query_lens=[40, 3, 200])
    assert_within(attend(case, 0), case.expected(0))
