"""Parts of requests: messages, tools and formats, with strict checks."""

from __future__ import annotations

from typing import Annotated, Any, Literal, LiteralString

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def wrong(field: str, message: str, code: LiteralString = "invalid_value") -> PydanticCustomError:
    """Return the error of a field. message: the rest of a sentence that begins with the field's name."""
    return PydanticCustomError(code, "{field} {message}", {"field": field, "message": message})


class Strict(BaseModel):
    """A part of a request: unknown fields are errors, types are not converted, and a null field counts as left out."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in given:  # stop at the first unknown field: there may be very many
            if name not in cls.model_fields and all(field.alias != name for field in cls.model_fields.values()):
                raise wrong(name, "is not supported; leave it out", "unsupported_parameter")
        return given


class StreamOptions(Strict):
    """include_usage: add a last chunk with the usage. continuous_usage_stats: add the usage so far to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """arguments: a JSON object as text. parsed_arguments: added by clients that have parsed it; ignored."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Strict):
    """index: added by clients that have assembled the call from chunks; ignored."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = Field(None, ge=0)


Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


class _Message(Strict):
    role: str
    content: Content | None = None
    name: str | None = None

    @property
    def text(self) -> str | None:
        """The content as one text; parts are joined by newlines."""
        return "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content


class GivenMessage(_Message):
    role: Literal["system", "developer", "user"]
    content: Content


class AssistantMessage(_Message):
    """parsed: added by clients that have parsed the content; ignored."""

    role: Literal["assistant"]
    parsed: Any = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise wrong("content", "is required, except in a message with tool_calls")
        return self


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


ChatMessage = Annotated[GivenMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ToolFunction(Strict):
    """parameters: a JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def takes(self) -> dict[str, Any]:
        """The schema of the arguments; a function without `parameters` has none."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        """Return the tool for a chat template: with every field, in the order that models were trained on."""
        given = self.function
        function = {"name": given.name, "description": given.description or "", "parameters": given.takes}
        return {"type": "function", "function": function}


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class FreeFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[FreeFormat | SchemaFormat, Field(discriminator="type")]
