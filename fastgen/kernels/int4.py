"""Matrix products with weights in int4: plain torch, until the kernels come."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused, finished
from fastgen.kernels.launch import Kernel


def check(outputs: int, inputs: int, group: int) -> None:
    """Raise ValueError if the kernels cannot take a weight [outputs, inputs] with `group` columns per group."""


def prepare(words: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the prepared form of a weight in its logical form. Both have the same shapes."""
    return words, scales, zeros


def restore(words: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logical form of a weight in its prepared form: the inverse of `prepare`."""
    return words, scales, zeros


def _twin(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, fused: Fused) -> Tensor:
    octets = weight.contiguous().view(torch.uint8)
    numbers = torch.stack((octets & 15, octets >> 4), -1).view(*scales.shape, -1).float()
    numbers -= 8 if zeros is None else zeros[..., None]
    found = numbers.mul_(scales.float()[..., None]).flatten(1)
    return finished(F.linear(x, found.to(x.dtype), bias), fused)


product = Kernel(_twin, _twin)
