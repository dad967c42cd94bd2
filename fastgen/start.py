"""The start of a Generator: its options are resolved, and its rank or ranks begin.

This is the door to tensor parallelism: the modules in `ranks/` load in these functions, if there are several ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fastgen.device.find import find_device
from fastgen.engine.features import read_options
from fastgen.engine.interface import StepRunner
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.startup import BuildArguments, build_rank
from fastgen.model.config import ModelConfig
from fastgen.parallel.group import Group

if TYPE_CHECKING:  # only for several ranks
    from fastgen.ranks.protocol import Follower

log = logging.getLogger(__name__)

_process: int | None = None  # the process in which torch has computed for a Generator; a fork of it sees this number


def agreeing(tp_group: Any) -> AbstractContextManager[None]:
    """Return a context manager: an error within its block, on any rank of a tp_group, is raised on all ranks."""
    if tp_group is None:
        return nullcontext()
    from fastgen.ranks import start

    return start.agreeing(tp_group)


def number_of_ranks(tp_group: Any) -> int:
    """Return the number of ranks of a tp_group. Raises ValueError or TypeError for one that cannot be used."""
    from fastgen.ranks import start

    return start.process_group_of(tp_group).size()


def start_runner(arguments: BuildArguments, tp_group: Any, status: Callable[[], Any]) -> StepRunner | Follower:
    """Load the weights on all ranks. Return the Runner, Leader or Follower of this rank.

    arguments: contain the options that `resolve_options` returned. tp_group: the program's process group or DeviceMesh,
    or None. status: see Leader. Raises RuntimeError in a fork of a process that had a Generator.
    """
    device = str(arguments[1].device)
    _check_fork(device)
    if tp_group is None and arguments[1].tensor_parallel == 1:
        return build_rank(*arguments, device, Group())
    from fastgen.ranks import start

    return start.start_ranks(arguments, tp_group, device, status)


def _check_fork(device: str) -> None:
    """Raise RuntimeError if this process is a fork of one whose threads computed: torch would wait for them forever.
    On a GPU torch raises an error itself."""
    global _process
    if _process not in (None, os.getpid()) and device == "cpu" and torch.get_num_threads() > 1:
        raise RuntimeError(
            f"this process is a fork of process {_process}, which had a Generator, and torch's threads are only there; "
            "in multiprocessing, use the start method 'spawn'"
        )
    _process = os.getpid()


def resolve_options(model_config: ModelConfig, options: GeneratorOptions) -> GeneratorOptions:
    """Check the options against the model and this machine. Return options that can be sent to other ranks: with this
    process's device and the number of ranks, and without tp_group. Raises ValueError or TypeError."""
    tp_group = options.tp_group
    if tp_group is not None and options.tensor_parallel != 1:
        raise ValueError(f"tp_group has its ranks already; leave tensor_parallel={options.tensor_parallel!r} out")
    size = options.tensor_parallel if tp_group is None else number_of_ranks(tp_group)
    sharded = model_config.split(size)
    device = find_device(options.device, ranks=options.tensor_parallel)
    options = replace(options, device=device, tensor_parallel=size, tp_group=None)
    options = read_options(options, model_config, size)
    EngineConfig.make(sharded, options)
    return options


def log_start(name: str, seconds: float, config: EngineConfig, model_config: ModelConfig) -> None:
    """Log the duration of a start and the configuration. Warn if the KV pool is smaller than the model's context, that
    a vision model reads no images, and of longrope in a long context."""
    log.info("%s in %.1f s: %s", name, seconds, config)
    if model_config.has_vision:
        log.warning("%s is a vision model, and fastgen runs only its text model: it cannot read images", name)
    rope = model_config.rope
    if rope.is_long_in(config.max_model_len):
        log.warning(
            "the context of %d tokens is above the original %d, so rope is stretched for prompts of every length; if "
            "all are short, give max_model_len=%d, as transformers does not stretch it for these",
            config.max_model_len,
            rope.original_max_position,
            rope.original_max_position,
        )
    if not config.context_given and config.max_model_len < model_config.max_position:
        log.warning(
            "the KV pool holds a context of %d tokens, and the model's is %d; raise num_pages, kv_cache_gb or "
            "memory_fraction",
            config.max_model_len,
            model_config.max_position,
        )
