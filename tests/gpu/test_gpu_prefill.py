"""Prefill attention in Gluon on Hopper, compared with float32; its bits are the same as in Triton. Unwritten values are
NaN. (test_gpu_deterministic.py compares its bits with decodes.)"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import attention, hopper_prefill
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.paged import PagedAttention
from fastgen.model.kv_pool import KVPool

ON_HOPPER = torch.cuda.is_available() and hopper_prefill.runs_on(Chip.of(torch.device("cuda", 0)), torch.bfloat16)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs Hopper, and Gluon")

LONGEST = 40_000
EDGES = ([31, 32, 33, 127, 128, 129, 300, 1], [31, 95, 33, 190, 192, 257, 1300, 65])  # of queries; with those before
FEW_OVER_MANY = ([16, 3, 40], [9000, LONGEST, 5001])
MANY = ([3] * 200, [*range(70, 270)])


class Case:
    """Sequences in shuffled pages, in layer 1 of two. lens: query lengths and KV lengths."""

    def __init__(
        self, lens: tuple[Sequence[int], Sequence[int]], group: int = 4, num_kv: int = 2, head_size: int = 128,
        page_size: int = 64, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.query_lens, self.kv_lens = lens
        count, slots = len(self.kv_lens), -(-max(self.kv_lens) // page_size)
        used = [-(-length // page_size) for length in self.kv_lens]
        self.pool = KVPool(2, sum(used), num_kv, page_size, head_size, dtype, torch.device("cuda"))
        self.table = torch.zeros(count, slots, dtype=torch.int32, device="cuda")
        for row, pages in zip(self.table, torch.randperm(sum(used), device="cuda").int().split(used), strict=True):
            row[: len(pages)] = pages
        for numbers in (self.pool.keys, self.pool.values):
            numbers.fill_(torch.nan)
            for s, length in enumerate(self.kv_lens):
                pages, inside = self.places(s)
                numbers[1, pages, :, inside] = torch.randn(length, num_kv, head_size, device="cuda").to(dtype)
        self.q = torch.randn(sum(self.query_lens), group * num_kv, head_size, device="cuda").to(dtype)

    def places(self, sequence: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(self.kv_lens[sequence], device="cuda")
        size = self.pool.page_size
        return self.table[sequence, position // size].long(), position % size

    def attend(self, window: int, triton: bool = False) -> Tensor:
        """Return the answer [T, H, D]. The first sequences of one token are decodes. triton: use the kernel in
        Triton."""
        decodes = next((s for s, length in enumerate(self.query_lens) if length > 1), len(self.query_lens))
        paged = PagedAttention(self.pool, self.q.shape[1], (window,), len(self.kv_lens), max(self.kv_lens))
        assert paged.configs[attention.PREFILL].specialized
        if triton:
            shape = paged.group, self.q.shape[2], self.q.dtype, paged.chip
            paged.configs[attention.PREFILL] = attention.configure(attention.PREFILL, *shape)
        whole = np.array(self.query_lens), np.array(self.kv_lens)
        layout = StepLayout(*whole, decodes, np.arange(len(self.kv_lens)), self.table)
        with torch.inference_mode():
            answer = paged.attend(paged.plan(layout), 1, self.q, window)
            again = paged.attend(paged.plan(layout), 1, self.q, window)
        assert torch.equal(answer, again), "a race"
        assert not paged._partial_results.arrivals.any()
        return answer

    def expected(self, window: int) -> Tensor:
        """Return the answer [T, H, D] in float32."""
        answers = []
        for s, q in enumerate(self.q.float().split(list(self.query_lens))):
            pages, inside = self.places(s)
            k, v = (numbers[1, pages, :, inside].float() for numbers in (self.pool.keys, self.pool.values))
            scores = torch.einsum("tkgd,nkd->kgtn", q.unflatten(1, (k.shape[1], -1)), k) / math.sqrt(q.shape[2])
            position = torch.arange(len(k), device="cuda")
            ahead = position[-len(q) :, None] - position
            hidden = (ahead < 0) | (ahead >= (window or len(k)))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            answers.append(torch.einsum("kgtn,nkd->tkgd", weights, v).flatten(1, 2))
        return torch.cat(answers)


SHAPES = [
    (1, 3, 64, 128, torch.bfloat16), (5, 2, 128, 192, torch.float16), (8, 1, 96, 64, torch.bfloat16),
    (6, 2, 80, 64, torch.bfloat16),
]  # fmt: skip


def check(case: Case) -> None:
    """Check that each row of a head differs from the answer in float32 by at most two roundings to bfloat16."""
    for window in (0, 100):
        found, want = case.attend(window), case.expected(window)
        distance = (found.float() - want).norm(dim=-1) / want.norm(dim=-1)
        assert distance.max() < 0.02, f"{distance.max():.4f} at token {int(distance.amax(1).argmax())}"
        assert torch.equal(found, case.attend(window, triton=True)), "the same bits as in Triton"


@pytest.mark.parametrize("lens", [EDGES, FEW_OVER_MANY, MANY, ([5], [5]), ([1, 1, 200], [1, 300, 264])])
def test_all_lengths_are_right(lens: tuple[list[int], list[int]]) -> None:
    check(Case(lens))


@pytest.mark.parametrize(("group", "num_kv", "head_size", "page_size", "dtype"), SHAPES)
def test_all_shapes_are_right(group: int, num_kv: int, head_size: int, page_size: int, dtype: torch.dtype) -> None:
    check(Case(EDGES, group, num_kv, head_size, page_size, dtype))
