"""fgserve as an inference server of datatrove 0.8, which starts it, waits until its model is loaded, and ends it:
`FastgenRunner(rollout, InferenceConfig("custom", "Qwen/Qwen3-8B"), writer, checkpoints_local_dir="checkpoints")`."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from typing import Any

import httpx
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.inference.servers import InferenceServer
from datatrove.pipeline.inference.types import InferenceError
from datatrove.utils.logging import logger

# fgserve, which also ends when the task is killed, so that the next attempt finds the GPU free.
PROGRAM = "from fastgen.processes.spawning import watch_parent; watch_parent(); "
PROGRAM += "from fastgen.cli.serve import command; raise SystemExit(command())"


class FastgenRunner(InferenceRunner):  # type: ignore[misc]
    """An InferenceRunner with a FastgenServer; the `server_type` of its config has no effect."""

    def _init_server(self, rank: int) -> FastgenServer:
        return FastgenServer(self.config, rank)


class FastgenServer(InferenceServer):  # type: ignore[misc]
    """A process of fgserve. `model_kwargs` are further flags of fgserve; `tp` is --tensor-parallel, `dp` --replicas."""

    def __init__(self, config: InferenceConfig, rank: int) -> None:
        super().__init__(config, rank)
        if config.pp > 1:
            raise ValueError("pp is more than 1, and fgserve has no pipeline parallelism; use tp")
        self._client = httpx.AsyncClient(timeout=config.request_timeout, limits=httpx.Limits())

    async def start_server(self) -> asyncio.subprocess.Process:
        config = self.config
        flags = {"port": self._port, "max-model-len": config.model_max_context}
        flags |= {"tensor-parallel": config.tp} if config.tp > 1 else {}
        flags |= {"replicas": config.dp} if config.dp > 1 else {}
        flags |= {name.replace("_", "-"): value for name, value in (config.model_kwargs or {}).items()}
        switches = {"True": "--{}", "False": "--no-{}"}
        arguments = [switches.get(str(value), "--{}={}").format(name, value) for name, value in flags.items()]
        program = [sys.executable, "-P", "-c", PROGRAM, config.model_name_or_path, "--no-access-log", *arguments]
        return await asyncio.create_subprocess_exec(*program, stdout=PIPE, stderr=STDOUT, limit=1 << 20)

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await self._client.aclose()

    async def is_ready(self) -> bool:
        return bool((await self._client.get(f"{self.get_base_url()}/ready")).status_code == 200)

    async def monitor_health(self) -> None:
        """Log what the server says until it ends, and raise RuntimeError with its last line."""
        log, last = self.server_logger(), ""
        assert self._server_process is not None
        async for line in self._server_process.stdout:
            last = line.decode(errors="replace").rstrip()
            log.info("%s", last) if log else logger.info("{}", last)
        raise RuntimeError(f"fgserve has ended with status {await self._server_process.wait()}: {last}")

    async def _make_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        path = "/v1/chat/completions" if self.config.use_chat else "/v1/completions"
        try:
            response = await self._client.post(self.get_base_url() + path, json=payload)
        except httpx.TransportError as error:
            raise ConnectionError(str(error)) from error  # which datatrove tries again
        status = response.status_code
        if status == 429 or status >= 500:  # it is full, or restarts its engine
            raise ConnectionError(f"fgserve answers {status}: {response.text}")
        if status != 200:
            raise InferenceError(None, f"BadRequestError: {response.text}", payload)  # the checkpoints keep these
        return dict(response.json())
