"""model/kv_pool.py: pages that are copied and wiped; the kernel that copies pages against its torch twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgen.kernels import fp8_pages
from fastgen.kernels.page_copies import copy_pages
from fastgen.model.kv_pool import KVPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("layers", "size"), [(1, 1), (3, 96), (2, 128), (1, 20_000)])
def test_pages_are_copied_between_any_layouts(layers: int, size: int, dtype: torch.dtype) -> None:
    def memory() -> tuple[Tensor, Tensor]:
        """Return tensors with the layouts of the pool and of staging memory."""
        staging = randn(5, layers, 2, size, seed=1, dtype=dtype).permute(2, 1, 0, 3)
        return randn(2, layers, 7, size, dtype=dtype), staging

    for source, target, sources, targets, first in (
        (0, 1, [6, 0, 3], [0, 1, 4], 0),
        (1, 0, [0, 4], [5, 6], 0),
        (0, 0, [1, 1, 4], [2, 3, 0], 0),
        (0, 1, [2], [2], layers // 2),
    ):
        expected = memory()
        expected[target][:, first:, targets] = memory()[source][:, first:, sources]
        for copy in (copy_pages.launch, copy_pages.twin):
            found = memory()
            index = torch.tensor(sources, device=DEVICE), torch.tensor(targets, device=DEVICE)
            copy(found[source][:, first:], found[target][:, first:], *index)
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("fp8", [False, True])
def test_keys_and_values_are_views_of_whole_pages(fp8: bool) -> None:
    """Copies move keys, values and scales; a wipe zeroes only values."""
    pool = KVPool(2, 5, 3, 4, 16, torch.float32, CPU, fp8=fp8)
    assert len(pool.keys) == len(pool.values) == 2
    assert pool.whole.shape[:3] == (2, 2, pool.spare + 1)
    rows = torch.arange(6 * 3 * 4)[:, None]
    for layer in range(2):
        for part in (pool.keys, pool.values):
            fp8_pages.put(part[layer], rows, torch.randn(72, 1, 16).abs() + 1)

    def read(part: Tensor, page: int) -> Tensor:
        return torch.stack([fp8_pages.read(part[layer], rows[12 * page : 12 * page + 12, 0], 1) for layer in range(2)])

    pool.copy(torch.tensor([1, 1]), torch.tensor([3, 4]))
    pool.wipe(torch.tensor([4]))
    for part in (pool.keys, pool.values):
        assert torch.equal(read(part, 1), read(part, 3))
        assert read(part, 1).all()
    assert torch.equal(read(pool.keys, 4), read(pool.keys, 1))
    assert not read(pool.values, 4).any()
