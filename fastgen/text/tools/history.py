"""Earlier tool calls and their results, in the form that a chat template takes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from fastgen.text.tools.parser import Syntax

Messages = list[dict[str, Any]]


def template_calls(messages: Messages, syntax: Syntax | None, render: Callable[[Messages], str]) -> Messages:
    """Return messages whose tool calls and results are as a chat template takes them.

    Arguments that are the JSON of an object become that object, or what else the template takes; those that are not, as
    after a cut, stay text. Results get the name of their function, which Hermes' template requires.

    render: function that returns the text of messages; it raises ValueError if the template fails.
    """
    names: dict[Any, Any] = {}
    written = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls = [_template_call(call, syntax, render) for call in message["tool_calls"]]
            names |= {_get(call, "id"): _get(_get(call, "function"), "name") for call in calls}
            message["tool_calls"] = calls
            if syntax is not None and not message.get("content"):
                message["content"] = syntax.no_content
        if (id := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = id = _template_id(id, syntax)
            if names.get(id) is not None:
                message.setdefault("name", names[id])
        written.append(message)
    return written


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _template_call(call: Any, syntax: Syntax | None, render: Callable[[Messages], str]) -> Any:
    function = _get(call, "function")
    if not isinstance(function, Mapping):
        return call
    written = {**call, "function": {**function}}
    if "id" in call:
        written["id"] = _template_id(call["id"], syntax)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(arguments or "{}")
            arguments = read if isinstance(read, dict) else arguments
    if syntax is not None and isinstance(arguments, str | Mapping):
        arguments = syntax.template_arguments(arguments, partial(_sample, render))
    written["function"]["arguments"] = arguments
    return written


def _sample(render: Callable[[Messages], str], arguments: Any) -> str:
    """Return the text of a short conversation with a call that has these arguments."""
    function = {"name": "f", "arguments": arguments}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a" * 9, "type": "function", "function": function}],
    }
    return render([{"role": "user", "content": "a"}, call])


def _template_id(id: Any, syntax: Syntax | None) -> Any:
    """Return an id that Mistral's templates accept, even for a call from another server."""
    if syntax is None or not syntax.short_ids or not isinstance(id, str) or re.fullmatch("[a-zA-Z0-9]{9}", id):
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]
