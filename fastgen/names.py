"""Names that users of vLLM and transformers try, with what to use here instead; docs/from-vllm.md explains more."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

ADVICE = {
    "gpu_memory_utilization": "use memory_fraction",
    "tensor_parallel_size": "use tensor_parallel",
    "pipeline_parallel_size": "use tensor_parallel",
    "cpu_offload_gb": "use tensor_parallel",
    "download_dir": "use HF_HOME of the environment",
    "max_num_seqs": "use max_seqs",
    "max_num_batched_tokens": "use max_step_tokens",
    "long_prefill_token_threshold": "use max_prefill_tokens",
    "max_num_partial_prefills": "use max_prefill_tokens",
    "max_long_partial_prefills": "use max_prefill_tokens",
    "max_step_ms": "use max_prefill_tokens, a number of tokens",
    "enable_prefix_caching": "use prefix_cache",
    "no_enable_prefix_caching": "use no_prefix_cache",
    "block_size": "use page_size",
    "num_gpu_blocks_override": "use num_pages",
    "kv_cache_memory_bytes": "use kv_cache_gb",
    "swap_space": "use host_cache_gb",
    "kv_offloading_size": "use host_cache_gb",
    "load_format": "use load",
    "torch_dtype": "use dtype",
    "device_map": "use device or tensor_parallel",
    "attn_implementation": "use attention",
    "attention_backend": "use attention",
    "enable_lora": "use adapter",
    "speculative_config": "use speculate",
    "allowed_origins": "use allow_origin",
    "data_parallel_size": "use --replicas of fgserve or fggen",
    "best_of": "use n",
    "num_return_sequences": "use n",
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "max_length": "use max_tokens, which counts new tokens only",
    "min_new_tokens": "use min_tokens",
    "do_sample": "use temperature=0 for greedy decoding",
    "stop_strings": "use stop",
    "eos_token_id": "use stop_token_ids",
    "bad_words_ids": "use bad_words",
    "suppress_tokens": "use logit_bias",
    "sequence_bias": "use logit_bias",
    "output_scores": "use logprobs",
    "top_logprobs": "use logprobs",
    "response_format": "use json_schema",
    "structured_outputs": "use json_schema, regex, choice or grammar",
    "guided_decoding": "use json_schema, regex, choice or grammar",
    "guided_json": "use json_schema",
    "guided_regex": "use regex",
    "guided_choice": "use choice",
    "guided_grammar": "use grammar",
    "logits_processors": "use mask, an object of yours that says which tokens may come next (fastgen.TokenMask)",
    "logits_processor": "use mask, an object of yours that says which tokens may come next (fastgen.TokenMask)",
    "enforce_eager": "leave it out",
    "enable_chunked_prefill": "leave it out",
    "trust_remote_code": "leave it out",
    "disable_log_stats": "leave it out",
    "tokenizer_mode": "leave it out",
    "skip_tokenizer_init": "leave it out",
    "truncate_prompt_tokens": "leave it out",
    "detokenize": "leave it out",
    "skip_special_tokens": "leave it out",
    "spaces_between_special_tokens": "leave it out",
    "output_kind": "leave it out",
    "extra_args": "leave it out",
    "enable_auto_tool_choice": "leave it out",
    "use_beam_search": "there is no beam search",
    "num_beams": "there is no beam search",
    "length_penalty": "there is no beam search",
    "logprobs_mode": "leave it out: outputs have all three lists, and a request to fgserve may name one",
}
"""What to do instead, for arguments of vLLM's LLM and SamplingParams, flags of its server, and arguments of
transformers. Where there is a counterpart, the advice is "use" and its name."""

FOREIGN = {
    "outputs": "use completions",
    "request_id": "use id, of a Request for `stream` or of an output",
    "num_cached_tokens": "use cached_tokens",
    "metrics": "use timings",
    "sequences": "use completions",
    "finished": "leave it out: an output is always complete, and its finish_reason says why it ended",
    "sampling_params": "use params",
    "use_tqdm": "use progress",
    "prompt_token_ids": "use prompts, which may be lists of ids",
    "input_ids": "use prompts, which may be lists of ids",
    "inputs": "use prompts",
    "lora_request": "use update_adapter",
    "chat_template": "use tokenizer.hf.chat_template, an attribute to set",
    "chat_template_content_format": "leave it out: the content of messages is text",
    "priority": "leave it out: there are no priorities",
    "get_tokenizer": "use tokenizer.hf",
    "get_default_sampling_params": "use default_params",
    "get_metrics": "use stats",
    "encode": "use embed",
    "beam_search": "there is no beam search",
    "wake_up": "use wake",
    "shutdown": "use close",
    "start_profile": "use profile",
    "stop_profile": "use profile",
    "llm_engine": "use update_weights for weights, config and stats for its state",
    "collective_rpc": "use update_weights for weights",
    "reset_prefix_cache": "leave it out: the cache never gives KV of old weights",
}
"""The same for attributes and arguments of vLLM's LLM and outputs, and of transformers' models."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to an unknown one, or "" if none is similar."""
    return next(iter(difflib.get_close_matches(name[:100], list(known), n=1)), "")


def explains_names(*methods: str) -> Callable[[Class], Class]:
    """Decorate a class so that an attribute in FOREIGN or ADVICE is an AttributeError that says what to use instead,
    and an unknown argument of one of these methods a TypeError that does. Type checkers see the class unchanged."""

    def decorate(cls: Class) -> Class:
        for name in methods:
            setattr(cls, name, _explaining(getattr(cls, name), f"{cls.__name__}.{name}"))
        setattr(cls, "__getattr__", _explain)  # noqa: B010  # a method would let type checkers accept any attribute
        return cls

    return decorate


def _explain(self: object, name: str) -> Any:
    """Raise AttributeError for an attribute that is not there, as `__getattr__` must."""
    advice = FOREIGN.get(name) or ADVICE.get(name, "")
    ours = re.match(r"use (\w+)", advice)
    if advice and (ours is None or hasattr(self, ours[1])):
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; {advice}")
    return object.__getattribute__(self, name)  # raises the usual error, also one from within a property


def _explaining(method: Callable[..., Any], shown: str) -> Callable[..., Any]:
    """Return a method whose TypeErrors for wrong arguments say what to use. shown: its name in errors."""
    signature = inspect.signature(method)
    known = list(signature.parameters)[1:]

    @wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        if unknown := given.keys() - set(known):
            name = min(unknown)
            near = nearest(name, known)
            usual = f"the nearest one is {near!r}" if near else f"the arguments are {', '.join(known)}"
            advice, inner = FOREIGN.get(name) or ADVICE.get(name, usual), ""
            if name not in FOREIGN and not near and "params" in known:
                inner = "; parameters of sampling go into params, as SamplingParams or as a dict"
            raise TypeError(f"{shown} has no argument {name!r}; {advice}{inner}")
        try:
            signature.bind(*args, **given)
        except TypeError as error:
            raise TypeError(f"{shown}: {error}") from None
        return method(*args, **given)

    return call
