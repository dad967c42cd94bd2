"""OpenAI's /responses, translated to a chat and back. Nothing is stored, so a request contains all earlier items.

Source: https://platform.openai.com/docs/api-reference/responses, and the requests of Codex. Tests check the answers
against the types of the openai package.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from fastgen.cli.serve import engine_input
from fastgen.cli.serve.dialects.translation import Block, BlockReply, called, merged, text_of, thought, translated
from fastgen.cli.serve.engine_input import ModelFacts
from fastgen.cli.serve.http_responses import answer_as_chat, compute
from fastgen.cli.serve.openai_input import ChatRequest, Reasoning, reasoning_texts
from fastgen.cli.serve.routes import Post, Routes
from fastgen.cli.serve.sampling_fields import SamplingFields
from fastgen.cli.serve.service import Service
from fastgen.cli.serve.validation import ApiError, Items, Strict, check_request, wrong
from fastgen.request import MAX_LOGPROBS, Event

# {field of a chat that an error may name: its name in /responses}
NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}

PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}  # of the ids of items, by the kind of a block
TEXTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}  # names of events


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error of a chat, with the name that its field has in /responses."""
    name = NAMES.get(error.param or "", error.param)
    return ApiError(error.status, error.message, name, error.code).body


# ------------------------------------------------------------------------------------------------- requests


def flat(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}__{name}"


def _messages_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Translate an item into messages of a chat. Raises ValueError."""
    match {**item, "type": item.get("type") or "message"}:
        case {"type": "message", "role": "system" | "developer" | "user" | "assistant" as role, "content": content}:
            return [{"role": role, "content": text_of(content, ".content")}]
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
            return [called(id, flat(item.get("namespace"), name), arguments)]
        case {"type": "function_call_output", "call_id": str(id), "output": output}:
            return [{"role": "tool", "tool_call_id": id, "content": text_of(output, ".output")}]
        case {"type": "reasoning"}:
            return thought("\n".join(reasoning_texts(item.get("content") or item.get("summary"))))
    raise ValueError(
        "must have the type message (with role and content), function_call (call_id, name, arguments), "
        "function_call_output (call_id, output) or reasoning; nothing is stored: a client that sends references sends "
        "items if its `store` is false"
    )


def _functions_of(tool: dict[str, Any]) -> list[tuple[str | None, dict[str, Any]]]:
    """Return (namespace, function) for each function of a tool. Raises ValueError."""
    match tool:
        case {"type": "function", "name": str()}:
            return [(None, tool)]
        case {"type": "namespace", "name": str(name), "tools": list(tools)}:
            return [(name, function) for each in tools for _, function in _functions_of(each)]
        case {"type": "web_search", "external_web_access": False}:  # of stored pages, which Codex offers by default
            return []
    raise ValueError("must be of the type function or namespace: the server runs no tools itself, such as a search")


def _nested(part: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the fields of a part as a chat has them, nested and without the type."""
    return {name: value for name, value in part.items() if name != "type"} | changes


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a tool_choice that names functions as a chat has it."""
    kind, inner = choice.get("type"), _nested(choice)
    if kind == "allowed_tools" and isinstance(tools := inner.get("tools"), list):
        inner["tools"] = [_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
    return {"type": kind, kind if kind == "allowed_tools" else "function": inner}


class Text(Strict):
    format: dict[str, Any] | None = None


class ResponseRequest(SamplingFields):
    """A request to /responses. Its items and tools are checked after they have been translated to a chat.

    truncation: "auto" drops the first tokens of a prompt that is too long, as in vLLM.
    """

    spoken = ("input", "tools")

    model: str | None = None
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    text: Text | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Items[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    enable_response_messages: bool | None = Field(None, description="return the ids of the prompt and of the answer")
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None

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

    def functions(self) -> list[tuple[str | None, dict[str, Any]]]:
        """Return (namespace, function) for each function of the tools. Raises ApiError."""
        return translated(self.tools or (), "tools", _functions_of)

    def chat(self) -> ChatRequest:
        """Translate the request into a chat. Raises ApiError."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages += translated(items, "input", _messages_of)
        if not messages:
            raise ApiError(400, "input is empty; give at least one message", "input", "invalid_value")
        same = ("model", "stream", "parallel_tool_calls", "chat_template_kwargs", "include_reasoning")
        data: dict[str, Any] = {name: getattr(self, name) for name in (*SamplingFields.model_fields, *same)}
        data |= {"messages": merged(messages), "max_tokens": self.max_output_tokens}
        data["return_prompt_text"] = self.enable_response_messages
        data["truncate_prompt_tokens"] = -1 if self.truncation == "auto" else None
        data["reasoning"] = None if self.reasoning is None else self.reasoning.model_dump()
        data |= {"logprobs": True, "top_logprobs": self.top_logprobs} if self.logprobs else {}
        functions = [_nested(function, name=flat(space, function["name"])) for space, function in self.functions()]
        data["tools"] = [{"type": "function", "function": function} for function in functions]
        data["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, dict):
            data["tool_choice"] = _choice(self.tool_choice)
        if self.text is not None and (form := self.text.format) is not None:
            data["response_format"] = {"type": form.get("type"), "json_schema": _nested(form) or None}
        return check_request(ChatRequest, data)


def count_tokens(request: ResponseRequest, model: ModelFacts) -> dict[str, Any]:
    """Answer /responses/input_tokens. Raises ApiError."""
    return {"object": "response.input_tokens", "input_tokens": engine_input.count_tokens(request.chat(), model)}


# ------------------------------------------------------------------------------------------------- responses


class ResponseReply(BlockReply):
    """The reply to a request to /responses. Each block of the answer is an item: a message, reasoning or a call."""

    def __init__(self, request: ResponseRequest, *chat: Any) -> None:
        super().__init__(*chat)
        self._asked = request
        functions = [(space, function["name"]) for space, function in request.functions()]
        self._functions = {flat(space, name): (space, name) for space, name in functions}
        self._hex = self.id.rpartition("-")[2]
        self._number = -1
        self._ids, self._texts = list[int](), list[str]()  # of the answer as the model has written it

    def _count(self, event: Event) -> None:
        super()._count(event)
        self._ids += event.token_ids
        self._texts.append(event.text)

    def begin(self) -> Iterable[dict[str, Any]]:
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def open(self, block: Block) -> Iterable[dict[str, Any]]:
        yield self._event("output_item.added", block, item=self._item(block, "in_progress", []))
        if block.kind != "call":
            yield self._inner("content_part.added", block, part=_part(block))

    def grow(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        scores = {"logprobs": logprobs} if block.kind == "text" else {}
        yield self._inner(f"{TEXTS[block.kind]}.delta", block, delta=piece, **scores)

    def close(self, block: Block) -> Iterable[dict[str, Any]]:
        item = self._item(block, self._status, [_part(block)])
        if block.kind == "call":
            yield self._inner("function_call_arguments.done", block, arguments=block.text, name=item["name"])
        else:
            scores = {"logprobs": block.logprobs} if block.kind == "text" else {}
            yield self._inner(f"{TEXTS[block.kind]}.done", block, text=block.text, **scores)
            yield self._inner("content_part.done", block, part=_part(block))
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
        place = {} if block.kind == "call" else {"content_index": 0}
        return self._event(kind, block, item_id=self._id(block), **place, **fields)

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._hex}{block.index}"

    def _item(self, block: Block, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an item of the output. content: the parts of a message."""
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        if block.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": content}
        namespace, name = self._functions.get(block.name, (None, block.name))
        call = {"type": "function_call", "call_id": block.id, "name": name, "arguments": block.text}
        return {**item, **call, **({} if namespace is None else {"namespace": namespace})}

    def _response(self, status: str) -> dict[str, Any]:
        given = self._asked.model_dump(exclude_none=True, exclude={"input"})
        ended = status == self._status
        statuses = ["completed"] * (len(self.blocks) - 1) + [status]
        output = [self._item(block, state, [_part(block)]) for block, state in zip(self.blocks, statuses, strict=False)]
        return {
            "id": f"resp_{self._hex}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output if ended else [],
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "truncation": given.get("truncation", "disabled"),
            "usage": _usage(self.usage) if ended else None,
            **(self._raw_messages() if ended and self._asked.enable_response_messages else {}),
        }

    def _raw_messages(self) -> dict[str, Any]:
        """Return the text and the ids of the prompt and of the answer, as vLLM does."""
        (prompt,) = self.prompts
        pairs = {"input_messages": (prompt.text, prompt.ids), "output_messages": ("".join(self._texts), self._ids)}
        kind = "raw_message_tokens"
        return {name: [{"type": kind, "message": text, "tokens": ids}] for name, (text, ids) in pairs.items()}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def routes(service: Service) -> Routes:
    answer, count = partial(answer_as_chat, service, ResponseReply), partial(compute, service, count_tokens)
    posts = {"/responses": Post(ResponseRequest, answer), "/responses/input_tokens": Post(ResponseRequest, count)}
    return Routes(posts)
