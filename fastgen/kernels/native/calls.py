"""The norm, the rope and the SwiGLU of native.cpp on tensors. The first two return None if the kernel cannot compute
their arguments; torch then does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_bool, c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from fastgen.kernels.native.library import library
from fastgen.kernels.norm import RMSNorm
from fastgen.kernels.rope import HeadNorm, SlotMapping

LANES = 16  # numbers of a vector; sizes are multiples of it
MOST_HEAD = 1024  # the largest head that the kernel can norm

_ARGUMENTS = {
    "norm": (c_void_p, c_void_p, c_void_p, c_float, c_bool, c_int, c_int, c_void_p),
    "rope_write": (c_void_p,) * 11,
    "attend": (c_void_p,) * 7,
    "multiply": (c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p),
    "swiglu": (c_void_p, c_void_p, c_int64, c_void_p),
    "run_layers": (c_void_p, c_int, *(c_void_p,) * 9),
}


@cache
def function(name: str, dtype: torch.dtype) -> Callable[..., None] | None:
    """Return a function of the library for tensors of a dtype, or None if there is none."""
    loaded, symbol = library(), f"{name}_{dtype}".replace("torch.", "")
    if loaded is None or not hasattr(loaded, symbol):
        return None
    found = loaded[symbol]
    found.argtypes, found.restype = _ARGUMENTS[name], None
    return found


def multiplies(dtype: str) -> bool:
    """Return whether native.cpp multiplies matrices in a dtype, such as "bfloat16", on this machine."""
    return function("multiply", getattr(torch, dtype)) is not None


def rms_norm(x: Tensor, norm: RMSNorm, delta: Tensor | None = None) -> Tensor | None:
    """See `fastgen.kernels.norm`."""
    compute, (rows, size) = function("norm", x.dtype), x.shape
    of_one_kind = norm.weight.dtype == x.dtype and x.is_contiguous() and (delta is None or delta.is_contiguous())
    if compute is None or size % LANES or not of_one_kind or x.requires_grad:
        return None
    out = torch.empty_like(x)
    added = None if delta is None else delta.data_ptr()
    compute(x.data_ptr(), added, norm.weight.data_ptr(), norm.eps, norm.centered, rows, size, out.data_ptr())
    return out


class Rope(ctypes.Structure):
    """The struct of this name in native.cpp. eps, centered: of the norms of heads."""

    _fields_ = (
        *((name, c_int) for name in ("tokens", "real", "heads", "kv_heads", "size", "half", "page_size", "centered")),
        ("eps", c_float),
    )


def rope_of(mapping: SlotMapping, tokens: int, heads: int, size: int, eps: float, centered: bool) -> Rope:
    """Return the sizes of a step of `tokens` tokens and of a layer with this number of query heads."""
    half, kv_heads = mapping.cos.shape[1], mapping.num_kv
    return Rope(tokens, mapping.real, heads, kv_heads, size, half, mapping.page_size, centered, eps)


def rope_write(
    qkv: Tensor, mapping: SlotMapping, keys: Tensor, values: Tensor, norm: HeadNorm | None = None
) -> Tensor | None:
    """See `fastgen.kernels.rope`."""
    write, size, half = function("rope_write", qkv.dtype), keys.shape[3], mapping.cos.shape[1]
    if write is None or keys.dtype != qkv.dtype or not qkv.is_contiguous():
        return None
    if size % LANES or half % LANES or size > MOST_HEAD or (norm is not None and norm.after_rope):
        return None
    heads = qkv.shape[1] // size - 2 * mapping.num_kv
    eps, centered = (0.0, False) if norm is None else (norm.eps, norm.centered)
    of = rope_of(mapping, len(qkv), heads, size, eps, centered)
    queries = qkv.new_empty(len(qkv), heads, size)
    norms = (None, None) if norm is None else (norm.q.data_ptr(), norm.k.data_ptr())
    inputs = qkv, mapping.positions, mapping.slots, mapping.cos, mapping.sin
    write(
        ctypes.addressof(of), *(each.data_ptr() for each in inputs), *norms, keys.data_ptr(), values.data_ptr(),
        queries.data_ptr(),
    )  # fmt: skip
    return queries


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate and up [T, N], each rounded to their dtype, as transformers does. There must be a
    `function` for it, and N must be a multiple of LANES."""
    compute, out = function("swiglu", gate.dtype), torch.empty_like(gate)
    assert compute is not None
    assert gate.shape[1] % LANES == 0
    compute(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
    return out
