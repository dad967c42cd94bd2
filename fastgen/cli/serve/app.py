"""The routes of fgserve: OpenAI's, with and without /v1, and what runs a server."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen import __version__
from fastgen.cli.serve import shapes
from fastgen.cli.serve.answers import GenerationResponse, error_response, json_response, limited
from fastgen.cli.serve.fields import Strict
from fastgen.cli.serve.models import ServedModel, Service
from fastgen.cli.serve.openapi import ERRORS, body, describe, stream
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

OPEN = ("/health", "/ready", "/metrics")  # that need no key
LARGE = 65536  # bytes of a body that is read in a thread
DISCARDED = 8  # times the limit of a body: so much is taken of one that is too large, that its client reads the answer


def make_app(service: Service) -> FastAPI:
    """The application of a service, which whoever runs it has to `run` and to `close`."""
    app = FastAPI(
        title="fgserve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, responses=ERRORS
    )
    routes = _Routes(service)
    app.include_router(routes.router(), prefix="/v1")
    app.include_router(routes.router(), include_in_schema=False)
    app.add_api_route("/v1/openapi.json", lambda: app.openapi(), include_in_schema=False)
    app.add_middleware(_Guard, key=service.options.api_key)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unforeseen)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    return app


class _Guard:
    """Lets requests with the key through, where one is set."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._wanted is None or scope["type"] != "http" or scope["path"].removeprefix("/v1") in OPEN:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "the API key is wrong or missing; send it as a bearer token", code="invalid_api_key")
        await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Of the routing: 404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    told = {
        404: f"there is no {path}; see /openapi.json",
        405: f"{request.method} is not allowed at {path}",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = told.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, code=code), dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    """The client went away before it had sent all of its request; nobody reads this."""
    return Response(status_code=400)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """A bug of ours, which the log tells of."""
    return error_response(ApiError(500, f"an internal error: {type(error).__name__}", code="internal_error"))


# ------------------------------------------------------------------------------------------------- routes


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter()
        posts: list[tuple[str, Callable[[Request], Awaitable[Response]], type[Strict], Any, dict[str, Any]]] = [
            ("/chat/completions", self.chat, ChatRequest, shapes.ChatCompletion, stream("ChatChunk")),
            ("/completions", self.completions, CompletionRequest, shapes.TextCompletion, stream("TextCompletion")),
            ("/tokenize", self.tokenize, TokenizeRequest, shapes.TokenizeReply, {}),
            ("/detokenize", self.detokenize, DetokenizeRequest, shapes.DetokenizeReply, {}),
        ]
        for path, handler, wanted, told, content in posts:
            router.add_api_route(
                path,
                handler,
                methods=["POST"],
                response_model=None,
                responses={200: {"model": told, "content": content}},
                openapi_extra=body(wanted),
            )
        gets: list[tuple[str, Callable[..., Awaitable[Response]], Any]] = [
            ("/models", self.models, shapes.ModelList),
            ("/models/{name:path}", self.model, shapes.ModelCard),
            ("/tokenizer_info", self.tokenizer_info, shapes.TokenizerInfo),
            ("/health", self.health, shapes.ServerStatus),
            ("/ready", self.ready, shapes.ServerStatus),
        ]
        for path, handler, told in gets:
            router.add_api_route(path, handler, response_model=None, responses={200: {"model": told}})
        text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
        router.add_api_route("/metrics", self.metrics, response_class=Response, responses=text)  # type: ignore[arg-type]
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
        """The models that have been loaded."""
        loaded = [model for model in self._service.models.values() if model.ready]
        return json_response({"object": "list", "data": [self._told(model) for model in loaded]})

    async def model(self, name: str) -> Response:
        """One of them, chosen as a request's `model` chooses."""
        return json_response(self._told(self._service.choose(name)))

    def _told(self, model: ServedModel) -> shapes.ModelCard:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "fastgen",
            "max_model_len": model.facts.max_model_len,
        }

    async def health(self) -> Response:
        """Whether the engines are idle or getting on."""
        if (trouble := self._service.trouble) is not None:
            raise ApiError(503, trouble, code="unhealthy")
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """Whether every model takes requests."""
        for model in self._service.models.values():
            model.check_ready()
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _read(self, kind: type[RequestT], request: Request) -> RequestT:
        async with limited(self._service):
            body = await _read_body(request, int(self._service.options.max_body_mb * 1e6))
        if len(body) > LARGE:
            return await asyncio.to_thread(read_request, kind, body)
        return read_request(kind, body)


async def _read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError where it is larger than `limit`, in bytes."""
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            body += piece
        elif size > DISCARDED * limit:
            break
    if size > limit:
        raise ApiError(413, f"the body is larger than {limit} bytes; send less", code="request_too_large")
    return bytes(body)
