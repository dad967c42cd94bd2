"""Anthropic's /messages and /messages/count_tokens, translated to a chat and back, and its form of /models.

Source: https://docs.anthropic.com/en/api/messages, and the requests of Claude Code. Tests check the answers against the
types of the anthropic package.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from pydantic import Field, FiniteFloat, model_validator
from pydantic_core import from_json, to_json

from fastgen.cli.serve import engine_input
from fastgen.cli.serve.dialects.translation import (
    Block,
    BlockReply,
    called,
    each_of,
    merged,
    text_of,
    text_of_part,
    thought,
    translated,
)
from fastgen.cli.serve.engine_input import ModelFacts
from fastgen.cli.serve.http_responses import answer_as_chat, compute
from fastgen.cli.serve.openai_input import FUNCTION_NAME, TEXT_ONLY, ChatRequest, Thinking
from fastgen.cli.serve.routes import Post, Routes
from fastgen.cli.serve.sampling_fields import INT32
from fastgen.cli.serve.service import Service
from fastgen.cli.serve.validation import ApiError, Body, Items, Some, Strict, check_request, wrong
from fastgen.request import SamplingParams

ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # {status: type}; other statuses are an invalid_request_error

# {kind of a block: (type of its deltas, field of their text)}
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}

# ------------------------------------------------------------------------------------------------- requests


def _messages_of(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Translate a turn into messages of a chat. Raises ValueError."""
    match turn:
        case {"role": "system", "content": content}:
            return [{"role": "system", "content": text_of(content, ".content")}]
        case {"role": "user" | "assistant" as role, "content": str() as text}:
            return [{"role": role, "content": text}]
        case {"role": "user" | "assistant" as role, "content": list(blocks)}:
            return each_of(blocks, ".content", partial(_messages_of_block, role))
    raise ValueError("must have a role, user, assistant or system, and content, a text or a list of blocks")


def _messages_of_block(role: str, block: Any) -> list[dict[str, Any]]:
    match block:
        case {"type": "text", "text": str(text)}:
            return [{"role": role, "content": text}]
        case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
            return [called(id, name, to_json(given).decode())]
        case {"type": "tool_result", "tool_use_id": str(id)}:
            return [{"role": "tool", "tool_call_id": id, "content": text_of(block.get("content"), ".content")}]
        case {"type": "thinking", "thinking": str(text)}:
            return thought(text)
        case {"type": "redacted_thinking"}:
            return []
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return [{"role": role, "content": text}]
    kind = block.get("type") if isinstance(block, dict) else block
    raise ValueError(
        f"is a block of the type {kind!r:.40}; give blocks of the types text (with text), tool_use (id, name, input), "
        f"tool_result (tool_use_id) and thinking (thinking): {TEXT_ONLY}"
    )


class ToolDefinition(Strict):
    """A tool of the client. Tools that Anthropic's servers run have other types."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        """Refuse another type before its fields, which are not those of a function."""
        kind = data.get("type") if isinstance(data, dict) else None
        if kind not in (None, "custom"):
            message = f"is {kind!r:.40}: Anthropic's own tools are not supported; give a name and an input_schema"
            raise wrong("type", message)
        return data

    def for_chat(self) -> dict[str, Any]:
        given = {"description": self.description, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": {"name": self.name, **given}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None


class CountRequest(Body):
    """A request to /messages/count_tokens; its fields are also those of /messages."""

    spoken = ("messages", "system", "tools")

    model: str | None = None
    messages: Some[dict[str, Any]] = Field(examples=[[{"role": "user", "content": "a"}]])
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="an older name of output_config.format")
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_thread(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("thread"):  # Anthropic's own tool runner then goes on without one
            raise wrong("thread", "is not supported: nothing is stored here", "thread_unsupported_request")
        return data

    def chat(self) -> ChatRequest:
        """Translate the request into a chat. Raises ApiError."""
        parts = self.system if isinstance(self.system, list) else [{"type": "text", "text": self.system}]
        texts = [] if self.system is None else translated(parts, "system", text_of_part)
        system = [{"role": "system", "content": "\n".join(texts)}] if texts else []
        messages = merged(system + translated(self.messages, "messages", _messages_of))
        last = messages[-1] if messages else {}
        begun = last.get("role") == "assistant" and "tool_calls" not in last and "content" in last
        data: dict[str, Any] = {"messages": messages, "continue_final_message": bool(begun), **self._fields()}
        data["tools"] = [tool.for_chat() for tool in self.tools or ()]
        if self.tool_choice is not None:
            data["tool_choice"] = self.tool_choice.for_chat()
            data["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        data["thinking"] = None if self.thinking is None else self.thinking.model_dump()
        if (form := (self.output_config or OutputConfig()).format or self.output_format) is not None:
            schema = {"name": "answer", "schema": form.schema_, "strict": True}
            data["response_format"] = {"type": "json_schema", "json_schema": schema}
        return check_request(_Chat, data)

    def _fields(self) -> dict[str, Any]:
        """Return the fields of the chat that are not part of its prompt."""
        return {"model": self.model, "chat_template_kwargs": self.chat_template_kwargs}


class MessageRequest(CountRequest):
    """A request to /messages."""

    max_tokens: int = Field(ge=1, le=INT32)
    temperature: FiniteFloat | None = Field(None, ge=0)
    top_p: FiniteFloat | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=INT32)
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    priority: int | None = Field(None, ge=-INT32, le=INT32)

    def _fields(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream", "priority")
        given = {name: getattr(self, name) for name in names}
        return {**super()._fields(), **given, "stop": self.stop_sequences or None}


class _Chat(ChatRequest):
    """A chat whose max_tokens may exceed the room in the context, as clients send it. The answer then ends where the
    context ends."""

    @property
    def limit(self) -> None:
        return None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        return replace(super().sampling_params(defaults), max_tokens=self.max_tokens)


def count_tokens(request: CountRequest, model: ModelFacts) -> dict[str, int]:
    """Answer /messages/count_tokens. Raises ApiError."""
    return {"input_tokens": engine_input.count_tokens(request.chat(), model)}


# ------------------------------------------------------------------------------------------------- responses


class MessageReply(BlockReply):
    """The reply to a request to /messages."""

    def __init__(self, request: MessageRequest, *chat: Any) -> None:
        super().__init__(*chat)
        self._max_tokens = request.max_tokens

    def begin(self) -> Iterable[dict[str, Any]]:
        yield {"type": "message_start", "message": {**self._message([]), "stop_reason": None}}

    def open(self, block: Block) -> Iterable[dict[str, Any]]:
        started = self._content(replace(block, text=""))
        started |= {"signature": ""} if block.kind == "reasoning" else {}
        yield {"type": "content_block_start", "index": block.index, "content_block": started}

    def grow(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        kind, field = DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: piece}}

    def close(self, block: Block) -> Iterable[dict[str, Any]]:
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self._signature(block)}
            yield {"type": "content_block_delta", "index": block.index, "delta": delta}
        yield {"type": "content_block_stop", "index": block.index}

    def end(self) -> list[dict[str, Any]]:
        delta = {name: value for name, value in self._message([]).items() if name.startswith("stop")}
        return [{"type": "message_delta", "delta": delta, "usage": self._usage}, {"type": "message_stop"}]

    def body(self) -> dict[str, Any]:
        return self._message([self._content(block) for block in self.blocks])

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        return [error_body(error)]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id.rpartition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self.stop_reason if self._stop_reason == "stop_sequence" else None,
            "usage": self._usage,
        }

    @property
    def _stop_reason(self) -> str:
        if self.finish_reason == "tool_calls":
            return "tool_use"
        if self.finish_reason == "length":
            full = self.usage["completion_tokens"] < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        return "stop_sequence" if isinstance(self.stop_reason, str) else "end_turn"

    @property
    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
        counts |= {"cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"]}
        thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        return {**counts, "output_tokens_details": {"thinking_tokens": thinking}}

    def _content(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": self._signature(block)}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.text)}

    def _signature(self, block: Block) -> str:
        """Return the signature of a thinking block. It proves nothing; some clients drop blocks without one."""
        return f"{self.id.rpartition('-')[2]}{block.index}"


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. For a call that was cut off, this is the part that exists. For JSON
    that is nested too deep to be read, it is {}, which the tool's own check will report to the model."""
    try:
        value: dict[str, Any] = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's format."""
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # Claude Code then shortens it
    kind = ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "details": {"error_code": error.code}}}


# ------------------------------------------------------------------------------------------------- models and routes


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Return the description of a model. created: Unix time of the start of the server, in seconds."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def model_list(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of all models, which is a single page."""
    ids = [card["id"] for card in cards]
    return {"data": cards, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


def routes(service: Service) -> Routes:
    answer, count = partial(answer_as_chat, service, MessageReply), partial(compute, service, count_tokens)
    return Routes({"/messages": Post(MessageRequest, answer), "/messages/count_tokens": Post(CountRequest, count)})
