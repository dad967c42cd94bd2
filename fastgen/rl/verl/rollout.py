"""Rollout: the end of a replica in each of verl's workers, which sends the weights of the trainer to the engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterator
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout

from fastgen.rl.http import Json
from fastgen.rl.options import RemoteGeneratorOptions
from fastgen.rl.verl import NAME, check_version
from fastgen.rl.verl.replica import STORE_HOST
from fastgen.rl.weights import WEIGHTS, Named, RemoteUpdate, WeightSender, tensors_of

Form = tuple[str, torch.dtype, torch.Size, torch.device]
"""Name, dtype, shape and device of a tensor."""


class ActorClient:
    """A client of an EngineServer, in the place of an HTTP client."""

    host = STORE_HOST

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def post(self, path: str, body: Json, connections: object = None) -> Json:
        """Return the answer to a call. It cannot be ended, and so ignores `connections`."""
        found: Json = ray.get(self._actor.post.remote(path, body))
        return found


class Sender:
    """Sends weights to the actor of an engine.

    A stream of weights is read as it is sent. Only the first one is read before: names, dtypes and shapes of the
    tensors have to be known beforehand, and later streams have the same.
    """

    def __init__(self, actor: Any) -> None:
        options = RemoteGeneratorOptions(f"http://{STORE_HOST}", replace_group=True)
        self._weights = WeightSender(ActorClient(actor), options, sends=True)  # from a rank that need not be rank 0
        self._forms: list[Form] | None = None

    def send(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights of the engine. Requests that run continue with the new ones."""
        if self._forms is None:
            named = tensors_of(stream)
            self._update(named)
            self._forms = [(name, tensor.dtype, tensor.shape, tensor.device) for name, tensor in named]
        else:
            self._update([(form[0], Turn(stream, form)) for form in self._forms])

    def _update(self, named: Named) -> None:
        self._weights.update(RemoteUpdate(WEIGHTS, named, {"version": None, "partial": False, "in_flight": "keep"}))


class Turn:
    """A tensor that is taken from a stream when it is sent, like a DTensor that is gathered then."""

    def __init__(self, stream: Iterator[tuple[str, Tensor]], form: Form) -> None:
        self._stream, self._form = stream, form
        _, self.dtype, self.shape, self.device = form

    def full_tensor(self) -> Tensor:
        """Return the next tensor of the stream. Raises ValueError if it is another one than in the last update."""
        name, tensor = next(self._stream, ("nothing", torch.empty(0)))
        if (name, tensor.dtype, tensor.shape) != self._form[:3]:
            raise ValueError(f"the trainer's weights have changed: {name} comes instead of {self._form[0]}")
        return tensor


class Rollout(BaseRollout):  # type: ignore[misc]
    """The rollout in a worker. Of the workers of a replica, the first one calls the engine; the others take part in
    gathering the weights."""

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        check_version()
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size
        rank = int(os.environ["RANK"])
        self._replica = rank // size if replica_rank == -1 else replica_rank
        self._leads = rank % size == 0
        self._sender: Sender | None = None
        self._actor: Any = None

    def _server(self) -> Any:
        """Return the actor of the engine, which is started after the workers."""
        if self._actor is None:
            self._actor = ray.get_actor(f"{NAME}_server_{self._replica}")
            self._sender = Sender(self._actor)
        return self._actor

    async def resume(self, tags: list[str]) -> None:
        """Take memory of the engine again. tags: "weights", "kv_cache" or both."""
        if self._leads and self.config.free_cache_engine:
            await self._server().wake_up.remote(tags)

    async def release(self) -> None:
        """Give the memory of the engine to the trainer."""
        if self._leads:
            await self._server().sleep.remote()

    async def update_weights(
        self,
        weights: Generator[tuple[str, Tensor], None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Send the weights of the trainer to the engine. All workers call this.

        weights: whole tensors by their Hugging Face names. Raises ValueError for sparse deltas, and for an adapter that
        is not merged.
        """
        if wire_format != "named_tensors":
            raise ValueError(
                f"the rollout 'fastgen' takes no weights as {wire_format!r}; change rollout.checkpoint_engine.backend"
            )
        if peft_config is not None:
            raise ValueError("the rollout 'fastgen' takes merged adapters; set actor_rollout_ref.model.lora.merge=True")
        if not self._leads:
            for _ in weights:
                pass
            return
        actor, device = self._server(), torch.cuda.current_device() if torch.cuda.is_available() else None
        assert self._sender is not None
        await asyncio.to_thread(_send, self._sender, weights, device)
        if global_steps is not None:
            await actor.set_global_steps.remote(global_steps)


def _send(sender: Sender, weights: Generator[tuple[str, Tensor], None, None], device: int | None) -> None:
    """Send weights, in a thread with the current device of the caller."""
    if device is not None:
        torch.cuda.set_device(device)
    sender.send(weights)
