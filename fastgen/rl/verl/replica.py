"""Replica: an engine of verl's rollout, and the Ray actor that it runs in."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_resource_name, get_visible_devices_keyword
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from fastgen import AsyncGenerator
from fastgen.rl.verl import NAME
from fastgen.rl.verl.gate import Gate
from fastgen.rl.verl.parameters import engine_arguments, logprobs_field, request_params

log = logging.getLogger(__name__)

STORE_HOST = "127.0.0.1"  # trainer and engine of a replica are on one machine


class EngineServer:
    """The actor of a replica: an AsyncGenerator, whose engine is a separate process.

    config: verl's configuration of the rollout. model: its configuration of the model. mode: how the engine shares the
    GPUs with the trainer. devices: value of CUDA_VISIBLE_DEVICES for the engine; "" leaves the variable as it is. rank:
    number of the replica.
    """

    def __init__(self, config: RolloutConfig, model: Any, mode: RolloutMode, devices: str, rank: int) -> None:
        if devices:
            os.environ[get_visible_devices_keyword()] = devices
        self._config: RolloutConfig = omega_conf_to_dataclass(config)
        self._mode, self._gate = mode, Gate()
        self._steps: int | None = None
        self._logprobs = logprobs_field(self._config)
        path = omega_conf_to_dataclass(model, dataclass_type=HFModelConfig).local_path
        self._engine = AsyncGenerator(path, **engine_arguments(self._config, rank))

    async def launch(self) -> None:
        """Start the engine, and wait until its model is loaded."""
        await self._engine.start()
        log.info("%s", self._engine.info.summary)

    # ------------------------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> TokenOutput:
        """Return the tokens that continue a prompt. Raises ValueError for images, video and audio."""
        if any(data is not None for data in (image_data, video_data, audio_data)):
            raise ValueError("the rollout 'fastgen' takes only text; use another rollout for images, video or audio")
        if not await self._gate.enter():
            return self._output([], [], "aborted")
        try:
            longest = self._engine.info.max_model_len
            params = request_params(self._config, sampling_params, len(prompt_ids), longest)
            output = await self._engine.generate([int(id) for id in prompt_ids], params)
        finally:
            self._gate.leave()
        (completion,) = output.completions
        if completion.error is not None or output.error is not None:
            raise RuntimeError(completion.error or output.error)
        reason = "aborted" if completion.finish_reason == "abort" else "completed"
        return self._output(completion.token_ids, getattr(completion, self._logprobs), reason)

    def _output(self, ids: list[int], logprobs: list[float], reason: str) -> TokenOutput:
        steps = {"global_steps": self._steps}
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason=reason, extra_fields=steps)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests, which return the tokens that they have. Later ones wait for `resume_generation`, or with
        `reject_request` return no tokens."""
        self._gate.close(reject_request)
        await self._engine.cut_off()
        await self._gate.empty()

    async def resume_generation(self) -> None:
        self._gate.open()

    # ------------------------------------------------------------------------------------ weights and memory

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a call of the rollout's RemoteGenerator, in the form of fgserve's routes."""
        call = self._engine.call
        if path == "/init_weight_group":
            limits = body["timeout"], body["bucket_bytes"], body["replace"]
            group: dict[str, Any] = await call("init_weight_group", STORE_HOST, body["backend"], body["gpu"], *limits)
            return group
        if path == "/close_weight_group":
            await call("close_weight_group", body["group"])
            return {}
        assert path == "/update_weights"
        options = {name: body[name] for name in ("version", "partial", "in_flight")}
        return {"weight_version": await call("receive_weights", body["group"], body["tensors"], options)}

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the number of the trainer's step, which outputs report."""
        self._steps = global_steps

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory of the engine again."""
        if self._mode != RolloutMode.STANDALONE:
            await self._engine.call("wake", tags)

    async def sleep(self) -> None:
        """Give the memory of the engine to the trainer. In hybrid mode the weights are dropped, since the trainer
        always sends new ones."""
        if self._config.free_cache_engine and self._mode != RolloutMode.STANDALONE:
            await self._engine.call("sleep", keep_weights=self._mode != RolloutMode.HYBRID)

    async def clear_kv_cache(self) -> None:
        """Empty the prefix cache. An update of the weights does it too."""
        await self._engine.call("sleep", "kv_cache")
        await self._engine.call("wake", "kv_cache")

    async def release_kv_cache(self) -> None:
        """Give the memory of the KV cache back for the time of an update."""
        if self._config.free_cache_engine:
            await self._engine.call("sleep", "kv_cache")

    async def resume_kv_cache(self) -> None:
        """Take the memory of the KV cache again."""
        if self._config.free_cache_engine:
            await self._engine.call("wake", "kv_cache")

    async def start_profile(self, **options: Any) -> None:
        log.warning("the rollout %r has no profiler; start_profile has no effect", NAME)

    async def stop_profile(self) -> None:
        log.warning("the rollout %r has no profiler; stop_profile has no effect", NAME)


def _place(worker: Any) -> tuple[str, str]:
    """Return the node and the GPU of a worker of verl, in which this runs."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get(get_resource_name(), [])
    return context.get_node_id(), ",".join(gpus)


class VerlReplica(RolloutReplica):  # type: ignore[misc]
    """An engine for the workers of one replica, which are on one machine.

    It has no HTTP server: `server_address` is the name of its actor, and agents reach it by `server_handle`.
    """

    async def launch_servers(self) -> None:
        """Start the actor and its engine on the machine and the GPUs of the workers. Raises ValueError for a replica on
        several machines, or with pipeline or data parallelism inside."""
        if self.nnodes > 1 or self.world_size != self.config.tensor_model_parallel_size:
            raise ValueError(
                "a replica of the rollout 'fastgen' has one machine and only tensor parallelism; "
                "set data_parallel_size and pipeline_model_parallel_size to 1, and tensor_model_parallel_size to at "
                "most the GPUs of a machine"
            )
        places = await asyncio.gather(*(worker.__ray_call__.remote(_place) for worker in self.workers))
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        devices = ",".join(device for _, device in places)
        name = f"{NAME}_server_{kind}{self.replica_rank}{self.name_suffix}"
        server = (
            ray.remote(EngineServer)
            .options(
                name=name,
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(places[0][0], soft=False),
            )
            .remote(self.config, self.model_config, self.rollout_mode, devices, self.replica_rank)
        )
        self.servers = [server]
        await server.launch.remote()
        self._server_handle, self._server_address = server, name
