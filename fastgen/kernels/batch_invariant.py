"""Batch-invariant matrix products, in which the bits of a row of the result do not depend on the number of other rows:
their twin, and the operations that are fused with a product. The kernels are in fastgen.kernels.triton.batch_invariant.

Where results must not depend on the schedule, all products use these kernels; elsewhere only the products for which
they are faster than cuBLAS (see `pays`).

Shape letters: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.epilogue import swiglu
from fastgen.kernels.launch import Kernel, gluon_runs_on
from fastgen.kernels.rope import SlotMapping, rope_write

ALIGN = 8  # the inputs of a weight are a multiple of it, so that rows begin at multiples of 16 bytes
FEW_IN_TRITON, FEW_IN_GLUON = 32, 128
"""Tokens up to which these products are faster than cuBLAS. Measured on an H200; GPUs of other generations, which
always use Triton, were not measured."""


def pays(tokens: int, inputs: int, dtype: torch.dtype, chip: Chip) -> bool:
    """Return whether the product of `tokens` tokens and a weight [outputs, inputs] is faster here than in cuBLAS."""
    most = FEW_IN_GLUON if gluon_runs_on(chip, dtype) else FEW_IN_TRITON
    return tokens <= most and dtype.itemsize == 2 and inputs % ALIGN == 0


@dataclass(frozen=True)
class RopeWrite:
    """The arguments of fastgen.kernels.rope.rope_write, for rope after the product with the weight of q, k and v."""

    mapping: SlotMapping
    keys: Tensor
    values: Tensor


class Fused(NamedTuple):
    """The epilogue of a product [T, N].

    add: [T, N] in x's dtype, to which the result is added in place. swiglu: weight and bias hold the rows of gate
    followed by the rows of up, and the result is silu(gate) * up [T, N / 2]. rope: the weight holds the rows of q, k
    and v, and the result is the same as for rope_write, q [T, H, D]. out_dtype: dtype of the result, by default x's.
    out: tensor that receives the result; only without add, swiglu and rope.
    """

    add: Tensor | None = None
    swiglu: bool = False
    rope: RopeWrite | None = None
    out_dtype: torch.dtype | None = None
    out: Tensor | None = None


UNFUSED = Fused()


def _twin(x: Tensor, weight: Tensor, bias: Tensor | None, fused: Fused) -> Tensor:
    """Return x weight^T + bias, [T, N] in x's dtype, with the epilogue `fused`.

    x: [T, K]. weight: [N, K]. bias: [N]. All have the same dtype, float32, bfloat16 or float16. K is a multiple of
    ALIGN.
    """
    return finished(F.linear(x, weight, bias), fused)


def finished(y: Tensor, fused: Fused) -> Tensor:
    """Apply the epilogue `fused` to a product y [T, N] and return the result; for twins."""
    if fused.rope is not None:
        y = y.to(fused.out_dtype or y.dtype)
        turned: Tensor = rope_write.twin(y, fused.rope.mapping, fused.rope.keys, fused.rope.values)
        return turned
    if fused.swiglu:
        y = swiglu.twin(y)
    if fused.out is not None:
        return fused.out.copy_(y)
    return y.to(fused.out_dtype or y.dtype) if fused.add is None else fused.add.add_(y)


product = Kernel(_twin, "fastgen.kernels.triton.batch_invariant:product")
