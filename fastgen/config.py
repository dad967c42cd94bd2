"""How an engine runs: every option resolved to a number, checked once, and not changed later."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastgen.arch import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ATTENTION = ("reference",)
DEFAULT_KV_CACHE_GB = 4.0


@dataclass(frozen=True)
class EngineConfig:
    """device: a torch device; dtype: of weights and KV; max_model_len: the context, prompt and answer together;
    max_seqs: lanes; max_step_tokens: the token budget of a step; page_size: tokens; num_pages: of the KV pool."""

    device: str
    dtype: str
    max_model_len: int
    max_seqs: int
    max_step_tokens: int
    page_size: int
    num_pages: int
    attention: str

    @classmethod
    def make(
        cls,
        model: ModelConfig,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_seqs: int = 256,
        max_step_tokens: int = 2048,
        page_size: int = 64,
        num_pages: int | None = None,
        kv_cache_gb: float | None = None,
        attention: str = "auto",
    ) -> EngineConfig:
        """Fill in what was left open, from the model. Raises ValueError with what to change."""
        if dtype == "auto":
            dtype = "float32" if device.split(":")[0] == "cpu" else model.dtype
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {dtype!r}; it must be 'auto' or one of {', '.join(DTYPE_BYTES)}")
        if attention not in ("auto", *ATTENTION):
            raise ValueError(f"attention is {attention!r}; it must be 'auto' or one of {', '.join(ATTENTION)}")
        for name, value in (("max_seqs", max_seqs), ("max_step_tokens", max_step_tokens), ("page_size", page_size)):
            _positive(name, value)
        if max_step_tokens < max_seqs:
            raise ValueError(
                f"max_step_tokens is {max_step_tokens}, below max_seqs, which is {max_seqs}: "
                "a step must hold one token of every sequence"
            )
        context = _context(model, max_model_len)
        num_pages = _num_pages(model, dtype, context, max_seqs, page_size, num_pages, kv_cache_gb)
        # A page less than all, so that a sequence alone always fits and can not preempt itself forever.
        room = (num_pages - 1) * page_size
        if max_model_len is not None and context > room:
            raise ValueError(
                f"max_model_len is {context}, and {num_pages} pages of {page_size} tokens hold a context of {room}; "
                "lower it, or raise num_pages or kv_cache_gb"
            )
        context = min(context, room)
        return cls(
            device=device,
            dtype=dtype,
            max_model_len=context,
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            page_size=page_size,
            num_pages=num_pages,
            attention="reference" if attention == "auto" else attention,
        )


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")


def _context(model: ModelConfig, max_model_len: int | None) -> int:
    if max_model_len is None:
        return model.max_position
    _positive("max_model_len", max_model_len)
    if max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len is {max_model_len}, above the model's {model.max_position} positions; lower it"
        )
    return max_model_len


def _num_pages(
    model: ModelConfig,
    dtype: str,
    context: int,
    max_seqs: int,
    page_size: int,
    num_pages: int | None,
    kv_cache_gb: float | None,
) -> int:
    if num_pages is not None:
        if kv_cache_gb is not None:
            raise ValueError("num_pages and kv_cache_gb both size the KV pool; give one of them")
        _positive("num_pages", num_pages)
        if num_pages < 2:
            raise ValueError("num_pages is 1; the pool needs at least 2 pages")
        return num_pages
    page_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_size * page_size * DTYPE_BYTES[dtype]
    gigabytes = DEFAULT_KV_CACHE_GB if kv_cache_gb is None else kv_cache_gb
    if not 0 < gigabytes < math.inf:
        raise ValueError(f"kv_cache_gb is {gigabytes}; it must be a number above 0")
    affordable = int(gigabytes * 1e9 / page_bytes)
    if affordable < 2:
        raise ValueError(
            f"kv_cache_gb is {gigabytes:g}, which holds {affordable} pages of {page_bytes / 1e6:.1f} MB; "
            "the pool needs at least 2: raise kv_cache_gb or lower page_size"
        )
    useful = max_seqs * -(-context // page_size) + 1
    return min(affordable, useful)
