"""Work on rows with a model on an OpenAI-style server: one request per row, many at a time.

The openai package repeats requests that fail because the server is busy, restarts or cannot be reached for a while.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import openai
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastgen.cli.gen.rows import Row, read_json
from fastgen.cli.gen.work import Done, Record, RowJob, Work, batch_record, check_json, given_by, priority_of
from fastgen.cli.options import EXCERPT, error_message
from fastgen.engine.seeds import seed_of
from fastgen.request import REPETITION

ANSWER_SECONDS = 3600.0  # time limit of one answer
CONNECT_SECONDS = 10.0
RETRIES = 10  # per request; with the pauses of the openai package, about a minute
WRONG_KEY, FORBIDDEN, NO_MODEL = 401, 403, 404
BAD_GATEWAY = 502  # status of a row whose answer is wrong or does not arrive
CHAT, COMPLETIONS = "/chat/completions", "/completions"
HARMLESS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
}
"""{path: a request that a server refuses only for its key, its model or its path}"""


# ------------------------------------------------------------------------------------------------- answers


class _Part(BaseModel):
    """A part of an answer, as far as it is read. Types are not converted."""

    model_config = ConfigDict(strict=True)


class _Message(_Part):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(_Part):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # an extension of vLLM

    @property
    def repeated(self) -> bool:
        """True if the server ended the answer because it repeated itself, which vLLM reports as the finish_reason."""
        return REPETITION in (self.finish_reason, self.stop_reason)

    @property
    def answer(self) -> str:
        """The text. The reasoning of a chat comes first, between the usual marks."""
        if self.message is None:
            return self.text or ""
        reasoning, content = self.message.reasoning_content or self.message.reasoning, self.message.content or ""
        return f"<think>\n{reasoning}\n</think>\n\n{content}" if reasoning else content


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Usage(_Part):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class ServerAnswer(_Part):
    """The answer to a request for completions; to another request, `choices` is None."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None


def read_answer(call: ServerCall, body: Any) -> ServerAnswer:
    """Return the answer to a request. Raises ValueError, which says what is wrong with it."""
    if isinstance(body, dict) and body.get("error"):
        raise ValueError(error_message(body))
    try:
        answer = ServerAnswer.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"])) or "it"
        reason = re.sub(r"dictionary or instance of \w+", "object", first["msg"].removeprefix("Input "))
        raise _wrong(f"{path} {reason}", body) from None
    if (text := {CHAT: "message", COMPLETIONS: "text"}.get(call.path)) is not None:
        if answer.choices is None:
            raise _wrong("choices is missing", body)
        if any(getattr(choice, text) is None for choice in answer.choices):
            raise _wrong(f"{text} is missing in a choice", body)
        if (there := len(answer.choices)) != (expected := _expected(call.body)):
            raise ValueError(f"the server has given {there} answers instead of {expected}")
    return answer


def _expected(body: Mapping[str, Any]) -> int:
    """Return the number of choices that a request asks for."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return prompts * n if isinstance(n, int) else prompts


def _wrong(reason: str, body: Any) -> ValueError:
    return ValueError(f"the server's answer is wrong: {reason}; it begins {json.dumps(body)[:EXCERPT]}")


# ------------------------------------------------------------------------------------------------- formats of jobs


@dataclass(frozen=True)
class ServerCall:
    """A request to the server. path: after /v1. Raises ValueError for a body that JSON does not have."""

    path: str
    body: dict[str, Any]

    def __post_init__(self) -> None:
        check_json(self.body)


class Calls(Protocol):
    """The format of a job: how rows become requests, and responses records."""

    refusals: tuple[int, ...]  # statuses that may be an error of the job, since all rows have the same model and path

    def call(self, row: Row) -> ServerCall:
        """Return the request of a row that could be read. Raises ValueError or TypeError if it has none."""

    def record(self, row: Row, answer: ServerAnswer, body: Any) -> Record:
        """Return the record of a row whose request was answered. body: the whole answer."""

    def failed(self, row: Row, status: int, body: Any) -> Record:
        """Return the record of a row whose request failed. body: an error in OpenAI's form."""


@dataclass(frozen=True)
class RowCalls:
    """The requests of rows with one prompt each: to /chat/completions for messages, else to /completions.

    job: the job's settings. model: name of the model on the server. fields: sampling parameters that a row does not
    set, and the priority. seed: seed that the seeds of rows without one are derived from; None for rows without a seed.
    """

    job: RowJob
    model: str
    fields: Mapping[str, Any]
    seed: int | None
    refusals = (FORBIDDEN, NO_MODEL)

    def call(self, row: Row) -> ServerCall:
        prompt, own = self.job.prompt(row.columns), given_by(row)
        self.job.params_with(own).validate()
        fields = {"model": self.model, **_seed(self.seed, row), **self.fields, **own}
        if (priority := priority_of(row)) is not None:
            fields["priority"] = priority
        chat = bool(prompt) and isinstance(prompt[0], dict)
        if isinstance(prompt, list) and not chat and any(type(id) is not int for id in prompt):
            raise ValueError(f"a prompt of ids must hold integers, not {prompt!r:.40}")
        return ServerCall(
            CHAT if chat else COMPLETIONS,
            {"messages" if chat else "prompt": prompt, **_with_structure(fields, chat)},
        )

    def record(self, row: Row, answer: ServerAnswer, body: Any) -> Record:
        choices, usage = answer.choices or [], answer.usage or _Usage()
        counts = [usage.completion_tokens] if len(choices) == 1 else None  # the usage has only their sum
        texts, reasons = [choice.answer for choice in choices], [choice.finish_reason for choice in choices]
        return self.job.record(row, None, [texts, reasons, usage.prompt_tokens, counts])

    def failed(self, row: Row, status: int, body: Any) -> Record:
        return self.job.record(row, error_message(body))


def _seed(seed: int | None, row: Row) -> dict[str, int]:
    """Return the field `seed` of a row's request, if the job has a seed. Servers take seeds below 2^63."""
    return {} if seed is None else {"seed": seed_of(seed, row.index) >> 1}


def _with_structure(fields: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """Return the fields of a request with json_schema, regex and choice as servers take them."""
    plain = {name: value for name, value in fields.items() if name not in ("json_schema", "regex", "choice")}
    if chat and "json_schema" in fields:
        schema = {"name": "answer", "schema": fields["json_schema"], "strict": True}
        return {**plain, "response_format": {"type": "json_schema", "json_schema": schema}}
    structure = {"json": fields.get("json_schema"), "regex": fields.get("regex"), "choice": fields.get("choice")}
    given = {name: value for name, value in structure.items() if value is not None}
    return {**plain, "structured_outputs": given} if given else plain  # an extension of vLLM


@dataclass(frozen=True)
class BatchCalls:
    """The requests of OpenAI's batch files, whose bodies are sent as they are, but with the given model. fields, seed:
    as in RowCalls, for bodies that do not set them."""

    model: str
    fields: Mapping[str, Any]
    seed: int | None
    refusals = (FORBIDDEN,)

    def call(self, row: Row) -> ServerCall:
        url, body = row.columns.get("url"), row.columns.get("body")
        path = re.fullmatch(r"/v1((?:/\w[\w.-]*)+)", url, re.ASCII) if isinstance(url, str) else None
        if path is None or not isinstance(body, dict) or body.get("stream"):
            raise ValueError("a row needs a url such as /v1/chat/completions, and a body without stream")
        return ServerCall(path[1], {**_seed(self.seed, row), **self.fields, **body, "model": self.model})

    def record(self, row: Row, answer: ServerAnswer, body: Any) -> Record:
        return batch_record(row, 200, body)

    def failed(self, row: Row, status: int, body: Any) -> Record:
        return batch_record(row, status, body)


# ------------------------------------------------------------------------------------------------- requests


def work_on_server(url: str, key: str | None, calls: Calls, rows: Iterator[Row], concurrency: int) -> Work:
    """Answer rows, and yield them in the order of completion. concurrency: number of requests at a time.

    Raises ValueError if the server cannot be reached, wants another key, or does not have the model.
    """
    with asyncio.Runner() as runner:  # its end cancels the requests
        server = _Server(url, key, calls)
        waiting: set[asyncio.Task[Done]] = set()
        try:
            runner.run(server.check())
            while True:
                ended, waiting = runner.run(server.advance(rows, waiting, concurrency))
                if not ended:
                    return
                for task in sorted(ended, key=lambda task: task.exception() is not None):
                    yield task.result()  # the last ones raise an error of the job
        except openai.APIStatusError as error:
            if error.status_code == WRONG_KEY:
                raise ValueError("the server wants another key; give it by --api-key") from None
            said = error_message(_body_of(error))
            raise ValueError(f"the server at {url} says {error.status_code}: {said}") from None
        except openai.APIConnectionError as error:
            raise ValueError(f"no connection to {url}: {_cause(error)}; the same command goes on from here") from None


class _Server:
    """The requests to a server."""

    def __init__(self, url: str, key: str | None, calls: Calls) -> None:
        timeout = openai.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        # The package needs a key; servers without one ignore it.
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key or "none", timeout=timeout, max_retries=RETRIES)
        self._calls = calls

    async def check(self) -> None:
        """Raise an error of openai if the server cannot be reached or wants another key."""
        try:
            await self._client.with_options(max_retries=0).get("/models", cast_to=bytes)
        except openai.APIStatusError as error:
            if error.status_code in (WRONG_KEY, FORBIDDEN):  # others may come from a server without a list of models
                raise

    async def advance(
        self, rows: Iterator[Row], waiting: set[asyncio.Task[Done]], concurrency: int
    ) -> tuple[set[asyncio.Task[Done]], set[asyncio.Task[Done]]]:
        """Begin requests up to the limit, and wait until one has ended. Return the tasks that ended and the others."""
        while len(waiting) < concurrency and (row := next(rows, None)) is not None:
            waiting.add(asyncio.create_task(self._answer(row)))
        return await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED) if waiting else (set(), set())

    async def _answer(self, row: Row) -> Done:
        """Return the record of a row. Raises an error of openai that is not due to the row."""
        try:
            if row.error is not None:
                raise ValueError(row.error)
            call = self._calls.call(row)
        except (ValueError, TypeError) as error:
            return self._failed(row, 400, str(error))
        try:
            data = await self._client.post(call.path, body=call.body, cast_to=bytes)
        except openai.APIStatusError as error:
            if await self._refuses_all(error.status_code, call):
                raise
            body = _body_of(error)
            return Done(row.index, self._calls.failed(row, error.status_code, body), error_message(body), 0, 0)
        except openai.APIConnectionError as error:
            await self.check()  # raises if it is not due to the row
            return self._failed(row, BAD_GATEWAY, f"the server gave no answer: {_cause(error)}")
        try:
            content = _read(data)
            answer = read_answer(call, content)
        except ValueError as error:
            return self._failed(row, BAD_GATEWAY, str(error))
        usage, record = answer.usage or _Usage(), self._calls.record(row, answer, content)
        repeated = sum(choice.repeated for choice in answer.choices or ())
        return Done(row.index, record, None, usage.prompt_tokens or 0, usage.completion_tokens or 0, repeated)

    def _failed(self, row: Row, status: int, reason: str) -> Done:
        return Done(row.index, self._calls.failed(row, status, _error_body(reason, status)), reason, 0, 0)

    async def _refuses_all(self, status: int, call: ServerCall) -> bool:
        """Return whether the server refuses any request to this path and model with this status, not only the row's."""
        if status not in self._calls.refusals or call.path not in HARMLESS:
            return status == WRONG_KEY
        try:
            await self._client.post(call.path, body={**HARMLESS[call.path], "model": call.body["model"]}, cast_to=bytes)
        except openai.APIStatusError as error:
            return error.status_code == status
        return False


def _read(data: bytes) -> Any:
    """Return the value of an answer. Raises ValueError."""
    try:
        return read_json(data)
    except ValueError as error:
        excerpt = data[:EXCERPT].decode(errors="backslashreplace")
        raise ValueError(f"the server's answer cannot be read: {error}; it begins {excerpt}") from None


def _cause(error: openai.APIConnectionError) -> str:
    cause = error.__cause__ or error
    return str(cause) or type(cause).__name__


def _body_of(error: openai.APIStatusError) -> dict[str, Any]:
    """Return the body of an error's response, in OpenAI's form."""
    try:
        body = read_json(error.response.content)
    except ValueError:
        said = error.response.text[:EXCERPT] or f"the server says {error.status_code} and nothing else"
        return _error_body(said, error.status_code)
    if isinstance(body, dict) and "error" in body:
        return body
    return _error_body(json.dumps(body)[:EXCERPT], error.status_code)


def _error_body(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
