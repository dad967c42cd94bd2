"""Both kinds of attention on the CPU against the reference over random ragged steps, and the same bits in any batch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from ragged import KV_HEADS, LAYER, Ragged, assert_within
from reference_attention import ReferenceAttention
from torch import Tensor

from fastgen.kernels import fp8_pages
from fastgen.kernels.native import calls
from fastgen.kernels.native import library as library_module
from fastgen.kernels.native.calls import LANES
from fastgen.kernels.native.library import compiled, compiler, library
from fastgen.model.attention.cpu import CpuAttention
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.native import NativeAttention
from fastgen.model.kv_pool import KVPool

Kind = type[CpuAttention] | type[NativeAttention]

SHAPES = [(10, 1), (24, 4), (64, 8), (96, 5), (128, 4), (256, 2)]  # head size, query heads per KV head
needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C++ compiler for this CPU")
NATIVE = pytest.param(NativeAttention, marks=needs_compiler)
kinds = pytest.mark.parametrize("kind", [CpuAttention, NATIVE])


def skip_odd_heads(kind: Kind, head_size: int) -> None:
    if kind is NativeAttention and head_size % LANES:
        pytest.skip("NativeAttention does not fit this head size")


LENS = [1, 70, 2, 31, 1, 33, 32]


class Steps:
    """Steps over the sequences of a case, each with a new object of a kind of attention."""

    def __init__(self, kind: Kind, case: Ragged) -> None:
        self.kind, self.case, self.pool = kind, case, case.pool()
        self.q = torch.split(case.q, case.query_lens)

    def attend(self, members: Sequence[int], window: int = 0, begin: int = 0, end: int | None = None) -> list[Tensor]:
        """Return the attention of the query tokens [begin:end] of these sequences, computed in one step."""
        queries = [self.q[member][begin:end] for member in members]
        query_lens = np.array([len(part) for part in queries])
        ends = np.array([slice(begin, end).indices(self.case.query_lens[member])[1] for member in members])
        known = np.array([self.case.kv_lens[member] - self.case.query_lens[member] for member in members])
        lanes = self.case.lanes.numpy()[list(members)]
        attention = self.kind(self.pool, self.case.q.shape[1])
        plan = attention.plan(StepLayout(query_lens, known + ends, 0, lanes, self.case.table))
        return list(attention.attend(plan, LAYER, torch.cat(queries), window).split(query_lens.tolist()))


@kinds
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("head_size", "group"), SHAPES)
def test_it_agrees_with_the_reference(kind: Kind, head_size: int, group: int, page_size: int) -> None:
    skip_odd_heads(kind, head_size)
    for seed, window in enumerate((0, 1, 64, 100)):
        case = Ragged(head_size, group, page_size, torch.float32, seed)
        attention = kind(case.pool(), case.q.shape[1])
        out = attention.attend(attention.plan(case.layout()), LAYER, case.q, window)
        torch.testing.assert_close(out, case.expected(window)[0], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("page_size", [16, 64])
def test_it_reads_keys_in_fp8(page_size: int) -> None:
    case = Ragged(64, 4, page_size, torch.bfloat16)
    plain = case.pool(garbage=0)
    pool = KVPool(2, plain.spare, KV_HEADS, page_size, 64, torch.bfloat16, torch.device("cpu"), fp8=True)
    rows = torch.arange((plain.spare + 1) * KV_HEADS * page_size)[:, None]
    for source, target in ((plain.keys, pool.keys), (plain.values, pool.values)):
        fp8_pages.put(target[LAYER], rows, source[LAYER].nan_to_num().view(-1, 1, 64))
    out, expected = (
        attention.attend(attention.plan(case.layout()), LAYER, case.q.float(), 20)
        for attention in (CpuAttention(pool, case.q.shape[1]), ReferenceAttention(pool, case.q.shape[1]))
    )
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)
    assert not torch.allclose(out, case.expected(20)[0], atol=1e-3, rtol=1e-3), "the numbers were rounded to fp8"


@kinds
def test_decodes_follow_the_device_and_rows_of_one_lane_differ_in_length(kind: Kind) -> None:
    """A speculative step has several rows per lane. Steps of the same lanes reuse the plan."""
    case = Ragged(64, 4, 64, torch.float32, query_lens=[1] * 6)
    rows = torch.tensor([0, 0, 0, 1, 2, 2])
    lanes, attention = case.lanes[rows], kind(case.pool(), case.q.shape[1])
    reference = ReferenceAttention(case.pool(), case.q.shape[1])
    whole = torch.tensor(case.kv_lens)[rows]
    for back in (0, 1, 17):
        lens = (whole - torch.tensor([2, 1, 0, 0, 1, 0]) - back).clamp(min=1).int()
        for window in (0, 20):
            out, expected = (
                each.attend(each.plan_decode(lanes, lens, case.table), LAYER, case.q, window)
                for each in (attention, reference)
            )
            assert_within(out, (expected, torch.tensor(1e-5)))


@kinds
@pytest.mark.parametrize(("head_size", "group"), [*SHAPES, (128, 1), (64, 5)])
def test_a_sequence_gets_the_same_bits_in_any_batch(kind: Kind, head_size: int, group: int) -> None:
    skip_odd_heads(kind, head_size)
    rng = np.random.default_rng(0)
    for seed, window in enumerate((0, 20)):
        steps = Steps(kind, Ragged(head_size, group, 16, torch.float32, seed, LENS))
        alone = [steps.attend([member], window)[0] for member in range(len(LENS))]
        for _ in range(3):
            members = rng.permutation(len(LENS))[: rng.integers(2, len(LENS) + 1)].tolist()
            for member, out in zip(members, steps.attend(members, window), strict=True):
                assert torch.equal(out, alone[member])


@kinds
def test_a_token_gets_the_same_bits_in_a_chunk_of_any_size(kind: Kind) -> None:
    """Pieces of a prefill chunk, and decodes, whose tiles have another size."""
    steps = Steps(kind, Ragged(48, 4, 16, torch.float32, query_lens=[70]))
    (whole,) = steps.attend([0])
    for size in (1, 7, 32, 40):
        for begin in range(0, 70, size):
            (part,) = steps.attend([0], 0, begin, begin + size)
            assert torch.equal(part, whole[begin : begin + size])


@kinds
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_size", [6, 10, 32, 64, 96, 128])
def test_a_decode_gets_the_bits_of_a_prefill_in_batches_of_any_size(kind: Kind, head_size: int, group: int) -> None:
    """CpuAttention reads keys in place if a page is a block, and otherwise copies them."""
    skip_odd_heads(kind, head_size)
    lens = [70, 33, 2, 64, 1, 31, 1, 65, 47, 1, 3, 50]
    for page_size in (64, 16):
        steps = Steps(kind, Ragged(head_size, group, page_size, torch.float32, query_lens=lens))
        everyone = list(range(len(lens)))
        chunks = steps.attend(everyone)
        for members in (everyone, everyone[::3], everyone[:2], everyone[3:8], *([member] for member in everyone)):
            for member, out in zip(members, steps.attend(members, begin=-1), strict=True):
                assert torch.equal(out[0], chunks[member][-1])


@pytest.fixture
def other_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile native.cpp as GCC 13 does for some processors: it would round products before it adds them, but in loops
    with few sums only."""
    found = compiler()
    assert found is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [each for each in library_module.FLAGS if each != "-ffp-contract=off"]
    monkeypatch.setattr(library_module, "FLAGS", (*flags, "--param=avoid-fma-max-bits=512"))
    other = ctypes.CDLL(str(compiled(found)))
    monkeypatch.setattr(calls, "library", lambda: other)
    calls.function.cache_clear()
    yield
    calls.function.cache_clear()


@needs_compiler
@pytest.mark.usefixtures("other_instructions")
def test_no_instructions_that_a_compiler_chooses_change_a_bit() -> None:
    for group in (1, 2, 3):
        steps = Steps(NativeAttention, Ragged(32, group, 16, torch.float32, query_lens=[70, 33, 64]))
        chunks = steps.attend(range(3))
        for member, out in enumerate(steps.attend(range(3), begin=-1)):
            assert torch.equal(out[0], chunks[member][-1])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_no_token_reads_a_later_one(dtype: torch.dtype, group: int) -> None:
    """Not even with a weight of 0, which would make a NaN of the later token one of this token as well."""
    steps = Steps(NativeAttention, Ragged(64, group, 16, dtype, query_lens=[70]))
    (whole,) = steps.attend([0])
    assert not whole.isnan().any()
    first, pages = steps.case.kv_lens[0] - 70, steps.case.table[steps.case.lanes[0]].tolist()
    for token in (69, 65, 62, 33, 3, 1):
        page, place = pages[(first + token) // 16], (first + token) % 16
        for pool in (steps.pool.keys, steps.pool.values):
            pool[LAYER][page, :, place] = torch.nan
        (found,) = steps.attend([0])
        assert torch.equal(found[:token], whole[:token]), token
        assert found[token:].isnan().all()
