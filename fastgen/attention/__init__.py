"""Attention over the paged KV pool: one interface, several implementations."""

from fastgen.attention.interface import Attention, StepLayout
from fastgen.attention.reference import ReferenceAttention
from fastgen.cache.pool import KVPool

__all__ = ["Attention", "StepLayout", "make_attention"]


def make_attention(name: str, pool: KVPool) -> Attention:
    """The implementation of that name (see fastgen.config.ATTENTION)."""
    assert name == "reference"
    return ReferenceAttention(pool)
