"""Tool calls in the text of answers: messages from whole answers, and from pieces; the formats are in tools/."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastgen.request import Completion
from fastgen.text.reasoning import AnswerParser, find_reasoning, starts_open
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.parser import Function


def parse_message(
    text: str | Completion, tokenizer: Tokenizer | None, tools: Iterable[Any], prompt: Sequence[int] | str | None = None
) -> dict[str, Any]:
    """Return the message of an answer in the form for chat templates; see `Generator.parse_message`."""
    tools, cut = list(tools), True
    if isinstance(text, Completion):
        cut, text = text.finish_reason != "stop" or isinstance(text.stop_reason, str), text.text
    syntax = None if tokenizer is None else tokenizer.tool_syntax
    reasoning = None if tokenizer is None else find_reasoning(tokenizer)
    if syntax is None and (tools or reasoning is None):
        raise ValueError(
            "this model's chat template has no known format for tools, so that calls cannot be found; name the format "
            "that the model writes with tool_call_parser"
        )
    if prompt is not None and tokenizer is not None:
        inside = starts_open(tokenizer, prompt)
    else:
        inside = reasoning is not None and reasoning.begins_inside(text)
    calls = None if syntax is None else syntax.parser([_function_of(tool, syntax.typed) for tool in tools])
    message = joined_message(AnswerParser(reasoning, inside, calls).push(text, last=True, cut=cut))
    message["content"] = message["content"] or ""
    for call in message.get("tool_calls", ()):
        with suppress(ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def _function_of(tool: Any, typed: bool) -> Function:
    """Return a tool, which is a function, its schema, or OpenAI's dict around the schema. typed: the schema of its
    arguments is needed. Raises ValueError for a function without types or description, as chat templates do."""
    if not isinstance(tool, Mapping):
        if not typed:
            return Function(str(tool.__name__))
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            tool = get_json_schema(tool)
        except Exception as error:  # transformers has several kinds
            raise ValueError(f"the function {tool.__name__} has no schema: {error}") from error
    schema = tool.get("function", tool)
    return Function(str(schema["name"]), schema.get("parameters") or {})


def joined_message(deltas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the message that consists of these deltas, with `reasoning_content` and `tool_calls` if there are any."""
    reasoning, content, calls = "", "", dict[int, dict[str, Any]]()
    for delta in deltas:
        reasoning += delta.get("reasoning", "")
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            function = piece["function"]
            if "id" in piece:
                call = {"id": piece["id"], "type": "function", "function": {"name": function["name"], "arguments": ""}}
                calls[piece["index"]] = call
            calls[piece["index"]]["function"]["arguments"] += function.get("arguments", "")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": list(calls.values())}
    return message
