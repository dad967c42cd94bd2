"""attention/flash.py without a GPU and without its package: a stand-in for flash_attn.cute checks the arguments and
computes the attention in torch."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from ragged import KV_HEADS, LAYER, Ragged, assert_within
from torch import Tensor

from fastgen.model.attention.flash import FlashAttention

SHAPES = [(64, 1), (96, 5), (128, 4), (64, 8)]  # head size, query heads a KV head


class Package:
    """A stand-in for flash_attn.cute. calls: the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        page_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int | None, int | None],
    ) -> tuple[Tensor, None]:
        self.calls.append({"q": q, "k": k, "v": v, "starts": cu_seqlens_q, "window": window_size})
        q = q * (softmax_scale / q.shape[-1] ** -0.5)
        count = len(seqused_k)
        for tensor in (cu_seqlens_q, seqused_k, page_table):
            assert tensor.dtype == torch.int32
            assert tensor.stride(-1) == 1
        assert len(cu_seqlens_q) == count + 1
        assert page_table.shape[0] == count
        assert k.shape == v.shape == (*k.shape[:2], KV_HEADS, q.shape[-1])
        assert k.dtype == v.dtype == q.dtype
        assert causal
        out = torch.full(q.shape, torch.nan, dtype=q.dtype)  # rows that the package does not write are undefined
        starts = cu_seqlens_q.tolist()
        for number, (start, end) in enumerate(itertools.pairwise(starts)):
            length = int(seqused_k[number])
            pages = page_table[number, : -(-length // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:length].float() for x in (k, v))
            out[start:end] = softmax_over(q[start:end].float(), keys, values, window_size).to(q.dtype)
        return out, None


def softmax_over(q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]) -> Tensor:
    """Return attention with the package's window (left, right): a query at p sees the keys p - left to p + right, or
    all keys up to p for (None, None)."""
    k, v = (x.repeat_interleave(q.shape[1] // KV_HEADS, dim=1) for x in (k, v))
    ahead = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    left, right = window
    assert right in (None, 0)
    hidden = (ahead < 0) | (ahead > (len(k) if left is None else left))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    install(monkeypatch, flash_attn_varlen_func=made.flash_attn_varlen_func)
    return made


def install(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    module = ModuleType("flash_attn.cute")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


def make(case: Ragged, windows: tuple[int, ...] = (0,), max_seqs: int = 16) -> FlashAttention:
    return FlashAttention(case.pool(), case.q.shape[1], windows, max_seqs, max(case.kv_lens))


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize(("head_size", "group"), SHAPES)
def test_it_agrees_with_the_reference(head_size: int, group: int, page_size: int, package: Package) -> None:
    for seed, window, query_lens in ((0, 0, None), (1, 1, None), (2, 100, None), (3, 50, [3, 1, 200])):
        case = Ragged(head_size, group, page_size, torch.bfloat16, seed, query_lens)
        attention = make(case, (window,))
        plan = attention.plan(case.layout())
        package.calls.clear()
        assert_within(attention.attend(plan, LAYER, case.q, window), case.expected(window))
        (call,) = package.calls
        assert call["starts"][0] == case.layout().decodes
        assert call["window"] == ((window - 1, 0) if window else (None, None))
        for name, own in (("k", attention.pool.keys), ("v", attention.pool.values)):
            assert call[name].data_ptr() == own[LAYER].data_ptr(), "the pool was copied"
        assert call["q"] is case.q


def test_the_scale_of_scores(package: Package) -> None:
    case = Ragged(64, 4, 16, torch.bfloat16, query_lens=[3, 1, 200])
    attention = FlashAttention(case.pool(), case.q.shape[1], (0,), 16, max(case.kv_lens), False, 0.0625)
    half = make(case)
    found = attention.attend(attention.plan(case.layout()), LAYER, case.q, 0)
    expected = half.attend(half.plan(case.layout()), LAYER, case.q / 2, 0)
    torch.testing.assert_close(found.float(), expected.float(), atol=2**-6, rtol=2**-6)


def test_decodes_do_not_go_through_the_package(package: Package) -> None:
    case = Ragged(64, 4, 16, torch.bfloat16, query_lens=[1] * 5)
    attention = make(case, (0, 30))
    package.calls.clear()
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    for window in (0, 30):
        for plan in (attention.plan(case.layout()), attention.plan_decode(case.lanes, kv_lens, case.table)):
            assert_within(attention.attend(plan, LAYER, case.q, window), case.expected(window))
    assert not package.calls


@pytest.mark.parametrize(
    ("windows", "max_seqs", "expected"),
    [
        ((0, 0), 256, [(1, None), (256, None)]),
        ((0, 0), 257, [(1, None), (256, None), (257, None)]),
        ((4096, 4096), 8, [(1, 0), (256, 0)]),
        ((0, 100, 200), 8, [(1, None), (256, None), (1, 0), (256, 0)]),
    ],
)
def test_each_variant_runs_once_at_the_start(
    windows: tuple[int, ...], max_seqs: int, expected: list[tuple[int, int | None]], package: Package
) -> None:
    """expected: (number of tokens, left side of the window) of each call."""
    make(Ragged(64, 4, 16, torch.bfloat16), windows, max_seqs)
    assert [(len(call["q"]), call["window"][0]) for call in package.calls] == expected
    assert {len(call["starts"]) - 1 for call in package.calls} == ({1, 257} if max_seqs > 256 else {1})


def test_a_package_that_does_not_run_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*tensors: Tensor, **arguments: Any) -> None:
        raise AssertionError("paged KV not supported on SM 8.0")

    case = Ragged(64, 1, 16, torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", None)
        with pytest.raises(
            ValueError, match=r"not run here \(ModuleNotFoundError: .*install.*fastgen\[flash\].*'auto'"
        ):
            make(case)
    install(monkeypatch)
    with pytest.raises(ValueError, match=r"ImportError: cannot import name 'flash_attn_varlen_func'"):
        make(case)
    install(monkeypatch, flash_attn_varlen_func=refuse)
    with pytest.raises(ValueError, match=r"\(AssertionError: paged KV not supported on SM 8.0\): it needs Hopper or"):
        make(case)
    with pytest.raises(ValueError, match="the head size is 256, above 128"):
        make(Ragged(256, 1, 16, torch.bfloat16))
