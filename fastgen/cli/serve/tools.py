"""Tool calling of requests: variables for chat templates, and grammars that make a model call."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastgen.cli.serve.protocol import ChatMessage, ChosenTools, NamedTool, Tool, ToolMode
from fastgen.text.grammar import json_rule, quoted
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tool_calls import HERMES, LLAMA, MISTRAL, ToolParser, find_syntax


class Calling:
    """The tool calling of one request.

    tools: the tools of the request. choice: its tool_choice; only chosen tools are called. parallel: an answer may have
    several calls, unless the choice names one function, which means exactly one call of it.

    Raises ValueError if the model has no known syntax for calls, or if a function's parameters are not an object.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        *,
        choice: ToolMode | NamedTool | ChosenTools = "auto",
        parallel: bool = True,
    ) -> None:
        self._tokenizer, self._syntax = tokenizer, find_syntax(tokenizer)
        self._tools = [] if choice == "none" else list(tools)
        for tool in self._tools:
            name, takes = tool.function.name, tool.function.takes
            if takes.get("type", "object") != "object":
                raise ValueError(f"the parameters of the function {name} must be a JSON schema of an object")
        if self._tools and self._syntax is None:
            raise ValueError("tools are not supported: this model's chat template has no known format for tools")
        self._required = choice == "required" if isinstance(choice, str) else choice.required
        self._parallel = parallel and not isinstance(choice, NamedTool)
        chosen = [tool.function.name for tool in self._tools] if isinstance(choice, str) else choice.names
        self._callable = [tool.function for tool in self._tools if tool.function.name in chosen]
        assert self._callable or not self._required, "a required call has no function"

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The variable `tools` of the chat template; None if the model must not call tools."""
        return [tool.for_template() for tool in self._tools] or None

    def template_messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return messages for the chat template. Content becomes one string, and the role developer becomes system. The
        arguments of earlier calls become objects; those that are not valid, as after a cut, stay text."""
        calls = [call for message in messages for call in message.tool_calls or ()]
        if self._syntax is None and (calls or any(message.role == "tool" for message in messages)):
            raise ValueError("messages of tools are not supported: this model's chat template has no format for them")
        names = {call.id: call.function.name for call in calls}
        return [self._template_message(message, names) for message in messages]

    def _template_message(self, message: ChatMessage, names: Mapping[str, str]) -> dict[str, Any]:
        """Return a message for the chat template. names: {id of a call: function}, since the template of
        Hermes requires the name in a result."""
        written = {**message.model_dump(exclude_none=True), "content": message.text or ""}
        if message.role == "developer":
            written["role"] = "system"
        if (id := message.tool_call_id) is not None:
            written["tool_call_id"] = self._template_id(id)
            if id in names:
                written.setdefault("name", names[id])
        if not message.tool_calls:
            written.pop("tool_calls", None)
        for call in written.get("tool_calls", ()):
            call["id"] = self._template_id(call["id"])
            with suppress(ValueError, RecursionError):
                arguments = json.loads(call["function"]["arguments"] or "{}")
                if isinstance(arguments, dict):
                    call["function"]["arguments"] = arguments
        return written

    def _template_id(self, id: str) -> str:
        """Return an id that Mistral's templates accept, even for a call from another server."""
        if self._syntax is not MISTRAL or re.fullmatch("[a-zA-Z0-9]{9}", id):
            return id
        return hashlib.sha256(id.encode()).hexdigest()[:9]

    def parser(self) -> ToolParser | None:
        """Return a parser for the calls of one answer; None if it cannot have any."""
        if not self._tools or self._syntax is None:
            return None
        return ToolParser(self._syntax, {tool.name for tool in self._callable})

    def grammar(self, answer: str | None = None) -> str | None:
        """Return the grammar of an answer; None if nothing is enforced.

        If a call is required, the answer consists of calls only. Otherwise it is text or calls, and has a grammar if a
        tool is strict, some tools are not chosen, calls must not be parallel, or there is a rule for the text
        (`answer`, see answer_rule). The schema of a tool that is not strict is enforced as far as it is supported.
        """
        syntax = self._syntax
        if not self._tools or syntax is None:
            return None if answer is None else f"start: {answer}"
        mark, chosen = self._mark(syntax.opens), len(self._callable) < len(self._tools)
        if self._required:
            rules = [f"start: {self._calls('' if syntax is LLAMA else mark)}"]
        elif answer is not None:  # the text may be JSON as well, so only a mark begins a call
            rules = [f"start: {self._calls(mark)} | answer", f"answer: {answer}"]
        elif chosen or not self._parallel or any(tool.strict for tool in self._callable):
            rules = self._text_or_calls()
        else:
            return None
        return "\n".join([*rules, *self._call_rules()])

    def _call_rules(self) -> list[str]:
        """Return the rule `call`: the name and arguments of one function, as the templates write them."""
        assert self._syntax is not None
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self._callable)))]
        for i, tool in enumerate(self._callable):
            begins = quoted(f'{{"name": {json.dumps(tool.name)}, "{self._syntax.arguments}": ')
            rules.append(f'call_{i}: {begins} {json_rule(tool.takes, strict=bool(tool.strict))} "}}"')
        return rules

    def _calls(self, mark: str) -> str:
        """Return the right side of a rule for all calls of an answer. mark: mark of the first call."""
        syntax = self._syntax
        if syntax is HERMES:
            more = f'("\\n" {self._one(self._mark(syntax.opens))})*' if self._parallel else ""
            return f"{self._one(mark)} {more}"
        if syntax is MISTRAL:
            more = '(", " call)*' if self._parallel else ""
            return f'{mark} " "? "[" call {more} "]"'
        return f"{mark} call"

    def _one(self, mark: str) -> str:
        return f'{mark} "\\n" call "\\n" {self._mark(HERMES.closes)}'

    def _text_or_calls(self) -> list[str]:
        """Return rules for text in which calls may begin anywhere (for Llama, text or one call)."""
        assert self._syntax is not None
        if self._syntax is LLAMA:
            return [f"start: TEXT? | {self._mark(LLAMA.opens)}? call", r"TEXT: /[^{](.|\n)*/"]
        token = self._token(self._syntax.opens)
        if token is not None:
            rules = [f"text: <[^{token}]>*", f"before: text <[{token}]>"]
        else:  # a lazy rule ends at the first occurrence of the mark
            rules = ["text: TEXT", f"before[lazy]: TEXT {quoted(self._syntax.opens)}", r"TEXT: /(.|\n)*/"]
        if self._syntax is HERMES and self._parallel:
            return [f"start: ({self._one('before')})* text", *rules]
        return [f"start: {self._calls('before')} | text", *rules]

    def _token(self, mark: str) -> int | None:
        token: int | None = self._tokenizer.hf.backend_tokenizer.token_to_id(mark)
        return token

    def _mark(self, mark: str) -> str:
        """Return a mark for a grammar, by its id if it is a token, since llguidance does not match tokens as text."""
        token = self._token(mark)
        return quoted(mark) if token is None else f"<[{token}]>"
