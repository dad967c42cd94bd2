"""Conversations as a chat template takes them: messages, their reasoning and tool calls, and the rendered text."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from fastgen.text.rendering import rendered
from fastgen.text.tools.formats import find_format
from fastgen.text.tools.history import template_calls
from fastgen.text.tools.parser import SAMPLE, Syntax

REASONING_FIELDS = ("reasoning_content", "reasoning")  # of an assistant's message
PROBE = "8307946152"  # a content that shows whether a chat template writes it
MOST_KNOWN = 1024  # findings about templates that are kept; clients choose the variables


class ChatTemplate:
    """The chat template of a tokenizer, if it has one.

    hf: the tokenizer of transformers, whose template may change. tool_call_parser: name of the format of tool calls, or
    None; see Tokenizer.
    """

    def __init__(self, hf: Any, tool_call_parser: str | None) -> None:
        self._hf, self._tool_call_parser = hf, tool_call_parser
        self._part_roles: dict[tuple[object, ...], bool] = {}  # what `_reads_parts` has found last

    @property
    def syntax(self) -> Syntax | None:
        """The format of the model's tool calls, or None if it is unknown."""
        has_template = self._hf.chat_template is not None
        # Some tokenizers have a separate template for tools.
        return find_format(self._hf.get_chat_template(tools=[{}]) if has_template else None, self._tool_call_parser)

    def plain(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return messages for the chat template. Raises ValueError, also if there is no template for them."""
        self.check(variables)
        template, reads_parts = str(self._hf.chat_template), cache(partial(self._reads_parts, variables))

        def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
            return [_plain_message(message, template, reads_parts) for message in messages]

        return template_calls(plain(messages), self.syntax, lambda sample: self.render(plain(sample), variables))

    def _reads_parts(self, variables: Mapping[str, Any], role: str, several: bool) -> bool:
        """Return whether the chat template gets the content of messages of this role as parts: if it loses texts, and
        also if it takes texts, but `several` parts are given, which it joins in its own way. variables: those that the
        template may need."""
        key = (str(self._hf.chat_template), _digest(variables), role, several)
        if key in self._part_roles:
            return self._part_roles[key]
        as_user = role != "user" and self._reads_parts(variables, "user", False)
        shows = partial(self._shows, variables, role, as_user)
        as_text, as_parts = shows(PROBE), shows([_text_part(PROBE)])
        parts = not as_text and bool(as_parts or as_user)
        if several and as_text:
            parts = bool(shows([_text_part(PROBE)] * 2))
        if as_text is not None or as_parts is not None:
            if len(self._part_roles) >= MOST_KNOWN:
                self._part_roles.clear()
            self._part_roles[key] = parts
        return parts

    def _shows(self, variables: Mapping[str, Any], role: str, as_user: bool, content: Any) -> bool | None:
        """Return whether the chat template writes all texts of a message with this content, PROBE or parts of it, and
        not the parts themselves; None if it takes no such conversation. as_user: users' messages have parts."""
        texts = 1 if isinstance(content, str) else len(content)
        begun = [{"role": "system", "content": "a" if isinstance(content, str) else [_text_part("a")]}]
        for before in ([],) if role == "system" else ([], begun):  # some templates ask for a system message
            messages = [*before, *_probing(role, content, as_user)]
            with suppress(ValueError):
                text = self.render(messages, variables, add_generation_prompt=False)
                return text.count(PROBE) >= texts and not re.search(rf"""['"]text['"]: *['"]{PROBE}""", text)
        return None

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of messages that `plain` has returned. Raises ValueError."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        try:
            return rendered(partial(self._hf.apply_chat_template, messages, tokenize=False, **options, **variables))
        except Exception as error:  # errors of jinja2, and the templates' own raise_exception
            reason = str(error) or type(error).__name__
            raise ValueError(f"the chat template does not take these messages: {reason}") from error

    def check(self, variables: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError if there is no chat template, or if it cannot take these variables."""
        variables = variables or {}
        if self._hf.chat_template is None:
            raise ValueError("this model's tokenizer has no chat template; give the prompt as text or ids")
        for name in inspect.signature(self._hf.apply_chat_template).parameters:
            if name in variables and name not in ("tools", "documents"):
                raise ValueError(f"{name} is not a variable of a chat template; leave it out")
        if variables.get("tools") and "tools" not in str(self._hf.chat_template):
            raise ValueError(
                "this model's chat template does not use tools, so the model would not see them; leave tools out, "
                "describe them in a message, or give the tokenizer a template with tools"
            )


def _digest(variables: Mapping[str, Any]) -> bytes:
    """Return what stands for the variables of a template, which may be long. Raises ValueError."""
    try:
        return hashlib.sha256(repr(sorted(variables.items())).encode()).digest()
    except RecursionError:
        raise ValueError("the tools or other variables are nested too deep; make them flatter") from None


def _probing(role: str, content: Any, parts: bool) -> list[dict[str, Any]]:
    """Return a conversation with a message of this role. parts: whether a user's content is in parts."""
    name, arguments = SAMPLE
    call = {"id": "a" * 9, "type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "user", "content": [_text_part("a")] if parts else "a"}
    said = {"role": role, "content": content}
    match role:
        case "user":
            return [said]
        case "system":
            return [said, asked]
        case "assistant":
            return [asked, said]
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [asked, called, {**said, "tool_call_id": call["id"], "name": name}]


def _usual_role(role: Any) -> str:
    """Return a role, or the user's for one that a template may have invented."""
    return role if role in ("system", "assistant", "tool") else "user"


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _plain_message(message: Any, template: str, reads_parts: Callable[[str, bool], bool]) -> dict[str, Any]:
    """Return a message for a chat template, with its content as a single text, or as parts if `reads_parts` is true of
    its role and of whether it has several parts. Raises ValueError.

    Reasoning of the message, as `reasoning_content`, `reasoning` or parts {"type": "thinking"}, is given to the
    template in the form that it reads, and left out if it reads none.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f"a message must be a dict with a role, not {message!r:.80}")
    reasoning, content = _split_reasoning(message)
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"a message needs content, or tool_calls; this one has neither: {message!r:.80}")
    plain = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    if content is not None:
        plain["content"] = content_text(content)
        if content and isinstance(content, str | list | tuple):
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            if reads_parts(_usual_role(message["role"]), len(texts) > 1):
                plain["content"] = list(map(_text_part, texts))
    if not reasoning:
        return plain
    read = (name for name in REASONING_FIELDS if re.search(rf"\.{name}\b|['\"]{name}['\"]", template))
    if field := next(read, None):
        plain[field] = reasoning
    elif re.search(r"""['"]thinking['"]""", template):
        said = plain.get("content") or []
        texts = [_text_part(said)] if isinstance(said, str) else said
        plain["content"] = [{"type": "thinking", "thinking": reasoning}, *texts]
    return plain


def _split_reasoning(message: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the reasoning of a message, and its content without parts of reasoning."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), "")
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return reasoning, content
    thoughts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "thinking"]
    reasoning = reasoning or "\n".join(content_text(part.get("thinking", "")) for part in thoughts)
    return reasoning, [part for part in content if part not in thoughts]


def content_text(content: Any) -> Any:
    """Return the content of a message. A list of text parts ({"type": "text", "text": ...}) is joined by newlines.
    Raises ValueError for other content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f"a message's content must be a text or a list of parts, and not {content!r:.80}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            form = '{"type": "text", "text": ...}'
            raise ValueError(f"a part of a message's content must be {form}, and not {part!r:.80}")
    return "\n".join(part["text"] for part in content)
