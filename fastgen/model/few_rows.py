"""Products of few rows on the CPU, by native.cpp on a weight that oneDNN has packed.

For one row, oneDNN takes 1.4 to 1.7 times as long as this kernel, and from 256 rows on about as long; but layers that
need no oneDNN run in one call (native_layers.py). The kernel reads oneDNN's own format, and adds in oneDNN's order, so
that a row has the same bits among few rows and among many. Neither is documented: both are tried with the weight
itself, and a weight for which they do not hold is left to oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.kernels.native.calls import function

FEW_ROWS = 512
"""The number of rows up to which the kernel is not slower than oneDNN. Measured on an EPYC of AMD's fourth
generation."""

BLOCK = 64  # outputs that are packed together
CHUNKS = (1024, 512, 256, 2048, 4096)
"""Numbers of inputs whose products oneDNN may add before it adds the sum to those of earlier inputs."""

SAMPLES = 2**18
"""Number of results that are compared. In bfloat16, sums in two orders differ in about one of 5,000."""

_chunks: dict[tuple[object, ...], int | None] = {}  # by oneDNN's description of a format, and whether there is a bias


@dataclass(frozen=True)
class FewRows:
    """A packed weight [outputs, inputs], for products with few rows. packed: keeps it in memory at `address`. bias:
    [outputs] or None."""

    packed: Tensor
    bias: Tensor | None
    address: int
    outputs: int
    inputs: int
    chunk: int
    multiply: Callable[..., None]

    def product(self, x: Tensor) -> Tensor:
        """Return x weight^T + bias, [T, outputs], for x [T, inputs]."""
        x, y = x.contiguous(), x.new_empty(len(x), self.outputs)
        bias = None if self.bias is None else self.bias.data_ptr()
        self.multiply(
            x.data_ptr(), self.address, bias, len(x), self.inputs, self.outputs, self.chunk, y.data_ptr()
        )  # fmt: skip
        return y


def few_rows(packed: Tensor, bias: Tensor | None, outputs: int, inputs: int) -> FewRows | None:
    """Return the products with few rows of a weight that oneDNN has packed, or None if oneDNN has to compute them."""
    multiply = function("multiply", packed.dtype)
    size = -(-outputs // BLOCK) * BLOCK * inputs * packed.dtype.itemsize
    if multiply is None or inputs % 2 or torch.ops.mkldnn._nbytes(packed) != size:
        return None
    address = torch.ops.mkldnn.data_ptr(packed)
    # The format depends on the dtype, the shape, and the number of threads that packed the weight.
    key = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy()), bias is None
    if key not in _chunks:
        tried = [FewRows(packed, bias, address, outputs, inputs, min(chunk, inputs), multiply) for chunk in CHUNKS]
        _chunks[key] = next((each.chunk for each in tried if _has_bits_of_onednn(each)), None)
    chunk = _chunks[key]
    return None if chunk is None else FewRows(packed, bias, address, outputs, inputs, chunk, multiply)


def _has_bits_of_onednn(few: FewRows) -> bool:
    rows = max(-(-SAMPLES // few.outputs), 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, few.inputs, generator=generator).to(few.packed.dtype)
    expected = torch.ops.mkldnn._linear_pointwise(x, few.packed, few.bias, "none", [], "")
    return torch.equal(few.product(x), expected)
