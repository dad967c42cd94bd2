"""Products in float32 with packed weights of torch's MKL, which torch does not expose.

A packed weight is stored in the order that MKL's product needs, which otherwise reorders the weight in each call.
Products with packed weights are up to twice as fast as F.linear, and have the same bits for any number of threads.
"""

from __future__ import annotations

from ctypes import c_float, c_size_t, c_void_p
from functools import cache

import torch.nn.functional as F
from torch import Tensor

from fastgen.device.mkl import PLAIN, ROW_MAJOR, TRANSPOSED, mkl_function

PACKED_INPUTS = 352
"""Maximum number of inputs of a packed part of a weight; the products of the parts are added in order. MKL sums longer
rows (from 450 to 700 inputs on) in pieces whose size depends on the number of rows."""

_PACKED, _RIGHT = 151, 162  # constants of CBLAS
_ROWS = 16  # number of rows of the products that a weight is packed for
_PACK, _MULTIPLY = mkl_function("cblas_sgemm_pack"), mkl_function("cblas_sgemm_compute")
_PACK_SIZE = mkl_function("cblas_sgemm_pack_get_size", returns=c_size_t)

PACKS = None not in (_PACK, _PACK_SIZE, _MULTIPLY)
"""True if products with packed weights are available."""


def packed_outputs(outputs: int) -> int:
    """Return the number of outputs of a packed weight, which is padded with rows of zeros.

    With AVX2, MKL uses another order for sums of products with fewer than 192 outputs, and with weights that 16 threads
    have packed. On AMD processors it also does for the 4 to 8 outputs that remain for the last of 16 or more threads.
    """
    return max(-(-outputs // 16) * 16, 192)


@cache
def _parts(outputs: int, inputs: int) -> tuple[tuple[int, int, int], ...]:
    """Return (first input, number of inputs, number of bytes padded to a multiple of 64) of each packed part of a
    weight."""
    assert _PACK_SIZE is not None
    sizes = {first: min(PACKED_INPUTS, inputs - first) for first in range(0, inputs, PACKED_INPUTS)}
    return tuple(
        (first, size, -(-_PACK_SIZE(_RIGHT, _ROWS, outputs, size) // 64) * 64) for first, size in sizes.items()
    )


def pack_size(outputs: int, inputs: int) -> int:
    """Return how many float32 numbers a packed weight [outputs, inputs] takes, a multiple of 64 bytes."""
    return sum(length for _, _, length in _parts(packed_outputs(outputs), inputs)) // 4


def pack(weight: Tensor, memory: Tensor) -> None:
    """Pack a weight [outputs, inputs] into `memory`, float32 [pack_size(outputs, inputs)]."""
    assert _PACK is not None
    if more := packed_outputs(len(weight)) - len(weight):
        weight = F.pad(weight, (0, 0, 0, more))
    weight = weight.contiguous()
    (outputs, inputs), part = weight.shape, memory.data_ptr()
    for first, size, length in _parts(outputs, inputs):
        _PACK(
            ROW_MAJOR, _RIGHT, TRANSPOSED, _ROWS, outputs, size, c_float(1), _at(weight, first), inputs,
            c_void_p(part),
        )  # fmt: skip
        part += length


def multiply_packed(x: Tensor, packed: Tensor, y: Tensor, keep: float) -> Tensor:
    """Set y to keep * y plus the product of x [T, inputs] and a packed weight, and return y.

    y: [T, packed_outputs(outputs)].
    """
    assert _MULTIPLY is not None
    assert y.is_contiguous()
    x = x.contiguous()
    (rows, inputs), outputs, part = x.shape, y.shape[1], packed.data_ptr()
    for first, size, length in _parts(outputs, inputs):
        _MULTIPLY(
            ROW_MAJOR, PLAIN, _PACKED, rows, outputs, size, _at(x, first), inputs, c_void_p(part), size,
            c_float(1 if first else keep), _at(y), outputs,
        )  # fmt: skip
        part += length
    return y


def _at(x: Tensor, number: int = 0) -> c_void_p:
    """Return the address of the element with index `number` of a float32 tensor."""
    return c_void_p(x.data_ptr() + 4 * number)
