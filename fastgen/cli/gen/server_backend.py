"""Work on rows with a model on an OpenAI-style server: one request per row, many at a time.

The openai package repeats requests that fail because the server is busy, restarts or cannot be reached for a while.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import openai

from fastgen.cli.gen.rows import Row
from fastgen.cli.gen.work import Done, Record, RowJob, Work, batch_record, given_by, seed_of
from fastgen.cli.options import EXCERPT, error_message

ANSWER_SECONDS = 3600.0  # time limit of one answer
CONNECT_SECONDS = 10.0
RETRIES = 10  # per request; with the pauses of the openai package, about a minute
WRONG_KEY = (401, 403)
NO_MODEL = 404


class Call(NamedTuple):
    """A request to the server. path: after /v1."""

    path: str
    body: dict[str, Any]


class Calls(Protocol):
    """The format of a job: how rows become requests, and responses records."""

    needs_all: bool  # a 404 is an error of the job, since all rows have the same model

    def call(self, row: Row) -> Call:
        """Return the request of a row that could be read. Raises ValueError or TypeError if it has none."""

    def finish(self, row: Row, call: Call, body: Any) -> tuple[Record, str | None]:
        """Return the record of a row whose request was answered, and its error, if any."""

    def failed(self, row: Row, status: int, body: Any) -> tuple[Record, str]:
        """Return the record of a row whose request failed, and the reason. body: an error in OpenAI's form."""


@dataclass(frozen=True)
class RowCalls:
    """The requests of rows with one prompt each: to /chat/completions for messages, else to /completions.

    job: the job's settings. model: name of the model on the server. fields: sampling parameters that a row does not
    set. seed: seed that the seeds of rows without one are derived from; None for rows without a seed.
    """

    job: RowJob
    model: str
    fields: Mapping[str, Any]
    seed: int | None
    needs_all = True

    def call(self, row: Row) -> Call:
        prompt, own = self.job.prompt(row.columns), given_by(row)
        self.job.params_with(own).validate(vocab_size=2**31)
        fields = {"model": self.model, **_seed(self.seed, row), **self.fields, **own}
        chat = bool(prompt) and isinstance(prompt[0], dict)
        return Call(
            "/chat/completions" if chat else "/completions",
            {"messages" if chat else "prompt": prompt, **_with_structure(fields, chat)},
        )

    def finish(self, row: Row, call: Call, body: Any) -> tuple[Record, str | None]:
        try:
            choices, usage = list(body["choices"]), body.get("usage") or {}
            texts = [_text(choice) for choice in choices]
            reasons = [choice.get("finish_reason") for choice in choices]
        except (TypeError, KeyError, AttributeError):
            return self._finished(row, f"the server has sent what is no answer: {json.dumps(body)[:EXCERPT]}")
        if (wanted := call.body.get("n", 1)) != len(choices):
            return self._finished(row, f"the server has given {len(choices)} answers instead of n={wanted}")
        counts = [usage.get("completion_tokens")] if len(choices) == 1 else None  # the usage has only their sum
        return self.job.record(row, None, [texts, reasons, usage.get("prompt_tokens"), counts]), None

    def failed(self, row: Row, status: int, body: Any) -> tuple[Record, str]:
        return self._finished(row, error_message(body))

    def _finished(self, row: Row, reason: str) -> tuple[Record, str]:
        return self.job.record(row, reason), reason


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


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice. The reasoning of a chat comes first, between the usual marks."""
    if "message" not in choice:
        return str(choice["text"])
    message = choice["message"]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content") or ""
    return f"<think>\n{reasoning}\n</think>\n\n{content}" if reasoning else content


@dataclass(frozen=True)
class BatchCalls:
    """The requests of OpenAI's batch files, whose bodies are sent as they are, but with the given model. fields, seed:
    as in RowCalls, for bodies that do not set them."""

    model: str
    fields: Mapping[str, Any]
    seed: int | None
    needs_all = False

    def call(self, row: Row) -> Call:
        url, body = row.columns.get("url"), row.columns["body"]
        if not isinstance(url, str) or not url.startswith("/v1/") or not isinstance(body, dict) or body.get("stream"):
            raise ValueError("a row needs a url such as /v1/chat/completions, and a body without stream")
        return Call(url.removeprefix("/v1"), {**_seed(self.seed, row), **self.fields, **body, "model": self.model})

    def finish(self, row: Row, call: Call, body: Any) -> tuple[Record, str | None]:
        return batch_record(row, 200, body), None

    def failed(self, row: Row, status: int, body: Any) -> tuple[Record, str]:
        return batch_record(row, status, body), error_message(body)


def work_on_server(url: str, key: str | None, calls: Calls, rows: Iterator[Row], concurrency: int) -> Work:
    """Answer rows, and yield them in the order of completion. concurrency: number of requests at a time.

    Raises ValueError if the server cannot be reached, wants another key, or does not have the model.
    """
    with asyncio.Runner() as runner:  # its end cancels the requests
        server = _Server(url, key, calls)
        runner.run(_explained(server.check(), url))
        waiting: set[asyncio.Task[Done]] = set()
        while True:
            ended, waiting = runner.run(_explained(server.advance(rows, waiting, concurrency), url))
            if not ended:
                return
            for task in ended:
                yield task.result()


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
            await self._client.with_options(max_retries=0).get("/models", cast_to=object)
        except openai.APIStatusError as error:
            if error.status_code in WRONG_KEY:  # others may come from a server without a list of models
                raise

    async def advance(
        self, rows: Iterator[Row], waiting: set[asyncio.Task[Done]], concurrency: int
    ) -> tuple[set[asyncio.Task[Done]], set[asyncio.Task[Done]]]:
        """Begin requests up to the limit, and wait until one has ended. Return the tasks that ended and the others."""
        while len(waiting) < concurrency and (row := next(rows, None)) is not None:
            waiting.add(asyncio.create_task(self._answer(row)))
        if not waiting:
            return set(), set()
        ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # raises an error of the job
        return ended, waiting

    async def _answer(self, row: Row) -> Done:
        """Return the record of a row. Raises an error of openai that is not due to the row."""
        try:
            if row.error is not None:
                raise ValueError(row.error)
            call = self._calls.call(row)
        except (ValueError, TypeError) as error:
            record, reason = self._calls.failed(row, 400, _error_body(str(error)))
            return Done(row.index, record, reason, 0, 0)
        try:
            body = await self._client.post(call.path, body=call.body, cast_to=object)
        except openai.APIStatusError as error:
            status = error.status_code
            if status in WRONG_KEY or (status == NO_MODEL and self._calls.needs_all):
                raise
            record, reason = self._calls.failed(row, status, _body_of(error))
            return Done(row.index, record, reason, 0, 0)
        record, wrong = self._calls.finish(row, call, body)
        usage = body.get("usage") if isinstance(body, dict) else None
        prompt_tokens, tokens = ((usage or {}).get(f"{kind}_tokens") or 0 for kind in ("prompt", "completion"))
        return Done(row.index, record, wrong, prompt_tokens, tokens)


async def _explained(waiting: Coroutine[Any, Any, Any], url: str) -> Any:
    """Wait for a result. Raises ValueError instead of an error of openai."""
    try:
        return await waiting
    except openai.APIStatusError as error:
        if error.status_code in WRONG_KEY:
            raise ValueError("the server wants another key; give it by --api-key") from None
        raise ValueError(f"the server at {url} says 404: {error_message(_body_of(error))}") from None
    except openai.APIConnectionError as error:
        reason = error.__cause__ or error
        raise ValueError(f"no connection to {url}: {reason}; the same command goes on from here") from None


def _body_of(error: openai.APIStatusError) -> Any:
    """Return the body of an error's response, in OpenAI's form."""
    try:
        body = error.response.json()
    except ValueError:
        return _error_body(error.response.text[:EXCERPT])
    return body if isinstance(body, dict) and "error" in body else _error_body(json.dumps(body)[:EXCERPT])


def _error_body(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
