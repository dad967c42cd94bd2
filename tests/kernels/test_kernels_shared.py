"""Attention of rows that share keys, in Triton's interpreter if there is no GPU, compared with the reference and the
twins."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from ragged import KV_HEADS
from reference_attention import ReferenceAttention
from test_kernels_attention import DEVICE, H200, HALF, close, launched, tiles_of
from torch import Tensor

from fastgen.kernels import attention as kernel
from fastgen.kernels import work_tiles
from fastgen.kernels.hopper import decode as hopper_decode
from fastgen.kernels.launch import Kernel
from fastgen.model.attention import shared
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.paged import PagedAttention
from fastgen.model.kv_pool import KVPool

__all__ = ["launched"]


TREE = [2, [2, [2, 1]], [1, [1, 1]], [1, 1]]  # see `make`


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SHARING_PAYS", 1)
    monkeypatch.setattr(shared, "FILLS", 0)


@dataclass
class Shared:
    """Decodes whose page tables are the leaves of a tree, in shuffled order and lanes."""

    pool: KVPool
    q: Tensor  # [S, H, D]
    lanes: np.ndarray
    kv_lens: np.ndarray
    table: Tensor

    def paged(self, window: int, max_seqs: int = 24) -> PagedAttention:
        windows = (0, window) if window else (0,)
        attention = PagedAttention(self.pool, self.q.shape[1], windows, max_seqs, 4096)
        attention.chip = attention.prefixes.chip = H200  # for which private keys are split
        return attention

    def share(self, paged: PagedAttention) -> bool:
        return paged.prefixes.find(self.lanes, self.kv_lens // self.pool.page_size, self.table.cpu().numpy())

    def plan(self, paged: PagedAttention, shared: bool = True) -> object:
        kv_lens = torch.from_numpy(self.kv_lens).int().to(DEVICE)
        return paged.plan_decode(torch.from_numpy(self.lanes).to(DEVICE), kv_lens, self.table, shared)

    def expected(self, window: int) -> Tensor:
        clean = KVPool(2, self.pool.spare, KV_HEADS, *self.pool.keys.shape[3:], torch.float32, DEVICE)
        clean.keys.copy_(self.pool.keys.nan_to_num())
        clean.values.copy_(self.pool.values.nan_to_num())
        attention = ReferenceAttention(clean, self.q.shape[1])
        ones = np.ones_like(self.lanes)
        plan = attention.plan(StepLayout(ones, self.kv_lens, len(ones), self.lanes, self.table))
        return attention.attend(plan, 1, self.q.float(), window)


def make(
    tree: list, head_size: int = 32, group: int = 4, page_size: int = 64, dtype: torch.dtype = torch.float32
) -> Shared:
    """Make decodes whose pages form a tree.

    tree: an inner node is a list of numbers of pages followed by its children, which are lists. A list that has only
    numbers is a leaf: one row for each number of private pages, of which the last is not full.
    """
    rng, random = np.random.default_rng(0), torch.Generator().manual_seed(0)
    rows: list[list[int]] = []
    pages = iter(rng.permutation(200).tolist())

    def walk(node: list, before: list[int]) -> None:
        children = [child for child in node if isinstance(child, list)]
        if not children:
            rows.extend([*before, *(next(pages) for _ in range(own))] for own in node)
            return
        here = [*before, *(next(pages) for _ in range(sum(x for x in node if not isinstance(x, list))))]
        rows.append([*here, next(pages)])
        for child in children:
            walk(child, here)

    walk(tree, [])
    rows = [rows[at] for at in rng.permutation(len(rows))]
    lens = np.array([(len(row) - 1) * page_size + int(rng.integers(1, page_size + 1)) for row in rows])
    lanes = rng.permutation(len(rows) + 2)[: len(rows)]
    table = torch.full((len(rows) + 2, max(map(len, rows)) + 1), 200, dtype=torch.int32)
    pool = KVPool(2, 200, KV_HEADS, page_size, head_size, dtype, DEVICE)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    for lane, row, length in zip(lanes, rows, lens, strict=True):
        table[lane, : len(row)] = torch.tensor(row)
        for slot, page in enumerate(row):
            here = min(page_size, int(length) - slot * page_size)
            for whole in (pool.keys, pool.values):
                if whole[1, page, 0, here - 1].isnan().any():
                    whole[1, page, :, :here] = torch.randn(KV_HEADS, here, head_size, generator=random).to(
                        DEVICE, dtype
                    )
    q = torch.randn(len(rows), KV_HEADS * group, head_size, generator=random).to(DEVICE, dtype)
    return Shared(pool, q, lanes, lens, table.to(DEVICE))


@pytest.mark.parametrize(("head_size", "group"), [(64, 1), (96, 5), (128, 8)])
def test_other_shapes_agree_with_the_twins(head_size: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group takes several tiles, and rows have partial results of shared keys and of splits."""
    case = make([3, [4, 1, 1, 1, 1, 1, 1, 1, 1]], head_size, group)
    for window in (0, 200):
        paged = case.paged(window)
        assert case.share(paged)
        found = [paged.attend(case.plan(paged), 1, case.q, window)]
        with monkeypatch.context() as patch:
            patch.setattr(Kernel, "runs_on", lambda self, device: False)
            found.append(paged.attend(case.plan(paged), 1, case.q, window))
        close(found[0], found[1].float())
        close(found[0], case.expected(window))


@pytest.mark.parametrize(
    ("page_size", "dtype", "window"),
    [(64, torch.float32, 0), (64, HALF, 150), (16, HALF, 0), (48, HALF, 5000)],
)
def test_a_tree_of_rows_has_the_bits_of_rows_that_do_not_share(
    page_size: int, dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Private keys are in one work tile, or in one per block."""
    monkeypatch.setattr(hopper_decode, "UNSPLIT", 0)  # which holds on a GPU only
    case = make([4, [4, [2, 1, 1]], [1, [1, 1]], [1, 1]], head_size=64, page_size=page_size, dtype=dtype)
    paged = case.paged(window)
    alone = paged.attend(case.plan(paged, shared=False), 1, case.q, window)
    close(alone, case.expected(window))
    assert case.share(paged)
    ends = paged.prefixes.rows.ends[: len(case.lanes)]
    assert set(ends.tolist()) == {4 * page_size, 8 * page_size}, "some rows share more than the root"
    for slots in (paged.partials, 0):  # 0: of no use for splits
        paged.partials = slots
        plan = case.plan(paged)
        assert [tiles.kind for tiles in plan.work[window]] == [kernel.SHARED, kernel.PRIVATE]  # type: ignore[attr-defined]
        splits = tiles_of(plan.work[window][1].list)[:, work_tiles.SPLIT] // work_tiles.SPLITS  # type: ignore[attr-defined]
        assert (int(splits.max()) > 1) == (slots > 0 and page_size > 16)
        assert torch.equal(paged.attend(plan, 1, case.q, window), alone)


@pytest.mark.parametrize("unsplit", [0, 128, 448, 1000])
def test_the_lists_agree_with_the_twin(unsplit: int) -> None:
    """Up to 1000 private keys, here of all rows, are not split."""
    case = make([2, [2, [2, 9, 1]], [2, [1, 1]], [1, 2]])
    paged = case.paged(100)
    assert case.share(paged)
    rows, lanes = paged.prefixes.rows, torch.from_numpy(case.lanes).to(DEVICE)
    kv_lens = torch.from_numpy(case.kv_lens).int().to(DEVICE)
    results = []
    for plan in (work_tiles.plan_decode.launch, work_tiles.plan_decode.twin):
        made = torch.zeros_like(paged._lists)
        rows.list[1 : work_tiles.HEADER] = 7  # counters of a step before
        plan(lanes, kv_lens, paged._windows, made, 64, rows, unsplit)
        assert not rows.list[1 : work_tiles.HEADER].any()
        results.append((made, rows.bases.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    items = tiles_of(results[0][0][0])
    assert (items[:, work_tiles.SPLIT] // work_tiles.SPLITS > 1).any() == (unsplit < 1000)
    assert (items[:, work_tiles.TOKENS] // work_tiles.SPLITS > 0).any()


def test_rows_that_come_and_go() -> None:
    """What rows share may change between steps with one plan, as between replays of a graph. Padding shares nothing,
    and rows that share nothing may be shorter than the keys that other rows shared before."""
    case = make(TREE)
    paged = case.paged(0)
    for seed in (0, 3):
        keep = np.random.default_rng(seed).permutation(len(case.lanes))[: len(case.lanes) - seed]
        part = replace(
            case, q=case.q[torch.from_numpy(keep).to(DEVICE)], lanes=case.lanes[keep], kv_lens=case.kv_lens[keep]
        )
        assert part.share(paged)
        padded = replace(part, lanes=np.append(part.lanes, [0, 0]), kv_lens=np.append(part.kv_lens, [1, 1]))
        q = torch.cat([part.q, part.q[:2]])
        found = paged.attend(padded.plan(paged), 1, q, 0)
        close(found[: len(keep)], part.expected(0))
    nobody = np.zeros(0, dtype=np.int64)
    assert not paged.prefixes.find(nobody, nobody, case.table.cpu().numpy())
    short = replace(case, kv_lens=np.minimum(case.kv_lens, 20))
    close(paged.attend(short.plan(paged), 1, case.q, 0), short.expected(0))


def test_a_step_with_prefills_reads_shared_keys_once_too() -> None:
    case = make(TREE)
    paged = case.paged(0)
    assert replace(case, lanes=case.lanes[:-1], kv_lens=case.kv_lens[:-1]).share(paged)
    ones = np.ones_like(case.lanes)
    plan = paged.plan(StepLayout(ones, case.kv_lens, len(ones) - 1, case.lanes, case.table, shared=True))
    assert [items.kind for items in plan.work[0]] == [kernel.SHARED, kernel.PRIVATE, kernel.PLAIN]
    close(paged.attend(plan, 1, case.q, 0), case.expected(0))


def test_rows_share_only_if_that_saves_much_and_fills_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared range is not split, so a few rows with a long prefix would wait for a few programs."""
    case = make([1, [1, 1]])
    assert case.share(case.paged(0))
    saved = 64 * 2 * KV_HEADS * 32 * 4 * 2  # two of three rows do not read a page of 64 tokens again
    for pays, fills, shares in ((saved + 1, 0, False), (saved, 0, True), (saved, 0.5, False)):
        monkeypatch.setattr(shared, "SHARING_PAYS", pays)
        monkeypatch.setattr(shared, "FILLS", fills)
        assert case.share(case.paged(0)) == shares


def test_if_sharing_does_not_compile_the_rest_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def launch(*arguments: object) -> None:
        raise OutOfResources(2, 1, "shared memory")

    case = make(TREE)
    paged = case.paged(0)
    assert paged.prefixes.enabled
    assert case.share(paged)
    monkeypatch.setattr(kernel.sharing, "refused", set())
    monkeypatch.setattr(kernel.sharing, "launch", launch)
    close(paged.attend(case.plan(paged), 1, case.q, 0), case.expected(0))
    assert not paged.prefixes.enabled
    assert not kernel.attention.refused
    close(paged.attend(case.plan(paged, shared=False), 1, case.q, 0), case.expected(0))
