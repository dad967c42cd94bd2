"""/server_info and /model_info, which vLLM and SGLang both have, with the fields that trainers and SGLang's router
read."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import QueryParams

from fastgen import __version__
from fastgen.async_engine.client import AsyncGenerator
from fastgen.cli.serve.rollout import ModelRequest, TrainerRoutes
from fastgen.cli.serve.routes import Routes
from fastgen.cli.serve.service import Service
from fastgen.request import MAX_LOGPROBS

PATHS = ("/server_info", "/get_server_info", "/model_info", "/get_model_info")


class ServerInfo(TrainerRoutes):
    """The routes that describe the server."""

    def routes(self) -> Routes:
        return Routes(gets=dict.fromkeys(PATHS, self.get(self._describe)))

    async def _describe(self, engine: AsyncGenerator, body: ModelRequest, _: QueryParams) -> dict[str, Any]:
        state = await engine.call("transfer_state")
        model = self.service.choose(body.model)
        name, length, mode = model.name, model.facts.max_model_len, self.service.options.logprobs_mode
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


def routes(service: Service) -> Routes:
    return ServerInfo(service).routes()
