"""Names that users of vLLM and transformers know, and what to give instead, as errors and docs/from-vllm.md say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

GENERATOR = {
    "gpu_memory_utilization": "use memory_fraction",
    "tensor_parallel_size": "use tensor_parallel",
    "max_num_seqs": "use max_seqs",
    "max_num_batched_tokens": "use max_step_tokens",
    "long_prefill_token_threshold": "use max_step_ms, by which prompts are computed in smaller chunks beside answers",
    "enable_prefix_caching": "use prefix_cache",
    "block_size": "use page_size",
    "num_gpu_blocks_override": "use num_pages",
    "kv_cache_memory_bytes": "use kv_cache_gb",
    "swap_space": "use host_cache_gb, which holds pages that the KV cache evicts",
    "kv_offloading_size": "use host_cache_gb",
    "cpu_offload_gb": "weights stay on the GPU; use tensor_parallel for a model that is too large for one",
    "load_format": "use load='dummy' for random weights; checkpoints are safetensors",
    "torch_dtype": "use dtype",
    "device_map": "use device or tensor_parallel",
    "attn_implementation": "use attention",
    "attention_backend": "use attention",
    "tokenizer_mode": "leave it out",
    "skip_tokenizer_init": "leave it out; prompts of ids need no tokenizer",
    "trust_remote_code": "leave it out; code of a checkpoint never runs",
    "enforce_eager": "leave it out; CUDA graphs are recorded in seconds",
    "enable_chunked_prefill": "leave it out; prefills are always chunked",
    "disable_log_stats": "leave it out; Generator.stats has the counts",
    "download_dir": "set HF_HOME in the environment",
    "pipeline_parallel_size": "use tensor_parallel",
    "enable_lora": "use adapter, or Generator.update_adapter",
    "speculative_config": "use speculate",
}
"""Arguments of vLLM's LLM and of from_pretrained."""

PARAMETERS = {
    "best_of": "use n",
    "num_return_sequences": "use n",
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "max_length": "use max_tokens, which counts the new tokens alone",
    "min_new_tokens": "use min_tokens",
    "do_sample": "use temperature=0 for greedy decoding",
    **dict.fromkeys(("num_beams", "use_beam_search"), "use n; beams are not supported"),
    "stop_strings": "use stop",
    "eos_token_id": "use stop_token_ids, beside which the model's own ids hold unless ignore_eos is set",
    "bad_words_ids": "use bad_words, or mask",
    "suppress_tokens": "use logit_bias, or mask",
    "sequence_bias": "use logit_bias, or mask",
    **dict.fromkeys(("output_scores", "top_logprobs"), "use logprobs"),
    "response_format": "use json_schema",
    "logits_processors": "use mask, an object of yours that says which tokens may come next (fastgen.TokenMask)",
    "logits_processor": "use mask, an object of yours that says which tokens may come next (fastgen.TokenMask)",
    "prefix_allowed_tokens_fn": "use mask, an object of yours that says which tokens may come next (fastgen.TokenMask)",
    "stopping_criteria": "use stop or stop_token_ids, or abort what Generator.step shows",
    "streamer": "use Generator.add and step, or AsyncGenerator.stream",
    **dict.fromkeys(("structured_outputs", "guided_decoding"), "use json_schema, regex, choice or grammar"),
    "guided_json": "use json_schema",
    "guided_regex": "use regex",
    "guided_choice": "use choice",
    "guided_grammar": "use grammar",
    "truncate_prompt_tokens": "shorten the prompt",
    "skip_special_tokens": "text has no special tokens; Generator.tokenizer.decode(ids, special=True) shows them",
    "spaces_between_special_tokens": "leave it out; text has no special tokens",
    "detokenize": "leave it out; text is made when it is needed",
    "output_kind": "use Generator.generate for whole answers, or add and step for their pieces",
    "extra_args": "leave it out",
}
"""Parameters of vLLM's SamplingParams, of transformers' GenerationConfig and of OpenAI's requests."""

CALLS = {
    "sampling_params": "use params",
    "generation_config": "use params",
    "prompt_token_ids": "give the ids as prompts",
    "inputs": "give the ids as prompts",
    "input_ids": "give the ids as prompts",
    "conversation": "use messages",
    "use_tqdm": "use progress",
    "priority": "requests run in the order in which they come",
    "lora_request": "all requests use one adapter; use Generator(adapter=folder) or update_adapter",
    "chat_template": "set Generator.tokenizer.hf.chat_template",
    "chat_template_content_format": "give a template what it takes",
    "request_id": "leave it out; Generator.add takes an id",
    "level": "use keep_weights: True is level 1, and False level 2",
    **dict.fromkeys(("documents", "enable_thinking"), "use chat_template_kwargs"),
}
"""Arguments of the methods of LLM, and of transformers' generate and apply_chat_template."""

FLAGS = {
    **GENERATOR,
    **PARAMETERS,
    "no_enable_prefix_caching": "use no_prefix_cache",
    "lora_modules": "use adapter, for one that all requests use",
    "allowed_origins": "use allow_origin",
    "data_parallel_size": "use replicas",
    **dict.fromkeys(("enable_auto_tool_choice", "tool_call_parser"), "leave it out; the chat template tells"),
}
"""Flags of `vllm serve`."""

ATTRIBUTES = {
    "request_id": "use id",
    "outputs": "use completions",
    "num_cached_tokens": "use cached_tokens",
    "metrics": "use timings",
    "get_tokenizer": "use tokenizer.hf",
    "get_default_sampling_params": "use default_params",
    "wake_up": "use wake",
    "add_request": "use add",
    "abort_request": "use abort",
    "has_unfinished_requests": "use unfinished",
    "llm_engine": "use add and step",
    "beam_search": "beams are not supported",
    "encode": "use tokenizer.encode; pooling is not supported",
    # Of a Generator, which an AsyncGenerator does not have.
    **dict.fromkeys(
        ("score", "update_weights", "update_adapter", "sleep", "wake"), "use call, with this name as its first argument"
    ),
    "chat": "generate and stream take messages, too",
    "abort": "leave the loop over stream, or cancel its task",
}
"""Attributes of vLLM's LLM and RequestOutput, and others that a class may not have."""


def unknown_name(owner: str, name: str, known: Iterable[str], foreign: Mapping[str, str]) -> TypeError:
    """Return the error for an argument that `owner` does not have, with what takes its place, or the nearest name."""
    near = nearest(name, known)
    other = f"the nearest one is {near!r}" if near else f"the options are {', '.join(sorted(known))}"
    return TypeError(f"{owner} has no option {name!r}; {foreign.get(name, other)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that an unknown one is most like, or ""."""
    import difflib

    return next(iter(difflib.get_close_matches(name[:100], list(known), n=1)), "")


def explains_attributes(cls: type[T]) -> type[T]:
    """Decorate a class so that the error for an attribute of ATTRIBUTES says what takes its place."""

    def missing(self: object, name: str) -> Any:
        hint = f"; {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    cls.__getattr__ = missing  # type: ignore[attr-defined]
    return cls


def explains_names(owner: str, foreign: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that an unknown argument is an error as `unknown_name` makes it."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = frozenset(inspect.signature(function).parameters) - {"self"}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except TypeError:
                if unknown := sorted(kwargs.keys() - known, key=lambda name: (name not in foreign, name)):
                    raise unknown_name(owner, unknown[0], known, foreign) from None
                raise

        return call

    return decorate


def explains_calls(foreign: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Decorate a class so that an unknown argument of a public method is an error as `unknown_name` makes it."""

    def decorate(cls: type[T]) -> type[T]:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, explains_names(name, foreign)(method))
        return cls

    return decorate
