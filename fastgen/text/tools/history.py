"""Earlier tool calls and their results, in the form that a chat template takes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fastgen.text.tools.parser import SAMPLE, Syntax

Messages = list[dict[str, Any]]


def template_calls(messages: Messages, syntax: Syntax | None, render: Callable[[Messages], str]) -> Messages:
    """Return messages whose tool calls and results are as a chat template takes them.

    Arguments that are the JSON of an object become that object, or what else the template takes; those that are not, as
    after a cut, stay text. Results get the name of their function, which the template of Hermes requires.

    syntax: the format of calls; None: messages are left alone. render: function that returns the text of messages; it
    raises ValueError if the template fails. Raises ValueError if the template leaves calls out.
    """
    if syntax is None or not any(message.get("tool_calls") or message.get("tool_call_id") for message in messages):
        return messages
    form = _find_form(syntax, render)
    names: dict[Any, Any] = {}
    written = []
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            changed["tool_calls"] = [_template_call(call, syntax, form) for call in message["tool_calls"]]
            names |= {_get(call, "id"): _get(_get(call, "function"), "name") for call in changed["tool_calls"]}
            if not message.get("content"):
                changed["content"] = syntax.forms({})[form][0]
        if (id := _template_id(message.get("tool_call_id"), syntax)) is not None:
            changed["tool_call_id"] = id
            if names.get(id) is not None:
                changed.setdefault("name", names[id])
        written.append(changed)
    return written


def _find_form(syntax: Syntax, render: Callable[[Messages], str]) -> int:
    """Return the index of the form of calls that the template takes, among those of the format."""
    name, arguments = SAMPLE
    forms, texts = syntax.forms(arguments), []
    for index, (content, each) in enumerate(forms if len(forms) > 1 else ()):
        call = {"id": "a" * 9, "type": "function", "function": {"name": name, "arguments": each}}
        said = {"role": "assistant", "content": content, "tool_calls": [call]}
        with suppress(ValueError):
            texts.append(render([{"role": "user", "content": "a"}, said]))
            if syntax.shows(texts[-1]):
                return index
    if texts and not any(name in text for text in texts):
        raise ValueError("the chat template leaves tool calls out; give the tokenizer a template that writes them")
    return 0


def _template_call(call: Any, syntax: Syntax, form: int) -> Any:
    function = _get(call, "function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(arguments or "{}")
            arguments = read if isinstance(read, dict) else arguments
    if isinstance(arguments, str | Mapping):
        arguments = syntax.forms(arguments)[form][1]
    ids = {"id": _template_id(call["id"], syntax)} if "id" in call else {}
    return {**call, **ids, "function": {**function, "arguments": arguments}}


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _template_id(id: Any, syntax: Syntax) -> Any:
    """Return an id that Mistral's templates accept, even for a call from another server."""
    if not syntax.short_ids or not isinstance(id, str) or re.fullmatch("[a-zA-Z0-9]{9}", id):
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]
