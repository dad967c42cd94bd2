"""OpenAI's /responses, translated to a chat and back. Nothing is stored: a request brings its earlier items with it.

Source: https://platform.openai.com/docs/api-reference/responses, and the requests of Codex. Tests hold the answers to
the types of the openai package.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, Tag, model_validator

from fastgen.cli.serve.protocol import (
    ApiError,
    ChatRequest,
    History,
    JsonSchema,
    Strict,
    ToolFunction,
    check_request,
    wrong,
)
from fastgen.cli.serve.replies import ChatReply
from fastgen.cli.serve.translation import Block, BlockReply, by_kind, called, kind_of, merged, text_of
from fastgen.request import MAX_LOGPROBS

# Fields of a chat that errors name, and what they are called here.
NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}


def renamed(error: ApiError) -> ApiError:
    """Return an error of a chat with the name that its field has here."""
    name = NAMES.get(error.param or "", error.param)
    return ApiError(error.status, error.message, name, error.code)


# ------------------------------------------------------------------------------------------------- items


class Part(History):
    type: Literal["input_text", "output_text", "text"]
    text: str


Parts = str | Annotated[list[Part], Field(fail_fast=True)]


class Message(History):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts

    def messages(self) -> list[dict[str, Any]]:
        """Return the item as messages of a chat; so do those below."""
        return [{"role": self.role, "content": text_of(self.content)}]


class FunctionCall(History):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    def messages(self) -> list[dict[str, Any]]:
        return [called(self.call_id, flat(self.namespace, self.name), self.arguments)]


class FunctionOutput(History):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}]


class Reasoning(History):
    """What a model has thought, which templates do not take back."""

    type: Literal["reasoning"]

    def messages(self) -> list[dict[str, Any]]:
        return []


def _kind_of_item(item: Any) -> str | None:
    """Return the tag of the type that an item is checked as. A message may be without its type."""
    untyped = isinstance(item, Message) or (isinstance(item, dict) and "role" in item)
    return kind_of(item) or ("message" if untyped else None)


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    by_kind(
        "must have the type message, function_call, function_call_output or reasoning; nothing is stored: a client "
        "that sends references sends items where its `store` is false",
        _kind_of_item,
    ),
]

# ------------------------------------------------------------------------------------------------- requests


def flat(namespace: str | None, name: str) -> str:
    """Return the name that a model knows a function by."""
    return name if namespace is None else f"{namespace}__{name}"


class Function(ToolFunction):
    type: Literal["function"]


class Namespace(Strict):
    """Functions whose calls have its name beside their own."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    tools: Annotated[list[Function], Field(fail_fast=True)]


class WebSearch(History):
    """A search in pages that are stored, which Codex offers by default: it is left out. One in the web is an error."""

    type: Literal["web_search"]


def _kind_of_tool(tool: Any) -> str | None:
    live = isinstance(tool, dict) and tool.get("external_web_access") is not False
    return None if live and kind_of(tool) == "web_search" else kind_of(tool)


ResponseTool = Annotated[
    Annotated[Function, Tag("function")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[WebSearch, Tag("web_search")],
    by_kind(
        "must be of the type function or namespace: the server runs no tools itself, such as a search", _kind_of_tool
    ),
]


class ChosenFunction(Strict):
    type: Literal["function"]
    name: str


class Plain(Strict):
    type: Literal["text", "json_object"]


class Schema(JsonSchema):
    type: Literal["json_schema"]


class Text(Strict):
    format: Annotated[Plain | Schema, Field(discriminator="type")] | None = None
    verbosity: str | None = None
    without_effect = frozenset({"verbosity"})


class Unused(Strict):
    """Fields that can not change the answer."""

    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = Field(None, description="of the tools of OpenAI's servers")
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None


class ResponseRequest(Unused):
    """A request to /responses."""

    without_effect = frozenset(Unused.model_fields)

    model: str | None = None
    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: FiniteFloat | None = Field(None, ge=0)
    top_p: FiniteFloat | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    text: Text | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_stored(cls, data: Any) -> Any:
        stored = ("previous_response_id", "conversation", "prompt", "background")
        if name := next((name for name in stored if isinstance(data, dict) and data.get(name)), None):
            message = "is not supported: nothing is stored; send all earlier items as input, and wait for the answer"
            raise wrong(name, message, "unsupported_parameter")
        return data

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    def functions(self) -> Iterator[tuple[str | None, Function]]:
        """Yield the functions with their namespaces."""
        for tool in self.tools or ():
            if isinstance(tool, Function):
                yield None, tool
            elif isinstance(tool, Namespace):
                yield from ((tool.name, function) for function in tool.tools)

    def chat(self) -> ChatRequest:
        """Return the request as a chat. Raises ApiError."""
        items = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages += [message for item in items for message in item.messages()]
        if not messages:
            raise ApiError(400, "input is empty; give at least one message", "input", "invalid_value")
        names = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "chat_template_kwargs")
        data: dict[str, Any] = {name: getattr(self, name) for name in names}
        data |= {"messages": merged(messages), "max_tokens": self.max_output_tokens}
        data |= {"logprobs": True, "top_logprobs": self.top_logprobs} if self.logprobs else {}
        data |= {"tools": [_chat_tool(*pair) for pair in self.functions()], "tool_choice": self.tool_choice}
        if isinstance(self.tool_choice, ChosenFunction):
            data["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text is not None and self.text.format is not None:
            data["response_format"] = {"type": self.text.format.type}
            if isinstance(self.text.format, Schema):
                data["response_format"]["json_schema"] = _given(self.text.format)
        return check_request(ChatRequest, data)


def _given(part: Strict) -> dict[str, Any]:
    """Return the fields of a part for a chat, which nests what has a type here."""
    return part.model_dump(by_alias=True, exclude_none=True, exclude={"type"})


def _chat_tool(namespace: str | None, function: Function) -> dict[str, Any]:
    return {"type": "function", "function": {**_given(function), "name": flat(namespace, function.name)}}


# ------------------------------------------------------------------------------------------------- responses


class ResponseReply(BlockReply):
    """The response: each block is an item, a message or a call."""

    def __init__(self, request: ResponseRequest, chat: ChatReply) -> None:
        super().__init__(chat)
        self._request = request
        self._functions = {flat(*(space, tool.name)): (space, tool.name) for space, tool in request.functions()}
        self._hex = chat.id.rpartition("-")[2]
        self._number = -1

    def begin(self) -> Iterable[dict[str, Any]]:
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def open(self, block: Block) -> Iterable[dict[str, Any]]:
        yield self._event("output_item.added", block, item=self._item(block, "in_progress", []))
        if block.name is None:
            yield self._inner("content_part.added", block, part=_part(block))

    def grow(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        if block.name is None:
            yield self._inner("output_text.delta", block, delta=piece, logprobs=logprobs)
        else:
            yield self._inner("function_call_arguments.delta", block, delta=piece)

    def close(self, block: Block) -> Iterable[dict[str, Any]]:
        item = self._item(block, self._status, [_part(block)])
        if block.name is None:
            yield self._inner("output_text.done", block, text=block.text, logprobs=block.logprobs)
            yield self._inner("content_part.done", block, part=_part(block))
        else:
            yield self._inner("function_call_arguments.done", block, arguments=block.text, name=item["name"])
        yield self._event("output_item.done", block, item=item)

    def end(self) -> list[dict[str, Any]]:
        return [self._event(self._status, response=self.body())]

    def body(self) -> dict[str, Any]:
        return self._response(self._status)

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        said = {"code": error.code, "message": error.message, "param": error.param}
        failed = {"code": "server_error", "message": error.message}
        self._number += 1
        return [
            {"type": "error", "sequence_number": self._number, **said, **error.body},
            self._event("failed", response={**self._response("failed"), "error": failed}),
        ]

    @property
    def _status(self) -> str:
        return "incomplete" if self.finish_reason == "length" else "completed"

    def _event(self, kind: str, block: Block | None = None, **fields: Any) -> dict[str, Any]:
        self._number += 1
        place = {} if block is None else {"output_index": block.index}
        return {"type": f"response.{kind}", "sequence_number": self._number, **place, **fields}

    def _inner(self, kind: str, block: Block, **fields: Any) -> dict[str, Any]:
        """Return an event inside an item."""
        place = {"content_index": 0} if block.name is None else {}
        return self._event(kind, block, item_id=self._id(block), **place, **fields)

    def _id(self, block: Block) -> str:
        return f"{'msg' if block.name is None else 'fc'}_{self._hex}{block.index}"

    def _item(self, block: Block, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an item of the output. content: its parts, if it is a message."""
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.name is None:
            return {**item, "type": "message", "role": "assistant", "content": content}
        namespace, name = self._functions.get(block.name, (None, block.name))
        call = {"type": "function_call", "call_id": block.id, "name": name, "arguments": block.text}
        return {**item, **call, **({} if namespace is None else {"namespace": namespace})}

    def _response(self, status: str) -> dict[str, Any]:
        given = self._request.model_dump(by_alias=True, exclude_none=True, exclude={"input"})
        ended = status == self._status
        statuses = ["completed"] * (len(self.blocks) - 1) + [status]
        output = [self._item(block, state, [_part(block)]) for block, state in zip(self.blocks, statuses, strict=False)]
        echoed = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p", "user")
        return {
            "id": f"resp_{self._hex}",
            "object": "response",
            "created_at": self.chat.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.chat.model,
            "output": output if ended else [],
            **{name: given.get(name) for name in echoed},
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "truncation": "disabled",
            "usage": _usage(self.chat.usage) if ended else None,
        }


def _part(block: Block) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
