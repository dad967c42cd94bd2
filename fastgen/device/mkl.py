"""Functions of torch's MKL that torch does not expose: batches of products in float32 whose matrices are given by
address. Products with packed weights are in mkl_packed.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112  # constants of CBLAS

Indices = NDArray[np.int64]


def library_function(library: str | None, name: str) -> Callable[..., int] | None:
    """Return a function of a library that torch has loaded, or None if there is none."""
    try:
        function: Callable[..., int] | None = getattr(ctypes.CDLL(library), name, None)
    except OSError:
        return None
    return function


def mkl_function(name: str, returns: type = c_int) -> Callable[..., int] | None:
    """Return a function of torch's MKL, or None if there is none. returns: the ctypes type of its result."""
    function: Any = library_function(_LIBTORCH, name)
    if function is not None:
        function.restype = returns
    return cast("Callable[..., int] | None", function)


_LIBTORCH = next(map(str, Path(torch.__file__).parent.glob("lib/libtorch_cpu.*")), None)
_MULTIPLY_BATCH = mkl_function("cblas_sgemm_batch")

BATCHES = _MULTIPLY_BATCH is not None
"""True if batches of products by address are available."""


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
        _MULTIPLY_BATCH, ROW_MAJOR, same(c_int, PLAIN), same(c_int, TRANSPOSED if transposed else PLAIN), *sizes,
        same(c_float, 1), a_at, a_row, b_at, b_row, same(c_float, 0), c_at, c_row, count,
        groups.astype(np.int32).ctypes.data_as(c_void_p),
    )  # fmt: skip
