"""attention/reference.py against a softmax written plainly in float64, over random ragged batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.reference import ReferenceAttention
from fastgen.model.kv_pool import KVPool

KV_HEADS = 2
SHAPES = [(16, 1), (24, 4), (64, 8), (96, 5), (128, 4)]  # head size, query heads a KV head


class Case:
    """Random sequences in a paged pool, some decoding, some prefilling a chunk. The pages are shuffled, and what no
    sequence holds is garbage.

    query_lens, kv_lens: one a sequence; q, k, v: lists of tensors [tokens, heads, D].
    """

    def __init__(
        self,
        head_size: int,
        group: int,
        page_size: int,
        seed: int,
        dtype: torch.dtype,
        query_lens: list[int] | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        random = torch.Generator().manual_seed(seed)
        lens = [int(rng.choice([1, 1, 2, 31, 32, 33, 70])) for _ in range(int(rng.integers(4, 9)))]
        self.query_lens = lens if query_lens is None else query_lens
        count = len(self.query_lens)
        self.kv_lens = [length + int(rng.choice([0, 1, 63, 64, 65, 130])) for length in self.query_lens]
        self.q = [torch.randn(n, KV_HEADS * group, head_size, generator=random).to(dtype) for n in self.query_lens]
        self.k, self.v = (
            [torch.randn(n, KV_HEADS, head_size, generator=random).to(dtype) for n in self.kv_lens] for _ in range(2)
        )
        slots = [-(-length // page_size) for length in self.kv_lens]
        self.pool = KVPool(1, sum(slots) + 3, KV_HEADS, page_size, head_size, dtype, torch.device("cpu"))
        self.pool.keys.fill_(torch.nan)
        self.pool.values.fill_(1e4)
        pages = torch.from_numpy(rng.permutation(sum(slots) + 3)[: sum(slots)])
        self.table = torch.zeros(count, max(slots), dtype=torch.int64)
        for row, own in enumerate(torch.split(pages, slots)):
            self.table[row, : len(own)] = own
            positions = torch.arange(self.kv_lens[row])
            page, offset = own[positions // page_size], positions % page_size
            self.pool.keys[0][page, :, offset] = self.k[row]
            self.pool.values[0][page, :, offset] = self.v[row]

    def attend(self, members: list[int], window: int) -> list[Tensor]:
        """One step with these sequences only."""
        attention = ReferenceAttention(self.pool, self.q[0].shape[1])
        lens = [np.array([lens[member] for member in members]) for lens in (self.query_lens, self.kv_lens)]
        plan = attention.plan(StepLayout(*lens, 0, np.array(members), self.table.int()))
        out = attention.attend(plan, 0, torch.cat([self.q[member] for member in members]), window)
        return list(torch.split(out, lens[0].tolist()))

    def expected(self, member: int, window: int) -> Tensor:
        q, k, v = (x[member].double() for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(q.shape[1] // KV_HEADS, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        ahead = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (ahead < 0) | (ahead >= (window or len(k)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("head_size", "group"), SHAPES)
def test_attention_is_a_masked_softmax(head_size: int, group: int, page_size: int) -> None:
    for seed, window in enumerate((0, 1, 20, 64, 100)):
        case = Case(head_size, group, page_size, seed, torch.float32)
        for member, out in enumerate(case.attend(list(range(len(case.q))), window)):
            torch.testing.assert_close(out.double(), case.expected(member, window), atol=2e-6, rtol=2e-5)


def test_half_precision_is_rounded_once() -> None:
    case = Case(64, 4, 16, 0, torch.bfloat16)
    for member, out in enumerate(case.attend(list(range(len(case.q))), 0)):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), case.expected(member, 0), atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize(("head_size", "group"), [*SHAPES, (128, 1), (64, 5)])
def test_a_sequence_gets_the_same_bits_in_any_company(head_size: int, group: int) -> None:
    rng = np.random.default_rng(0)
    for seed, window in enumerate((0, 20)):
        case = Case(head_size, group, 16, seed, torch.float32)
        alone = [case.attend([member], window)[0] for member in range(len(case.q))]
        for _ in range(3):
            members = rng.permutation(len(case.q))[: rng.integers(2, len(case.q) + 1)].tolist()
            for member, out in zip(members, case.attend(members, window), strict=True):
                assert torch.equal(out, alone[member])


def test_a_token_gets_the_same_bits_in_a_chunk_of_any_size() -> None:
    """A prefill chunk, its pieces, and decodes, which take tiles of another size."""
    case = Case(24, 4, 16, 0, torch.float32)
    member = int(np.argmax(case.query_lens))
    length, known = case.query_lens[member], case.kv_lens[member] - case.query_lens[member]
    whole = case.attend([member], 0)[0]
    queries = case.q[member]
    for size in (1, 7, 32, 40):
        for start in range(0, length, size):
            case.q[member] = queries[start : start + size]
            case.query_lens[member] = len(case.q[member])
            case.kv_lens[member] = known + start + len(case.q[member])
            assert torch.equal(case.attend([member], 0)[0], whole[start : start + size])


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
def test_a_decode_gets_the_bits_of_a_prefill_in_batches_of_any_size(head_size: int, group: int) -> None:
    """Keys are read in place where pages are blocks and lie close together, else copied."""
    lens = [70, 33, 2, 64, 1, 31, 1, 65, 47, 1, 3, 50]
    for page_size in (64, 16):
        case = Case(head_size, group, page_size, 0, torch.float32, lens)
        everyone = list(range(len(lens)))
        chunks = case.attend(everyone, 0)
        case.q = [q[-1:] for q in case.q]
        case.query_lens = [1] * len(lens)
        for members in (everyone, everyone[::3], everyone[:2], everyone[3:8], *([member] for member in everyone)):
            for member, out in zip(members, case.attend(members, 0), strict=True):
                assert torch.equal(out[0], chunks[member][-1])
