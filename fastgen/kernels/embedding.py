"""Embeddings of tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.launch import Kernel, jit, tl

MOST_BLOCK = 4096  # numbers per program


@jit("ids_ptr", "first", "rows")
def _embed_kernel(
    ids_ptr, weight_ptr, out_ptr, first, rows, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy one block of a token's embedding per program."""
    if PDL:
        # The next kernels may start when all earlier writes have ended, also those of weights: the first layer's
        # products load weights before they wait (see fastgen.kernels.hopper_products).
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + tl.program_id(0)) - first
    own = (row >= 0) & (row < rows)
    x = tl.load(weight_ptr + row * N + column, mask=own & (column < N), other=0.0)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * N + column, x, mask=column < N)


def _launch(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    (count,), (rows, size) = ids.shape, weight.shape
    assert ids.is_contiguous()
    assert weight.is_contiguous()
    out = weight.new_empty(count, size)
    block = min(power_of_two(size), MOST_BLOCK)
    pdl = Chip.of(weight.device).dependent_launch
    _embed_kernel[(count, -(-size // block))](
        ids, weight, out, first or 0, rows, size, block, pdl, num_warps=min(max(block // 512, 1), 8), launch_pdl=pdl
    )
    return out


def _twin(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """Return the embeddings [T, N] of ids, int64 [T].

    weight: [rows, N], the embeddings of the ids from `first` on; None: of all ids, and ids outside of the
    vocabulary are an error here, zeros in the kernel. The result is zeros for other ids.
    """
    if first is None:
        return F.embedding(ids, weight)
    own = ids - first
    here = (own >= 0) & (own < len(weight))
    return F.embedding(own.masked_fill_(~here, 0), weight).masked_fill_(~here[:, None], 0)


embed = Kernel(_launch, _twin)
