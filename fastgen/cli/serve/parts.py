"""Parts of requests: messages and tools of a chat, and the structure of answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from typing_extensions import TypedDict

from fastgen.cli.serve.fields import History, Items, Some, Strict, wrong
from fastgen.request import SamplingParams
from fastgen.text.grammar import MAX_GRAMMAR, lark_grammar

TEXT_ONLY = "the model reads text only"
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR)]


class StreamOptions(Strict):
    """Options of a stream.

    include_usage: add a last chunk with the usage. continuous_usage_stats: add the usage so far to every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    without_effect = frozenset({"include_obfuscation"})


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


def _check_part(part: Any) -> Any:
    """Refuse a part that is not text with a reason, instead of the list of types."""
    if isinstance(part, dict) and (kind := part.get("type")) not in ("text", "refusal"):
        if kind is None:
            raise wrong("type", "is required", "missing_required_parameter")
        raise wrong("type", f"is {kind!r:.40}, and {TEXT_ONLY}; give parts of the type text")
    return part


_Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(History):
    """A call of a function. arguments: a JSON object as text, which is incomplete if max_tokens has cut it off."""

    name: str
    arguments: str


class ToolCall(History):
    id: str
    type: Literal["function"]
    function: CalledFunction


Content = str | Items[Annotated[_Part, BeforeValidator(_check_part)]]


def reasoning_texts(parts: Any) -> list[str]:
    """Return the texts of a list of parts of reasoning. Other values have none, as encrypted parts."""
    found = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    texts = (part.get("text") or part.get("summary") for part in found)
    return [text for text in texts if isinstance(text, str)]


def _thought(message: dict[str, Any]) -> str | None:
    """Return the reasoning of an earlier answer, from the field that its server has put it into."""
    joined = "".join(reasoning_texts(message.get("reasoning_details")))  # OpenRouter's
    found = (message.get("reasoning_content"), message.get("reasoning"), joined)
    return next((text for text in found if isinstance(text, str) and text), None)


class ChatMessage(History):
    """A message of a chat. reasoning_content: reasoning of an earlier answer, which may also have other names."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: Annotated[str | None, WithJsonSchema({})] = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def texts(self) -> str | list[dict[str, str]] | None:
        """The content, with all parts of the type text."""
        if not isinstance(self.content, list):
            return self.content
        texts = (part["text"] if part["type"] == "text" else part["refusal"] for part in self.content)
        return [{"type": "text", "text": text} for text in texts]

    @property
    def text(self) -> str | None:
        """The content in one text."""
        texts = self.texts
        return "\n".join(part["text"] for part in texts) if isinstance(texts, list) else texts

    @model_validator(mode="before")
    @classmethod
    def _find_reasoning(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {**data, "reasoning_content": _thought(data) if data.get("role") == "assistant" else None}

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise wrong("content", "is required, except in a message of the assistant", "missing_required_parameter")
        if self.content == [] and self.role != "assistant":
            raise wrong("content", "is empty; give at least 1 item")
        if self.role == "tool" and self.tool_call_id is None:
            raise wrong("tool_call_id", "is required in a message of a tool", "missing_required_parameter")
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) is not None and self.role != role:
                raise wrong(field, f"is only allowed in a message of the role {role}", "unsupported_parameter")
        return self


class ToolFunction(Strict):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def takes(self) -> dict[str, Any]:
        """The JSON schema of the arguments; without `parameters`, the function takes none."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        """Return the tool for a chat template, with all fields in the order that models were trained on."""
        given = self.function
        function = {"name": given.name, "description": given.description or "", "parameters": given.takes}
        return {"type": "function", "function": function}


ToolMode = Literal["none", "auto", "required"]


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    """The name of a function. As a tool_choice it means exactly one call of this function."""

    type: Literal["function"]
    function: NamedFunction
    required: ClassVar[bool] = True

    @property
    def names(self) -> list[str]:
        """The name of the only function that may be called."""
        return [self.function.name]


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Some[NamedTool]


class ChosenTools(Strict):
    """A tool_choice of some of the tools. The chat template still shows all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> list[str]:
        """The names of the functions that may be called."""
        return [tool.function.name for tool in self.allowed_tools.tools]

    @property
    def required(self) -> bool:
        """True if one of these functions must be called."""
        return self.allowed_tools.mode == "required"


class JsonSchema(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            code = "missing_required_parameter" if self.json_schema is None else "unsupported_parameter"
            raise wrong("json_schema", "belongs to the type 'json_schema', which requires it", code)
        return self


class StructuredOutputs(Strict):
    """The structure of an answer, with vLLM's fields, of which exactly one is given."""

    json_: dict[str, Any] | GrammarText | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Some[GrammarText] | None = None
    grammar: GrammarText | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise wrong("structured_outputs", "must have one field: json, regex, choice, grammar or json_object")
        return self

    @property
    def params(self) -> SamplingParams:
        """The same structure as parameters of the engine. Raises ValueError."""
        schema = {"type": "object"} if self.json_object else self.json_
        grammar = None if self.grammar is None else lark_grammar(self.grammar)
        return SamplingParams(json_schema=schema, regex=self.regex, choice=self.choice, grammar=grammar)


# {field of a request: the field of structured_outputs that it is another name of}, in SGLang and older versions of vLLM
STRUCTURES = {
    "regex": "regex", "json_schema": "json", "ebnf": "grammar",
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
