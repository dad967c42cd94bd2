"""How an engine runs: every option resolved to a number, checked once, and not changed later."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

from fastgen.model.config import ModelConfig
from fastgen.request import check_integer

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ATTENTION = ("flash", "paged", "reference")
LANE_BYTES = 22  # a token of the vocabulary: penalty counts, logits and what the sampler makes of them
MOST_SEQS = 8192  # that the kernels which list a step's work can take
DEFAULT_KV_CACHE_GB = 4.0  # without a GPU, whose memory is measured
DECODE_KEYS, DECODE_GROUP = 64, 32  # keys of a block and most heads a KV head of the decode kernel in Gluon


@dataclass(frozen=True)
class EngineConfig:
    """device: a torch device; dtype: of weights and KV; max_model_len: the context, prompt and answer together;
    max_seqs: lanes; max_step_tokens: the token budget of a step; page_size: tokens; num_pages: of the KV pool, 0 where
    it is still to be measured (see `settle`); attention: "auto" or a name; memory_fraction: of the GPU's free memory.
    prefix_cache: full pages are found again by later requests; host_pages: of the host tier, which evicted pages go to.
    tensor_parallel: ranks that hold the model together. Memory and pages are those of each rank. deterministic: what a
    sequence gets is the same to the bit, whatever the schedule. kernels: the kind that runs, "gluon" (beside Triton's),
    "triton" or "torch".
    """

    device: str
    dtype: str
    max_model_len: int
    max_seqs: int
    max_step_tokens: int
    page_size: int
    num_pages: int
    attention: str
    memory_fraction: float = 0.9
    prefix_cache: bool = True
    host_pages: int = 0
    tensor_parallel: int = 1
    deterministic: bool = False
    kernels: str = "torch"
    context_given: bool = False  # whether max_model_len was asked for; else it is what the model and the pool allow

    @classmethod
    def make(
        cls,
        model: ModelConfig,
        *,
        device: str = "cpu",
        memory: int = 0,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_seqs: int | None = None,
        max_step_tokens: int | None = None,
        page_size: int = 64,
        num_pages: int | None = None,
        kv_cache_gb: float | None = None,
        memory_fraction: float = 0.9,
        prefix_cache: bool = True,
        host_cache_gb: float = 0,
        attention: str = "auto",
        tensor_parallel: int = 1,
        deterministic: bool | None = None,
        kernels: str = "torch",
    ) -> EngineConfig:
        """Fill in what was left open, from the model and the GPU's memory in bytes (0: there is no GPU).

        model: as a rank holds it (`ModelConfig.split`). kv_cache_gb and host_cache_gb are of all ranks together.
        kernels: the fastest kind that the device runs ("gluon", "triton" or "torch"). Raises ValueError with what to
        change.
        """
        gpu = device.split(":")[0] != "cpu"
        if dtype == "auto":
            dtype = model.dtype if gpu else "float32"
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {dtype!r}; it must be 'auto' or one of {', '.join(DTYPE_BYTES)}")
        if attention not in ("auto", *ATTENTION):
            raise ValueError(f"attention is {attention!r}; it must be 'auto' or one of {', '.join(ATTENTION)}")
        if attention in ("flash", "paged") and not gpu:
            raise ValueError(f"attention is {attention!r}, which needs a GPU; use 'auto' or 'reference'")
        check_integer("page_size", page_size, 1)
        if deterministic is None:
            deterministic = tensor_parallel == 1 and (not gpu or _is_fast(model, dtype, attention, page_size, kernels))
        elif deterministic:
            _check_deterministic(model, attention, tensor_parallel, gpu)
        if not 0 < memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {memory_fraction}; it must be above 0 and at most 1")
        for name, value in (("prefix_cache", prefix_cache), ("deterministic", deterministic)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        max_seqs, max_step_tokens = _step_size(model, dtype, memory, max_seqs, max_step_tokens)
        config = cls(
            device=device,
            dtype=dtype,
            max_model_len=_context(model, max_model_len),
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            page_size=page_size,
            num_pages=0,
            attention=attention if attention != "auto" else "paged" if gpu else "reference",
            memory_fraction=memory_fraction,
            prefix_cache=prefix_cache,
            tensor_parallel=tensor_parallel,
            deterministic=deterministic,
            kernels="triton" if kernels == "gluon" and not deterministic else kernels,
            context_given=max_model_len is not None,
        )
        config = replace(config, host_pages=_host_pages(config, model, host_cache_gb))
        pages = _num_pages(config, model, num_pages, kv_cache_gb, measured=gpu)
        return config.settle(pages) if pages else config

    def settle(self, num_pages: int) -> EngineConfig:
        """With so many pages, and the context that they hold where it is less than the model's and none was given."""
        # A page less than all, so that a sequence alone always fits and can not preempt itself forever.
        room = (num_pages - 1) * self.page_size
        if self.context_given and self.max_model_len > room:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, and {num_pages} pages of {self.page_size} tokens hold a "
                f"context of {room}; lower it, or raise num_pages, kv_cache_gb or memory_fraction"
            )
        return replace(self, num_pages=num_pages, max_model_len=min(self.max_model_len, room))

    def page_bytes(self, model: ModelConfig) -> int:
        """Of the keys and values of all layers, on one rank."""
        return token_bytes(model, self.dtype) * self.page_size

    def useful_pages(self) -> int:
        """What all lanes can fill, and one."""
        return self.max_seqs * -(-self.max_model_len // self.page_size) + 1


def _check_deterministic(model: ModelConfig, attention: str, ranks: int, gpu: bool) -> None:
    """Raise ValueError where bits can not but depend on the schedule."""
    if ranks > 1:
        raise ValueError(
            f"deterministic=True with {ranks} ranks: their sums are not made in one order for steps of all sizes; "
            "leave deterministic or tensor parallelism out"
        )
    if not gpu:
        return
    if attention not in ("auto", "paged"):
        raise ValueError(f"deterministic=True needs attention='paged' on a GPU, not {attention!r}; use 'auto'")
    if not _aligned(model):
        raise ValueError(
            f"deterministic=True needs layers whose inputs are multiples of 8 on a GPU, and this model's are "
            f"{', '.join(map(str, _inputs(model)))}; leave it out"
        )


def _is_fast(model: ModelConfig, dtype: str, attention: str, page_size: int, kernels: str) -> bool:
    """Return whether deterministic mode is at least as fast as ordinary mode in chats on a GPU: whether the kernels in
    Gluon run, for products and for decodes (`fastgen.kernels.hopper_decode.streams`)."""
    heads = 64 <= model.head_size <= 128 and model.head_size % 8 == 0
    group = model.num_heads // model.num_kv_heads <= DECODE_GROUP
    shapes = heads and group and page_size % DECODE_KEYS == 0 and _aligned(model)
    return kernels == "gluon" and dtype != "float32" and attention in ("auto", "paged") and shapes


def _inputs(model: ModelConfig) -> tuple[int, ...]:
    return model.hidden_size, model.num_heads * model.head_size, model.intermediate_size


def _aligned(model: ModelConfig) -> bool:
    return not any(size % 8 for size in _inputs(model))


def token_bytes(model: ModelConfig, dtype: str) -> int:
    """The KV of one token."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * DTYPE_BYTES[dtype]


def _step_size(
    model: ModelConfig, dtype: str, memory: int, max_seqs: int | None, max_step_tokens: int | None
) -> tuple[int, int]:
    """Lanes and the token budget, as given or as they suit the memory.

    On a GPU: as many lanes as sequences of 256 tokens find room beside the weights, since more lanes a step use its
    arithmetic better; and a budget at which its products run at full speed.
    """
    for name, value in (("max_seqs", max_seqs), ("max_step_tokens", max_step_tokens)):
        if value is not None:
            check_integer(name, value, 1)
    budget = 2048
    if memory:
        budget = 8192 if memory > 60e9 else 4096 if memory > 30e9 else 2048
    if max_seqs is not None and max_seqs > MOST_SEQS:
        raise ValueError(f"max_seqs is {max_seqs}; it must be at most {MOST_SEQS}")
    if max_seqs is None:
        lanes = 256
        if memory:
            room = 0.9 * memory - model.num_parameters * DTYPE_BYTES[dtype]
            fit = int(room / (256 * token_bytes(model, dtype) + LANE_BYTES * model.vocab_size))
            lanes = min(1 << max(fit, 1).bit_length() - 1, 1024)
        max_seqs = max(min(lanes, max_step_tokens or budget), 1)
    if max_step_tokens is None:
        max_step_tokens = max(budget, max_seqs)
    if max_step_tokens < max_seqs:
        raise ValueError(
            f"max_step_tokens is {max_step_tokens}, below max_seqs, which is {max_seqs}: "
            "a step must hold one token of every sequence"
        )
    return max_seqs, max_step_tokens


def _context(model: ModelConfig, max_model_len: int | None) -> int:
    if max_model_len is None:
        return model.max_position
    check_integer("max_model_len", max_model_len, 1)
    if max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len is {max_model_len}, above the model's {model.max_position} positions; lower it"
        )
    return max_model_len


def _num_pages(
    config: EngineConfig, model: ModelConfig, num_pages: int | None, kv_cache_gb: float | None, measured: bool
) -> int:
    """What num_pages or kv_cache_gb says; 0 where neither is given and the memory will be measured."""
    if num_pages is not None:
        if kv_cache_gb is not None:
            raise ValueError("num_pages and kv_cache_gb both size the KV pool; give one of them")
        check_integer("num_pages", num_pages, 1)
        if num_pages < 2:
            raise ValueError("num_pages is 1; the pool needs at least 2 pages")
        return num_pages
    if kv_cache_gb is None and measured:
        return 0
    gigabytes = DEFAULT_KV_CACHE_GB if kv_cache_gb is None else kv_cache_gb
    if not isinstance(gigabytes, Real) or isinstance(gigabytes, bool):
        raise TypeError(f"kv_cache_gb must be a number, not {gigabytes!r}")
    if not 0 < gigabytes < math.inf:
        raise ValueError(f"kv_cache_gb is {gigabytes}; it must be a number above 0")
    page_bytes = config.page_bytes(model) * config.tensor_parallel
    affordable = int(gigabytes * 1e9 / page_bytes)
    if affordable < 2:
        raise ValueError(
            f"kv_cache_gb is {gigabytes:g}, which holds {affordable} pages of {page_bytes / 1e6:.1f} MB; "
            "the pool needs at least 2: raise kv_cache_gb or lower page_size"
        )
    if kv_cache_gb is not None and config.prefix_cache:  # what no lane holds, the prefix cache can use
        return affordable
    return min(affordable, config.useful_pages())


def _host_pages(config: EngineConfig, model: ModelConfig, host_cache_gb: float) -> int:
    """How many pages fit in so much of the host's memory."""
    if not isinstance(host_cache_gb, Real) or isinstance(host_cache_gb, bool):
        raise TypeError(f"host_cache_gb must be a number, not {host_cache_gb!r}")
    if not 0 <= host_cache_gb < 1e9:  # 10^18 bytes, which nobody has
        raise ValueError(f"host_cache_gb is {host_cache_gb}; it must be at least 0, and no more than the host's memory")
    if host_cache_gb and not config.prefix_cache:
        raise ValueError(
            f"host_cache_gb is {host_cache_gb:g} with prefix_cache=False, which leaves nothing to keep there; "
            "take one of them away"
        )
    page_bytes = config.page_bytes(model) * config.tensor_parallel
    pages = int(host_cache_gb * 1e9 / page_bytes)
    if host_cache_gb and not pages:
        raise ValueError(
            f"host_cache_gb is {host_cache_gb:g}, which holds no page of {page_bytes / 1e6:.1f} MB; "
            "raise it, or lower page_size"
        )
    return pages
