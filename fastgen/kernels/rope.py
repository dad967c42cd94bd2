"""Rotary embedding of queries and keys (after Qwen3's norm of each head), and the write of keys and values to pages.

Shape letters: T tokens, H query heads, K KV heads, D head size, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels import pages
from fastgen.kernels.launch import Kernel, jit, tl
from fastgen.kernels.pages import quantized_heads

HEADS = 16  # heads per program


@dataclass(frozen=True)
class HeadNorm:
    """The parameters of the RMSNorm of each query head and key head. q, k: weights [D]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True)
class SlotMapping:
    """The positions of a step's tokens in their sequences, and their slots in the pool, the same for all layers.

    positions: int64 [T]. slots: int64 [T], page * P + offset, negative if a token has no slot. cos, sin: float32
    [context, D / 2], tables for all positions. real: number of tokens before the padding, which has no slots. num_kv,
    page_size: K and P of the pool. query_scales: factors of the queries after rope, [T, 1, 1] in their dtype; None: 1.
    other: the mapping of the same tokens for layers with another rope, if there are any.
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

    @cached_property
    def turns(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the tokens for both halves of a head, [T, 1, D], with -sin in the first; for the
        twin."""
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

    def of_layer(self, has_other_rope: bool) -> SlotMapping:
        """Return the mapping for a layer with the first rope or with the other one."""
        if not has_other_rope:
            return self
        assert self.other is not None
        return self.other

    def check(self, tokens: int, keys: Tensor, values: Tensor) -> None:
        """Assert that the mapping is for `tokens` tokens and a layer's keys and values [pages, K, P, D]."""
        assert keys.shape == values.shape
        pages.check(keys)
        pages.check(values)
        assert keys.shape[1:3] == (self.num_kv, self.page_size)
        assert self.positions.shape == self.slots.shape == (tokens,)
        assert self.positions.dtype == self.slots.dtype == torch.int64
        assert self.cos.shape[1] == keys.shape[3] // 2


@jit()
def look_up(token, at, known, table, positions_ptr, slots_ptr, cos_ptr, sin_ptr, HALF: tl.constexpr):
    """Return cos and sin of tokens for dimensions `at` of a half, and the slots. known, table: masks for loading from
    the tokens' tensors, and from the tables of cos and sin."""
    position = tl.load(positions_ptr + token, mask=known, other=0)
    cos = tl.load(cos_ptr + position * HALF + at, mask=table, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + at, mask=table, other=0.0)
    return cos, sin, tl.load(slots_ptr + token, mask=known, other=-1)


@jit()
def turn(
    a, b, found, token, head, at, here, q_ptr, keys_ptr, values_ptr,
    H, K: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Rotate pairs (a, b) of heads (H query heads, then K key heads, then K value heads), and store them where `here`.

    at: dimensions of a pair within the two halves of its head. found: the result of `look_up`. For pages in fp8, a and
    b have to be the halves of whole heads.
    """
    cos, sin, slot = found
    turned = head < H + K
    first = tl.where(turned, a * cos - b * sin, a).to(q_ptr.dtype.element_ty)
    second = tl.where(turned, b * cos + a * sin, b).to(q_ptr.dtype.element_ty)
    to_q = q_ptr + (token * H + head) * 2 * HALF + at
    tl.store(to_q, first, mask=here & (head < H))
    tl.store(to_q + HALF, second, mask=here & (head < H))
    kept = here & (slot >= 0)
    FP8: tl.constexpr = keys_ptr.dtype.element_ty == tl.float8e4nv
    STEP: tl.constexpr = P * (2 * HALF + 1) if FP8 else P * 2 * HALF  # from one head's page to the next one's
    to_k = keys_ptr + (slot // P * K + head - H) * STEP
    to_v = values_ptr + (slot // P * K + head - H - K) * STEP
    if FP8:
        first, second, bits = quantized_heads(first, second)
        scale_at = P * 2 * HALF + slot % P
        tl.store(to_k + scale_at, bits, mask=(slot >= 0) & turned & (head >= H))
        tl.store(to_v + scale_at, bits, mask=(slot >= 0) & (head >= H + K) & (head < H + 2 * K))
    to_k += slot % P * 2 * HALF + at
    tl.store(to_k, first, mask=kept & turned & (head >= H))
    tl.store(to_k + HALF, second, mask=kept & turned & (head >= H))
    to_v += slot % P * 2 * HALF + at
    tl.store(to_v, first, mask=kept & (head >= H + K))
    tl.store(to_v + HALF, second, mask=kept & (head >= H + K))


@jit("eps")
def _rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr, q_norm_ptr, k_norm_ptr, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of a token per program; queries come first, then keys, then values. HALF: D / 2 rounded up to
    a power of two."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    place = tl.arange(0, HALF)[None, :]
    half = place < D // 2
    here = half & (head < H + 2 * K)
    at = qkv_ptr + token * (H + 2 * K) * D + head * D + place
    a = tl.load(at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(at + D // 2, mask=here, other=0.0).to(tl.float32)
    is_q = head < H
    turned = head < H + K
    if NORM:
        scale = 1 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        q_a = tl.load(q_norm_ptr + place, mask=half, other=0.0).to(tl.float32)
        q_b = tl.load(q_norm_ptr + D // 2 + place, mask=half, other=0.0).to(tl.float32)
        k_a = tl.load(k_norm_ptr + place, mask=half, other=0.0).to(tl.float32)
        k_b = tl.load(k_norm_ptr + D // 2 + place, mask=half, other=0.0).to(tl.float32)
        # Rounded twice, as in transformers.
        normed_a = (a * scale).to(q_ptr.dtype.element_ty).to(tl.float32) * tl.where(is_q, q_a, k_a)
        normed_b = (b * scale).to(q_ptr.dtype.element_ty).to(tl.float32) * tl.where(is_q, q_b, k_b)
        a = tl.where(turned, normed_a.to(q_ptr.dtype.element_ty).to(tl.float32), a)
        b = tl.where(turned, normed_b.to(q_ptr.dtype.element_ty).to(tl.float32), b)
    found = look_up(token, place, True, half, positions_ptr, slots_ptr, cos_ptr, sin_ptr, D // 2)
    turn(a, b, found, token, head, place, here, q_ptr, keys_ptr, values_ptr, H, K, D // 2, P)


def _launch(qkv: Tensor, mapping: SlotMapping, keys: Tensor, values: Tensor, norm: HeadNorm | None = None) -> Tensor:
    tokens = len(qkv)
    _, num_kv, page_size, head_size = keys.shape
    num_q = qkv.shape[1] // head_size - 2 * num_kv
    assert qkv.is_contiguous()
    mapping.check(tokens, keys, values)
    q = torch.empty(tokens, num_q, head_size, dtype=qkv.dtype, device=qkv.device)
    pdl = Chip.of(qkv.device).dependent_launch
    # Without fused multiply-adds the bits are the same as for rope in fastgen.kernels.batch_invariant.
    _rope_kernel[(tokens, -(-(num_q + 2 * num_kv) // HEADS))](
        qkv, mapping.cos, mapping.sin, mapping.positions, mapping.slots, q, keys, values,
        norm.q if norm else qkv, norm.k if norm else qkv, norm.eps if norm else 0.0,
        num_q, num_kv, head_size, page_size, HEADS, power_of_two(head_size // 2), norm is not None, pdl,
        num_warps=4, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    return q


def _twin(qkv: Tensor, mapping: SlotMapping, keys: Tensor, values: Tensor, norm: HeadNorm | None = None) -> Tensor:
    """Return the rotated queries [T, H, D] of qkv [T, (H + 2 K) D], and write the rotated keys and the values of the
    real tokens to keys and values [pages, K, P, D], which have the dtype of qkv or fp8.

    Dimension i is rotated with i + D / 2, as in Hugging Face checkpoints (https://arxiv.org/abs/2104.09864), in
    float32.
    """
    num_kv, head_size = keys.shape[1], keys.shape[3]
    heads = qkv.view(len(qkv), -1, head_size)
    num_q = heads.shape[1] - 2 * num_kv
    qk = heads[:, :-num_kv]
    if norm is not None:
        normed_q = normed(qk[:, :num_q], norm.q, norm.eps)
        qk = torch.cat([normed_q, normed(qk[:, num_q:], norm.k, norm.eps)], dim=1)
    turned = rotate(qk, *mapping.turns)
    pages.put(keys, mapping.rows, turned[: mapping.real, num_q:])
    pages.put(values, mapping.rows, heads[: mapping.real, -num_kv:])
    return turned[:, :num_q]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, D] rotated by cos and sin, float32 [T, 1, D], in the form of `SlotMapping.turns`."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos).addcmul_(torch.cat((b, a), dim=-1), sin).to(x.dtype)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x over its last dimension, computed in float32, times weight, in x's dtype."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


rope_write = Kernel(_launch, _twin)
