"""The options of a Generator: one dataclass, from which the Python signature and the command-line tools derive.

Each field has a type, a default and a help line. Nothing here depends on torch, so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from fastgen.model.config import BUNDLED_NAME
from fastgen.names import unknown_name
from fastgen.option import option, options_of

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_SEQS = 8192  # limit of the kernels that list the work of a step
MOST_GB = 1e9  # of memory: 10^18 bytes


@dataclass(frozen=True)
class GeneratorOptions:
    """The arguments of a Generator, not yet checked (`check`); EngineConfig fills in what is left open."""

    model: str | Path | None = option(None, "a folder in Hugging Face format or a hub id", unset=BUNDLED_NAME)
    _: KW_ONLY
    revision: str | None = option(None, "revision of the hub id", unset="the newest one")
    tokenizer: str | Path | None = option(None, "folder or hub id of another tokenizer", unset="the model's own")
    adapter: str | Path | None = option(
        None, "folder of a LoRA adapter that PEFT has saved, merged into the weights", unset="no adapter"
    )
    adapter_base: str = option(
        "host", "memory for the weights as they are without an adapter, which the first update_adapter copies: pinned "
        "memory of the host, or the device's, which makes an update faster",
        choices=("host", "device"),
    )  # fmt: skip
    dtype: str = option(
        "auto", "dtype of weights and KV cache; auto is the checkpoint's on a GPU, float32 on the CPU; in Python "
        "also a torch.dtype", choices=("auto", *DTYPE_BYTES),
    )  # fmt: skip
    quantization: str | None = option(
        None, "fp8: linear layers but the head in E4M3, quantized as they are loaded, with a scale a row, and their "
        "inputs with a scale a token; a checkpoint in fp8 needs no option", choices=("fp8",), unset="the checkpoint's",
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto", "numbers of the KV cache; auto is the model's dtype, fp8 is E4M3 with a scale a token and KV head: "
        "twice as many tokens in the same memory", choices=("auto", "fp8"),
    )  # fmt: skip
    device: str | None = option(
        None, "cpu, cuda or cuda:1, for example", unset="a GPU if torch can use one, else the CPU"
    )
    max_model_len: int | None = option(
        None, "the context: tokens of prompt and answer together", low=1,
        unset="the model's, or what the KV cache holds if that is less",
    )  # fmt: skip
    max_seqs: int | None = option(
        None, "sequences that run at a time", unset="as many as suit the device", low=1, high=MOST_SEQS
    )
    max_step_tokens: int | None = option(
        None, "tokens that one step computes at most", unset="as many as suit the device", low=1
    )
    max_step_ms: float = option(
        0.0, "target in ms for a step that computes prompts beside answers, met by smaller chunks of prompts; "
        "0: no limit", unset="0; 55 in fgserve and AsyncGenerator", low=0,
    )  # fmt: skip
    page_size: int = option(64, "tokens of a page of the KV cache", low=1)
    num_pages: int | None = option(None, "pages of the KV cache", unset="what kv_cache_gb holds", low=2)
    kv_cache_gb: float | None = option(
        None, "size of the KV cache on all GPUs together, in 10^9 bytes",
        unset="what memory_fraction leaves on a GPU, at most 4 on the CPU", low=0, above=True, high=MOST_GB,
    )  # fmt: skip
    memory_fraction: float = option(
        0.9, "share of the GPU's free memory for weights, steps and KV cache together, if the KV cache is given no "
        "size; the models of one fgserve split it", low=0, above=True, high=1,
    )  # fmt: skip
    prefix_cache: bool = option(
        True, "keep the KV of full pages for later prompts that begin alike, and for preempted sequences"
    )
    host_cache_gb: float = option(
        0, "pinned memory of the host for pages that the KV cache evicts, in 10^9 bytes", low=0, high=MOST_GB
    )
    attention: str = option(
        "auto", "attention kernels; auto is paged on a GPU and reference on the CPU, flash is paged with flash-attn "
        "for prefills",
        choices=("auto", "flash", "paged", "reference"),
    )  # fmt: skip
    tensor_parallel: int = option(
        1, "GPUs that hold the model together; this process drives the first, and starts a process for each other one",
        low=1,
    )  # fmt: skip
    tp_group: Any = option(
        None, "process group of torch.distributed, or DeviceMesh of one dimension, whose ranks hold the model "
        "together: every rank makes the Generator and calls the same methods in the same order, rank 0's arguments "
        "count, rank 0 alone reads the iterable of `stream`, and all ranks get the same results", unset="no group",
    )  # fmt: skip
    deterministic: bool | None = option(
        None, "tokens and logprobs do not depend on the schedule, to the bit", unset="on the CPU, and on one H100 "
        "or H200 in bfloat16 or float16 with heads of 64 to 128",
    )  # fmt: skip
    speculate: Any = option(
        False, "draft tokens and compute them together, which in deterministic mode changes no bit of an output: auto "
        "where few sequences run, ngram from a sequence's own tokens alone, off; in Python also False or a Speculation",
        unset="off",
    )  # fmt: skip
    generation_config: bool = option(
        True, "take sampling parameters that a request leaves out from the model's generation_config.json"
    )
    load: str = option(
        "auto", "source of the weights: the checkpoint, or random numbers (dummy)", choices=("auto", "dummy")
    )
    seed: int | None = option(
        None,
        "requests without a seed derive theirs from it, so that a run can be repeated",
        unset="a seed from the operating system",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))  # "bfloat16" for torch.bfloat16

    def check(self) -> None:
        """Raise TypeError or ValueError for the first option whose value can not work, whatever the model."""
        for name, each in OPTIONS.items():
            each.check(getattr(self, name))


OPTIONS = options_of(GeneratorOptions)

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")


def takes_fields_of(
    cls: Callable[Arguments, GeneratorOptions],
) -> Callable[[Callable[[Owner, GeneratorOptions], None]], Callable[Concatenate[Owner, Arguments], None]]:
    """Make an `__init__` of one GeneratorOptions take the fields as arguments instead, in signature and docstring too.

    An unknown argument is a TypeError that says what to give instead.
    """

    def decorate(init: Callable[[Owner, GeneratorOptions], None]) -> Callable[Concatenate[Owner, Arguments], None]:
        @wraps(init)
        def take(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            for name in kwargs.keys() - OPTIONS.keys():
                raise unknown_name(type(self).__name__, name, OPTIONS)
            init(self, cls(*args, **kwargs))

        shown = inspect.signature(cls).parameters.values()
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        take.__signature__ = inspect.Signature([first, *shown])  # type: ignore[attr-defined]
        take.__doc__ = "\n".join(each.line for each in OPTIONS.values())
        return take

    return decorate
