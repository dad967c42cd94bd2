"""The arguments of an engine and the parameters of a request, from verl's. Imports neither torch nor verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.engine.seeds import replica_seed
from fastgen.request import SamplingParams

LOGPROBS = {"processed_logprobs": "logprobs", "raw_logprobs": "raw_logprobs"}
"""The fields of a completion that have the logprobs of a `rollout.logprobs_mode` of verl."""

NEUTRAL: dict[str, Any] = {"quantization": (None, "fp8"), "enable_rollout_routing_replay": (False,)}
"""Fields of verl's configuration that no other value can be honored for, and the values that can."""


def engine_arguments(config: Any, rank: int) -> dict[str, Any]:
    """Return the arguments of the AsyncGenerator of a replica. config: verl's RolloutConfig, whose
    `engine_kwargs.fastgen` has more arguments, which override. Raises ValueError for what the engine does not have.

    `load_format` has no effect: the engine always reads the checkpoint.
    """
    for name, neutral in NEUTRAL.items():
        if getattr(config, name, neutral[0]) not in neutral:
            values = " or ".join(map(repr, neutral))
            raise ValueError(f"rollout.{name} is {getattr(config, name)!r}; the rollout 'fastgen' needs {values}")
    own = (config.engine_kwargs or {}).get("fastgen") or {}
    arguments = {
        "dtype": config.dtype,
        "quantization": config.quantization,
        "max_model_len": config.max_model_len,
        "max_seqs": config.max_num_seqs,
        "memory_fraction": config.gpu_memory_utilization,
        "prefix_cache": config.enable_prefix_caching,
        "tensor_parallel": config.tensor_model_parallel_size,
        "seed": config.seed,
        "generation_config": False,
        **own,
    }
    return {**arguments, "seed": replica_seed(arguments["seed"], rank)}


def logprobs_field(config: Any) -> str:
    """Return the field of a completion that has the logprobs of verl's configuration. Raises ValueError."""
    if config.logprobs_mode not in LOGPROBS:
        raise ValueError(f"rollout.logprobs_mode is {config.logprobs_mode!r}; it must be one of {', '.join(LOGPROBS)}")
    return LOGPROBS[config.logprobs_mode]


def request_params(config: Any, given: Mapping[str, Any], prompt: int, longest: int) -> SamplingParams:
    """Return the parameters of a request.

    given: parameters in verl's names, which are those of SamplingParams, and `max_new_tokens`. prompt: number of the
    prompt's tokens. longest: maximum number of tokens of prompt and answer.

    Raises ValueError if the prompt leaves no room for an answer, and TypeError for an unknown parameter.
    """
    own = dict(given)
    own.pop("logprobs", None)  # the logprobs of the tokens are always there
    room = longest - prompt
    if room < 1:
        raise ValueError(f"the prompt has {prompt} tokens, which leave no room in a context of {longest}")
    usual = min(config.response_length, config.prompt_length + config.response_length - prompt)
    most = own.pop("max_tokens", own.pop("max_new_tokens", usual))
    own.setdefault("ignore_eos", config.ignore_eos)
    return SamplingParams(**own, max_tokens=max(1, min(most, room)))
