"""A model behind an OpenAI-style server, as fgchat talks to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from fastgen.cli.extras import needed
from fastgen.cli.speakers import Interrupt, RefusedError, Reply
from fastgen.request import Message

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 10.0
SHOWN = 300  # characters of a reply that is not understood


class ServerError(OSError):
    """The server can not be reached, or can not answer."""


class Remote:
    """A Speaker that is a server's model.

    url: of the server; its API is at /v1, unless the url has a path. api_key: None where none is needed. model: what
    the server calls it; None: the one that it serves. fields: of the requests, such as temperature and max_tokens;
    the server has its own values for the others.

    Raises ValueError where the url is none, and where httpx is not installed.
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
        self._options = {"include_usage": True}

    def check(self, messages: Sequence[Message]) -> None:
        """See what the server serves. Raises ValueError or ServerError where it can not be talked to."""
        with self._client() as client:
            response = client.get(f"{self._url}/models")
        if response.status_code != 200:
            raise ValueError(_told(response))
        try:
            served = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self._url} is no OpenAI-style API: {response.text[:SHOWN]!r}") from None
        if self._model is None:
            if not served:
                raise ValueError("the server has no model yet; try again when it has loaded one")
            if len(served) > 1:
                raise ValueError(f"the server has several models; choose one by --model: {', '.join(served)}")
            (self._model,) = served
        entry = served.get(self._model) or (next(iter(served.values())) if len(served) == 1 else {})
        self.max_model_len = entry.get("max_model_len")
        if entry.get("owned_by") == "fastgen":  # others may refuse what is not OpenAI's
            self._options["continuous_usage_stats"] = True

    def answer(self, messages: Sequence[Message], say: Callable[[str], None], interrupt: Interrupt) -> Reply:
        reply = Reply()
        try:
            with closing(self._chunks(messages)) as chunks:  # leaving it ends the request
                while chunk := interrupt.call(lambda: next(chunks, None)):
                    if text := self._take(chunk, reply):
                        say(text)
            if reply.finish_reason is None:
                raise ServerError("the server has ended the answer early")
        except KeyboardInterrupt:
            reply.finish_reason = reply.finish_reason or "abort"
        except ServerError as error:
            reply.finish_reason, reply.error = "error", str(error)
        return reply

    def _take(self, chunk: dict[str, Any], reply: Reply) -> str:
        """Add a chunk to the reply; returns its text. Raises ServerError where it is an error."""
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
            reply.num_tokens += 1  # about that, until the server tells
        return text

    def _chunks(self, messages: Sequence[Message]) -> Generator[dict[str, Any], None, None]:
        """What the server sends of its answer, none of it empty. Raises RefusedError, ServerError."""
        body = {"model": self._model, "messages": messages, **self._fields}
        body |= {"stream": True, "stream_options": self._options}
        with (
            self._client() as client,
            client.stream("POST", f"{self._url}/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                wrong = response.status_code in (400, 413, 422)
                raise RefusedError(_told(response)) if wrong else ServerError(_told(response))
            for data in _events(response.iter_bytes()):
                if data == b"[DONE]":
                    return
                yield _chunk(data)

    @contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        """A client; what goes wrong with its connection is a ServerError."""
        import httpx

        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        try:
            with httpx.Client(headers=self._headers, timeout=timeout) as client:
                yield client
        except httpx.HTTPError as error:
            raise ServerError(f"no connection to {self._url}: {error or type(error).__name__}") from None


def _events(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The data of server-sent events of one line each, whatever line ends their text has beside the newline."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict) or not chunk:
        raise ServerError(f"the server has sent what is no answer: {data[:SHOWN]!r}")
    return chunk


def _told(response: httpx.Response) -> str:
    """What a reply that is an error says, in a line."""
    if response.status_code == 401:
        return "the server wants another key; give it by --api-key"
    try:
        return _message(response.json())
    except ValueError:
        return f"the server says {response.status_code}: {response.text[:SHOWN]!r}"


def _message(body: Any) -> str:
    """The message of an error in OpenAI's shape, or else all of it."""
    error = body.get("error") if isinstance(body, dict) else None
    told = error.get("message") if isinstance(error, dict) else error
    return str(told or json.dumps(body)[:SHOWN])
