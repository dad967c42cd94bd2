"""Models that fgchat talks to: one in this process, or one behind an OpenAI-style server.

Both backends have max_tokens, the limit of an answer (None: none), max_model_len, the tokens of the context (None:
unknown), and two methods. `check` raises ValueError or OSError if no message can be answered, as far as the given
messages show it. `answer` answers the last message, passes each new piece of text to `say`, and raises RefusedError; it
is called with Ctrl-C deferred by `interrupt`, and a Ctrl-C ends the answer with the finish_reason "abort".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastgen.cli.command import needed
from fastgen.engine.interrupts import DeferredInterrupt
from fastgen.request import Event, Message, SamplingParams

if TYPE_CHECKING:
    import httpx

    import fastgen

CONNECT_SECONDS = 10.0
EXCERPT = 300  # characters of an unexpected response that an error shows


class RefusedError(ValueError):
    """An error of these messages; other messages may be answered."""


class ServerError(OSError):
    """An error of the server, or of the connection to it."""


@dataclass
class Reply:
    """An answer, as far as it has come. finish_reason: as in Completion. error: the error that ended the answer."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


class LocalBackend:
    """A Generator in this process. Ctrl-C stops an answer when the engine has finished its step."""

    def __init__(self, gen: fastgen.Generator, params: SamplingParams) -> None:
        self.max_tokens: int | None = params.max_tokens
        self.max_model_len: int | None = gen.max_model_len
        self._gen, self._params = gen, params

    def check(self, messages: Sequence[Message]) -> None:
        self._gen.abort([self._gen.add(messages, self._params)])

    def answer(self, messages: Sequence[Message], say: Callable[[str], None], interrupt: DeferredInterrupt) -> Reply:
        try:
            id = self._gen.add(messages, self._params)
        except ValueError as error:
            raise RefusedError(str(error).split(";")[0]) from error  # advice for programmers follows
        reply = Reply()
        try:
            while reply.finish_reason is None:
                interrupt.check()
                _take_events(self._gen.step(), reply, say)
        except KeyboardInterrupt:
            self._stop(id, reply, say)
        return reply

    def _stop(self, id: str | int, reply: Reply, say: Callable[[str], None]) -> None:
        """Abort the answer, and show its text that no event has told yet."""
        outputs = self._gen.abort([id])
        if outputs:
            completion = outputs[0].completions[0]
            say(completion.text[len(reply.text) :])
            reply.text, reply.num_tokens = completion.text, len(completion.token_ids)
        else:  # the answer has ended in the step that was in flight
            _take_events(self._gen.step(), reply, say)
        reply.finish_reason = "abort"


def _take_events(events: Iterable[Event], reply: Reply, say: Callable[[str], None]) -> None:
    for event in events:
        reply.text += event.text
        reply.num_tokens += len(event.token_ids)
        reply.finish_reason, reply.error = event.finish_reason, event.error
        say(event.text)


class ServerBackend:
    """A model of a server.

    url: of the server; its API is at /v1, unless the url has a path. api_key: None if none is needed. model: its name
    on the server; None: the only model of the server. fields: of the requests, such as temperature and max_tokens; the
    server has its own values for the others.

    Raises ValueError for a malformed url, and if httpx is not installed.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None, fields: Mapping[str, Any]) -> None:
        httpx = needed("httpx", "serve", "--url")
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"--url {url!r} is no URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"--url is {url!r}; it must be like http://localhost:5678")
        self.max_tokens: int | None = fields.get("max_tokens")
        self.max_model_len: int | None = None
        self._url = url.rstrip("/") + ("/v1" if parsed.path in ("", "/") else "")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._model, self._fields = model, fields

    def check(self, messages: Sequence[Message]) -> None:
        """Find the model among those of the server. Raises ValueError or ServerError if that fails."""
        with self._client() as client:
            response = client.get(f"{self._url}/models")
        if response.status_code != 200:
            raise ValueError(_error_of(response))
        try:
            served = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self._url} is no OpenAI-style API: {response.text[:EXCERPT]!r}") from None
        if self._model is None:
            if not served:
                raise ValueError("the server has no model yet; try again when it has loaded one")
            if len(served) > 1:
                raise ValueError(f"the server has several models; choose one by --model: {', '.join(served)}")
            (self._model,) = served

    def answer(self, messages: Sequence[Message], say: Callable[[str], None], interrupt: DeferredInterrupt) -> Reply:
        reply = Reply()
        try:
            with closing(self._chunks(messages)) as chunks:  # closing the connection ends the request
                for chunk in interrupt.reading(chunks):
                    if text := _take_chunk(chunk, reply):
                        say(text)
            if reply.finish_reason is None:
                raise ServerError("the server has ended the answer early")
        except KeyboardInterrupt:
            reply.finish_reason = reply.finish_reason or "abort"
        except ServerError as error:
            reply.finish_reason, reply.error = "error", str(error)
        return reply

    def _chunks(self, messages: Sequence[Message]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of an answer. Raises RefusedError or ServerError."""
        body = {"model": self._model, "messages": messages, **self._fields}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with (
            self._client() as client,
            client.stream("POST", f"{self._url}/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                wrong = response.status_code in (400, 413, 422)
                raise RefusedError(_error_of(response)) if wrong else ServerError(_error_of(response))
            for data in _events(response.iter_bytes()):
                if data == b"[DONE]":
                    return
                try:
                    chunk = dict(json.loads(data))
                except (ValueError, TypeError):
                    raise ServerError(f"the server has sent what is no answer: {data[:EXCERPT]!r}") from None
                yield chunk

    @contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        """Return a client whose connection errors are ServerErrors."""
        import httpx

        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        try:
            with httpx.Client(headers=self._headers, timeout=timeout) as client:
                yield client
        except httpx.HTTPError as error:
            raise ServerError(f"no connection to {self._url}: {error or type(error).__name__}") from None


Backend = LocalBackend | ServerBackend


def _take_chunk(chunk: dict[str, Any], reply: Reply) -> str:
    """Add a chunk to the reply, and return its text. Raises ServerError if the chunk is an error."""
    if chunk.get("error"):
        raise ServerError(_message(chunk))
    text = ""
    for choice in chunk.get("choices") or ():
        text += (choice.get("delta") or {}).get("content") or ""
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    reply.text += text
    if usage := chunk.get("usage"):
        reply.num_tokens = usage["completion_tokens"]
    elif text:
        reply.num_tokens += 1  # an estimate, until the server gives the number
    return text


def _events(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events of one line each. Only a newline ends a line: text may hold others."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _error_of(response: httpx.Response) -> str:
    """Return the error of a response in one line."""
    if response.status_code == 401:
        return "the server wants another key; give it by --api-key"
    try:
        return _message(response.json())
    except ValueError:
        return f"the server says {response.status_code}: {response.text[:EXCERPT]!r}"


def _message(body: Any) -> str:
    """Return the message of an error in OpenAI's form, or else the whole body."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or json.dumps(body)[:EXCERPT])
