"""The addition of the sum over all ranks to the residual stream, followed by RMSNorm."""

from __future__ import annotations

from torch import Tensor

from fastgen.kernels.allreduce import add_in_order
from fastgen.kernels.launch import Kernel
from fastgen.kernels.norm import RMSNorm, rms_norm


def _twin(x: Tensor, y: Tensor, stage: Tensor, rank: int, weight: Tensor | None, eps: float, out: Tensor) -> None:
    """Add the sum over all ranks to x [T, N], and write rms_norm(x) * weight, or x if weight is None, to out [T, N].

    y: [T, N], this rank's summand. stage: [ranks, any number >= T, N], whose first T rows are the summands of the other
    ranks (this rank's part is not read). weight: [N]. All tensors are contiguous and have the same dtype. The sum is
    computed in the order of the ranks, in float32, and rounded once.
    """
    check(x, y, stage, weight, out)
    add_in_order(x, [y if other == rank else rows[: len(x)] for other, rows in enumerate(stage)])
    out.copy_(x if weight is None else rms_norm(x, RMSNorm(weight, eps)))


def check(x: Tensor, y: Tensor, stage: Tensor, weight: Tensor | None, out: Tensor) -> None:
    assert x.shape == y.shape == out.shape
    assert stage.shape[1] >= len(x) > 0
    assert stage.shape[2:] == x.shape[1:]
    assert weight is None or weight.shape == x.shape[1:]
    assert {x.dtype, y.dtype, stage.dtype} == {out.dtype}
    assert all(tensor.is_contiguous() for tensor in (x, y, stage, out))


sum_norm = Kernel(_twin, "fastgen.kernels.triton.sum_norm:sum_norm")
