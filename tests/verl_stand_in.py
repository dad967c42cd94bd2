"""The classes of verl 0.9 and functions of Ray that `fastgen.rl.verl` uses, for tests where these are not installed.

The "actor" is an object of this process, whose methods run in the loop of a thread. Its engine is a process of its own,
so that weights take the way that they take under verl.
"""

from __future__ import annotations

import asyncio
import enum
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.model.loader import BUNDLED, read_tensors


@dataclass
class Config:
    """The fields of verl's RolloutConfig that are read, with its defaults."""

    dtype: str = "bfloat16"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.5
    enable_prefix_caching: bool = True
    tensor_model_parallel_size: int = 2
    seed: int = 42
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    logprobs_mode: str = "processed_logprobs"
    enable_rollout_routing_replay: bool = False
    ignore_eos: bool = False
    prompt_length: int = 512
    response_length: int = 512
    free_cache_engine: bool = True


@dataclass
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    extra_fields: dict[str, Any]


class RolloutMode(enum.Enum):
    HYBRID = "hybrid"
    STANDALONE = "standalone"


class BaseRollout:
    def __init__(self, config: Config, model_config: Any, device_mesh: Any) -> None:
        self.config = config


class Answer:
    """What a call of an actor returns: `ray.get` waits for it, and so does `await`."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.future).__await__()


class Actor:
    """An actor around an object with asynchronous methods."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._loop = inner, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> SimpleNamespace:
        method: Callable[..., Coroutine[Any, Any, Any]] = getattr(self._inner, name)
        return SimpleNamespace(
            remote=lambda *args, **kwargs: Answer(asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop))
        )

    def end(self) -> None:
        engine = getattr(self._inner, "_engine", None)  # None if `launch` has failed
        if engine is not None:
            asyncio.run_coroutine_threadsafe(engine.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


MODULES: dict[str, dict[str, Any]] = {
    "ray": {"get": lambda answer: answer.future.result()},
    "ray.util": {},
    "ray.util.scheduling_strategies": {"NodeAffinitySchedulingStrategy": object},
    "verl": {},
    "verl.utils": {},
    "verl.utils.config": {"omega_conf_to_dataclass": lambda config, dataclass_type=None: config},
    "verl.utils.device": {"get_resource_name": str, "get_visible_devices_keyword": str},
    "verl.workers": {},
    "verl.workers.config": {"HFModelConfig": object, "RolloutConfig": Config},
    "verl.workers.rollout": {},
    "verl.workers.rollout.base": {"BaseRollout": BaseRollout},
    "verl.workers.rollout.replica": {"RolloutMode": RolloutMode, "RolloutReplica": object, "TokenOutput": TokenOutput},
}
OURS = ("fastgen.rl.verl.replica", "fastgen.rl.verl.rollout")


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let verl and Ray be the classes and functions of this module within the block."""
    before = {name: sys.modules.pop(name, None) for name in (*MODULES, *OURS)}
    for name, members in MODULES.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    try:
        with mock.patch("fastgen.rl.verl.version", return_value="0.9.1"), mock.patch.dict(os.environ, {"RANK": "0"}):
            yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def changed(seed: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield weights one at a time, in float32 and on the device, as FSDP gathers them."""
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in read_tensors(BUNDLED).items():
        yield name, (tensor.float() + 0.02 * torch.randn(tensor.shape, generator=draw)).to(device)


def use_rollout(device: str, backend: str) -> None:
    """Take the steps of verl's synchronous trainer. backend: the way that the weights must take."""
    with stand_ins():
        from fastgen.rl.verl.replica import EngineServer
        from fastgen.rl.verl.rollout import VerlRollout

        engine = {"fastgen": {"device": device, "num_pages": 100, "page_size": 16}}
        config: Any = Config("float32", tensor_model_parallel_size=1, engine_kwargs=engine)
        model: Any = SimpleNamespace(local_path=str(BUNDLED))
        actor = Actor(EngineServer(config, model, RolloutMode.HYBRID, "", 0))
        try:
            vars(sys.modules["ray"])["get_actor"] = {"fastgen_server_0": actor}.__getitem__
            rollout = VerlRollout(config, model, None, replica_rank=0)
            asyncio.run(_take_steps(actor, rollout, device))
            assert rollout._sender is not None
            assert rollout._sender._weights.backend == backend
        finally:
            actor.end()


async def _take_steps(actor: Actor, rollout: Any, device: str) -> None:
    prompt, params = [5, 6, 7, 8], SamplingParams(max_tokens=32, seed=3, ignore_eos=True)
    asked = {"max_tokens": 32, "seed": 3, "ignore_eos": True, "logprobs": True}
    await actor.launch.remote()
    found = set[tuple[int, ...]]()
    with Generator(device=device, dtype="float32", page_size=16, num_pages=100) as here:
        for step in (1, 2, 3):
            await rollout.release()
            await rollout.resume(["weights"])
            await rollout.update_weights(changed(step, device), global_steps=step)
            await rollout.resume(["kv_cache"])
            output = await actor.generate.remote(prompt, asked, "id")
            here.update_weights(dict(changed(step, device)))
            (expected,) = here.generate([prompt], params)[0].completions
            assert output.token_ids == expected.token_ids
            torch.testing.assert_close(output.log_probs, expected.logprobs, atol=1e-4, rtol=0)
            assert output.extra_fields["global_steps"] == step
            found.add(tuple(output.token_ids))
    assert len(found) == 3, "the weights differ"
