"""Prefill attention in Gluon on Hopper, compared with float32; its bits are the same as in Triton. Unwritten values are
NaN. (test_gpu_deterministic.py compares its bits with decodes.)"""

from __future__ import annotations

import pytest
import torch
from ragged import LAYER, Ragged, assert_within
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import attention, launch
from fastgen.kernels.triton import attention as attention_kernels
from fastgen.model.attention.paged import PagedAttention

ON_HOPPER = torch.cuda.is_available() and launch.gluon_runs_on(Chip.of(torch.device("cuda", 0)), torch.bfloat16)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs Hopper, and Gluon")

EDGES = ([31, 32, 33, 127, 128, 129, 300, 1], [31, 95, 33, 190, 192, 257, 1300, 65])  # query lengths; KV lengths
FEW_OVER_MANY = ([16, 3, 40], [9000, 40_000, 5001])
MANY = ([3] * 200, [*range(70, 270)])


def attend(case: Ragged, window: int, triton: bool) -> Tensor:
    """Return the answer [T, H, D]. triton: use the kernel in Triton."""
    pool, q = case.pool("cuda", garbage=torch.nan), case.q.cuda()
    paged = PagedAttention(pool, q.shape[1], (window,), len(case.kv_lens), max(case.kv_lens))
    assert paged.configs[attention.PREFILL].specialized
    if triton:
        shape = paged.group, q.shape[2], q.dtype, paged.chip
        paged.configs[attention.PREFILL] = attention_kernels.configure(attention.PREFILL, *shape)
    with torch.inference_mode():
        answer, again = (paged.attend(paged.plan(case.layout("cuda")), LAYER, q, window) for _ in range(2))
    assert torch.equal(answer, again), "a race"
    assert not paged._partial_results.arrivals.any()
    return answer


def check(case: Ragged) -> None:
    for window in (0, 100):
        found = attend(case, window, triton=False)
        assert_within(found, case.expected(window))
        assert torch.equal(found, attend(case, window, triton=True)), "the same bits as in Triton"


@pytest.mark.parametrize("lens", [EDGES, FEW_OVER_MANY, MANY, ([5], [5]), ([1, 1, 200], [1, 300, 264])])
def test_all_lengths_are_right(lens: tuple[list[int], list[int]]) -> None:
    check(Ragged(128, 4, 64, torch.bfloat16, 0, *lens))


@pytest.mark.parametrize(
    ("head_size", "group", "page_size", "dtype"),
    [
        (64, 1, 128, torch.bfloat16), (128, 5, 192, torch.float16), (96, 8, 64, torch.bfloat16),
        (80, 6, 64, torch.bfloat16),
    ],
)  # fmt: skip
def test_all_shapes_are_right(head_size: int, group: int, page_size: int, dtype: torch.dtype) -> None:
    check(Ragged(head_size, group, page_size, dtype, 0, *EDGES))
