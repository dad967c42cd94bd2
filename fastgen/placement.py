"""Where a model runs: in this process, in ranks that are started for it, or in those that a program has already."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fastgen.arch import ModelConfig
from fastgen.config import EngineConfig
from fastgen.interrupts import DeferredInterrupt
from fastgen.kernels.launch import current
from fastgen.links import Links
from fastgen.parallel import Group
from fastgen.runner import Runner
from fastgen.spmd import Follower, Leader, connect
from fastgen.startup import build_rank, find_device, find_devices
from fastgen.workers import Ranks

log = logging.getLogger(__name__)

Engine = Runner | Ranks | Leader | Follower


@dataclass(frozen=True)
class Placement:
    """options: of EngineConfig.make, but for what follows from the rest; device: of this process, or "cuda" or "cpu"
    for ranks that are started."""

    model_config: ModelConfig
    options: Mapping[str, Any]
    device: str
    ranks: int
    tp_group: Any

    @classmethod
    def find(
        cls, model_config: ModelConfig, options: dict[str, Any], device: str | None, tensor_parallel: int, tp_group: Any
    ) -> Placement:
        """Raises ValueError, or TypeError, for what can not work, as far as no GPU has to be asked."""
        if tp_group is not None and tensor_parallel != 1:
            raise ValueError(f"tp_group has its ranks already; leave tensor_parallel={tensor_parallel!r} out")
        ranks = tensor_parallel if tp_group is None else process_group_of(tp_group).size()
        shared = model_config.split(ranks)
        device = find_device(device) if ranks == 1 or tp_group is not None else find_devices(device, ranks)
        EngineConfig.make(shared, device=device, tensor_parallel=ranks, **options)
        return cls(model_config, options, device, ranks, tp_group)

    def start(self, folder: Path, load: str, tell: Callable[[], Any]) -> Engine:
        """Load the weights, and make ready. tell: what ranks above 0 of a tp_group are told at the end of a call."""
        what = self.model_config, self.options, folder, load, self.device
        if self.tp_group is None:
            return build_rank(*what, Group()) if self.ranks == 1 else Ranks(self.ranks, *what)
        given, device = process_group_of(self.tp_group), torch.device(self.device)
        with current(device):
            asked: list[Any] = [None] * self.ranks
            dist.all_gather_object(asked, (self.model_config, dict(self.options), load), group=given)
            model_config, options, load = asked[0]
            what = model_config, options, folder, load, self.device
            group = Group.beside(given, device)
            try:
                ends = connect(given, group.interrupt)
                build = partial(build_rank, *what, group)
                if isinstance(ends, Links):
                    return Leader(build, ends, group, tell)
                return Follower(build, ends, group)
            except BaseException:
                group.leave()
                raise


def log_start(name: str, seconds: float, config: EngineConfig, model_config: ModelConfig) -> None:
    log.info("%s in %.1f s: %s", name, seconds, config)
    if not config.context_given and config.max_model_len < model_config.max_position:
        log.warning(
            "the KV pool holds a context of %d tokens, and the model's is %d; raise kv_cache_gb or memory_fraction",
            config.max_model_len,
            model_config.max_position,
        )


def agreeing(tp_group: Any) -> AbstractContextManager[None]:
    """An error within, on any rank of a tp_group, is raised on all of them behind it."""
    known = isinstance(tp_group, DeviceMesh | dist.ProcessGroup)  # what else it may be is an error within
    return Group(process_group_of(tp_group) if known else None).agreeing()


def process_group_of(tp_group: Any) -> dist.ProcessGroup:
    """A process group, or that of a DeviceMesh of one dimension."""
    if isinstance(tp_group, DeviceMesh):
        if tp_group.ndim != 1:
            raise ValueError(f"tp_group is a mesh of {tp_group.ndim} dimensions; give one of them, as mesh['tp']")
        return tp_group.get_group()
    if not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(f"tp_group must be a process group or a DeviceMesh, not {type(tp_group).__name__}")
    return tp_group


class _HasTeam(Protocol):
    """What methods on all ranks are of. _team: None, but in a tp_group."""

    _interrupt: DeferredInterrupt

    @property
    def _team(self) -> Leader | Follower | None: ...


P = ParamSpec("P")
S = TypeVar("S", bound=_HasTeam)
T = TypeVar("T")


def on_all_ranks(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that all ranks of a tp_group call: rank 0 runs it, others replay its steps, and all return the same.
    Ctrl-C is deferred meanwhile."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> T:
        with self._interrupt:
            if self._team is None:
                return method(self, *args, **options)
            result: T = self._team.call(method.__name__.lstrip("_"), lambda: method(self, *args, **options))
            return result

    return call
