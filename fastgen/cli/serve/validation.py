"""The validation of requests: limits of bodies, strict checks of fields, lists of fields that are not used, and errors.

A field that other servers know is accepted if its value changes nothing here. Fields of which a user might expect
something are named in the log, once each. fastgen/names.toml has their names.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, LiteralString, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from fastgen.names import foreign_names, nearest

UNSUPPORTED = "is not supported; leave it out"
MAX_NAMED = 200  # maximum number of fields that the log names, since clients may make up any number of them
MAX_NAME = 100  # maximum number of characters of a name in the log

_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True)]  # checked up to the first wrong item: a body may have very many
Some = Annotated[list[_T], Field(min_length=1, fail_fast=True)]

_FIELDS = foreign_names()["fields"]
UNUSED = frozenset(_FIELDS["unused"])
"""Fields that change no answer, whatever their value is."""
NOTED: dict[str, str] = _FIELDS["noted"]
"""{field that is ignored as a user would expect, and named in the log: what holds instead}"""
Neutral = Mapping[str, tuple[Any, str]]
NEUTRAL: Neutral = {name: tuple(pair) for name, pair in _FIELDS["neutral"].items()}
"""{field: (the only value that changes nothing here, what to do instead of another value)}"""
HINTS: dict[str, str] = _FIELDS["hints"]
"""{unsupported field: what to do instead}"""


def is_neutral(value: Any, neutral: Any) -> bool:
    """Return whether a value of a body is the neutral one of its field. In JSON, true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class FieldPolicy:
    """The policy of a server for fields that it does not use, and for values that only OpenAI's API refuses.

    strict: refuse those without effect. ignore_unknown: ignore those that are not supported, instead of an error.
    say: logs a line; by default, nothing is logged. limited: refuse values beyond the limits of OpenAI's API.
    """

    def __init__(
        self,
        strict: bool = False,
        ignore_unknown: bool = False,
        say: Callable[[str], None] = lambda _: None,
        limited: bool = False,
    ) -> None:
        self.strict, self.ignore_unknown, self.limited, self._say = strict, ignore_unknown, limited, say
        self._named: set[str] = set()

    def note(self, field: str, reason: str) -> None:
        """Log that a field is ignored, once for each name."""
        field = field[:MAX_NAME]
        if field not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(field)
            last = "; further names are not logged" if len(self._named) == MAX_NAMED else ""
            self._say(f"the field {field!r} of a request is ignored: {reason}{last}")


# ------------------------------------------------------------------------------------------------- fields


def wrong(field: str, message: str, code: LiteralString = "invalid_value") -> PydanticCustomError:
    """Return an error about a field. message: the rest of a sentence that begins with the field's name."""
    return PydanticCustomError(code, "{field} {message}", {"field": field, "message": message})


def _describe(schema: dict[str, Any], kind: type[Strict]) -> None:
    """Add to the JSON schema of a part: other fields must be null, and some fields have no effect."""
    foreign = (UNUSED | NOTED.keys()) & kind.without_effect
    schema["additionalProperties"] = {"type": "null"}
    for name in sorted(kind.without_effect - foreign):
        schema["properties"].setdefault(name, {})["description"] = "accepted without effect"
    if foreign:  # as properties, they would be most of the schema
        patterns: dict[str, dict[str, Any]] = {"|".join(sorted(foreign)): {"description": "accepted without effect"}}
        for name, (value, advice) in sorted(kind.neutral.items()):
            patterns[name] = {"enum": [value, None], "description": f"for another value, {advice}"}
        schema["patternProperties"] = {f"^({names})$": each for names, each in patterns.items()}


class Strict(BaseModel):
    """A part of a request. Unknown fields are errors, types are not converted (but 3.0 is an integer, as in JSON), and
    null means that a field is left out. The validation's context may be a FieldPolicy.

    without_effect: names of fields that are accepted and dropped; those that the class also declares are checked.
    neutral: fields that are accepted with one value, in the form of NEUTRAL. A class inherits both from its base;
    names.toml adds more under the name of a class of fastgen.
    spoken: names of fields whose items become tokens of one prompt. batch: name of a field with a list of prompts.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), json_schema_extra=_describe
    )
    without_effect: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Neutral] = {}
    spoken: ClassVar[tuple[str, ...]] = ()
    batch: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("fastgen."):
            part = foreign_names()["parts"].get(cls.__name__, {})
            cls.without_effect = cls.without_effect | frozenset(part.get("without_effect", ()))
            cls.neutral = {**cls.neutral, **{name: tuple(pair) for name, pair in part.get("neutral", {}).items()}}

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        policy, fields = info.context or FieldPolicy(), {}
        for name, value in data.items():  # stops at the first unknown field, since there may be very many
            if value is None or (name in cls.neutral and is_neutral(value, cls.neutral[name][0])):
                continue
            unused = name in cls.without_effect
            if unused and name in NOTED and not policy.strict:
                policy.note(name, NOTED[name])
            if policy.strict if unused else not cls._knows(name):
                cls._refuse_other_type(data)
                cls._refuse(name, policy)
            elif not unused or name in cls.model_fields:
                whole = isinstance(value, float) and value.is_integer() and name in _integers(cls)
                fields[name] = int(value) if whole else value
        return fields

    @classmethod
    def _refuse_other_type(cls, data: dict[str, Any]) -> None:
        """Raise an error about the `type` of a part that has another one, rather than about a field of that type."""
        field = cls.model_fields.get("type")
        types = get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()
        if types and (given := data.get("type")) not in (None, *types):
            raise wrong("type", f"is {given!r:.40}, which is not supported; give {' or '.join(types)}")

    @classmethod
    def _knows(cls, name: str) -> bool:
        return name in _names(cls)

    @classmethod
    def _refuse(cls, name: str, policy: FieldPolicy) -> None:
        """Raise an error about a field that is not supported, unless the policy ignores it."""
        if policy.ignore_unknown and name not in cls.without_effect:
            return policy.note(name, "it is not supported")
        hint = HINTS.get(name, UNSUPPORTED)
        if name in cls.neutral:
            value, advice = cls.neutral[name]
            hint = f"is only supported as {json.dumps(value)}: {advice}"
        elif hint == UNSUPPORTED and name not in cls.without_effect and (near := nearest(name, _names(cls))):
            hint = f"{UNSUPPORTED} (the nearest field is {near})"
        raise wrong(name, hint, "unsupported_parameter")


class Body(Strict):
    """The body of a request, in which fields of other servers are accepted."""

    without_effect = UNUSED | NOTED.keys()
    neutral = NEUTRAL


@cache
def _names(kind: type[Strict]) -> tuple[str, ...]:
    """Return the names of the fields in a body."""
    return tuple(field.alias or name for name, field in kind.model_fields.items())


@cache
def _integers(kind: type[Strict]) -> frozenset[str]:
    """Return the names of the fields that are integers."""
    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if int in (field.annotation, *get_args(field.annotation)))


class MessagePart(Strict):
    """A part of a message. Clients send messages back with keys that servers and libraries have added. These are
    dropped, except for keys that hold a part of what was said, which are errors."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=None)

    @classmethod
    def _knows(cls, name: str) -> bool:
        return name not in ("audio", "function_call")

    @classmethod
    def _refuse(cls, name: str, policy: FieldPolicy) -> None:
        super()._refuse(name, FieldPolicy())


# ------------------------------------------------------------------------------------------------- bodies and errors

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
        opened = (match for match in STRING_OR_OPENED.finditer(body) if len(match[0]) == 1)
        if next(islice(opened, MAX_CONTAINERS, None), None) is not None:
            message = f"the body has more than {MAX_CONTAINERS} lists and objects; send less"
            raise ApiError(400, message, code="invalid_value")
    try:
        return from_json(body[len(BOM_UTF8) :] if body.startswith(BOM_UTF8) else body, allow_inf_nan=False)
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
    errors = [(_path(details, data), details) for details in error.errors(include_url=False)]
    path, details = max(errors, key=lambda pair: (len(pair[0]), [step for step in pair[0] if isinstance(step, int)]))
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    kind = details["type"]
    if kind == "missing":
        return ApiError(400, f"{param} is required", param, "missing_required_parameter")
    if "field" in (context := details.get("ctx", {})):  # see `wrong`
        inside = param if path[-1:] == (context["field"],) else f"{param}.{context['field']}".removeprefix(".")
        return ApiError(400, f"{inside} {context['message']}", inside, kind)
    messages = dict.fromkeys(other["msg"] for at, other in errors if at == path)
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
