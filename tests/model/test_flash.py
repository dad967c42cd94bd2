"""attention/flash.py without a GPU and without its package: a made-up flash_attn.cute, which computes in torch from
exactly the arguments that the package's function gets, holds it to them."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ragged import KV_HEADS, LAYER, LAYERS, Ragged, assert_within
from torch import Tensor

from fastgen.kernels.launch import Chip
from fastgen.model.attention import StepLayout, flash
from fastgen.model.attention.flash import FlashAttention, why_not
from fastgen.model.attention.reference import ReferenceAttention
from fastgen.model.kv_pool import KVPool

SHAPES = [(64, 1), (96, 5), (128, 4), (64, 8)]  # head size, query heads a KV head


class Package:
    """Stands for flash_attn.cute. calls: the arguments of each call."""

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
        causal: bool,
        window_size: tuple[int | None, int | None],
    ) -> tuple[Tensor, None]:
        self.calls.append({"q": q, "k": k, "v": v, "starts": cu_seqlens_q, "window": window_size})
        count = len(seqused_k)
        for tensor in (cu_seqlens_q, seqused_k, page_table):
            assert tensor.dtype == torch.int32
            assert tensor.stride(-1) == 1
        assert len(cu_seqlens_q) == count + 1
        assert page_table.shape[0] == count
        assert k.shape == v.shape == (*k.shape[:2], KV_HEADS, q.shape[-1])
        assert k.dtype == v.dtype == q.dtype
        assert causal
        out = torch.full(q.shape, torch.nan, dtype=q.dtype)  # what the package does not write is anything
        starts = cu_seqlens_q.tolist()
        for number, (start, end) in enumerate(itertools.pairwise(starts)):
            length = int(seqused_k[number])
            pages = page_table[number, : -(-length // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:length].float() for x in (k, v))
            out[start:end] = softmax_over(q[start:end].float(), keys, values, window_size).to(q.dtype)
        return out, None


def softmax_over(q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]) -> Tensor:
    """As the package defines it: a query at p sees the keys p - left to p + right; all up to p for (None, None)."""
    k, v = (x.repeat_interleave(q.shape[1] // KV_HEADS, dim=1) for x in (k, v))
    ahead = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    left, right = window
    assert right in (None, 0)
    hidden = (ahead < 0) | (ahead > (len(k) if left is None else left))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


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


class Other(ReferenceAttention):
    """Does the decodes. layouts: what it was given to plan."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.layouts: list[StepLayout] = []

    def plan(self, layout: StepLayout) -> Any:
        self.layouts.append(layout)
        return super().plan(layout)


def make(case: Ragged, decodes: bool, **options: Any) -> FlashAttention:
    pool = case.pool()
    return FlashAttention(pool, case.q.shape[1], (0,) * LAYERS, Other(pool), decodes=decodes, **options)


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize(("head_size", "group"), SHAPES)
def test_it_agrees_with_the_reference(
    head_size: int, group: int, page_size: int, decodes: bool, package: Package
) -> None:
    for seed, window in enumerate((0, 1, 100)):
        case = Ragged(head_size, group, page_size, torch.bfloat16, seed)
        attention = make(case, decodes)
        plan = attention.plan(case.layout())
        package.calls.clear()
        assert_within(attention.attend(plan, LAYER, case.q, window), case.expected(window))
        (call,) = package.calls
        assert call["starts"][0] == (0 if decodes else case.layout().decodes)
        assert call["window"] == ((window - 1, 0) if window else (None, None))
        for name, own in (("k", attention.pool.keys), ("v", attention.pool.values)):
            assert call[name].data_ptr() == own[LAYER].data_ptr(), "the pool was copied"
        assert call["q"] is case.q


def test_decodes_go_to_the_other(package: Package) -> None:
    case = Ragged(64, 4, 16, torch.bfloat16, query_lens=[1] * 5)
    attention = make(case, decodes=False)
    package.calls.clear()
    assert_within(attention.attend(attention.plan(case.layout()), LAYER, case.q, 0), case.expected(0))
    assert not package.calls
    assert isinstance(attention.other, Other)
    assert [layout.decodes for layout in attention.other.layouts] == [5]


def test_prefills_leave_the_other_alone(package: Package) -> None:
    case = Ragged(64, 4, 16, torch.bfloat16, query_lens=[3, 1, 200])
    attention = make(case, decodes=False)
    layout = case.layout()
    assert layout.decodes == 0
    assert_within(attention.attend(attention.plan(layout), LAYER, case.q, 50), case.expected(50))
    assert isinstance(attention.other, Other)
    assert not attention.other.layouts


@pytest.mark.parametrize("decodes", [False, True])
def test_a_plan_of_decodes_known_on_the_device_alone(decodes: bool, package: Package) -> None:
    case = Ragged(64, 4, 16, torch.bfloat16, query_lens=[1] * 5)
    attention = make(case, decodes)
    package.calls.clear()
    plan = attention.plan_decode(case.lanes, torch.tensor(case.kv_lens, dtype=torch.int32), case.table)
    for window in (0, 30):
        assert_within(attention.attend(plan, LAYER, case.q, window), case.expected(window))
    assert len(package.calls) == (2 if decodes else 0)


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
    """As (tokens, left side of the window)."""
    pool = Ragged(64, 4, 16, torch.bfloat16).pool()
    FlashAttention(pool, 4 * KV_HEADS, windows, Other(pool), max_seqs=max_seqs)
    assert [(len(call["q"]), call["window"][0]) for call in package.calls] == expected
    assert {len(call["starts"]) - 1 for call in package.calls} == ({1, 257} if max_seqs > 256 else {1})


def test_pages_are_wiped_where_they_are_loaded_as_a_whole(package: Package) -> None:
    for page_size, clean in ((16, False), (64, False), (128, True)):
        pool = Ragged(64, 1, page_size, torch.bfloat16).pool()
        other = Other(pool)
        other.needs_clean_pages = False
        other.capturable = True
        attention = FlashAttention(pool, KV_HEADS, (0,) * LAYERS, other)
        assert attention.needs_clean_pages is clean
        assert attention.capturable


def test_a_package_that_does_not_run_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*tensors: Tensor, **arguments: Any) -> None:
        raise AssertionError("\n\x1b[91m\x1b[1mpaged KV not supported\x1b[0m on SM 9.0\nand more")

    install(monkeypatch, flash_attn_varlen_func=refuse)
    case = Ragged(64, 1, 16, torch.bfloat16)
    with pytest.raises(ValueError, match=r"not run here \(AssertionError: paged KV not supported on SM 9.0\); take"):
        make(case, decodes=False)


def made_up_pool(dtype: torch.dtype = torch.bfloat16, head_size: int = 128) -> Any:
    keys = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 1, 1, 16, head_size))
    return SimpleNamespace(keys=keys)


def chip(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(Chip, "of", lambda device: Chip((major, minor), 132, 200_000))


def test_why_it_can_not_be_had(monkeypatch: pytest.MonkeyPatch, package: Package) -> None:
    assert why_not(Ragged(64, 1, 16, torch.bfloat16).pool()) == "flash-attn-4 needs a GPU"
    for capability in ((8, 0), (8, 6), (8, 9), (12, 0)):
        chip(monkeypatch, *capability)
        assert "needs Hopper or a data-center Blackwell" in (why_not(made_up_pool()) or "")
    for capability in ((9, 0), (10, 0), (10, 3)):
        chip(monkeypatch, *capability)
        assert why_not(made_up_pool()) is None
        assert why_not(made_up_pool(torch.float16, 96)) is None
        assert "dtype is float32" in (why_not(made_up_pool(torch.float32)) or "")
        for head_size in (24, 256):
            assert f"this is {head_size}" in (why_not(made_up_pool(head_size=head_size)) or "")


def test_a_package_that_is_absent_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    chip(monkeypatch, 9, 0)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", None)
        assert why_not(made_up_pool()) == "the package flash-attn-4 is not installed"
    install(monkeypatch)
    assert "can not be imported (ImportError: cannot import name 'flash_attn_varlen_func'" in (
        why_not(made_up_pool()) or ""
    )


def test_kernels_are_kept_on_disk_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    before = dict(os.environ)
    with flash._keeping_kernels():
        folder = Path(os.environ[flash.FOLDER])
        assert os.environ[flash.SWITCH] == "1"
        assert folder.is_dir()
        assert folder.is_relative_to(home)
    assert dict(os.environ) == before
    monkeypatch.setenv(flash.SWITCH, "0")
    with flash._keeping_kernels():
        assert os.environ[flash.SWITCH] == "0"
        assert flash.FOLDER not in os.environ
    monkeypatch.delenv(flash.SWITCH)
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))  # no folder can be made there
    with flash._keeping_kernels():
        assert flash.SWITCH not in os.environ
