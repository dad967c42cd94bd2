"""parallel/group.py: what of a tensor a rank holds."""

from __future__ import annotations

import pytest
import torch

from fastgen.parallel.group import Part


def test_a_part_is_a_slice_of_rows_or_of_columns() -> None:
    tensor = torch.arange(60).view(6, 10)
    for start, size in [(0, 6), (0, 2), (2, 3), (5, 1), (4, 0), (6, 0)]:
        rows = Part(torch.empty(size, 10), (6, 10), 0, start)
        assert torch.equal(rows.of(tensor), tensor[start : start + size])
        columns = Part(torch.empty(10, size), (10, 6), 1, start)
        assert torch.equal(columns.of(tensor.t()), tensor.t()[:, start : start + size])
        assert rows.is_whole == columns.is_whole == (size == 6)
    for shape in [(), (3,), (0, 4), (2, 3, 4)]:
        whole = Part.whole(torch.empty(shape))
        assert whole.is_whole
        assert whole.shape == shape
        assert whole.of(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize(
    ("view", "shape", "dim", "start"),
    [
        ((2, 10), (6, 10), 0, 5),  # over the end
        ((2, 10), (6, 10), 0, -1),
        ((2, 10), (6, 10), 1, 0),  # along the other dimension
        ((2, 5), (6, 10), 0, 0),  # along both
        ((6, 10), (6, 10), 0, 1),
        ((2,), (6, 10), 0, 0),
        ((2, 3, 4), (2, 3, 8), 2, 0),
    ],
)
def test_a_part_that_is_none(view: tuple[int, ...], shape: tuple[int, ...], dim: int, start: int) -> None:
    with pytest.raises(AssertionError):
        Part(torch.empty(view), shape, dim, start)
