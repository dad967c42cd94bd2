"""The routes for a trainer (`--rollout`): complete outputs as in Python, new weights, pauses and sleep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastgen.async_engine.client import AsyncGenerator, EngineError, EventStream
from fastgen.cli.serve.http_responses import json_bytes, json_response, limited
from fastgen.cli.serve.routes import Handler, Post, Routes
from fastgen.cli.serve.sampling_fields import INT32
from fastgen.cli.serve.service import Service
from fastgen.cli.serve.validation import ApiError, Items, Some, Strict, wrong
from fastgen.option import ITEMS
from fastgen.processes.errors import DepartedError
from fastgen.request import SAMPLING_OPTIONS, Completion, Event
from fastgen.rl.bodies import completion_of
from fastgen.rl.options import MAX_SECONDS

Tags = Some[Literal["weights", "kv_cache"]]
Treatment = Literal["error", "keep", "recompute", "abort"]
_Span = Annotated[tuple[int, int, int], Field(strict=False)]
_Pair = Annotated[tuple[int, int], Field(strict=False)]
_Tensor = Annotated[tuple[str, str, list[Annotated[int, Field(ge=0)]]], Field(strict=False)]  # since JSON has no tuples


class ModelRequest(Strict):
    """A request with no other field than the model that it is for."""

    model: str | None = None


class Resumed(Strict):
    """A completion to continue, with the fields of fastgen.Completion."""

    index: int = Field(ge=0, le=INT32)
    token_ids: Items[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    weight_versions: list[_Span] = Field(default_factory=list)
    recomputed: list[_Pair] = Field(default_factory=list)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    logprobs: Items[float]
    untruncated_logprobs: Items[float]
    raw_logprobs: Items[float]
    top_logprobs: Items[dict[str, float]] | None = None
    sampling_mask: Items[Items[int]] | None = None


class GenerateRequest(ModelRequest):
    """A request to /generate, with the prompt and params of `Generator.generate`.

    id: name of the request for /abort. resume: a completion of the prompt to continue. priority: see fastgen.Request.
    stream: the response is a line of JSON for each event, as it arrives, instead of the output.
    """

    prompt: str | Items[int] | list[dict[str, Any]] | dict[str, Any]
    params: dict[str, Any] | None = None
    id: str | None = None
    resume: Resumed | None = None
    priority: int = Field(0, ge=-INT32, le=INT32)
    stream: bool = False

    @property
    def resumed(self) -> Completion | None:
        """The completion to continue. Raises ValueError for a key of its alternatives that is no id."""
        return None if self.resume is None else completion_of(dict(self.resume))


class AbortRequest(ModelRequest):
    """A request to /abort. ids: of requests to /generate; None: all requests to the model."""

    ids: list[str] | None = None


class ScoreRequest(ModelRequest):
    """A request to /score, with the arguments of `Generator.score`."""

    sequences: Items[str | Items[int] | list[dict[str, Any]] | dict[str, Any]]
    start: int | Items[int] = 0
    temperature: FiniteFloat = 1.0
    logprobs: int | None = None


class GroupRequest(ModelRequest):
    """A request to /init_weight_group.

    backend: None to choose by `gpu`, the UUID of the sender's GPU. timeout: seconds without progress after which an
    update fails. bucket_bytes: total size of the tensors that are sent together. replace: end an existing group.
    """

    backend: Literal["gloo", "nccl"] | None = None
    gpu: str | None = None
    timeout: FiniteFloat = Field(gt=0, le=MAX_SECONDS)
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
    in_flight: Treatment = "error"
    requantize: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> UpdateRequest:
        if (self.folder is None) == (self.group is None):
            raise wrong("folder", "or group is required, and not both", "missing_required_parameter")
        if (self.group is None) != (self.tensors is None):
            raise wrong("tensors", "belongs to group, which requires it")
        return self


class AdapterRequest(ModelRequest):
    """A request to /update_adapter. Without a group, the weights without an adapter are restored. tensors: as of
    UpdateRequest. See `Generator.update_adapter` for the other fields."""

    group: str | None = None
    tensors: list[_Tensor] | None = None
    config: dict[str, Any] | None = None
    version: int | None = None
    in_flight: Treatment = "error"

    @model_validator(mode="after")
    def _check_source(self) -> AdapterRequest:
        if (self.group is None) != (self.tensors is None):
            raise wrong("tensors", "belongs to group, which requires it")
        return self


class SleepRequest(ModelRequest):
    tags: Tags | None = None
    keep_weights: bool = True


class WakeRequest(ModelRequest):
    tags: Tags | None = None


EngineCall = Callable[[AsyncGenerator, Any, QueryParams], Awaitable[Any]]
"""A function that answers a checked request and its query by calls of its model's engine."""


DICTS: dict[str, Any] = {"logit_bias": dict[str, float], "repetition_detection": dict[str, int]}
"""The types of sampling parameters that are dicts."""


def sampling_fields(names: Iterable[str]) -> dict[str, Any]:
    """Return fields for pydantic.create_model: sampling parameters with their types. The engine checks their bounds."""
    fields = {}
    for name in names:
        kind = SAMPLING_OPTIONS[name].kind
        if name in ITEMS:
            items, _ = ITEMS[name]
            kind = DICTS.get(name, Items[str] if items is str else Items[int])
            kind = str | kind if name == "stop" else kind
        fields[name] = kind | None, None
    return fields


class TrainerRoutes:
    """Base class of routes for a trainer, each of which calls the engine of a model."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def post(self, kind: type[ModelRequest], call: EngineCall, *, bodiless: bool = False, timed: bool = False) -> Post:
        """Return a post that a call answers. timed: it is subject to the time limit of requests."""
        return Post(kind, partial(self._answer, call, timed), bodiless=bodiless)

    def get(self, call: EngineCall) -> Handler:
        """Return a handler of GETs that a call answers. Their query may name the model."""

        async def handle(request: Request) -> Response:
            return await self._answer(call, False, ModelRequest(model=request.query_params.get("model")), request)

        return handle

    def check_samples(self, samples: Any) -> None:
        """Raise ValueError if one request asks for too many samples."""
        most = self.service.options.max_queued_requests
        if isinstance(samples, int) and samples > most:
            raise ValueError(f"n is {samples}; one request may have {most} samples (max_queued_requests)")

    async def _answer(self, call: EngineCall, timed: bool, body: Any, request: Request) -> Response:
        """Return the response with the result of a call. If the client disconnects, the call ends if it can be
        ended."""
        engine = self.service.choose(body.model).engine
        try:
            async with limited(self.service, request.scope, request.receive, timed=timed):
                result = await call(engine, body, request.query_params)
        except (ValueError, TypeError, OverflowError, RuntimeError, OSError) as error:
            raise call_error(error) from None
        if isinstance(result, Response):
            return result
        return json_response({} if result is None else result)

    @contextmanager
    def updating(self, engine: AsyncGenerator) -> Iterator[None]:
        """Mark the weights of an engine as being updated. Raises RuntimeError if they are already."""
        if engine in self.service.updating:
            raise RuntimeError("another update of the weights runs; send this one when it has ended")
        self.service.updating.add(engine)
        try:
            yield
        finally:
            self.service.updating.discard(engine)

    async def reset_weights(self, engine: AsyncGenerator) -> int:
        """Set all weights to 0, so that a check after an update finds those that it left out. Return their version."""
        with self.updating(engine):
            version: int = await engine.call("reset_weights")
        return version


def differing(checksums: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the names of weights whose checksums differ, or that only one of the mappings has."""
    return sorted({name for name, _ in checksums.items() ^ others.items()})


class RolloutRoutes(TrainerRoutes):
    """Our own routes for a trainer. /pause, /resume and /sleep are among vLLM's, whose bodies they take too."""

    def routes(self) -> Routes:
        posts = {
            "/generate": self.post(GenerateRequest, self._generate, timed=True),
            "/init_weight_group": self.post(GroupRequest, self._init_group),
            "/close_weight_group": self.post(
                CloseRequest, lambda engine, body, _: engine.call("close_weight_group", body.group)
            ),
            "/abort": self.post(AbortRequest, lambda engine, body, _: engine.cut_off(body.ids)),
            "/score": self.post(ScoreRequest, _score),
            "/fleet_seed": self.post(ModelRequest, self._fleet_seed),
            "/update_weights": self.post(UpdateRequest, self._update),
            "/update_adapter": self.post(AdapterRequest, self._update_adapter),
            "/wake": self.post(WakeRequest, lambda engine, body, _: engine.call("wake", body.tags)),
        }
        return Routes(posts, {"/weight_version": self.get(weight_version)})

    async def _generate(self, engine: AsyncGenerator, body: GenerateRequest, _: QueryParams) -> Any:
        self.check_samples((body.params or {}).get("n"))
        if body.stream:
            submit = partial(engine.submit, [body.prompt], body.params, resume=body.resumed, priority=body.priority)
            return EventResponse(self.service, submit)
        return await engine.generate(body.prompt, body.params, body.id, body.resumed, body.priority)

    async def _fleet_seed(self, _: AsyncGenerator, body: ModelRequest, __: QueryParams) -> dict[str, int]:
        return {"seed": self.service.choose(body.model).fleet_seed()}

    async def _init_group(self, engine: AsyncGenerator, body: GroupRequest, _: QueryParams) -> Any:
        arguments = body.backend, body.gpu, body.timeout, body.bucket_bytes, body.replace
        return await engine.call("init_weight_group", self.service.options.host, *arguments)

    async def _update(self, engine: AsyncGenerator, body: UpdateRequest, _: QueryParams) -> dict[str, int]:
        fields = "version", "partial", "in_flight", "requantize"
        options = {field: getattr(body, field) for field in fields}
        with self.updating(engine):
            if body.folder is not None:
                version = await engine.call("update_weights", body.folder, **options)
            else:
                version = await engine.call("receive_weights", body.group, body.tensors, options)
        return {"weight_version": version}

    async def _update_adapter(self, engine: AsyncGenerator, body: AdapterRequest, _: QueryParams) -> dict[str, int]:
        options = {"version": body.version, "in_flight": body.in_flight}
        with self.updating(engine):
            if body.group is None:
                version = await engine.call("update_adapter", None, None, **options)
            else:
                version = await engine.call("receive_adapter", body.group, body.tensors, body.config, options)
        return {"weight_version": version}


class EventResponse(Response):
    """The response to a streamed request: each event is a line of JSON. An error after the beginning is the last line,
    {"status": ..., "error": ...}; earlier errors are answered by the application's handlers.

    open_stream: function that submits the request.
    """

    content_type = b"application/x-ndjson"
    end = b""  # last bytes of a complete response

    def __init__(self, service: Service, open_stream: Callable[[], EventStream]) -> None:
        super().__init__()
        self._service, self._open = service, open_stream

    def lines(self, events: list[Event]) -> bytes:
        """Return what is sent for new events."""
        return b"".join(json_bytes(event) + b"\n" for event in events)

    def error_line(self, failure: ApiError) -> bytes:
        return json_bytes({"status": failure.status, **failure.body}) + b"\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with limited(self._service, scope, receive):
                with self._open() as stream:
                    async for events in stream:
                        if not begun:
                            headers = [(b"content-type", self.content_type), (b"cache-control", b"no-cache")]
                            await send({"type": "http.response.start", "status": 200, "headers": headers})
                        begun = True
                        await send({"type": "http.response.body", "body": self.lines(events), "more_body": True})
                await send({"type": "http.response.body", "body": self.end})
        except (ApiError, ValueError, TypeError, OverflowError, RuntimeError) as error:
            failure = error if isinstance(error, ApiError) else call_error(error)
            if not begun:
                raise failure from None
            await send({"type": "http.response.body", "body": self.error_line(failure)})
        except ClientDisconnect:
            if not begun:
                raise


def call_error(error: Exception) -> ApiError:
    """Return the ApiError of the routes for trainers for an error of an engine, where a RuntimeError is a conflict with
    the state of the engine."""
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, EngineError):
        return ApiError(500, message, code="engine_error")
    if isinstance(error, ValueError | TypeError | OverflowError):
        return ApiError(400, message, code="invalid_value")
    if isinstance(error, DepartedError):
        return ApiError(504, message, code="departed")
    return ApiError(409, message, code="conflict")


async def _score(engine: AsyncGenerator, body: ScoreRequest, _: QueryParams) -> dict[str, Any]:
    scored = await engine.call("score", body.sequences, body.start, body.temperature, logprobs=body.logprobs)
    if body.logprobs is None:
        return {"logprobs": scored}
    logprobs, alternatives = scored
    return {"logprobs": logprobs, "top_logprobs": alternatives}


async def sleep(engine: AsyncGenerator, body: SleepRequest, _: QueryParams) -> dict[str, int]:
    """Answer /sleep."""
    tags = {} if body.tags is None else {"tags": body.tags}
    return {"freed": await engine.call("sleep", **tags, keep_weights=body.keep_weights)}


async def weight_version(engine: AsyncGenerator, *_: Any) -> Any:
    """Answer /weight_version."""
    return await engine.call("weight_state")


def routes(service: Service) -> Routes:
    return RolloutRoutes(service).routes()
