"""Rotary embedding of queries and keys, with a norm of each head before or after it, and the write of keys and values
to pages.

Shape letters: T tokens, H query heads, K KV heads, D head size, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels import fp8_pages
from fastgen.kernels.launch import Kernel


@dataclass(frozen=True)
class HeadNorm:
    """The parameters of the RMSNorm of each query head and key head. q, k: weights [D]. after_rope: the heads are
    rotated before the norm, as in HunYuan, and not after it, as in Qwen3. centered: see RMSNorm."""

    q: Tensor
    k: Tensor
    eps: float
    after_rope: bool = False
    centered: bool = False


@dataclass(frozen=True)
class SlotMapping:
    """The positions of a step's tokens in their sequences, and their slots in the pool, the same for all layers.

    positions: int64 [T]. slots: int64 [T], page * P + offset, negative if a token has no slot. cos, sin: float32
    [context, D / 2], tables for all positions, or with fewer columns: the other dimensions of a head stay. real:
    number of tokens before the padding, which has no slots. num_kv, page_size: K and P of the pool. query_scales:
    factors of the queries after rope, [T, 1, 1] in their dtype; None: 1. other: the mapping of the same tokens for
    layers with another rope, if there are any. windowed: that for layers with windows, if these have other slots.
    """

    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    real: int
    num_kv: int
    page_size: int
    query_scales: Tensor | None = None
    other: SlotMapping | None = None
    windowed: SlotMapping | None = None

    @cached_property
    def turns(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the tokens for both halves of the R rotated dimensions, [T, 1, R], with -sin in the
        first; for the twin."""
        cos, sin = self.cos[self.positions, None], self.sin[self.positions, None]
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    @cached_property
    def rows(self) -> Tensor:
        """Return the row in a layer's keys.view(-1, D) of each head of the real tokens, int64 [real, K]; for the twin.

        In a graph the padding counts as real, and its slot, -1, refers to the end of the last page, which is spare.
        """
        slots = self.slots[: self.real]
        row = (slots // self.page_size * (self.num_kv * self.page_size) + slots % self.page_size)[:, None]
        return row + torch.arange(self.num_kv, device=row.device) * self.page_size

    def of_layer(self, has_other_rope: bool, window: int) -> SlotMapping:
        """Return the mapping for a layer with the first rope or with the other one."""
        mapping = self.windowed if window and self.windowed is not None else self
        if not has_other_rope:
            return mapping
        assert mapping.other is not None
        return mapping.other

    def check(self, tokens: int, keys: Tensor, values: Tensor) -> None:
        """Assert that the mapping is for `tokens` tokens and a layer's keys and values [pages, K, P, D]."""
        assert keys.shape == values.shape
        fp8_pages.check(keys)
        fp8_pages.check(values)
        assert keys.shape[1:3] == (self.num_kv, self.page_size)
        assert self.positions.shape == self.slots.shape == (tokens,)
        assert self.positions.dtype == self.slots.dtype == torch.int64
        assert self.cos.shape[1] <= keys.shape[3] // 2


def _twin(qkv: Tensor, mapping: SlotMapping, keys: Tensor, values: Tensor, norm: HeadNorm | None = None) -> Tensor:
    """Return the rotated queries [T, H, D] of qkv [T, (H + 2 K) D], and write the rotated keys and the values of the
    real tokens to keys and values [pages, K, P, D], which have the dtype of qkv or fp8.

    Dimension i is rotated with i + D / 2, as in Hugging Face checkpoints (https://arxiv.org/abs/2104.09864), in
    float32. If only the first R dimensions of a head are rotated, i is rotated with i + R / 2.
    """
    num_kv, head_size = keys.shape[1], keys.shape[3]
    heads = qkv.view(len(qkv), -1, head_size)
    num_q = heads.shape[1] - 2 * num_kv
    qk = heads[:, :-num_kv]
    if norm is not None and not norm.after_rope:
        qk = _normed_heads(qk, num_q, norm)
    turned = rotate(qk, *mapping.turns)
    if norm is not None and norm.after_rope:
        turned = _normed_heads(turned, num_q, norm)
    fp8_pages.put(keys, mapping.rows, turned[: mapping.real, num_q:])
    fp8_pages.put(values, mapping.rows, heads[: mapping.real, -num_kv:])
    return turned[:, :num_q]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, D] rotated by cos and sin, float32 [T, 1, R], in the form of `SlotMapping.turns`: the first R
    dimensions of each head."""
    if (rotary := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary], cos, sin), x[..., rotary:]), dim=-1)
    a, b = x.chunk(2, dim=-1)
    return (x * cos).addcmul_(torch.cat((b, a), dim=-1), sin).to(x.dtype)


def _normed_heads(qk: Tensor, num_q: int, norm: HeadNorm) -> Tensor:
    """Return the norms of H = num_q query heads and K key heads: [T, H + K, D]."""
    parts = (qk[:, :num_q], norm.q), (qk[:, num_q:], norm.k)
    return torch.cat([normed(part, weight, norm.eps, norm.centered) for part, weight in parts], dim=1)


def normed(x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
    """Return the RMSNorm of x over its last dimension, computed in float32, times weight, in x's dtype. centered: see
    RMSNorm."""
    if centered:
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1, eps).to(x.dtype)
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


rope_write = Kernel(_twin, "fastgen.kernels.triton.rope:rope_write", "fastgen.kernels.native.calls:rope_write")
