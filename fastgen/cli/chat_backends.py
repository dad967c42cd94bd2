"""The models that fgchat talks to: one in this process, or one on an OpenAI-style server.

Both backends have the same attributes and methods:

settings: the settings that the user has changed, by their names in SETTINGS. `change` replaces them.
default: returns the default of a setting; None if it is unknown or not set.
max_tokens: maximum number of tokens of an answer; None for no limit.
max_model_len: number of tokens of the context; None if it is unknown.
check: tries the given messages, and raises ValueError or OSError if they show that no message can be answered.
stream: yields the answer to the last message in pieces, (text, whether it is thinking), and fills in a Reply. Closing
    the generator ends the answer. Raises RefusedError or ServerError.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastgen.cli.options import EXCERPT, api_url, error_message
from fastgen.option import Option
from fastgen.request import SAMPLING_OPTIONS, Message, SamplingParams
from fastgen.rl.http import asking
from fastgen.text.reasoning import AnswerParser, find_reasoning, starts_open
from fastgen.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    import fastgen

THINKING = Option(
    "thinking", bool, help="think before answering, by the template's enable_thinking", unset="as the template does"
)
SETTINGS = {name: option for name, option in SAMPLING_OPTIONS.items() if option.help and name != "n"}
SETTINGS |= {"seed": SAMPLING_OPTIONS["seed"], "stop": Option("stop", str), "thinking": THINKING}
"""The settings of a chat: sampling parameters, and whether the model thinks."""


# The errors of reading values from a server's JSON that have other types than in OpenAI's API.
WRONG = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class RefusedError(ValueError):
    """An error that is due to the messages; other messages may be answered."""


class ServerError(OSError):
    """An error of the server or of the connection to it."""


@dataclass
class Reply:
    """The part of an answer that has arrived. reasoning: the thinking before its text. finish_reason: as in Completion.
    error: message of the error that ended the answer."""

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


Pieces = Generator[tuple[str, bool], None, None]


class _Backend:
    """The settings of both backends."""

    settings: dict[str, Any]

    def change(self, settings: Mapping[str, Any]) -> None:
        """Replace all settings. Raises ValueError or TypeError for one that cannot be used."""
        SamplingParams(**_sampling(settings)).validate(vocab_size=1)
        THINKING.check(settings.get("thinking"))
        self.settings = dict(settings)

    def default(self, name: str) -> Any:
        return None

    @property
    def max_tokens(self) -> int | None:
        limit: int | None = self.settings.get("max_tokens", self.default("max_tokens"))
        return limit


def _sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters among the settings."""
    return {name: value for name, value in settings.items() if name != "thinking"}


class LocalBackend(_Backend):
    """A Generator in this process."""

    def __init__(self, gen: fastgen.Generator, settings: Mapping[str, Any]) -> None:
        self.max_model_len: int | None = gen.max_model_len
        self._gen = gen
        self.change(settings)

    def change(self, settings: Mapping[str, Any]) -> None:
        if settings.get("thinking") is not None:
            tokenizer = self._gen.tokenizer
            if tokenizer is None or "enable_thinking" not in str(tokenizer.hf.chat_template):
                wrong = "this model's chat template has no switch for thinking (enable_thinking)"
                raise ValueError(f"{wrong}, so it cannot be turned on or off; leave the setting out")
        super().change(settings)

    def default(self, name: str) -> Any:
        return getattr(self._gen.default_params, name, None)

    def _add(self, messages: Sequence[Message]) -> tuple[str | int, AnswerParser]:
        """Begin an answer. Return its id and its parser."""
        tokenizer, prompt = self._gen.tokenizer, dict[str, Any](messages=messages)
        if (thinking := self.settings.get("thinking")) is not None:
            prompt["chat_template_kwargs"] = {"enable_thinking": thinking}
        id = self._gen.add(prompt, replace(self._gen.default_params, **_sampling(self.settings)))
        if tokenizer is None:
            return id, AnswerParser(None)
        ids, _ = encode_prompt(prompt, tokenizer)
        return id, AnswerParser(find_reasoning(tokenizer), starts_open(tokenizer, ids))

    def check(self, messages: Sequence[Message]) -> None:
        self._gen.abort([self._add(messages)[0]])

    def stream(self, messages: Sequence[Message], reply: Reply) -> Pieces:
        try:
            id, parser = self._add(messages)
        except ValueError as error:
            raise RefusedError(str(error).split(";")[0]) from error  # advice for programmers follows
        try:
            while reply.finish_reason is None:
                for event in self._gen.step():
                    reply.num_tokens += len(event.token_ids)
                    reply.finish_reason, reply.error = event.finish_reason, event.error
                    for delta in parser.push(event.text, last=event.finish_reason is not None):
                        yield delta.get("content") or delta["reasoning"], "reasoning" in delta
                yield "", False  # Ctrl-C counts here
        finally:
            self._gen.abort([id])  # does nothing if the answer has ended


class ServerBackend(_Backend):
    """A model on a server.

    url: URL of the server; its API is at /v1 unless the URL has a path.
    api_key: the server's key; None if it needs none.
    model: name of the model on the server; None for the server's only model.
    settings: the server has its own defaults for other settings.

    Raises ValueError if the URL is malformed.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None, settings: Mapping[str, Any]) -> None:
        self._url = api_url(url)
        self.max_model_len: int | None = None
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model
        self.change(settings)

    def check(self, messages: Sequence[Message]) -> None:
        """Check that the server answers, and find its model. Raises ValueError or ServerError."""
        with self._asking("GET", "/models") as response:
            status, data = response.status, response.read()
        if status != 200:
            raise ValueError(_error_of(status, data))
        try:
            served = [str(entry["id"]) for entry in json.loads(data)["data"]]
        except WRONG:
            raise ValueError(f"{self._url} is not an OpenAI-style API: {_excerpt(data)!r}") from None
        if self._model is None:
            if not served:
                raise ValueError("the server has no model yet; try again when it has loaded one")
            if len(served) > 1:
                raise ValueError(f"the server has several models; choose one by --model: {', '.join(served)}")
            (self._model,) = served

    def stream(self, messages: Sequence[Message], reply: Reply) -> Pieces:
        for data in self._chunks(messages):
            try:
                chunk = json.loads(data)
                failure = error_message(chunk) if chunk.get("error") else None
                thought, text = _take(chunk, reply)
            except WRONG:
                raise ServerError(f"the server has sent something that is not an answer: {data[:EXCERPT]!r}") from None
            if failure is not None:
                raise ServerError(failure)
            yield thought, True
            yield text, False
        if reply.finish_reason is None:
            raise ServerError("the server has ended the answer early")

    def _chunks(self, messages: Sequence[Message]) -> Iterator[bytes]:
        """Yield the chunks of an answer, which are JSON. Raises RefusedError or ServerError."""
        # Earlier thinking is not sent: templates drop it before a new message, and some servers refuse it.
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        body = {"model": self._model, "messages": plain, **_sampling(self.settings)}
        if (thinking := self.settings.get("thinking")) is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._asking("POST", "/chat/completions", json.dumps(body)) as response:
            if response.status != 200:
                error = RefusedError if response.status in (400, 413, 422) else ServerError
                raise error(_error_of(response.status, response.read()))
            for line in response:  # only "\n" ends a line, since texts may hold other line separators
                if line.startswith(b"data:"):
                    if (data := line[5:].strip()) == b"[DONE]":
                        return
                    yield data

    @contextmanager
    def _asking(self, method: str, path: str, data: str | None = None) -> Iterator[HTTPResponse]:
        """Send a request; the block reads the response. Errors of the connection are ServerErrors."""
        try:
            with asking(urlsplit(self._url), method, path, data, self._headers, set()) as response:
                yield response
        except ServerError:
            raise
        except (OSError, HTTPException) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise ServerError(f"no connection to {self._url}: {reason}; is the server running?") from None


Backend = LocalBackend | ServerBackend


def _take(chunk: Mapping[str, Any], reply: Reply) -> tuple[str, str]:
    """Return the thought and the text of a chunk, and note in the reply what else it says. Raises an error for a chunk
    with values of other types."""
    text = thought = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text += delta.get("content") or ""
        thought += delta.get("reasoning_content") or delta.get("reasoning") or ""
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    if usage := chunk.get("usage"):
        reply.num_tokens = int(usage["completion_tokens"])
    elif text or thought:
        reply.num_tokens += 1  # an estimate until the server reports the number
    return thought, text


def _error_of(status: int, data: bytes) -> str:
    """Return the error message of a response."""
    if status == 401:
        return "the server wants another key; give it by --api-key"
    try:
        return error_message(json.loads(data))
    except (ValueError, RecursionError):
        return f"the server says {status}: {_excerpt(data)!r}"


def _excerpt(data: bytes) -> str:
    return data.decode(errors="replace")[:EXCERPT]
