"""Embeddings of tokens: see the twin in fastgen.kernels.embedding."""

from __future__ import annotations

from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.triton.jit import jit, tl

MAX_BLOCK = 4096  # numbers per program


@jit("ids_ptr", "first", "rows")
def _embed_kernel(
    ids_ptr, weight_ptr, out_ptr, first, rows, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy one block of a token's embedding per program."""
    if PDL:
        # The next kernels may start when all earlier writes have ended, also those of weights: the first layer's
        # products load weights before they wait (see fastgen.kernels.hopper.products).
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + tl.program_id(0)) - first
    own = (row >= 0) & (row < rows)
    x = tl.load(weight_ptr + row * N + column, mask=own & (column < N), other=0.0)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * N + column, x, mask=column < N)


def embed(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    (count,), (rows, size) = ids.shape, weight.shape
    assert ids.is_contiguous()
    assert weight.is_contiguous()
    out = weight.new_empty(count, size)
    block = min(power_of_two(size), MAX_BLOCK)
    pdl = Chip.of(weight.device).dependent_launch
    _embed_kernel[(count, -(-size // block))](
        ids, weight, out, first or 0, rows, size, block, pdl, num_warps=min(max(block // 512, 1), 8), launch_pdl=pdl
    )
    return out
