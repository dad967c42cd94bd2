"""The routes of a vLLM server that load and unload LoRA adapters, as prime-rl and SkyRL call them.

An adapter is merged into the weights: it holds for all requests, whichever model they name, and there is one at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from starlette.datastructures import QueryParams

from fastgen.async_engine.client import AsyncGenerator
from fastgen.cli.serve.checking import ApiError
from fastgen.cli.serve.rollout import ModelRequest, Rollout

CONFIG = "adapter_config.json"


class LoadRequest(ModelRequest):
    """A request to load an adapter from a folder that PEFT has saved, or to replace the one of this name."""

    without_effect = frozenset({"load_inplace"})
    neutral: ClassVar[Any] = {"in_memory": (False, "save the adapter in a folder: SkyRL's lora.sync_mode=disk")}

    lora_name: str
    lora_path: str


class UnloadRequest(ModelRequest):
    without_effect = frozenset({"lora_int_id"})

    lora_name: str


class VllmAdapters:
    """The routes of a service. posts: {path: post}."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._merged: dict[AsyncGenerator, tuple[str, int]] = {}  # name, and version of the weights with it
        load, unload = rollout.post(LoadRequest, self._load), rollout.post(UnloadRequest, self._unload)
        self.posts = {
            "/load_lora_adapter": load,
            "/skyrl/v1/load_lora_adapter": load,
            "/unload_lora_adapter": unload,
        }
        self.gets: dict[str, Any] = {}

    async def _load(self, engine: AsyncGenerator, wanted: LoadRequest, _: QueryParams) -> Any:
        with self._rollout.updating(engine):
            merged = await self._name(engine)
            if merged not in (None, wanted.lora_name):
                raise RuntimeError(f"one adapter is merged at a time; POST /unload_lora_adapter {merged!r} first")
            if not (Path(wanted.lora_path).expanduser() / CONFIG).is_file():  # which prime-rl tries again
                raise ApiError(404, f"there is no {CONFIG} in the folder {wanted.lora_path}", "lora_path", "not_found")
            version = await engine.call("read_adapter", wanted.lora_path, {"in_flight": "keep"})
            self._merged[engine] = wanted.lora_name, version
        return {"status": "ok", "weight_version": version}

    async def _unload(self, engine: AsyncGenerator, wanted: UnloadRequest, _: QueryParams) -> Any:
        with self._rollout.updating(engine):
            if await self._name(engine) != wanted.lora_name:
                raise ApiError(404, f"no adapter {wanted.lora_name!r} is merged", "lora_name", "not_found")
            version = await engine.call("update_adapter", None, in_flight="keep")
            del self._merged[engine]
        return {"status": "ok", "weight_version": version}

    async def _name(self, engine: AsyncGenerator) -> str | None:
        """Return the name of the adapter in the weights. None: there is none, also after another update."""
        name, version = self._merged.get(engine, (None, None))
        return name if version == (await engine.call("weight_state"))["weight_version"] else None
