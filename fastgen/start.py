"""The start of a Generator: its options are resolved, and its rank or ranks begin.

This is the door to tensor parallelism: the modules in `ranks/` load in these functions, if there are several ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.device.find import find_device
from fastgen.engine.interface import StepRunner
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.speculation.options import Speculation
from fastgen.engine.startup import BuildArguments, build_rank
from fastgen.model.config import BUNDLED_NAME, ModelConfig
from fastgen.model.loader import BUNDLED, resolve
from fastgen.parallel.group import Group

if TYPE_CHECKING:  # only for several ranks
    from fastgen.ranks.protocol import Follower

log = logging.getLogger(__name__)


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
    or None. status: see Leader.
    """
    device = str(arguments[1].device)
    if tp_group is None and arguments[1].tensor_parallel == 1:
        return build_rank(*arguments, device, Group())
    from fastgen.ranks import start

    return start.start_ranks(arguments, tp_group, device, status)


def resolve_options(model_config: ModelConfig, options: GeneratorOptions) -> GeneratorOptions:
    """Check the options against the model and this machine. Return options that can be sent to other ranks: with this
    process's device and the number of ranks, and without tp_group. Raises ValueError or TypeError."""
    tp_group = options.tp_group
    if tp_group is not None and options.tensor_parallel != 1:
        raise ValueError(f"tp_group has its ranks already; leave tensor_parallel={options.tensor_parallel!r} out")
    size = options.tensor_parallel if tp_group is None else number_of_ranks(tp_group)
    sharded = model_config.split(size)
    device = find_device(options.device, ranks=options.tensor_parallel)
    speculate = with_head(Speculation.of(options.speculate), model_config, size, options.load)
    options = replace(options, device=device, tensor_parallel=size, tp_group=None, speculate=speculate)
    EngineConfig.make(sharded, options)
    return options


def with_head(given: Speculation | None, target: ModelConfig, ranks: int, load: str) -> Speculation | None:
    """Return options of speculation in which the name of a head is replaced by its configuration. Raises ValueError for
    a head that cannot be used. load: see GeneratorOptions. The module of heads loads only if there is one."""
    if given is None or given.head is None:
        return given
    from fastgen.engine.speculation.heads import HeadConfig, SelfDraftConfig, read_head

    if isinstance(given.head, HeadConfig):
        return given
    if ranks > 1:
        raise ValueError(f"speculate={str(given.head)!r} needs tensor_parallel=1; leave it out, or take 'auto'")
    if given.head == "int4":
        if target.quantization:
            raise ValueError("speculate='int4' needs a model that is not quantized; leave it out, or take 'auto'")
        return replace(given, head=SelfDraftConfig())
    return replace(given, head=read_head(find_head(given.head, weights=load == "auto"), target))


def find_head(name: str | Path, weights: bool) -> Path:
    """Return the local folder of a head: BUNDLED_NAME/NAME (one that drafts for the bundled model), a folder, or a hub
    id; see `loader.resolve`."""
    model, _, head = str(name).partition("/")
    if model == BUNDLED_NAME and isinstance(name, str):
        own = {each.name: each for each in BUNDLED.iterdir() if each.is_dir()}
        if head in own:
            return own[head]
        if not Path(name).is_dir():
            heads = ", ".join(sorted(own))
            raise ValueError(f"{name!r} is neither a folder nor a head that drafts for {model}, which has {heads}")
    return resolve(name, weights=weights)


def log_start(name: str, seconds: float, config: EngineConfig, model_config: ModelConfig) -> None:
    """Log the duration of a start and the configuration. Warn if the KV pool is smaller than the model's context."""
    log.info("%s in %.1f s: %s", name, seconds, config)
    if not config.context_given and config.max_model_len < model_config.max_position:
        log.warning(
            "the KV pool holds a context of %d tokens, and the model's is %d; raise kv_cache_gb or memory_fraction",
            config.max_model_len,
            model_config.max_position,
        )
