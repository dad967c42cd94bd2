"""The HTTP application: OpenAI's routes and those for operators, with and without /v1, and their OpenAPI schema."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen import __version__
from fastgen.cli.serve import shapes
from fastgen.cli.serve.answers import GenerationResponse, error_response, json_response, limited
from fastgen.cli.serve.fields import Strict
from fastgen.cli.serve.models import ServedModel, Service
from fastgen.cli.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestT,
    TokenizeRequest,
    read_request,
)
from fastgen.cli.serve.tokens import detokenize, needed, tokenize, tokenizer_info

OPEN = ("/health", "/ready", "/metrics")  # routes without the API key
LARGE = 65536  # bytes; larger bodies are parsed in a thread
DISCARDED = 8  # multiple of the size limit that is read of a larger body, so that its client reads the response

PLACE = "#/components/schemas/"
REQUESTS: tuple[type[Strict], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_TEXT, _NAME = {"type": "string"}, {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _NAME, "code": _NAME},
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error", "content": {"application/json": {"schema": {"$ref": f"{PLACE}Error"}}}}
}


def make_app(service: Service) -> FastAPI:
    """Return the application of a service, which the caller runs and closes."""
    app = FastAPI(
        title="fgserve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, responses=ERRORS
    )
    routes = _Routes(service)
    app.include_router(routes.router(), prefix="/v1")
    app.include_router(routes.router(), include_in_schema=False)
    app.add_api_route("/v1/openapi.json", lambda: app.openapi(), include_in_schema=False)
    app.add_middleware(_KeyCheck, key=service.options.api_key)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(Exception, _internal_error)
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]
    return app


class _KeyCheck:
    """Middleware that refuses requests without the API key, if there is one."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if self._wanted is not None and scope["type"] == "http" and scope["path"].removeprefix("/v1") not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                message = "the API key is wrong or missing; send it as a bearer token"
                app = error_response(ApiError(401, message, code="invalid_api_key"), {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)


# ------------------------------------------------------------------------------------------------- errors


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the routing (404 or 405)."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    code, message = {
        404: ("not_found", f"there is no {path}; see /openapi.json"),
        405: ("method_not_allowed", f"{request.method} is not allowed at {path}"),
    }.get(error.status_code, (None, str(error.detail)))
    return error_response(ApiError(error.status_code, message, code=code), dict(error.headers or {}))


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # not read: the client has gone


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer an unexpected error, which uvicorn logs."""
    return error_response(ApiError(500, f"an internal error: {type(error).__name__}", code="internal_error"))


# ------------------------------------------------------------------------------------------------- routes


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter()
        posts: list[tuple[str, Callable[[Request], Awaitable[Response]], type[Strict], Any, dict[str, Any]]] = [
            ("/chat/completions", self.chat, ChatRequest, shapes.ChatCompletion, _stream_schema("ChatChunk")),
            ("/completions", self.completions, CompletionRequest, shapes.TextCompletion,
             _stream_schema("TextCompletion")),
            ("/tokenize", self.tokenize, TokenizeRequest, shapes.TokenizeReply, {}),
            ("/detokenize", self.detokenize, DetokenizeRequest, shapes.DetokenizeReply, {}),
        ]  # fmt: skip
        for path, handler, request, reply, content in posts:
            body = {"required": True, "content": {"application/json": {"schema": {"$ref": PLACE + request.__name__}}}}
            router.add_api_route(
                path,
                handler,
                methods=["POST"],
                response_model=None,
                responses={200: {"model": reply, "content": content}},
                openapi_extra={"requestBody": body},
            )
        gets: list[tuple[str, Callable[..., Awaitable[Response]], Any]] = [
            ("/models", self.models, shapes.ModelList),
            ("/models/{name:path}", self.model, shapes.ModelCard),
            ("/tokenizer_info", self.tokenizer_info, shapes.TokenizerInfo),
            ("/health", self.health, shapes.ServerStatus),
            ("/ready", self.ready, shapes.ServerStatus),
        ]
        for path, handler, reply in gets:
            router.add_api_route(path, handler, response_model=None, responses={200: {"model": reply}})
        text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": _TEXT}}}}
        router.add_api_route("/metrics", self.metrics, response_class=Response, responses=text)
        return router

    async def chat(self, request: Request) -> Response:
        return GenerationResponse(self._service, await self._read(ChatRequest, request))

    async def completions(self, request: Request) -> Response:
        return GenerationResponse(self._service, await self._read(CompletionRequest, request))

    async def tokenize(self, request: Request) -> Response:
        wanted = await self._read(TokenizeRequest, request)
        return json_response(await asyncio.to_thread(tokenize, wanted, self._service.choose(wanted.model).facts))

    async def detokenize(self, request: Request) -> Response:
        wanted = await self._read(DetokenizeRequest, request)
        return json_response(await asyncio.to_thread(detokenize, wanted, self._service.choose(wanted.model).facts))

    async def tokenizer_info(self, model: str | None = None) -> Response:
        return json_response(tokenizer_info(needed(self._service.choose(model).facts.tokenizer)))

    async def models(self) -> Response:
        """List the models that are ready."""
        ready = [model for model in self._service.models.values() if model.ready]
        return json_response({"object": "list", "data": [self._card(model) for model in ready]})

    async def model(self, name: str) -> Response:
        """Describe the model that a request with this `model` would use."""
        return json_response(self._card(self._service.choose(name)))

    def _card(self, model: ServedModel) -> shapes.ModelCard:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "fastgen",
            "max_model_len": model.facts.max_model_len,
        }

    async def health(self) -> Response:
        """Answer 200 while all engines are idle or make progress."""
        if (trouble := self._service.trouble) is not None:
            raise ApiError(503, trouble, code="unhealthy")
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """Answer 200 while every model accepts requests."""
        for model in self._service.models.values():
            model.check_ready()
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _read(self, kind: type[RequestT], request: Request) -> RequestT:
        """Read and check the body of a request. Raises ApiError."""
        limit = int(self._service.options.max_body_mb * 1e6)
        body, size = bytearray(), 0
        async with limited(self._service):
            async for piece in request.stream():
                size += len(piece)
                if size <= limit:
                    body += piece
                elif size > DISCARDED * limit:
                    break
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes; send less", code="request_too_large")
        if size > LARGE:
            return await asyncio.to_thread(read_request, kind, bytes(body))
        return read_request(kind, bytes(body))


# ------------------------------------------------------------------------------------------------- schema


def _stream_schema(chunk: str) -> dict[str, Any]:
    """Return the schema of a stream: events with a chunk or with the error that ends the stream, then [DONE]."""
    content = {"anyOf": [{"$ref": PLACE + chunk}, {"$ref": f"{PLACE}Error"}]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    event = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}
    return {"text/event-stream": {"itemSchema": event}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the application's schema, with what FastAPI does not see: bodies that routes read, chunks and errors."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        for request in REQUESTS:
            schema = request.model_json_schema(ref_template=f"{PLACE}Request{{model}}")
            parts = schema.pop("$defs", {})
            schemas.update({f"Request{name}": part for name, part in parts.items()}, **{request.__name__: schema})
        chunk = TypeAdapter(shapes.ChatChunk).json_schema(ref_template=f"{PLACE}{{model}}")
        schemas.update(chunk.pop("$defs"), ChatChunk=chunk, Error=ERROR)
        app.openapi_schema = described
    return app.openapi_schema
