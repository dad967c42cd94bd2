"""All routes for trainers: our own, and those that trainers of other engines call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from fastgen import __version__
from fastgen.async_engine.client import AsyncGenerator
from fastgen.cli.serve.dialects.sglang import SglangEngine
from fastgen.cli.serve.dialects.vllm import VllmAdapters, VllmControl
from fastgen.cli.serve.rollout import ModelRequest, Rollout
from fastgen.cli.serve.routes import Post
from fastgen.cli.serve.service import Service
from fastgen.request import MAX_LOGPROBS


class Routes(Protocol):
    """Routes by their paths."""

    @property
    def posts(self) -> Mapping[str, Post]: ...

    @property
    def gets(self) -> Mapping[str, Callable[[Request], Awaitable[Response]]]: ...


class ServerInfo:
    """/server_info, which vLLM and SGLang both have, and /model_info, with the fields that trainers and SGLang's router
    read in either."""

    def __init__(self, rollout: Rollout, service: Service) -> None:
        self._service = service
        info = rollout.get(self._describe)
        self.posts: dict[str, Post] = {}
        self.gets = dict.fromkeys(("/server_info", "/get_server_info", "/model_info", "/get_model_info"), info)

    async def _describe(self, engine: AsyncGenerator, wanted: ModelRequest, _: QueryParams) -> dict[str, Any]:
        state = await engine.call("transfer_state")
        model = self._service.choose(wanted.model)
        name, length, mode = model.name, model.facts.max_model_len, self._service.options.logprobs_mode
        names = dict.fromkeys(("model_path", "tokenizer_path", "served_model_name"), name)
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "world_size")
        return {
            "vllm_config": {
                "model_config": {
                    "model": name,
                    "tokenizer": name,
                    "served_model_name": name,
                    "dtype": f"torch.{state['dtype']}",
                    "max_model_len": length,
                    "max_logprobs": MAX_LOGPROBS,
                    "logprobs_mode": mode,
                },
                "parallel_config": dict.fromkeys(sizes, 1),  # a server is one rank for a trainer, as at /get_world_size
                "lora_config": None,  # adapters are merged, and the next one cannot be loaded beside the last one
                "weight_transfer_config": {"backend": "nccl"} if state["nccl"] else None,
            },
            **names,
            "dtype": state["dtype"],
            "is_generation": True,
            "weight_version": str(state["weight_version"]),
            **dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size"), 1),
            "disaggregation_mode": "null",
            "version": f"fastgen {__version__}",
        }


def trainer_routes(service: Service) -> list[Routes]:
    """Return all routes for trainers. Later ones replace earlier ones of the same path, whose bodies they take, too."""
    rollout = Rollout(service)
    return [
        rollout,
        VllmControl(rollout, service.options),
        VllmAdapters(rollout),
        SglangEngine(rollout),
        ServerInfo(rollout, service),
    ]
