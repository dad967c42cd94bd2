"""The check of a request's body, and the errors that a client gets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from fastgen.cli.serve.fields import FieldPolicy, Strict

RequestT = TypeVar("RequestT", bound=Strict)
MAX_CONTAINERS = 500_000  # maximum number of lists and objects of a body
MAX_VALUES = 100_000  # maximum number of values of a field other than prompts, such as a schema
INNER = {"content", "tool_calls", "tools", "output", "summary"}  # fields of items whose lists also count
STRING_OR_OPENED = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)


class ApiError(Exception):
    """An error response: an HTTP status and a body in OpenAI's format.

    param: path of the wrong field, such as "messages[0].content". code: an identifier for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def parse(body: bytes | bytearray) -> Any:
    """Return the value of a body. Raises ApiError if it is not JSON, or has so many lists and objects that reading them
    would stop all other threads for long."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:  # also in strings
        opened = (found for found in STRING_OR_OPENED.finditer(body) if len(found[0]) == 1)
        if next(islice(opened, MAX_CONTAINERS, None), None) is not None:
            message = f"the body has more than {MAX_CONTAINERS} lists and objects; send less"
            raise ApiError(400, message, code="invalid_value")
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


@dataclass(frozen=True)
class Limits:
    """The limits of a model's requests.

    context: maximum number of tokens of a prompt and its answer together. prompts: maximum number of prompts. ids:
    number of ids of the vocabulary.
    """

    context: int
    prompts: int
    ids: int


def check_counts(kind: type[Strict], data: Mapping[str, Any], limits: Limits) -> None:
    """Refuse a body with too many messages, prompts or values before it is checked, which would take seconds. A message
    needs a token, and so does each part of it, each call and each tool. Raises ApiError."""
    prompts = data.get(kind.batch)
    if isinstance(prompts, list) and len(prompts) > limits.prompts and not isinstance(prompts[0], int):
        message = f"{kind.batch} has {len(prompts)} prompts; one request may have {limits.prompts}"
        raise ApiError(400, message, kind.batch, "invalid_value")
    for name in kind.spoken:
        if (count := _count(data.get(name), limits.context, INNER)) > limits.context:
            message = f"This model's maximum context length is {limits.context} tokens. However, {name} has at least "
            message += f"{count} messages, parts, calls and tools, each of which needs a token. Shorten it."
            raise ApiError(400, message, name, "context_length_exceeded")
    for name in data.keys() - ({kind.batch, *kind.spoken} - {"tools"}) if kind.spoken or kind.batch else ():
        most = max(MAX_VALUES, limits.ids) if name == "allowed_token_ids" else MAX_VALUES
        if _count(data[name], most) > most:
            raise ApiError(400, f"{name[:100]} has more than {most} values", name[:100], "invalid_value")


def _count(value: Any, most: int, names: Set[str] | None = None) -> int:
    """Return the number of items of a list, and of the lists and objects in them, or a number above `most` if there are
    more. names: fields of objects that count, each with its items; None: all fields."""
    count, left = 0, [value]
    while left and count <= most:
        inner = left.pop()
        if isinstance(inner, list):
            count += len(inner)
            left += inner if count <= most else ()
        elif isinstance(inner, dict):
            count += 0 if names is not None else len(inner)
            left += inner.values() if names is None else [inner[name] for name in names & inner.keys()]
    return count


def check_request(kind: type[RequestT], data: Any, policy: FieldPolicy | None = None) -> RequestT:
    """Check the value of a body. Raises ApiError, which names the wrong field."""
    try:
        return kind.model_validate(data, context=policy)
    except ValidationError as error:
        raise _api_error(error, data) from None


def _api_error(error: ValidationError, data: Any) -> ApiError:
    """Return the error about the deepest wrong field, or the last one in a list. Of the types of a union, this belongs
    to the type that the value is closest to."""
    found = [(_path(details, data), details) for details in error.errors(include_url=False)]
    path, details = max(found, key=lambda pair: (len(pair[0]), [step for step in pair[0] if isinstance(step, int)]))
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    kind = details["type"]
    if kind == "missing":
        return ApiError(400, f"{param} is required", param, "missing_required_parameter")
    if "field" in (context := details.get("ctx", {})):  # see `wrong`
        inside = param if path[-1:] == (context["field"],) else f"{param}.{context['field']}".removeprefix(".")
        return ApiError(400, f"{inside} {context['message']}", inside, kind)
    messages = dict.fromkeys(other["msg"] for at, other in found if at == path)
    reason = ", or ".join(_plain(message) for message in messages)
    return ApiError(
        400,
        f"{param or 'the body'} {reason}",
        param or None,
        "invalid_type" if kind.endswith("_type") else "invalid_value",
    )


def _plain(message: str) -> str:
    """Return a message of pydantic without terms of Python."""
    message = re.sub(r"should have at least 1 item.*", "is empty; give at least 1 item", message)
    message = re.sub(r"dictionary or (instance of \w+|object to extract fields from)|dictionary", "object", message)
    return re.sub(r"^(Input|String|List|Dictionary|Value) ", "", message)


def _path(details: ErrorDetails, data: Any) -> tuple[str | int, ...]:
    """Return the path of an error in the body, without the steps that pydantic adds for the types of a union."""
    path: list[str | int] = []
    for step in details["loc"]:
        if isinstance(data, dict) and (step in data or (details["type"] == "missing" and step is details["loc"][-1])):
            path.append(step)
            data = data.get(step)
        elif isinstance(data, list) and isinstance(step, int):
            path.append(step)
            data = data[step] if step < len(data) else None
    return tuple(path)
