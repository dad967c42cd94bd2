"""The routes for a trainer (`--rollout`): complete outputs as in Python, new weights, pauses and sleep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from fastgen.async_engine.client import AsyncGenerator, EngineError
from fastgen.cli.serve.answers import limited
from fastgen.cli.serve.checking import ApiError
from fastgen.cli.serve.fields import Items, Some, Strict, wrong
from fastgen.cli.serve.service import Service

Tags = Some[Literal["weights", "kv_cache"]]
_Tensor = Annotated[tuple[str, str, list[Annotated[int, Field(ge=0)]]], Field(strict=False)]  # since JSON has no tuples


class ModelRequest(Strict):
    """A request with no other field than the model that it is for."""

    model: str | None = None


class GenerateRequest(ModelRequest):
    """A request to /generate, with the prompt and params of `Generator.generate`."""

    prompt: str | Items[int] | list[dict[str, Any]] | dict[str, Any]
    params: dict[str, Any] | None = None


class GroupRequest(ModelRequest):
    """A request to /init_weight_group.

    backend: None to choose by `gpu`, the UUID of the sender's GPU. timeout: seconds without progress after which an
    update fails. bucket_bytes: total size of the tensors that are sent together. replace: end an existing group.
    """

    backend: Literal["gloo", "nccl"] | None = None
    gpu: str | None = None
    timeout: FiniteFloat = Field(gt=0)
    bucket_bytes: int = Field(gt=0)
    replace: bool = False


class CloseRequest(ModelRequest):
    """A request to /close_weight_group. group: key of the group; None for any group."""

    group: str | None = None


class UpdateRequest(ModelRequest):
    """A request to /update_weights, from a folder or from a group whose sender sends tensors in the meantime.

    tensors: (name, dtype, shape) of each tensor of a group. See `Generator.update_weights` for the other fields.
    """

    folder: str | None = None
    group: str | None = None
    tensors: list[_Tensor] | None = None
    version: int | None = None
    partial: bool = False
    in_flight: Literal["error", "keep", "recompute", "abort"] = "error"
    requantize: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> UpdateRequest:
        if (self.folder is None) == (self.group is None):
            raise wrong("folder", "or group is required, and not both", "missing_required_parameter")
        if (self.group is None) != (self.tensors is None):
            raise wrong("tensors", "belongs to group, which requires it")
        return self


class SleepRequest(ModelRequest):
    tags: Tags | None = None
    keep_weights: bool = True


class WakeRequest(ModelRequest):
    tags: Tags | None = None


Call = Callable[[AsyncGenerator, Any], Awaitable[Any]]
"""A function that answers a checked request by calls of its model's engine."""


class Rollout:
    """The routes for a trainer. posts: {path: (class of its bodies, function that answers them)}."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._updating: set[AsyncGenerator] = set()
        calls: dict[str, tuple[type[Strict], Call]] = {
            "/generate": (GenerateRequest, self._generate),
            "/init_weight_group": (GroupRequest, self._init_group),
            "/close_weight_group": (
                CloseRequest,
                lambda engine, wanted: engine.call("close_weight_group", wanted.group),
            ),
            "/update_weights": (UpdateRequest, self._update),
            "/pause": (ModelRequest, lambda engine, _: engine.pause()),
            "/resume": (ModelRequest, lambda engine, _: engine.resume()),
            "/sleep": (SleepRequest, _sleep),
            "/wake": (WakeRequest, lambda engine, wanted: engine.call("wake", wanted.tags)),
        }
        self.posts = {path: (kind, partial(self._answer, call)) for path, (kind, call) in calls.items()}

    async def weight_version(self, request: Request) -> Response:
        wanted = ModelRequest(model=request.query_params.get("model"))
        return await self._answer(lambda engine, _: engine.call("weight_state"), wanted, request)

    async def _answer(self, call: Call, wanted: Any, request: Request) -> Response:
        """Return the response with the result of a call. If the client disconnects, the call ends if it can be ended.
        Only /generate is subject to the time limit of requests."""
        engine = self._service.choose(wanted.model).engine
        try:
            async with limited(self._service, request.receive, timed=isinstance(wanted, GenerateRequest)):
                result = await call(engine, wanted)
        except EngineError as error:
            raise ApiError(500, str(error), code="engine_error") from None
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            message = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if isinstance(error, ValueError | TypeError):
                raise ApiError(400, message, code="invalid_value") from None
            raise ApiError(409, message, code="conflict") from None
        body = to_json({} if result is None else result, inf_nan_mode="constants")  # as Python's json module reads them
        return Response(body, media_type="application/json")

    async def _generate(self, engine: AsyncGenerator, wanted: GenerateRequest) -> Any:
        samples, most = (wanted.params or {}).get("n"), self._service.options.max_queued_requests
        if isinstance(samples, int) and samples > most:
            raise ValueError(f"n is {samples}; one request may have {most} samples (max_queued_requests)")
        return await engine.generate(wanted.prompt, wanted.params)

    async def _init_group(self, engine: AsyncGenerator, wanted: GroupRequest) -> Any:
        arguments = wanted.backend, wanted.gpu, wanted.timeout, wanted.bucket_bytes, wanted.replace
        return await engine.call("init_weight_group", self._service.options.host, *arguments)

    async def _update(self, engine: AsyncGenerator, wanted: UpdateRequest) -> dict[str, int]:
        if engine in self._updating:
            raise RuntimeError("another update of the weights runs; send this one when it has ended")
        fields = "version", "partial", "in_flight", "requantize"
        options = {field: getattr(wanted, field) for field in fields}
        self._updating.add(engine)
        try:
            if wanted.folder is not None:
                version = await engine.call("read_weights", wanted.folder, options)
            else:
                version = await engine.call("receive_weights", wanted.group, wanted.tensors, options)
        finally:
            self._updating.discard(engine)
        return {"weight_version": version}


async def _sleep(engine: AsyncGenerator, wanted: SleepRequest) -> dict[str, int]:
    tags = {} if wanted.tags is None else {"tags": wanted.tags}
    return {"freed": await engine.call("sleep", **tags, keep_weights=wanted.keep_weights)}
