"""Rotary embedding of queries and keys, and the write of keys and values to pages: see the twin in
fastgen.kernels.rope.

Shape letters: T tokens, H query heads, K KV heads, D head size, P page size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.rope import HeadNorm, SlotMapping
from fastgen.kernels.triton.fp8_pages import quantized_heads
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.triton.norm import weighted

HEADS = 16  # heads per program


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
    first, second = rotate(a, b, cos, sin, head < H + K)
    write_heads(first, second, slot, token, head, at, HALF, here, q_ptr, keys_ptr, values_ptr, H, K, HALF, P)


@jit()
def rotate(a, b, cos, sin, turned):
    """Return the pairs (a, b), rotated if `turned`."""
    return tl.where(turned, a * cos - b * sin, a), tl.where(turned, b * cos + a * sin, b)


@jit()
def write_heads(
    first, second, slot, token, head, at, apart, here, q_ptr, keys_ptr, values_ptr,
    H, K: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store pairs of heads, whose dimensions are `at` and `at + apart`; see `turn`."""
    first = first.to(q_ptr.dtype.element_ty)
    second = second.to(q_ptr.dtype.element_ty)
    turned = head < H + K
    to_q = q_ptr + (token * H + head) * 2 * HALF + at
    tl.store(to_q, first, mask=here & (head < H))
    tl.store(to_q + apart, second, mask=here & (head < H))
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
    tl.store(to_k + apart, second, mask=kept & turned & (head >= H))
    to_v += slot % P * 2 * HALF + at
    tl.store(to_v, first, mask=kept & (head >= H + K))
    tl.store(to_v + apart, second, mask=kept & (head >= H + K))


@jit("eps")
def _rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr, q_norm_ptr, k_norm_ptr, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, P: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    CENTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of a token per program; queries come first, then keys, then values. HALF: D / 2 rounded up to
    a power of two. ROTARY: number of rotated dimensions. NORM: norm the heads. AFTER: norm them after the rotation.
    CENTERED: see RMSNorm."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    place = tl.arange(0, HALF)[None, :]
    half = place < D // 2
    here = half & (head < H + 2 * K)
    is_q = head < H
    turned = head < H + K
    if ROTARY < D:  # pairs of rotated dimensions first, then pairs of the others
        in_table = place < ROTARY // 2
        at = tl.where(in_table, place, place + ROTARY // 2)
        apart = tl.where(in_table, ROTARY // 2, (D - ROTARY) // 2)
        rotated = turned & in_table
    else:
        in_table = half
        at = place
        apart = D // 2
        rotated = turned
    source = qkv_ptr + token * (H + 2 * K) * D + head * D + at
    a = tl.load(source, mask=here, other=0.0).to(tl.float32)
    b = tl.load(source + apart, mask=here, other=0.0).to(tl.float32)
    if NORM and not AFTER:
        a, b = norm_heads(a, b, at, apart, half, is_q, turned, q_ptr, q_norm_ptr, k_norm_ptr, eps, D, CENTERED)
    cos, sin, slot = look_up(token, place, True, in_table, positions_ptr, slots_ptr, cos_ptr, sin_ptr, ROTARY // 2)
    a, b = rotate(a, b, cos, sin, rotated)
    if AFTER:
        a = a.to(q_ptr.dtype.element_ty).to(tl.float32)
        b = b.to(q_ptr.dtype.element_ty).to(tl.float32)
        a, b = norm_heads(a, b, at, apart, half, is_q, turned, q_ptr, q_norm_ptr, k_norm_ptr, eps, D, CENTERED)
    write_heads(a, b, slot, token, head, at, apart, here, q_ptr, keys_ptr, values_ptr, H, K, D // 2, P)


@jit()
def norm_heads(
    a, b, at, apart, half, is_q, turned, q_ptr, q_norm_ptr, k_norm_ptr, eps, D: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Return the heads, and the RMSNorm of those that are `turned`. a, b: float32 [HEADS, HALF], the pairs of
    dimensions `at` and `at + apart`. half: mask of the pairs that exist."""
    scale = 1 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
    q_a = tl.load(q_norm_ptr + at, mask=half, other=0.0).to(tl.float32)
    q_b = tl.load(q_norm_ptr + at + apart, mask=half, other=0.0).to(tl.float32)
    k_a = tl.load(k_norm_ptr + at, mask=half, other=0.0).to(tl.float32)
    k_b = tl.load(k_norm_ptr + at + apart, mask=half, other=0.0).to(tl.float32)
    normed_a = weighted(a * scale, tl.where(is_q, q_a, k_a), q_ptr.dtype.element_ty, CENTERED)
    normed_b = weighted(b * scale, tl.where(is_q, q_b, k_b), q_ptr.dtype.element_ty, CENTERED)
    a = tl.where(turned, normed_a.to(q_ptr.dtype.element_ty).to(tl.float32), a)
    b = tl.where(turned, normed_b.to(q_ptr.dtype.element_ty).to(tl.float32), b)
    return a, b


def rope_write(qkv: Tensor, mapping: SlotMapping, keys: Tensor, values: Tensor, norm: HeadNorm | None = None) -> Tensor:
    tokens = len(qkv)
    _, num_kv, page_size, head_size = keys.shape
    num_q = qkv.shape[1] // head_size - 2 * num_kv
    assert qkv.is_contiguous()
    mapping.check(tokens, keys, values)
    q = torch.empty(tokens, num_q, head_size, dtype=qkv.dtype, device=qkv.device)
    pdl = Chip.of(qkv.device).dependent_launch
    # Without fused multiply-adds the bits are the same as for rope in fastgen.kernels.triton.batch_invariant.
    _rope_kernel[(tokens, -(-(num_q + 2 * num_kv) // HEADS))](
        qkv, mapping.cos, mapping.sin, mapping.positions, mapping.slots, q, keys, values,
        norm.q if norm else qkv, norm.k if norm else qkv, norm.eps if norm else 0.0,
        num_q, num_kv, head_size, 2 * mapping.cos.shape[1], page_size, HEADS, power_of_two(head_size // 2),
        norm is not None, norm is not None and norm.after_rope,
        norm is not None and norm.centered, pdl,
        num_warps=4, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    return q
