"""Attention over the paged KV pool: one interface, three implementations."""

from __future__ import annotations

from typing import Any

from fastgen.model.attention.interface import Attention, StepLayout
from fastgen.model.kv_pool import KVPool

__all__ = ["Attention", "StepLayout", "make_attention"]


def make_attention(name: str, pool: KVPool, num_heads: int, *sizes: Any) -> Attention:
    """Make the implementation `name`: "reference" (torch), "paged" (fastgen's kernels) or "flash" (flash-attn).

    sizes: see PagedAttention. Raises ValueError if flash-attn does not run here.
    """
    if name == "reference":
        from fastgen.model.attention.reference import ReferenceAttention

        return ReferenceAttention(pool, num_heads)
    if name == "flash":
        from fastgen.model.attention.flash import FlashAttention

        return FlashAttention(pool, num_heads, *sizes)
    from fastgen.model.attention.paged import PagedAttention

    return PagedAttention(pool, num_heads, *sizes)
