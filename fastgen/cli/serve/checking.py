"""The check of a request's body, and the errors that a client gets."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from fastgen.cli.serve.fields import FieldPolicy, Strict

RequestT = TypeVar("RequestT", bound=Strict)


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


def parse(body: bytes) -> Any:
    """Return the value of a body. Raises ApiError if it is not JSON."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


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
