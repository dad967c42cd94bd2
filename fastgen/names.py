"""Names that users of vLLM and transformers know, and ours for the same, for errors. docs/from-vllm.md has more."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

OTHER_NAMES = {
    "gpu_memory_utilization": "memory_fraction",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "tensor_parallel",
    "cpu_offload_gb": "tensor_parallel",
    "download_dir": "HF_HOME of the environment",
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "max_step_tokens",
    "long_prefill_token_threshold": "max_prefill_tokens",
    "max_num_partial_prefills": "max_prefill_tokens",
    "max_long_partial_prefills": "max_prefill_tokens",
    "max_step_ms": "max_prefill_tokens, a number of tokens",
    "enable_prefix_caching": "prefix_cache",
    "no_enable_prefix_caching": "no_prefix_cache",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
    "kv_cache_memory_bytes": "kv_cache_gb",
    "swap_space": "host_cache_gb",
    "kv_offloading_size": "host_cache_gb",
    "load_format": "load",
    "torch_dtype": "dtype",
    "device_map": "device or tensor_parallel",
    "attn_implementation": "attention",
    "attention_backend": "attention",
    "enable_lora": "adapter",
    "speculative_config": "speculate",
    "allowed_origins": "allow_origin",
    "data_parallel_size": "--replicas of fgserve or fggen",
    "best_of": "n",
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, which counts the new tokens alone",
    "min_new_tokens": "min_tokens",
    "do_sample": "temperature=0 for greedy decoding",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "suppress_tokens": "logit_bias",
    "sequence_bias": "logit_bias",
    "output_scores": "logprobs",
    "top_logprobs": "logprobs",
    "response_format": "json_schema",
    "structured_outputs": "json_schema, regex, choice or grammar",
    "guided_decoding": "json_schema, regex, choice or grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "logits_processors": "mask, an object of yours that says which tokens may come next (fastgen.TokenMask)",
    "logits_processor": "mask, an object of yours that says which tokens may come next (fastgen.TokenMask)",
}
"""Arguments of vLLM's LLM and SamplingParams and flags of its server, and arguments of transformers."""
NO_NAMES = {
    **dict.fromkeys((
        "enforce_eager", "enable_chunked_prefill", "trust_remote_code", "disable_log_stats", "tokenizer_mode",
        "skip_tokenizer_init", "truncate_prompt_tokens", "detokenize", "skip_special_tokens",
        "spaces_between_special_tokens", "output_kind", "extra_args", "enable_auto_tool_choice", "tool_call_parser",
    ), "leave it out"),
    **dict.fromkeys(("use_beam_search", "num_beams", "length_penalty"), "there is no beam search"),
    "logprobs_mode": "leave it out: outputs have all three lists, and a request to fgserve may name one",
}  # fmt: skip
"""Names of the same origin that have no counterpart, with what to do."""
ADVICE = {name: f"use {ours}" for name, ours in OTHER_NAMES.items()} | NO_NAMES


def unknown_name(owner: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an argument that `owner` does not have, with ours of the same meaning, or the nearest."""
    near = nearest(name, known)
    other = f"the nearest one is {near!r}" if near else f"the options are {', '.join(sorted(known))}"
    return TypeError(f"{owner} has no option {name!r}; {ADVICE.get(name, other)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that an unknown one is most like, or ""."""
    return next(iter(difflib.get_close_matches(name[:100], list(known), n=1)), "")


def explains_names(init: Callable[P, T], owner: str, known: Iterable[str]) -> Callable[P, T]:
    """Return an `__init__` for which an unknown argument is an error as `unknown_name` makes it."""

    @wraps(init)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in sorted(kwargs.keys() - known):
            raise unknown_name(owner, name, known)
        return init(*args, **kwargs)

    return call
