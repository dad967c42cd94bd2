"""Models that fgchat talks to: one in this process, or one behind an OpenAI-style server.

Both backends have max_tokens, the limit of an answer (None: none), max_model_len, the tokens of the context (None:
unknown), and two methods. `check` raises ValueError or OSError if no message can be answered, as far as the given
messages show it. `stream` yields the pieces of the answer to the last message, and writes its other facts to a Reply;
closing it ends the answer. It raises RefusedError or ServerError.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastgen.cli.command import needed
from fastgen.request import Message, SamplingParams

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


Pieces = Generator[str, None, None]


class LocalBackend:
    """A Generator in this process."""

    def __init__(self, gen: fastgen.Generator, params: SamplingParams) -> None:
        self.max_tokens: int | None = params.max_tokens
        self.max_model_len: int | None = gen.max_model_len
        self._gen, self._params = gen, params

    def check(self, messages: Sequence[Message]) -> None:
        self._gen.abort([self._gen.add(messages, self._params)])

    def stream(self, messages: Sequence[Message], reply: Reply) -> Pieces:
        try:
            id = self._gen.add(messages, self._params)
        except ValueError as error:
            raise RefusedError(str(error).split(";")[0]) from error  # advice for programmers follows
        try:
            while reply.finish_reason is None:
                for event in self._gen.step():
                    reply.num_tokens += len(event.token_ids)
                    reply.finish_reason, reply.error = event.finish_reason, event.error
                    yield event.text
        finally:
            self._gen.abort([id])  # which an answer that has ended does not notice


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

    def stream(self, messages: Sequence[Message], reply: Reply) -> Pieces:
        for chunk in self._chunks(messages):
            if chunk.get("error"):
                raise ServerError(_message(chunk))
            text = ""
            for choice in chunk.get("choices") or ():
                text += (choice.get("delta") or {}).get("content") or ""
                reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
            if usage := chunk.get("usage"):
                reply.num_tokens = usage["completion_tokens"]
            elif text:
                reply.num_tokens += 1  # an estimate, until the server gives the number
            yield text
        if reply.finish_reason is None:
            raise ServerError("the server has ended the answer early")

    def _chunks(self, messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
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
