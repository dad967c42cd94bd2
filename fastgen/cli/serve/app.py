"""The HTTP application: the routes of all APIs and for operators, with and without /v1, and their OpenAPI schema."""

from __future__ import annotations

import hmac
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen import __version__
from fastgen.cli.command import note
from fastgen.cli.serve.engine_input import GenerationRequest, detokenize, needed, tokenize, tokenizer_info
from fastgen.cli.serve.http_responses import (
    GenerationResponse,
    as_api_error,
    compute,
    error_response,
    given_id,
    is_anthropic,
    json_response,
    limited,
)
from fastgen.cli.serve.openai_input import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from fastgen.cli.serve.options import LOCAL, ServerOptions
from fastgen.cli.serve.routes import ANTHROPIC, MODULES, TRAINER_MODULES, Answerer, Post, Routes, RouteTable
from fastgen.cli.serve.service import ServedModel, Service
from fastgen.cli.serve.validation import ApiError, FieldPolicy, Strict
from fastgen.cli.serve.web_pages import chat_page, docs_page

PROBES = ("/health", "/ping", "/ready")
OPEN = ("/", "/docs", "/openapi.json", "/metrics", *PROBES)  # routes that need no API key
TWICE = re.compile("/{2,}")
HOST = re.compile(r"[\w.~!$&'()*+,;=%:\[\]-]*", re.ASCII)  # the characters of a host and a port
ABSOLUTE = re.compile(rb"https?://([^/]+)(/.*)?", re.IGNORECASE | re.DOTALL)
LARGE = 65536  # size in bytes of a body above which its work is large
# A body above the size limit is read up to this multiple of the limit, so that its client receives the error.
DISCARDED = 8


def make_app(service: Service, engines: Callable[[], Awaitable[list[str]]] | None = None) -> Starlette:
    """Return the application of a service. The caller runs and closes the service.

    engines: function that returns the addresses of replicas, for the application at their common address. It lists them
    at /engines instead of serving the routes for a trainer, who has to call each replica.
    """
    options = service.options
    routes, origins = _Routes(service, engines), options.origins
    middleware = [Middleware(_Report, service=service), Middleware(_Guard, options=options)]
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
        middleware.insert(1, cors)
    pages = [Route("/", chat_page(options.ignore_limits)), Route("/docs", docs_page)] if options.page else []
    app = Starlette(
        routes=pages + [route for prefix in ("/v1", "") for route in routes.under(prefix)],
        middleware=middleware,
        exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), _handle),
    )
    app.router.redirect_slashes = False
    return app


class _Report:
    """Middleware that gives each request an id (its X-Request-Id or a new one), counts its status and logs it, unless
    --no-access-log is set or it is a successful probe. The status 499 means that the client left before its answer was
    complete."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["path"] = plain_path(scope["path"])
        name = given_id(scope) or uuid.uuid4().hex
        start, status = time.monotonic(), 500

        async def receive_watched() -> Message:
            nonlocal status
            message = await receive()
            if message["type"] == "http.disconnect":
                status = 499
            return message

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start" and status != 499:
                status = message["status"]
                if self._service.options.replicas is None:  # Ray returns the id itself
                    message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._app(scope, receive_watched, send_named)
        finally:
            self._service.metrics.responses.labels(status).inc()
            probe = status == 200 and scope["path"].removeprefix("/v1") in (*PROBES, "/metrics")
            if self._service.options.access_log and not probe:
                path = quote(scope["path"])  # without line breaks, and never with the query
                host, _ = scope.get("client") or ("unknown", 0)
                end = f"client={host} id={name} {scope.get('meter', '')}".rstrip()
                moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                seconds = time.monotonic() - start
                note("fgserve", f"{moment} {scope['method']} {path} {status} {seconds:.3f}s {end}")


def plain_path(path: str) -> str:
    """Return a path without doubled and trailing slashes, but with the name of a model as it is."""
    before, models, name = path.partition("/models/")
    plain = TWICE.sub("/", f"/{before}").rstrip("/")
    return plain + models + name if models else plain or "/"


def read_head(scope: Scope) -> None:
    """Check what h11 leaves open in the head of a request, and bring a target in absolute form into the usual form, in
    which its host replaces the header's (RFC 9112, 3.2.2). Raises ApiError, after which the connection must close."""
    headers, target = Headers(scope=scope), scope.get("raw_path") or b"/"
    wrong = ""
    if "transfer-encoding" in headers and ("content-length" in headers or scope.get("http_version") == "1.0"):
        wrong = "Transfer-Encoding goes without Content-Length, and needs HTTP/1.1"  # RFC 9112, 6.1
    elif not HOST.fullmatch(headers.get("host", "")):
        wrong = "the header Host is not a host"
    elif not target.startswith(b"/") and target != b"*":
        match = ABSOLUTE.fullmatch(target)
        if match is None or not HOST.fullmatch(match[1].decode("latin-1")):
            wrong = "the target of the request is neither a path nor a URL of this server"
        else:
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope["headers"], scope["raw_path"] = [*others, (b"host", match[1])], match[2] or b"/"
            scope["path"] = plain_path(unquote(scope["raw_path"].decode("latin-1")))
    if wrong:
        raise ApiError(400, wrong, code="malformed_request")


class _Guard:
    """Middleware that refuses requests with a malformed head, requests without the API key, if there is one, and posts
    from other servers' web pages.

    A browser sends a page's post to any server, even a local one. It asks the server first (CORS) only for content
    types such as JSON, and not at all if the page's own host name resolves to this server, which the owner of the name
    can arrange (DNS rebinding). Therefore a server without a key that only this machine reaches accepts posts only from
    pages at localhost or at an IP address. A browser sends no Origin header with a page's GET to its own host name, so
    these GETs are refused by their Host header.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._origins = app, options.origins
        self._rebindable = options.api_key is None and options.host in LOCAL
        # With replicas, Ray decides where the server listens.
        self._named = self._rebindable and options.replicas is None and "*" not in options.origins
        self._key = None if options.api_key is None else options.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            read_head(scope)
        except ApiError as wrong:
            return await error_response(wrong, scope, {"Connection": "close"})(scope, receive, send)
        headers, app = Headers(scope=scope), self._app
        path, host = scope["path"].removeprefix("/v1"), headers.get("host", "localhost")
        if self._key is not None and path not in OPEN and not self._knows_key(headers):
            error = ApiError(401, "the API key is wrong or missing; send it as a bearer token", code="invalid_api_key")
            app = error_response(error, scope, {"WWW-Authenticate": "Bearer"})
        elif scope["method"] == "POST" and self._is_foreign(headers):
            message = f"pages of {headers['origin']} may not use this server; --allow-origin allows it"
            app = error_response(ApiError(403, message, code="foreign_origin"), scope)
        elif scope["method"] != "POST" and self._named and path not in PROBES and not self._is_own(host):
            message = f"this server answers at localhost and addresses, not at {host}; --allow-origin http://{host} or "
            message += "--api-key changes that"
            app = error_response(ApiError(403, message, code="foreign_host"), scope)
        await app(scope, receive, send)

    def _knows_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # as Anthropic's clients send it
        return hmac.compare_digest(key.strip().encode("latin-1"), self._key or b"")

    def _is_foreign(self, headers: Headers) -> bool:
        """Return whether this may come from another server's page without a CORS request from its browser."""
        origin = headers.get("origin")
        if origin is None or {"*", origin} & set(self._origins):
            return False
        place = _parts(origin)
        if place.netloc == headers.get("host"):
            return self._rebindable and not _is_address(place.hostname)
        return headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header names this machine, a host outside the public DNS, or an allowed origin."""
        name = _parts(f"//{host}").hostname or ""
        local = bool(name) and ("." not in name or name.endswith(".internal"))  # Docker's name for its host ends so
        return local or _is_address(name) or any(host == _parts(origin).netloc for origin in self._origins)


def _parts(url: str) -> SplitResult:
    """Return the parts of a URL, which are empty if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _is_address(host: str | None) -> bool:
    """Return whether a host is an IP address or localhost, for which nobody can choose another destination."""
    try:
        ip_address(host or "")
    except ValueError:
        return f".{host}".endswith(".localhost")
    return True


async def _handle(request: Request, error: Exception) -> Response:
    """Answer an error of a route or of the routing, or an unexpected one, which uvicorn logs."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)  # nobody reads it: the client has gone
    if not isinstance(error, HTTPException):
        return error_response(as_api_error(error), request.scope)
    path = request.url.path
    allowed = " or ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    code, message = {
        404: ("not_found", f"there is no {path}; see /openapi.json"),
        405: ("method_not_allowed", f"{request.method} is not allowed at {path}; use {allowed}"),
    }.get(error.status_code, (None, str(error.detail)))
    return error_response(ApiError(error.status_code, message, code=code), request.scope, dict(error.headers or {}))


class PingRequest(Strict):
    """A request to /ping, which needs no body."""


class _Routes:
    """The routes of a service. Each post route has the class of its bodies and a function that answers them."""

    def __init__(self, service: Service, engines: Callable[[], Awaitable[list[str]]] | None = None) -> None:
        self._service, self._engines = service, engines
        options = service.options
        say, limited = partial(note, "fgserve"), not options.ignore_limits
        self._policy = FieldPolicy(options.strict, options.ignore_unknown, say, limited)
        self._created = int(time.time())
        own = Routes(
            posts={
                "/chat/completions": Post(ChatRequest, self._generate),
                "/completions": Post(CompletionRequest, self._generate),
                "/tokenize": Post(TokenizeRequest, partial(compute, service, tokenize)),
                "/detokenize": Post(DetokenizeRequest, partial(compute, service, detokenize)),
                "/ping": Post(PingRequest, self._ping, bodiless=True),
            },
            gets={
                "/models": self.models,
                "/models/{name:path}": self.model,
                "/tokenizer_info": self.tokenizer_info,
                "/version": self.version,
                "/health": self.health,
                "/ping": self.health,
                "/ready": self.ready,
                "/load": self.load,
                "/metrics": self.metrics,
                "/openapi.json": self.openapi,
                **({} if engines is None else {"/engines": self.engines}),
            },
        )
        trains = service.options.rollout and engines is None
        self._table = RouteTable(service, own, MODULES + (TRAINER_MODULES if trains else ()))

    def under(self, prefix: str) -> list[Route]:
        """Return all routes, with a prefix of their paths."""
        posts, gets = self._table.posts, self._table.gets
        methods = {path: ["POST"] * (path in posts) + ["GET"] * (path in gets) for path in {**posts, **gets}}
        return [Route(prefix + path, partial(self._answer, path), methods=methods[path]) for path in methods]

    async def _answer(self, path: str, request: Request) -> Response:
        return await (self._post if request.method == "POST" else self._get)(path, request)

    async def _post(self, path: str, request: Request) -> Response:
        body, answer = await self._read(await self._table.post(path), request)
        return await answer(body, request)

    async def _get(self, path: str, request: Request) -> Response:
        handle = await self._table.get(path)
        return await handle(request)

    async def _generate(self, body: GenerationRequest, request: Request) -> Response:
        """Answer a chat or a completion. As in vLLM, the header X-Request-Id goes before `request_id`."""
        named = body.model_copy(update={"request_id": given_id(request.scope) or body.request_id})
        return GenerationResponse(self._service, named.with_mode(self._service.options.logprobs_mode))

    async def tokenizer_info(self, request: Request) -> Response:
        model = self._service.choose(request.query_params.get("model"))
        return json_response(tokenizer_info(needed(model.facts.tokenizer)))

    async def models(self, request: Request) -> Response:
        """List the models that are ready, for Anthropic's clients in the form of their API."""
        cards = [self._card(model, request) for model in self._service.models.values() if model.ready]
        return json_response(
            ANTHROPIC.load().model_list(cards) if is_anthropic(request.scope) else {"object": "list", "data": cards}
        )

    async def model(self, request: Request) -> Response:
        """Describe the model that requests with this `model` use. /models/ lists all models."""
        if not request.path_params["name"]:
            return await self.models(request)
        return json_response(self._card(self._service.choose(request.path_params["name"]), request))

    def _card(self, model: ServedModel, request: Request) -> dict[str, Any]:
        if is_anthropic(request.scope):
            card: dict[str, Any] = ANTHROPIC.load().model_card(model.name, self._created, model.facts.max_model_len)
            return card
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "fastgen",
            "max_model_len": model.facts.max_model_len,
        }

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def health(self, request: Request) -> Response:
        """Answer 200 as long as all engines are idle or make progress. Trainers of other engines, whose ports open
        when a model is loaded, wait here for it."""
        if (trouble := self._service.trouble) is not None:
            raise ApiError(503, trouble, code="unhealthy")
        if self._service.options.rollout and not self._service.loaded.is_set():
            raise ApiError(503, "the model is being loaded", code="not_ready")
        return json_response({"status": "ok"})

    async def _ping(self, _: PingRequest, request: Request) -> Response:
        return await self.health(request)

    async def load(self, request: Request) -> Response:
        """Return the number of samples that run or wait."""
        return json_response({"server_load": sum(s.running + s.waiting for s in self._service.stats().values())})

    async def ready(self, request: Request) -> Response:
        """Answer 200 as long as every model accepts requests."""
        for model in self._service.models.values():
            model.check_ready()
        return json_response({"status": "ready"})

    async def engines(self, request: Request) -> Response:
        """List the addresses of the replicas at which a trainer finds their engines."""
        assert self._engines is not None
        return json_response({"urls": await self._engines()})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI schema, with every field of requests. Responses are described by OpenAI's own schema."""
        place, schemas = "#/components/schemas/", dict[str, Any]()
        error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
        answers: dict[str, Any] = {"200": {"description": "An answer", "content": {"*/*": {}}}}
        answers["default"] = {"description": "An error", "content": {"application/json": {"schema": error}}}
        paths: dict[str, Any] = {
            "/v1" + path.replace(":path", ""): {"get": {"responses": answers}} for path in self._table.gets
        }
        text = {"schema": {"type": "string"}}
        paths["/v1/models/{name}"]["parameters"] = [{"name": "name", "in": "path", "required": True, **text}]
        paths["/v1/tokenizer_info"]["parameters"] = [{"name": "model", "in": "query", **text}]
        for path in self._table.posts:
            post = await self._table.post(path)
            for kind in post.kinds:
                schema = kind.model_json_schema(ref_template=f"{place}{{model}}")
                schemas |= {**schema.pop("$defs", {}), kind.__name__: schema}
            links = [{"$ref": place + kind.__name__} for kind in post.kinds]
            media = {"schema": links[0] if len(links) == 1 else {"anyOf": links}}
            body = {"required": not post.bodiless, "content": {"application/json": media}}
            paths.setdefault(f"/v1{path}", {})["post"] = {"requestBody": body, "responses": answers}
        if self._service.options.ignore_unknown:
            schemas = {name: {**schema, "additionalProperties": True} for name, schema in schemas.items()}
        info = {"title": "fgserve", "version": __version__}
        components: dict[str, Any] = {"schemas": schemas}
        described: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}
        if self._service.options.api_key is not None:  # for the button "Authorize" of /docs
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            described["security"] = [{"key": []}]
        return json_response(described)

    async def _read(self, post: Post, request: Request) -> tuple[Strict, Answerer]:
        """Read and check the body of a request, and note in its scope whether it is large. Raises ApiError."""
        service, body = self._service, await self._receive(request)
        large = request.scope["large"] = len(body) > LARGE
        if not large:
            return post.read(body, self._policy, service.limits)
        async with limited(service, request.scope, request.receive):
            return await service.work.run(large, post.read, body, self._policy, service.limits)

    async def _receive(self, request: Request) -> bytearray:
        """Return the body of a request. Raises ApiError if it is too large or comes too late."""
        limit = int(self._service.options.max_body_mb * 1e6)
        body, size = bytearray(), 0
        async with limited(self._service, request.scope):
            async for piece in request.stream():
                size += len(piece)
                if size <= limit:
                    body += piece
                elif size > DISCARDED * limit:
                    break
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes; send less", code="request_too_large")
        return body
