"""Responses of the generating routes: prompts become tokens, and events of the engine a body or a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fastgen.cli.serve.engine import EngineError, EventStream
from fastgen.cli.serve.grammar import answer_rule
from fastgen.cli.serve.metrics import Meter
from fastgen.cli.serve.models import Service, Waiting, expire
from fastgen.cli.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    check_echo,
    check_params,
    check_prompt,
    refused,
)
from fastgen.cli.serve.replies import ChatReply, CompletionReply
from fastgen.cli.serve.tokens import ModelFacts, encode_chat, encode_text, needed
from fastgen.cli.serve.tools import Calling
from fastgen.request import Event, SamplingParams

log = logging.getLogger(__name__)

RETRY_SECONDS = 1  # Retry-After of a 503
FAREWELL_SECONDS = 2.0  # for a client to take the error that ends its stream
MANY = 1024  # tokens; longer chunks are made in a thread, so that other requests do not wait
CHARS = 4  # estimated characters of a token, before tokenization

GenerationRequest = ChatRequest | CompletionRequest
GenerationReply = ChatReply | CompletionReply


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, "application/json")


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return json_response(error.body, error.status, headers)


@asynccontextmanager
async def limited(service: Service, receive: Receive | None = None) -> AsyncIterator[None]:
    """Cancel the block when the time of a request is over, when the service expires, or, with `receive`, when the
    client disconnects. Raises ApiError or ClientDisconnect then."""
    watch = None
    seconds = service.options.request_timeout
    try:
        async with asyncio.timeout(seconds) as deadline:
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
    the application's handlers answer earlier ones."""

    def __init__(self, service: Service, request: GenerationRequest) -> None:
        super().__init__()
        self._service, self._request = service, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_begun(message: Message) -> None:
            nonlocal begun
            await send(message)
            begun = True

        try:
            async with limited(self._service, receive):
                await _answer(self._service, self._request, send_begun)
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, ClientDisconnect):
                with suppress(TimeoutError):
                    async with asyncio.timeout(FAREWELL_SECONDS):
                        body = b"data: " + to_json(_as_api_error(error).body) + b"\n\n"
                        await send({"type": "http.response.body", "body": body, "more_body": False})


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"an internal error: {type(error).__name__}", code="internal_error")


# ------------------------------------------------------------------------------------------------- events


async def _answer(service: Service, request: GenerationRequest, send: Send) -> None:
    """Answer a request. Raises ApiError."""
    model = service.choose(request.model)
    meter = Meter(service.metrics, model.name)
    with model.queue.enter(_sizes(request), request.choices) as waiting:
        reply, params, grammar = await asyncio.to_thread(prepare, model.facts, request)
        model.check_ready()  # it may have died meanwhile
        param = None if grammar is None else grammar_field(request)
        prompts = [prompt.ids for prompt in reply.prompts]
        with model.engine.submit(prompts, params, grammar, every_step=bool(request.stream)) as stream:
            turns = _measured(stream, waiting, meter, param)
            await (_send_stream if request.stream else _send_whole)(reply, turns, send)


async def _measured(
    stream: EventStream, waiting: Waiting, meter: Meter, param: str | None
) -> AsyncIterator[list[Event]]:
    """Yield the events of a stream. Raises ApiError; param: the field to name where the engine refuses the request."""
    try:
        async for events in stream:
            for event in events:
                waiting.leave(int(event.id))
            meter.observe(events)
            yield events
    except EngineError as error:
        raise ApiError(500, str(error), code="engine_error") from None
    except (ValueError, TypeError) as error:
        raise refused(error, param) from None


async def _send_stream(reply: GenerationReply, turns: AsyncIterator[list[Event]], send: Send) -> None:
    begun = False
    async for events in turns:
        many = sum(len(event.token_ids) + len(event.prompt_logprobs or ()) for event in events) > MANY
        chunks: list[Any] = await asyncio.to_thread(reply.push, events) if many else reply.push(events)
        if not begun:  # not before the engine has accepted the request
            begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if chunks:
            await send({"type": "http.response.body", "body": _sse(chunks), "more_body": True})
    await send({"type": "http.response.body", "body": _sse(reply.end()) + b"data: [DONE]\n\n"})


def _sse(chunks: Iterable[Any]) -> bytes:
    """Return chunks as server-sent events."""
    return b"".join(b"data: " + to_json(chunk) + b"\n\n" for chunk in chunks)


async def _send_whole(reply: GenerationReply, turns: AsyncIterator[list[Event]], send: Send) -> None:
    events = [event async for new in turns for event in new]
    body = await asyncio.to_thread(lambda: to_json(reply.whole(events)))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ------------------------------------------------------------------------------------------------- prompts


def _sizes(request: GenerationRequest) -> list[int]:
    """Estimate the number of tokens of each prompt."""
    if isinstance(request, ChatRequest):
        return [sum(len(message.text or "") for message in request.messages) // CHARS]
    return [len(prompt) // CHARS if isinstance(prompt, str) else len(prompt) for prompt in request.prompts]


def prepare(model: ModelFacts, request: GenerationRequest) -> tuple[GenerationReply, SamplingParams, str | None]:
    """Tokenize and check a request. Return its reply, which has no events yet, its sampling parameters and its grammar,
    which is not compiled yet. Raises ApiError. May take long, so call it in a thread."""
    reply: GenerationReply
    grammar = None
    if isinstance(request, ChatRequest):
        reply, grammar = _prepare_chat(model, request)
    else:
        echo = bool(request.echo)
        prompts = [encode_text(prompt, model.tokenizer, echo, model.max_model_len) for prompt in request.prompts]
        reply = CompletionReply(request, model.name, prompts, model.vocabulary)
        check_echo(request, [len(prompt.ids) for prompt in prompts])
    params = request.sampling_params(model.defaults)
    check_params(params, model.vocab_size)
    for prompt in reply.prompts:
        check_prompt(prompt.ids, request, model.max_model_len, model.vocab_size)
    return reply, params, grammar


def _prepare_chat(model: ModelFacts, request: ChatRequest) -> tuple[ChatReply, str | None]:
    tokenizer = needed(model.tokenizer)
    param = "tools"
    try:
        parallel = request.parallel_tool_calls is not False
        calling = Calling(tokenizer, request.tools or (), choice=request.tool_choice or "auto", parallel=parallel)
        param = "messages"
        messages = calling.template_messages(request.messages)
        prompt = encode_chat(request, tokenizer, messages, {"tools": calling.template_tools}, model.max_model_len)
        param = grammar_field(request)
        grammar = calling.grammar(answer_rule(request.response_format))
    except ValueError as error:
        raise refused(error, param) from None
    return ChatReply(request, model.name, prompt, model.vocabulary, calling.parser), grammar


def grammar_field(request: GenerationRequest) -> str:
    """Return the name of the field that the grammar of a request comes from."""
    wanted = request.response_format if isinstance(request, ChatRequest) else None
    return "tools" if wanted is None or wanted.type == "text" else "response_format"
