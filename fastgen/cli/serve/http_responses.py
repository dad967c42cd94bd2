"""From a checked request to its HTTP response: prompts go to the engine, and its events become a body or a stream."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastgen.cli.serve.engine_input import GenerationRequest, ModelFacts, grammar_field, prepare
from fastgen.cli.serve.metrics import Meter
from fastgen.cli.serve.openai_input import ChatRequest
from fastgen.cli.serve.openai_output import ChatReply
from fastgen.cli.serve.routes import ANTHROPIC, RESPONSES
from fastgen.cli.serve.service import Service, engine_error, expire
from fastgen.cli.serve.validation import ApiError
from fastgen.request import Event

log = logging.getLogger(__name__)

RETRY_SECONDS = 1  # Retry-After header of a 503
FAREWELL_SECONDS = 2.0  # time for a client to receive the error that ends its stream
MANY = 1024  # number of tokens above which making chunks is large work
MANY_PROMPTS = 64  # number of prompts above which tokenizing them is large work
REQUEST_ID = re.compile(r"[!-~]{1,128}")
CHARS = 4  # estimated number of characters per token, before tokenization


def json_bytes(content: Any) -> bytes:
    """Return content as JSON, in which null replaces NaN and the infinities, which JSON does not have."""
    return to_json(content, inf_nan_mode="null")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(content), status, headers, "application/json")


def given_id(scope: Scope) -> str | None:
    """Return the id that the header X-Request-Id gives a request; None if it has none, or one of another form."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else None


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API, by its path or by the header that its clients send."""
    return scope["path"].endswith(ANTHROPIC.posts) or "anthropic-version" in Headers(scope=scope)


def error_response(error: ApiError, scope: Scope, headers: dict[str, str] | None = None) -> Response:
    """Return the response for an error, in the format of the API that the request belongs to."""
    headers = dict(headers or {})
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    own_form = ANTHROPIC if is_anthropic(scope) else RESPONSES if scope["path"].endswith(RESPONSES.posts) else None
    body = error.body if own_form is None else own_form.load().error_body(error)
    return json_response(body, error.status, headers)


def as_api_error(error: Exception) -> ApiError:
    """Return the error to report to a client; of an unexpected one, only the type."""
    if isinstance(error, ApiError):
        return error
    return ApiError(500, f"an internal error: {type(error).__name__}", code="internal_error")


@asynccontextmanager
async def limited(
    service: Service, scope: Scope, receive: Receive | None = None, timed: bool = True
) -> AsyncIterator[None]:
    """Cancel the block when the request takes too long (if it is `timed`), when the service expires or, if `receive` is
    given, when the client disconnects. Raises ApiError or ClientDisconnect then. The time of a request begins with its
    first block."""
    watch = None
    seconds = service.options.request_timeout
    if seconds is not None:
        scope.setdefault("ends", asyncio.get_running_loop().time() + seconds)
    try:
        async with asyncio.timeout_at(scope.get("ends") if timed else None) as deadline:
            service.deadlines.add(deadline)
            if service.expired:
                expire(deadline)
            if receive is not None:
                watch = asyncio.create_task(_await_disconnect(receive, deadline))
            try:
                yield
            finally:
                service.deadlines.discard(deadline)
                if watch is not None:
                    watch.cancel()
    except TimeoutError:
        if watch is not None and watch.done() and not watch.cancelled():
            raise ClientDisconnect from None
        if service.expired:
            raise ApiError(503, "the server is shutting down", code="shutting_down") from None
        raise ApiError(504, f"the request took more than {seconds:g} seconds", code="timeout") from None


async def _await_disconnect(receive: Receive, deadline: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    expire(deadline)


class GenerationResponse(Response):
    """The response to a request for generated text. An error after its beginning becomes the last event of the stream;
    earlier errors are answered by the application's handlers."""

    def __init__(
        self, service: Service, request: GenerationRequest, make_reply: Callable[..., ChatReply] = ChatReply
    ) -> None:
        super().__init__()
        self._service, self._request, self._make_reply = service, request, make_reply
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with limited(self._service, scope, receive):
                await self._answer(scope, send)
        except Exception as error:
            if not self._begun:
                raise
            if isinstance(error, ClientDisconnect):
                return
            if not isinstance(error, ApiError):
                log.exception("a request failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await _send_body(send, _sse(self._reply.error(as_api_error(error))))

    async def _answer(self, scope: Scope, send: Send) -> None:
        """Answer the request, and put its meter into `scope`. Raises ApiError."""
        service, request = self._service, self._request
        model = service.choose(request.model)
        scope["meter"] = meter = Meter(service.metrics, model.name)
        sizes = [min(size, model.facts.max_model_len) for size in _sizes(request)]  # a longer one is refused
        with model.queue.enter(sizes, request.choices) as leave:
            large = scope["large"] or len(sizes) > MANY_PROMPTS
            arguments = model.facts, request, self._make_reply, service.options.strict_max_tokens
            self._reply, params = await service.work.run(large, prepare, *arguments)
            model.check_ready()  # it may have died in the meantime
            field = None if params.grammar is None else grammar_field(request)
            prompts = [prompt.ids for prompt in self._reply.prompts]
            meter.prompt_tokens = sum(map(len, prompts))
            streamed, priority = bool(request.stream), request.priority or 0
            if request.use_beam_search:
                from fastgen.cli.serve.beams import search_beams  # few servers need it

                turns = _observed(search_beams(model, prompts, params, request, field), leave, meter, field)
                await self._send_whole(turns, send)
            else:
                with model.engine.submit(prompts, params, every_step=streamed, priority=priority) as stream:
                    turns = _observed(stream, leave, meter, field)
                    await (self._send_stream if streamed else self._send_whole)(turns, send)
            meter.end()

    async def _send_stream(self, turns: AsyncIterator[list[Event]], send: Send) -> None:
        reply = self._reply
        async for events in _at_once(turns) if reply.scored else turns:
            chunks = await self._service.work.run(True, reply.push, events) if _many(events) else reply.push(events)
            if not self._begun:  # not before the engine has accepted the request
                await self._begin(send, "text/event-stream; charset=utf-8", (b"cache-control", b"no-cache"))
            if chunks:
                await _send_body(send, _sse(chunks), more=True)
        await _send_body(send, _sse(reply.end()) + reply.end_mark)

    async def _send_whole(self, turns: AsyncIterator[list[Event]], send: Send) -> None:
        events = [event async for new in turns for event in new]
        body = await self._service.work.run(_many(events), lambda: json_bytes(self._reply.whole(events)))
        await self._begin(send, "application/json", (b"content-length", b"%d" % len(body)))
        await _send_body(send, body)

    async def _begin(self, send: Send, kind: str, header: tuple[bytes, bytes]) -> None:
        headers = [(b"content-type", kind.encode()), header]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._begun = True


class _Translated(Protocol):
    """A request of another API."""

    def chat(self) -> ChatRequest: ...


async def answer_as_chat(
    service: Service, make_reply: Callable[..., ChatReply], body: _Translated, request: Request
) -> Response:
    """Answer a request of another API, which is translated to a chat. make_reply: class of its reply."""
    async with limited(service, request.scope, request.receive):
        chat = await service.work.run(request.scope["large"], body.chat)
    return GenerationResponse(service, chat, partial(make_reply, body))


async def compute(
    service: Service, function: Callable[[Any, ModelFacts], Any], body: Any, request: Request
) -> Response:
    """Answer a request about tokens by a function of its checked body and its model."""
    facts = service.choose(body.model).facts
    async with limited(service, request.scope, request.receive):
        return json_response(await service.compute(request.scope["large"], function, body, facts))


def _many(events: list[Event]) -> bool:
    """Return whether a response to events takes long to make."""
    return sum(len(event.token_ids) + len(event.prompt_logprobs or ()) for event in events) > MANY


async def _send_body(send: Send, body: bytes, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _sizes(request: GenerationRequest) -> list[int]:
    """Estimate the number of tokens of each prompt."""
    if isinstance(request, ChatRequest):
        said = (len(message.text or "") + len(message.reasoning_content or "") for message in request.messages)
        return [sum(said) // CHARS]
    return [len(prompt) // CHARS if isinstance(prompt, str) else len(prompt) for prompt in request.prompts]


async def _observed(
    stream: AsyncIterator[list[Event]], leave: Callable[[int], None], meter: Meter, field: str | None
) -> AsyncIterator[list[Event]]:
    """Yield the events of a stream. Raises ApiError. field: as in `engine_error`."""
    try:
        async for events in stream:
            for event in events:
                leave(int(event.id))
            meter.observe(events)
            yield events
    except (ValueError, TypeError, RuntimeError) as error:
        raise engine_error(error, field) from None


async def _at_once(turns: AsyncIterator[list[Event]]) -> AsyncIterator[list[Event]]:
    yield [event async for events in turns for event in events]


def _sse(chunks: Iterable[dict[str, Any]]) -> bytes:
    """Return chunks as server-sent events. The type of a chunk, if it has one, is the name of its event."""
    events = []
    for chunk in chunks:
        name = b"event: %s\n" % chunk["type"].encode() if "type" in chunk else b""
        events.append(name + b"data: " + json_bytes(chunk) + b"\n\n")
    return b"".join(events)
