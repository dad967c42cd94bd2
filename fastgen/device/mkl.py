"""Products in float32 of torch's MKL that torch does not expose: products with packed weights, and batches of products
whose matrices are given by address.

A packed weight is stored in the order that MKL's product needs, which otherwise reorders the weight in each call.
Products with packed weights are up to twice as fast as F.linear, and have the same bits for any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_size_t, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

PACKED_INPUTS = 352
"""Maximum number of inputs of a packed part of a weight; the products of the parts are added in order. MKL sums longer
rows (from 450 to 700 inputs on) in pieces whose size depends on the number of rows."""

_ROW_MAJOR, _PLAIN, _TRANSPOSED, _PACKED, _RIGHT = 101, 111, 112, 151, 162  # constants of CBLAS
_ROWS = 16  # number of rows of the products that a weight is packed for

Indices = NDArray[np.int64]


def library_function(library: str | None, name: str) -> Callable[..., int] | None:
    """Return a function of a library that torch has loaded, or None if there is none."""
    try:
        found: Callable[..., int] | None = getattr(ctypes.CDLL(library), name, None)
    except OSError:
        return None
    return found


def mkl_function(name: str, returns: type = c_int) -> Callable[..., int] | None:
    """Return a function of torch's MKL, or None if there is none. returns: the ctypes type of its result."""
    found: Any = library_function(_LIBTORCH, name)
    if found is not None:
        found.restype = returns
    return cast("Callable[..., int] | None", found)


_LIBTORCH = next(map(str, Path(torch.__file__).parent.glob("lib/libtorch_cpu.*")), None)
_PACK, _MULTIPLY = mkl_function("cblas_sgemm_pack"), mkl_function("cblas_sgemm_compute")
_PACK_SIZE = mkl_function("cblas_sgemm_pack_get_size", returns=c_size_t)
_MULTIPLY_BATCH = mkl_function("cblas_sgemm_batch")

PACKS = None not in (_PACK, _PACK_SIZE, _MULTIPLY)
"""True if products with packed weights are available."""

BATCHES = _MULTIPLY_BATCH is not None
"""True if batches of products by address are available."""


# Packed weights


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
            _ROW_MAJOR, _RIGHT, _TRANSPOSED, _ROWS, outputs, size, c_float(1), _at(weight, first), inputs,
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
            _ROW_MAJOR, _PLAIN, _PACKED, rows, outputs, size, _at(x, first), inputs, c_void_p(part), size,
            c_float(1 if first else keep), _at(y), outputs,
        )  # fmt: skip
        part += length
    return y


def _at(x: Tensor, number: int = 0) -> c_void_p:
    """Return the address of the element with index `number` of a float32 tensor."""
    return c_void_p(x.data_ptr() + 4 * number)


# Batches


def batch(
    groups: Indices,
    m: Indices,
    n: Indices,
    k: Indices,
    a: tuple[Indices, int],
    b: tuple[Indices, int],
    c: tuple[Indices, int],
    transposed: bool = False,
) -> Callable[[], object]:
    """Return a function that sets matrices c [m, n] to the products of a [m, k] and b, [k, n] or if transposed [n, k].

    groups: number of products of each size (m, n, k). a, b, c: addresses of the matrices, which are read at each call,
    and number of elements between the beginnings of two rows.
    """
    assert _MULTIPLY_BATCH is not None
    count = len(groups)

    def same(kind: Any, value: float) -> Any:
        return (kind * count)(*[value] * count)

    sizes = (each.astype(np.int32).ctypes.data_as(c_void_p) for each in (m, n, k))
    (a_at, a_row), (b_at, b_row), (c_at, c_row) = (
        (at.ctypes.data_as(c_void_p), same(c_int, row)) for at, row in (a, b, c)
    )
    return partial(
        _MULTIPLY_BATCH, _ROW_MAJOR, same(c_int, _PLAIN), same(c_int, _TRANSPOSED if transposed else _PLAIN), *sizes,
        same(c_float, 1), a_at, a_row, b_at, b_row, same(c_float, 0), c_at, c_row, count,
        groups.astype(np.int32).ctypes.data_as(c_void_p),
    )  # fmt: skip
