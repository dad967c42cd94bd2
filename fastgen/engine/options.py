"""The options of a Generator, and the configuration of an engine that they resolve to.

`GeneratorOptions` holds what the user gives; the signature of `Generator` and the flags of the command-line tools are
made from its fields. `EngineConfig` holds a value for every option, checked once and not changed later. This module
does not import torch, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastgen.device.processor import fast_bfloat16, has_amx
from fastgen.engine.feature_options import FeatureOptions
from fastgen.model.config import BUNDLED_NAME, ModelConfig
from fastgen.model.quantization import Int4
from fastgen.option import Options, option, options_of
from fastgen.text.syntax_names import ReasoningParser, ToolCallParser

if TYPE_CHECKING:  # for hybrids only
    from fastgen.model.recurrent_layers import Recurrent

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_SEQS = 8192  # limit of the kernels that list the work of a step
MAX_GB = 1e9  # limit of memory sizes: 10^18 bytes
LANE_BYTES = 22  # memory per lane and token of the vocabulary: penalty counts, logits and temporaries of the sampler
DEFAULT_KV_CACHE_GB = 4.0  # on the CPU; on a GPU the free memory is measured
PREFILL_TILE = 128  # tokens of a tile in the kernels for many tokens
MIN_PREFILL_TOKENS = 256  # a smaller step takes about as long on a GPU, since it reads all weights


@dataclass(frozen=True)
class GeneratorOptions(Options):
    """The arguments of a Generator, not yet checked (`check`); EngineConfig chooses what the user leaves open."""

    model: str | Path | None = option(None, "a folder in Hugging Face format or a hub id", unset=BUNDLED_NAME)
    _: KW_ONLY
    revision: str | None = option(None, "revision of the hub id", unset="the newest one")
    tokenizer: str | Path | None = option(None, "folder or hub id of another tokenizer", unset="the model's own")
    allow_special_tokens: bool = option(
        False, "let texts in messages become special tokens, as transformers does: users can then forge turns"
    )
    reasoning_parser: ReasoningParser | None = option(
        None, "syntax of the reasoning in answers, by its own name or vLLM's; off: all of an answer is content, and "
        "grammars hold from its first token", unset="the one in the chat template",
    )  # fmt: skip
    tool_call_parser: ToolCallParser | None = option(
        None, "format of the tool calls in answers, by the name that vLLM uses", unset="the one in the chat template"
    )
    adapter: str | Path | None = option(
        None, "folder of a LoRA adapter saved by PEFT, which is merged into the weights", unset="no adapter"
    )
    adapter_base: Literal["host", "device"] = option(
        "host", "where the first update_adapter keeps a copy of the weights without an adapter: in pinned memory of "
        "the host, or on the device, which makes updates faster",
    )  # fmt: skip
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "dtype of weights and steps; auto is the checkpoint's dtype on a GPU; on the CPU it is bfloat16 for a "
        "checkpoint in bfloat16 if the CPU has AVX512-BF16 without AMX, else float32; in Python also a torch.dtype",
    )  # fmt: skip
    quantization: Literal["fp8", "awq", "gptq", "compressed-tensors", "auto-round"] | None = option(
        None, "fp8: linear layers except the head are quantized to E4M3 as they are loaded, with one scale per row, "
        "and on Hopper and the CPU their inputs with one scale per token; a checkpoint in fp8 or int4 needs no option, "
        "and the others are a check of its quant_method", unset="the checkpoint's",
    )  # fmt: skip
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto", "dtype of the KV cache; auto is the model's dtype, or float32 on a CPU without a kernel for it; fp8 is "
        "E4M3 with one scale per token and KV head: at least twice as many tokens fit in the same memory",
    )  # fmt: skip
    device: str | None = option(
        None, "cpu, cuda or cuda:1, for example", unset="a GPU if torch can use one, else the CPU"
    )
    max_model_len: int | None = option(
        None, "the context: maximum number of tokens of prompt and answer together", low=1,
        unset="the model's context, or what the KV cache holds if that is less",
    )  # fmt: skip
    max_seqs: int | None = option(
        None, "maximum number of sequences that run at a time", unset="chosen for the device", low=1, high=MAX_SEQS
    )
    max_step_tokens: int | None = option(
        None, "maximum number of tokens that one step computes", unset="chosen for the device", low=1
    )
    max_prefill_tokens: int | None = option(
        None, "maximum number of prefill tokens in a step that also decodes; 0: measured at the start, for steps of "
        "about 50 ms",
        unset="no limit; 0 in fgserve and AsyncGenerator", low=0,
    )  # fmt: skip
    page_size: int = option(64, "number of tokens per page of the KV cache", low=1)
    num_pages: int | None = option(None, "number of pages of the KV cache", unset="what kv_cache_gb holds", low=2)
    kv_cache_gb: float | None = option(
        None, "size of the KV cache on all GPUs together, in 10^9 bytes",
        unset="what memory_fraction leaves on a GPU, at most 4 on the CPU", low=0, above=True, high=MAX_GB,
    )  # fmt: skip
    memory_fraction: float = option(
        0.9, "fraction of the GPU's free memory for weights, steps and KV cache together, if no size is given for the "
        "KV cache; the models of one fgserve split it", low=0, above=True, high=1,
    )  # fmt: skip
    prefix_cache: bool = option(
        True, "keep the KV of full pages for later prompts that begin in the same way, and for preempted sequences"
    )
    host_cache_gb: float = option(
        0, "pinned host memory for pages that the KV cache evicts, in 10^9 bytes", low=0, high=MAX_GB
    )
    free_windows: bool = option(
        False, "free the KV of layers with a sliding window outside of their windows; more long sequences then fit if "
        "max_seqs is no larger than needed, since memory for a window of each is set aside; num_pages and kv_cache_gb "
        "are those of the other layers",
    )  # fmt: skip
    attention: Literal["auto", "cpu", "flash", "paged"] = option(
        "auto", "attention kernels; auto is paged on a GPU and cpu on the CPU, flash is paged with flash-attn for "
        "prefills",
    )  # fmt: skip
    tensor_parallel: int = option(
        1, "number of GPUs that hold the model together; this process uses the first, and starts a process for each of "
        "the others", low=1,
    )  # fmt: skip
    tp_group: Any = option(
        None, "process group of torch.distributed, or DeviceMesh of one dimension, whose ranks hold the model "
        "together: every rank makes the Generator and calls the same methods in the same order, rank 0's arguments "
        "count, only rank 0 reads the iterable of `stream`, and all ranks get the same results", unset="no group",
    )  # fmt: skip
    deterministic: bool | None = option(
        None, "tokens and logprobs do not depend on the schedule, bit for bit; always the case on the H100s or H200s "
        "of one host in bfloat16 or float16",
        unset="on there, for hybrid models, and on the CPU (in bfloat16 only without AMX); off elsewhere",
    )  # fmt: skip
    speculate: Any = option(
        False, "draft tokens and verify them together, which changes no bit if deterministic is on: auto drafts "
        "when few sequences run, ngram only from a sequence's own tokens, int4 also with an int4 copy of the model, "
        "off, or the folder or hub id of a head that drafts from the model's hidden states (DFlash, EAGLE-3, Medusa); "
        "in Python also False or a Speculation",
        unset="off",
    )  # fmt: skip
    generation_config: bool = option(
        True, "take the sampling parameters that a request leaves out from the model's generation_config.json"
    )
    load: Literal["auto", "dummy"] = option("auto", "source of the weights: the checkpoint, or random numbers (dummy)")
    seed: int | None = option(
        None,
        "requests without a seed derive theirs from it, so that a run can be repeated",
        unset="a seed from the operating system",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))  # "bfloat16" for torch.bfloat16


OPTIONS = options_of(GeneratorOptions)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(GeneratorOptions):
    """The configuration of an engine: the options with the values chosen for those that were left open, and what
    follows from them.

    num_pages: number of pages on each rank; 0 until a GPU's memory is measured (`with_pages`).
    max_prefill_tokens: 0 until the speed of prefills is measured, if the user asks for that.
    kv_cache_dtype: "fp8", or a dtype: the same as `dtype`, or float32 on a CPU without a kernel for it.
    speculate: options of speculation, including max_rows and row_cost; None: no speculation.
    recurrent: the recurrent layers of a hybrid model.
    host_pages: number of pages of the host tier, on each rank.
    kernels: kind of kernels that run: "gluon" (in addition to Triton's), "triton" or "torch".
    context_given: whether the user gave max_model_len; if not, it is what the model and the pool allow.
    dtype_reason: why `dtype` was chosen, if "auto" has chosen it on the CPU.
    weights: form of quantized weights, "fp8" or "int4"; "": they have the dtype.
    """

    # `field()` has no default; without it, the option's default would be inherited. The types are of the values chosen.
    dtype: str = field()  # type: ignore[assignment]
    kv_cache_dtype: str = field()  # type: ignore[assignment]
    device: str = field()
    max_model_len: int = field()
    max_seqs: int = field()
    max_step_tokens: int = field()
    max_prefill_tokens: int = field()
    num_pages: int = field()
    attention: str = field()  # type: ignore[assignment]
    deterministic: bool = field()
    free_windows: FeatureOptions | None = None  # type: ignore[assignment]
    speculate: FeatureOptions | None = None
    recurrent: Recurrent | None = None
    host_pages: int
    kernels: str
    context_given: bool
    dtype_reason: str = ""
    weights: str = ""

    @classmethod
    def make(
        cls,
        model: ModelConfig,
        options: GeneratorOptions,
        memory: int = 0,
        kernels: str = "torch",
        processors: int = 0,
    ) -> EngineConfig:
        """Return the configuration for options of one rank which are checked and read (`features.read_options`), with a
        device; tensor_parallel is the number of ranks.

        model: configuration of the model's part on this rank (`ModelConfig.split`). memory: bytes of the GPU's memory,
        0 on the CPU. kernels: fastest kind of kernels that the device runs ("gluon", "triton" or "torch"). processors:
        number of the GPU's multiprocessors, 0 if it does not matter. Raises ValueError, saying what to change.
        """
        assert options.device is not None
        gpu = options.device.split(":")[0] != "cpu"
        auto_attention = "paged" if gpu else "cpu"
        dtype, dtype_reason = (options.dtype, "") if options.dtype != "auto" else _auto_dtype(model, gpu)
        if options.attention in ("flash", "paged") and not gpu:
            raise ValueError(f"attention is {options.attention!r}, which needs a GPU; use 'auto' or 'cpu'")
        if options.attention == "cpu" and gpu:
            raise ValueError("attention is 'cpu', which does not run on a GPU; use 'auto' or 'paged'")
        context = options.max_model_len
        if context is not None and context > model.max_position:
            raise ValueError(f"max_model_len is {context}, above the model's {model.max_position} positions; lower it")
        auto_kv = dtype if gpu else _kv_dtype_on_cpu(dtype, model.head_size)
        kv_dtype = auto_kv if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
        if options.attention == "flash" and kv_dtype == "fp8":
            raise ValueError("attention is 'flash', whose kernels do not read fp8; leave it or kv_cache_dtype out")
        max_seqs, max_step_tokens = _step_size(model, options, dtype, kv_dtype, memory, processors)
        limit = options.max_prefill_tokens
        features = {
            name: given.choose(gpu, kernels, max_step_tokens) for name, given in feature_options(options).items()
        }
        bytes_of_token = token_bytes(model, kv_dtype, sum(each.more_kv_layers for each in features.values() if each))
        page_bytes = bytes_of_token * options.page_size * options.tensor_parallel  # on all ranks
        chosen: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": model.max_position if context is None else context,
            "max_seqs": max_seqs,
            "max_step_tokens": max_step_tokens,
            "max_prefill_tokens": max_step_tokens if limit is None else min(limit, max_step_tokens),
            "num_pages": 0,
            "kv_cache_dtype": kv_dtype,
            "attention": auto_attention if options.attention == "auto" else options.attention,
            "deterministic": _deterministic(model, options, (dtype, kv_dtype), gpu, kernels),
            "host_pages": _host_pages(options, page_bytes),
            "kernels": "triton" if kernels == "gluon" and dtype == "float32" else kernels,
            "context_given": context is not None,
            "dtype_reason": dtype_reason,
            "weights": model.quantization.name if model.quantization else "",
            "recurrent": model.recurrent,
        }
        config = cls(**{each.name: getattr(options, each.name) for each in fields(options)} | features | chosen)
        pages = _num_pages(config, options, page_bytes, measured=gpu)
        return config.with_pages(pages) if pages else config

    def with_pages(self, num_pages: int) -> EngineConfig:
        """Return the configuration with this number of pages, and a context that fits in them.

        Raises ValueError if the user gave a longer context.
        """
        # One page is left over, so that a single sequence always fits and cannot preempt itself forever.
        room = (num_pages - 1) * self.page_size
        if self.context_given and self.max_model_len > room:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, and {num_pages} pages of {self.page_size} tokens hold a "
                f"context of {room}; lower it, or raise num_pages, kv_cache_gb or memory_fraction"
            )
        return replace(self, num_pages=num_pages, max_model_len=min(self.max_model_len, room))

    def __str__(self) -> str:
        """Return the values that are not the defaults of their options, for the log."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return f"EngineConfig({', '.join(f'{each.name}={value!r}' for each, value in values if value != each.default)})"

    @property
    def summary(self) -> str:
        """Description of the values that a user looks for after a start."""
        ranks = f" and {self.tensor_parallel - 1} more" if self.tensor_parallel > 1 else ""
        mode = ", deterministic" if self.deterministic else ""
        kv = " in fp8" if self.kv_cache_dtype == "fp8" else ""
        dtype = f"{self.dtype} ({self.dtype_reason})" if self.dtype_reason else self.dtype
        weights = f", weights in {self.weights}" if self.weights else ""
        return (
            f"{self.device}{ranks}, {dtype}{weights}, context of {self.max_model_len} tokens, KV cache of "
            f"{self.num_pages * self.page_size} tokens{kv}, kernels: {self.kernels}, attention: {self.attention}{mode}"
        )

    def prefill_tokens(self, decodes: int) -> int:
        """Return the maximum number of prefill tokens in a step with this number of decodes.

        The decodes count towards `max_prefill_tokens` as long as MIN_PREFILL_TOKENS remain, so that the tokens of a
        large step are a whole number of tiles.
        """
        room, limit = self.max_step_tokens - decodes, self.max_prefill_tokens
        return min(room, max(limit - decodes, min(limit, MIN_PREFILL_TOKENS))) if decodes else room

    def page_bytes(self, model: ModelConfig) -> int:
        """Return the size in bytes of a page on one rank: keys and values of all layers."""
        return token_bytes(model, self.kv_cache_dtype, self.more_kv_layers) * self.page_size

    @property
    def more_kv_layers(self) -> int:
        """The number of layers in the KV pool in addition to the model's."""
        return sum(each.more_kv_layers for each in feature_options(self).values())

    @property
    def most_rows(self) -> int:
        """Maximum number of rows in a step of decodes, including drafted tokens."""
        return max(self.max_seqs, 0, *(each.most_rows for each in feature_options(self).values()))

    def useful_pages(self) -> int:
        """Return the number of pages that all lanes can fill, plus one."""
        return self.max_seqs * -(-self.max_model_len // self.page_size) + 1


def feature_options(options: GeneratorOptions) -> dict[str, FeatureOptions]:
    """Return the options of features among options, by name."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    return {name: value for name, value in values.items() if isinstance(value, FeatureOptions)}


def _auto_dtype(model: ModelConfig, gpu: bool) -> tuple[str, str]:
    """Return the dtype for "auto", and why it is that one if this is not evident: on the CPU."""
    if gpu or model.dtype == "float32":
        return model.dtype, ""
    if model.dtype != "bfloat16" or model.quantization:
        return "float32", "the CPU has no fast products for this checkpoint's dtype"
    fast, reason = fast_bfloat16()
    return ("bfloat16", f"the checkpoint's; {reason}") if fast else ("float32", reason)


def _kv_dtype_on_cpu(dtype: str, head_size: int) -> str:
    from fastgen.model.attention.native import kv_dtype  # imports torch

    return kv_dtype(dtype, head_size)


def _multiplies_on_cpu(model: ModelConfig, dtype: str) -> bool:
    """Return whether fastgen's own kernels compute the products on the CPU. They multiply no fp8."""
    from fastgen.kernels.native.calls import multiplies  # imports torch

    return (model.quantization is None or isinstance(model.quantization, Int4)) and multiplies(dtype)


def _deterministic(
    model: ModelConfig, options: GeneratorOptions, dtypes: tuple[str, str], gpu: bool, kernels: str
) -> bool:
    """Return whether no bit of a result depends on the schedule. Raises ValueError if the user asks for something else
    than is possible.

    dtypes: dtype of the computation and of the KV cache.
    """
    always = gpu and _has_fast_products(model, options, dtypes[0], kernels)
    asked, reason = options.deterministic, "deterministic=True"
    if model.recurrent:  # cached tokens are computed again, and must not change what others read
        if asked is False:
            raise ValueError("deterministic=False does not work with models that have recurrent layers; leave it out")
        asked, reason = True, "a model with recurrent layers"
    if always and asked is False:
        raise ValueError(
            "deterministic=False on a Hopper GPU: its kernels give the same bits under any schedule, and there are "
            "no faster ones; leave deterministic out"
        )
    by_amx = not gpu and dtypes[0] == "bfloat16" and has_amx()
    if asked is None:
        return always or not (gpu or by_amx)
    if asked and by_amx and not _multiplies_on_cpu(model, dtypes[0]):
        raise ValueError(
            f"{reason} in bfloat16 needs fastgen's C++ kernels (g++ 10 or later) and no fp8 on this CPU, "
            "whose products by AMX depend on the batch; pass dtype='float32', or leave deterministic out"
        )
    if asked and gpu:
        if options.attention not in ("auto", "paged"):
            raise ValueError(f"{reason} needs attention='paged' on a GPU, not {options.attention!r}; use 'auto'")
        if not _aligned(model):
            raise ValueError(
                f"{reason} needs layers whose inputs are multiples of 8 on a GPU, and this model's are "
                f"{', '.join(map(str, model.input_sizes))}; leave it out"
            )
    return asked


def _has_fast_products(model: ModelConfig, options: GeneratorOptions, dtype: str, kernels: str) -> bool:
    """Return whether Gluon kernels compute the products. Like attention, they give results that do not depend on the
    schedule. In Qwen3.5 9B, cuBLAS saved at most 2 % of the time."""
    two_bytes = dtype in ("bfloat16", "float16")
    return kernels == "gluon" and two_bytes and options.attention in ("auto", "paged") and _aligned(model)


def _aligned(model: ModelConfig) -> bool:
    return not any(size % 8 for size in model.input_sizes)


def token_bytes(model: ModelConfig, kv_dtype: str, more_layers: int = 0) -> int:
    """Return the size in bytes of one token's KV on one rank. kv_dtype: a dtype, or "fp8", which has a one-byte scale
    per head. more_layers: number of layers in addition to the model's."""
    head = model.head_size + 1 if kv_dtype == "fp8" else model.head_size * DTYPE_BYTES[kv_dtype]
    return 2 * (model.kv_layers + more_layers) * model.num_kv_heads * head


def _step_size(
    model: ModelConfig, options: GeneratorOptions, dtype: str, kv_dtype: str, memory: int, processors: int
) -> tuple[int, int]:
    """Return the number of lanes and the token budget: as given, or chosen for the memory (in bytes; 0 on the CPU) and
    the number of multiprocessors.

    On a GPU, there are as many lanes as sequences of 256 tokens fit next to the weights, since more lanes per step make
    better use of the arithmetic, and the budget is one at which matrix products run at full speed.
    """
    max_seqs, max_step_tokens = options.max_seqs, options.max_step_tokens
    budget = 512  # on the CPU, where a step of 2048 tokens may take seconds that a newcomer waits
    if memory:
        budget = _even_budget(8192 if memory > 60e9 else 4096 if memory > 30e9 else 2048, processors)
    if max_seqs is None:
        recurrent = model.recurrent
        lanes = 32 if recurrent else 256
        if memory:
            room = 0.9 * memory - model.weight_bytes(DTYPE_BYTES[dtype])
            states = 3.3 * recurrent.state_bytes if recurrent else 0  # a lane has up to 2.3, and one is kept
            fit = int(room / (256 * token_bytes(model, kv_dtype) + LANE_BYTES * model.vocab_size + states))
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


def _even_budget(tokens: int, processors: int) -> int:
    """Return the token budget nearest to `tokens` whose tiles a GPU's multiprocessors share evenly, or `tokens` if it
    differs by more than a quarter.

    The number of tiles of tokens is a multiple of half the number of multiprocessors, and the number of tiles of a
    weight's rows is usually even. Measured on an H200 (8448 instead of 8192 tokens); on GPUs with another number of
    multiprocessors, it only follows from that number.
    """
    unit = PREFILL_TILE * processors // 2
    near = round(tokens / unit) * unit if unit else tokens
    return near if abs(near - tokens) <= tokens / 4 else tokens


def _num_pages(config: EngineConfig, options: GeneratorOptions, page_bytes: int, measured: bool) -> int:
    """Return the number of pages that num_pages or kv_cache_gb asks for; 0 if the memory will be measured."""
    if options.num_pages is not None:
        if options.kv_cache_gb is not None:
            raise ValueError("num_pages and kv_cache_gb both size the KV pool; give one of them")
        return options.num_pages
    if options.kv_cache_gb is None:
        default = 0 if measured else _pages_in("kv_cache_gb", DEFAULT_KV_CACHE_GB, page_bytes, 2)
        return min(default, config.useful_pages())
    pages = _pages_in("kv_cache_gb", options.kv_cache_gb, page_bytes, 2)
    return pages if config.prefix_cache else min(pages, config.useful_pages())  # prefixes can use more


def _host_pages(options: GeneratorOptions, page_bytes: int) -> int:
    """Return the number of pages of the host tier."""
    if not options.host_cache_gb:
        return 0
    if not options.prefix_cache:
        raise ValueError(
            f"host_cache_gb is {options.host_cache_gb:g} with prefix_cache=False, which leaves nothing to keep there; "
            "leave one of them out"
        )
    return _pages_in("host_cache_gb", options.host_cache_gb, page_bytes, 1)


def _pages_in(name: str, gigabytes: float, page_bytes: int, least: int) -> int:
    """Return the number of pages that fit in this much memory. Raises ValueError if fewer than `least` fit."""
    pages = int(gigabytes * 1e9 / page_bytes)
    if pages < least:
        raise ValueError(
            f"{name} is {gigabytes:g}, which holds {pages} pages of {page_bytes / 1e6:.1f} MB, and must hold {least}: "
            "raise it, or lower page_size"
        )
    return pages
