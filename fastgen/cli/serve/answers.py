"""From a request to its answer: tokens in, events of the engine, a body or a stream out; and an end at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing, suppress
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fastgen.cli.serve.engine import Stream
from fastgen.cli.serve.grammar import answer_rule
from fastgen.cli.serve.metrics import Meter
from fastgen.cli.serve.models import Place, Service
from fastgen.cli.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    check_echo,
    check_params,
    check_prompt,
    refused,
)
from fastgen.cli.serve.replies import ChatReply, CompletionReply, Plain
from fastgen.cli.serve.tokens import Vocabulary, encode_chat, encode_text, needed
from fastgen.cli.serve.tools import Calling
from fastgen.request import Event, SamplingParams
from fastgen.tokenizer import Tokenizer

log = logging.getLogger(__name__)

RETRY_SECONDS = 1  # that a client is told to wait where there is no room
FAREWELL_SECONDS = 2.0  # that a client has to take the error that ends its answer
MANY = 1024  # tokens whose reply is made beside the event loop, as others wait for that
CHARS = 4  # of a text, a token, as long as it is not counted

Request = ChatRequest | CompletionRequest
Reply = ChatReply | CompletionReply
Result = TypeVar("Result")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, "application/json")


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return json_response(error.body, error.status, headers)


class Answer(Response):
    """What a client gets of `work`, which sends it. The work is cancelled when the client goes away, when its time is
    over, and when the server ends; its errors become a body, or the last frame of a stream."""

    def __init__(self, service: Service, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._service, self._work = service, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def tell(message: Message) -> None:
            nonlocal begun
            await send(message)
            begun = True

        error = await self._watch(asyncio.ensure_future(self._work(tell)), receive)
        if error is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                if begun:
                    body = b"data: " + to_json(error.body) + b"\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": False})
                else:
                    await error_response(error)(scope, receive, send)

    async def _watch(self, work: asyncio.Future[None], receive: Receive) -> ApiError | None:
        """Wait for the work, as long as that makes sense; returns what is to be told of its end, if anything is."""
        try:
            await limited(self._service, work, asyncio.ensure_future(_gone(receive)))
        except ClientDisconnect:
            return None
        except Exception as error:
            return _told(error)
        return None


async def limited(service: Service, work: asyncio.Future[Result], gone: asyncio.Future[None] | None = None) -> Result:
    """The result of `work`, which is cancelled when the client is `gone`, the time of a request is over, or the server
    ends. Raises what it raises, and ClientDisconnect or ApiError in these cases."""
    expired = asyncio.ensure_future(service.expired.wait())
    timeout = service.options.request_timeout
    tasks: list[asyncio.Future[Any]] = [work, expired] if gone is None else [work, expired, gone]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            if gone is not None and gone.done():
                raise ClientDisconnect
            if expired.done():
                raise ApiError(503, "the server is shutting down", code="shutting_down")
            raise ApiError(504, f"the request took more than {timeout:g} seconds", code="timeout")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return work.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(error: Exception) -> ApiError:
    """An exception as the client learns of it. What nobody has foreseen goes to the log as well."""
    if isinstance(error, ApiError):
        return error
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"an internal error: {type(error).__name__}", code="internal_error")


# ------------------------------------------------------------------------------------------------- the work


async def answer(service: Service, request: Request, send: Send) -> None:
    """Answer a request. Raises ApiError."""
    model = service.choose(request.model)
    meter = Meter(service.metrics, model.name)
    with ExitStack() as stack:
        place = stack.enter_context(model.queue.enter(_sizes(request), request.choices))
        reply, params = await asyncio.to_thread(prepare, model, request)
        for number, prompt in enumerate(reply.prompts):
            place.count(number, len(prompt.ids))
        model.check_ready()  # it may have died meanwhile
        streams = []
        for number, prompt in enumerate(reply.prompts):
            name, every_step = f"{reply.id}-{number}", bool(request.stream)
            stream = model.engine.submit(name, prompt.ids, params, every_step=every_step)
            streams.append(stack.enter_context(stream))
        param = ruled_by(request) if isinstance(request, ChatRequest) and params.mask is not None else None
        async with aclosing(_turns(streams, place, meter, param)) as turns:
            if request.stream:
                await _send_stream(reply, turns, send)
            else:
                await _send_whole(reply, turns, send)


async def _send_stream(reply: Reply, turns: AsyncIterator[tuple[int, list[Event]]], send: Send) -> None:
    begun = False
    async for number, events in turns:
        if sum(len(event.token_ids) + len(event.prompt_logprobs or ()) for event in events) > MANY:
            data = await asyncio.to_thread(_chunks, reply, events, number)
        else:
            data = _chunks(reply, events, number)
        if not begun:  # not before it is known that the engine has taken it
            begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": _frames(reply.end()) + b"data: [DONE]\n\n"})


def _chunks(reply: Reply, events: list[Event], number: int) -> bytes:
    return _frames(reply.push(events, number))


def _frames(chunks: Iterable[Any]) -> bytes:
    return b"".join(b"data: " + to_json(chunk) + b"\n\n" for chunk in chunks)


async def _send_whole(reply: Reply, turns: AsyncIterator[tuple[int, list[Event]]], send: Send) -> None:
    events: list[list[Event]] = [[] for _ in reply.prompts]
    async for number, new in turns:
        events[number] += new
    body = await asyncio.to_thread(_body, reply, events)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _body(reply: Reply, events: Sequence[list[Event]]) -> bytes:
    return to_json(reply.whole(events[0]) if isinstance(reply, ChatReply) else reply.whole(events))


async def _turns(
    streams: Sequence[Stream], place: Place, meter: Meter, param: str | None
) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """What comes of several prompts, as it comes: (number of the prompt, events). Raises ApiError. param: the field
    that is wrong, where the engine does not take them."""
    try:
        async with aclosing(_together(streams)) as turns:
            async for number, events in turns:
                place.leave(number)
                meter.take(number, events)
                yield number, events
    except (ValueError, TypeError) as error:
        raise refused(error, param) from None


async def _together(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    if len(streams) == 1:
        async for events in streams[0]:
            yield 0, events
        return
    # Room for one: what is not read yet stays with the streams, which join it.
    news: asyncio.Queue[tuple[int, list[Event] | Exception | None]] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_pump(number, stream, news)) for number, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            number, item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()


async def _pump(number: int, stream: Stream, news: asyncio.Queue[tuple[int, list[Event] | Exception | None]]) -> None:
    try:
        async for events in stream:
            await news.put((number, events))
        await news.put((number, None))
    except Exception as error:
        await news.put((number, error))


# ------------------------------------------------------------------------------------------------- prompts


def _sizes(request: Request) -> list[int]:
    """About how many tokens the prompts of a request have."""
    if isinstance(request, ChatRequest):
        return [sum(len(message.text or "") for message in request.messages) // CHARS]
    return [len(prompt) // CHARS if isinstance(prompt, str) else len(prompt) for prompt in request.prompts]


class Model(Protocol):
    """What has to be known of a model before it is asked. defaults: of sampling; max_model_len: tokens of prompt and
    answer together, at most."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def vocabulary(self) -> Vocabulary | None: ...
    @property
    def defaults(self) -> SamplingParams: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...


def prepare(model: Model, request: Request) -> tuple[Reply, SamplingParams]:
    """Tokenize and check; the mask of the parameters is a Grammar, which is not compiled yet, or None. Raises ApiError.
    For a thread: it may take long."""
    reply: Reply
    if isinstance(request, ChatRequest):
        reply, params = _prepare_chat(model, request)
    else:
        echo = bool(request.echo)
        prompts = [encode_text(prompt, model.tokenizer, echo, model.max_model_len) for prompt in request.prompts]
        reply = CompletionReply(request, model.name, prompts, model.vocabulary)
        params = request.sampling_params(model.defaults)
        check_echo(request, [len(prompt.ids) for prompt in prompts])
    check_params(params, model.vocab_size)
    for prompt in reply.prompts:
        check_prompt(prompt.ids, request, model.max_model_len, model.vocab_size)
    return reply, params


def _prepare_chat(model: Model, request: ChatRequest) -> tuple[ChatReply, SamplingParams]:
    tokenizer = needed(model.tokenizer)
    parallel = request.parallel_tool_calls is not False
    try:
        calling = Calling(tokenizer, request.tools or (), choice=request.tool_choice or "auto", parallel=parallel)
    except ValueError as error:
        raise refused(error, "tools") from None
    try:
        messages = calling.template_messages(request.messages)
    except ValueError as error:
        raise refused(error, "messages") from None
    prompt = encode_chat(request, tokenizer, messages, {"tools": calling.template_tools}, model.max_model_len)
    try:
        grammar = calling.grammar(answer_rule(request.response_format))
    except ValueError as error:
        raise refused(error, ruled_by(request)) from None
    params = request.sampling_params(model.defaults, grammar)  # type: ignore[arg-type]  # a MaskFactory
    return ChatReply(request, model.name, prompt, model.vocabulary, lambda: calling.parser() or Plain()), params


def ruled_by(request: ChatRequest) -> str:
    """The field that a grammar comes of."""
    wanted = request.response_format
    return "tools" if wanted is None or wanted.type == "text" else "response_format"
