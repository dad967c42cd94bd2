"""Attention over the paged KV pool: one interface, three implementations."""

from __future__ import annotations

from fastgen.model.attention.interface import Attention, StepLayout
from fastgen.model.kv_pool import KVPool

__all__ = ["Attention", "StepLayout", "make_attention"]


def make_attention(
    name: str,
    pool: KVPool,
    num_heads: int,
    windows: tuple[int, ...],
    max_seqs: int,
    max_step_tokens: int,
    context: int,
    deterministic: bool = False,
) -> Attention:
    """Make the implementation `name`: "reference" (torch), "paged" (fastgen's kernels) or "flash" (flash-attn).

    See PagedAttention for the other arguments. Raises ValueError if flash-attn does not run here.
    """
    if name == "reference":
        from fastgen.model.attention.reference import ReferenceAttention

        return ReferenceAttention(pool, num_heads)
    sizes = num_heads, windows, max_seqs, max_step_tokens, context, deterministic
    if name == "flash":
        from fastgen.model.attention.flash import FlashAttention

        return FlashAttention(pool, *sizes)
    from fastgen.model.attention.paged import PagedAttention

    return PagedAttention(pool, *sizes)
