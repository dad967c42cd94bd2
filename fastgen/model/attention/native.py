"""Attention on the CPU by the kernel of kernels/native, which reads the paged KV pool in place.

Each query head of a token goes through the keys of its sequence in blocks of 64, from position 0 or the beginning of
its window on, with the softmax's weights relative to the largest score so far (https://arxiv.org/abs/2205.14135). So
its bits do not depend on the rest of the step.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.kernels.native.calls import LANES, function
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.shared import SharedPrefixes
from fastgen.model.kv_pool import KVPool

TILE_ROWS = 192
"""Approximate number of query rows of a tile of a prefill: so many share a block of keys."""


class Shape(ctypes.Structure):
    """The struct Attention in native.cpp."""

    _fields_ = (
        *((each, c_int) for each in ("tiles", "heads", "kv_heads", "size", "page_size", "columns", "window", "rows")),
        ("scale", c_float),
    )


def has_attention(dtype: torch.dtype, head_size: int) -> bool:
    """Return whether the kernel can be had on this machine for keys of a dtype and heads of a size."""
    return head_size * dtype.itemsize % (4 * LANES) == 0 and function("attend", dtype) is not None


def kv_dtype(dtype: str, head_size: int) -> str:
    """Return the dtype of keys and values on the CPU, one that its attention multiplies, for a model in `dtype`."""
    return dtype if has_attention(getattr(torch, dtype), head_size) else "float32"


@dataclass(frozen=True)
class NativePlan:
    """tiles: int64 [n, 4], of each tile the first token's row in the step, the number of tokens, the first position,
    and the row of page_table, int32 [lanes, columns]. tokens: the maximum number of a tile."""

    tiles: NDArray[np.int64]
    page_table: Tensor
    tokens: int


class NativeAttention:
    """Attention on the CPU (see Attention). num_heads: H. scale: factor of the scores; None: D ** -0.5."""

    capturable = False
    needs_clean_pages = False  # no unwritten values are loaded
    prefixes: SharedPrefixes | None = None

    def __init__(self, pool: KVPool, num_heads: int, scale: float | None = None) -> None:
        self.pool = pool
        self._heads, self._kv_heads = num_heads, pool.keys.shape[2]
        self._scale = pool.keys.shape[-1] ** -0.5 if scale is None else scale
        self._layers = [
            (keys.data_ptr(), values.data_ptr()) for keys, values in zip(pool.keys, pool.values, strict=True)
        ]

    @staticmethod
    def fits(pool: KVPool) -> bool:
        """Return whether the kernel can be had on this machine and reads this pool."""
        return has_attention(pool.keys.dtype, pool.keys.shape[-1])

    def plan(self, layout: StepLayout) -> NativePlan:
        """Cut the query tokens of each sequence into tiles, the ones with the most keys first."""
        size = max(TILE_ROWS * self._kv_heads // self._heads, 1)
        lens = layout.query_lens
        count = -(-lens // size)
        owner = np.repeat(np.arange(len(lens)), count)  # tile -> sequence
        offset = (np.arange(len(owner)) - np.repeat(count.cumsum() - count, count)) * size
        tokens = np.minimum(lens[owner] - offset, size)
        position = (layout.kv_lens - lens)[owner] + offset
        tiles = np.stack([(lens.cumsum() - lens)[owner] + offset, tokens, position, layout.lanes[owner]], 1)
        tiles = tiles[np.argsort(-tokens * (position + tokens), kind="stable")]
        return NativePlan(np.ascontiguousarray(tiles, dtype=np.int64), layout.page_table, int(tokens.max()))

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, reads_early: bool = False
    ) -> NativePlan:
        ones = np.ones(len(lanes), dtype=np.int64)
        return self.plan(StepLayout(ones, kv_lens.long().numpy(), len(lanes), lanes.numpy(), page_table))

    def attend(self, plan: NativePlan, layer: int, q: Tensor, window: int) -> Tensor:
        dtype, attend, q = q.dtype, function("attend", self.pool.keys.dtype), q.to(self.pool.keys.dtype).contiguous()
        assert attend is not None
        of = self.shape(plan, window)
        out = torch.empty_like(q)
        attend(
            ctypes.addressof(of), plan.tiles.ctypes.data, plan.page_table.data_ptr(), q.data_ptr(),
            *self._layers[layer], out.data_ptr(),
        )  # fmt: skip
        return out.to(dtype)

    def shape(self, plan: NativePlan, window: int) -> Shape:
        """Return the sizes of a step's attention in a layer."""
        return Shape(
            len(plan.tiles), self._heads, self._kv_heads, self.pool.keys.shape[-1], self.pool.page_size,
            plan.page_table.shape[1], window, plan.tokens * (self._heads // self._kv_heads), self._scale,
        )  # fmt: skip
