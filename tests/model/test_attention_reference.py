"""The attention that tests compare with, against a softmax in float64 over the keys of one query and head at a time."""

from __future__ import annotations

import pytest
import torch
from ragged import KV_HEADS, LAYER, Ragged
from reference_attention import ReferenceAttention
from torch import Tensor

QUERY_LENS = [1, 1, 5, 70]


def one_query(case: Ragged, q: Tensor, lane: int, position: int, window: int) -> Tensor:
    """Return the attention [H, D] of the query [H, D] at a position of a lane."""
    pool, found = case.pool(), []
    first = max(position + 1 - window, 0) if window else 0
    places = [(int(case.table[lane, at // pool.page_size]), at % pool.page_size) for at in range(first, position + 1)]
    page, offset = torch.tensor(places).T
    for head, query in enumerate(q.double()):
        kv_head = head // (len(q) // KV_HEADS)
        keys, values = (x[LAYER, page, kv_head, offset].double() for x in (pool.keys, pool.values))
        found.append((keys @ query * len(query) ** -0.5).softmax(0) @ values)
    return torch.stack(found)


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (1, torch.float32), (40, torch.bfloat16)])
@pytest.mark.parametrize(("head_size", "group", "page_size"), [(24, 4, 16), (64, 1, 1), (128, 3, 64)])
def test_it_is_a_softmax_over_the_visible_keys(
    head_size: int, group: int, page_size: int, window: int, dtype: torch.dtype
) -> None:
    """Places that no token has written hold NaN, and are not read."""
    case = Ragged(head_size, group, page_size, dtype, query_lens=QUERY_LENS)
    attention = ReferenceAttention(case.pool(garbage=torch.nan), case.q.shape[1])
    out = attention.attend(attention.plan(case.layout()), LAYER, case.q, window)
    assert out.dtype == dtype
    token = 0
    for lane, queries, length in zip(case.lanes.tolist(), QUERY_LENS, case.kv_lens, strict=True):
        for position in range(length - queries, length):
            expected = one_query(case, case.q[token], lane, position, window)
            torch.testing.assert_close(out[token].double(), expected, atol=1e-5, rtol=2 * torch.finfo(dtype).eps + 1e-5)
            token += 1


def test_rows_of_a_lane_may_differ_in_length() -> None:
    """As in a speculative step."""
    case = Ragged(64, 2, 16, torch.float32, query_lens=[1] * 4, seed=1)
    lanes, lens = case.lanes[[0, 1, 1, 1]], [case.kv_lens[0], *(max(case.kv_lens[1] - back, 1) for back in (2, 1, 0))]
    attention = ReferenceAttention(case.pool(garbage=torch.nan), case.q.shape[1])
    plan = attention.plan_decode(lanes, torch.tensor(lens).int(), case.table)
    for row, out in enumerate(attention.attend(plan, LAYER, case.q, 0)):
        expected = one_query(case, case.q[row], int(lanes[row]), lens[row] - 1, 0)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
