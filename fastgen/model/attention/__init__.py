"""Attention over the paged KV pool: one interface, several implementations."""

from __future__ import annotations

import logging

from fastgen.model.attention.interface import Attention, StepLayout
from fastgen.model.attention.reference import ReferenceAttention
from fastgen.model.kv_pool import KVPool

__all__ = ["Attention", "StepLayout", "make_attention"]

log = logging.getLogger(__name__)


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
    """The implementation of that name (see fastgen.engine.config.ATTENTION), or for "auto" what measured fastest: for
    decodes `paged`; for prefills `flash` on Hopper and Blackwell where its package is installed, else `paged`.
    deterministic: answers are the same to the bit in whatever step; of `reference` they are that on the CPU, of
    `flash` never.

    Raises ValueError where one that is asked for by name can not run here.
    """
    if name == "reference" or pool.keys.device.type == "cpu":
        return ReferenceAttention(pool)
    from fastgen.model.attention.flash import FlashAttention, why_not
    from fastgen.model.attention.paged import PagedAttention

    paged = PagedAttention(pool, num_heads, windows, max_seqs, max_step_tokens, context, deterministic)
    missing = None if name == "paged" else why_not(pool)
    if not missing and name != "paged":
        try:
            flash = FlashAttention(pool, num_heads, windows, paged, decodes=name == "flash", max_seqs=max_seqs)
        except ValueError as error:
            missing = str(error)
        else:
            log.info("attention: %s for decodes, flash for prefills", "flash" if name == "flash" else "paged")
            return flash
    if name == "flash":
        raise ValueError(f"attention is 'flash', but {missing}; use 'auto'")
    log.info("attention: paged%s", f" ({missing})" if missing else "")
    return paged
