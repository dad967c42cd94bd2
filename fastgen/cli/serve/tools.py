"""Tool calling of requests: variables for chat templates, and grammars that make a model call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastgen.cli.serve.openai_input import ChatMessage, ChosenTools, NamedTool, Tool, ToolMode
from fastgen.cli.serve.tool_grammars import call_rules, calls_rule
from fastgen.text.grammar import quoted
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.parser import Function, Syntax, ToolParser


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
        self._tokenizer, self._syntax = tokenizer, tokenizer.tool_syntax
        self._tools = [] if choice == "none" else list(tools)
        for tool in self._tools:
            name, takes = tool.function.name, tool.function.takes
            if takes.get("type", "object") != "object":
                raise ValueError(f"the parameters of the function {name} must be a JSON schema of an object")
        if self._tools and self._syntax is None:
            raise ValueError(
                "tools are not supported: this model's chat template has no known format for tools; start fgserve with "
                "--tool-call-parser if you know which format the model writes"
            )
        self._required = choice == "required" if isinstance(choice, str) else choice.required
        self._parallel = parallel and not isinstance(choice, NamedTool)
        chosen = None if isinstance(choice, str) else set(choice.names)
        functions = [tool.function for tool in self._tools if chosen is None or tool.function.name in chosen]
        self._callable = [Function(each.name, each.takes, bool(each.strict)) for each in functions]
        assert self._callable or not self._required, "a required call has no function"

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The variable `tools` of the chat template; None if the model must not call tools."""
        return [tool.for_template() for tool in self._tools] or None

    def template_messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return messages for `Tokenizer.encode_chat`. Content becomes text, or parts of it; the role developer becomes
        system."""
        asked = any(message.tool_calls or message.role == "tool" for message in messages)
        if self._syntax is None and asked:
            raise ValueError("messages of tools are not supported: this model's chat template has no format for them")
        return [_template_message(message) for message in messages]

    def parser(self) -> ToolParser | None:
        """Return a parser for the calls of one answer; None if it cannot have any."""
        return None if not self._tools or self._syntax is None else self._syntax.parser(self._callable)

    def grammar(self, answer: str | None = None) -> str | None:
        """Return the grammar of an answer; None if nothing is enforced.

        If a call is required, the answer consists of calls only. Otherwise it is text or calls, and has a grammar if a
        tool is strict, some tools are not chosen, calls must not be parallel, or there is a rule for the text
        (`answer`, see answer_rule). The schema of a tool that is not strict is enforced as far as it is supported.
        Raises ValueError for a schema that cannot be enforced.
        """
        syntax = self._syntax
        if not self._tools or syntax is None:
            return None if answer is None else f"start: {answer}"
        mark, chosen = self._mark(syntax.opens), len(self._callable) < len(self._tools)
        if self._required:
            rules = [f"start: {self._calls('' if syntax.bare == 'start' else mark)}"]
        elif answer is not None:  # the text may be JSON as well, so only a mark begins a call
            rules = [f"start: {self._calls(mark)} | answer", f"answer: {answer}"]
        elif chosen or not self._parallel or any(tool.strict for tool in self._callable):
            rules = self._text_or_calls(syntax)
        else:
            return None
        return "\n".join([*rules, *call_rules(syntax, self._callable, self._mark)])

    def _calls(self, first: str, parallel: bool | None = None) -> str:
        """Return the right side of a rule for all calls of an answer. first: mark of the first call."""
        assert self._syntax is not None
        return calls_rule(self._syntax, first, self._mark, self._parallel if parallel is None else parallel)

    def _text_or_calls(self, syntax: Syntax) -> list[str]:
        """Return rules for text in which calls may begin anywhere; for text or calls, if calls have no mark."""
        if syntax.bare == "start":
            return [
                f"start: TEXT? | {self._mark(syntax.opens)}? {self._calls('')}",
                rf"TEXT: /[^{re.escape(syntax.first)}](.|\n)*/",
            ]
        token = self._token(syntax.opens)
        if token is not None:
            rules = [f"text: <[^{token}]>*", f"before: text <[{token}]>"]
        else:  # a lazy rule ends at the first occurrence of the mark
            rules = ["text: TEXT", f"before[lazy]: TEXT {quoted(syntax.opens)}", r"TEXT: /(.|\n)*/"]
        if syntax.separate and self._parallel:
            return [f"start: ({self._calls('before', parallel=False)})* text", *rules]
        return [f"start: {self._calls('before')} | text", *rules]

    def _token(self, mark: str) -> int | None:
        token: int | None = self._tokenizer.hf.backend_tokenizer.token_to_id(mark)
        return token

    def _mark(self, mark: str) -> str:
        """Return a mark for a grammar, by its id if it is a token, since llguidance does not match tokens as text."""
        token = self._token(mark)
        return quoted(mark) if token is None else f"<[{token}]>"


def _template_message(message: ChatMessage) -> dict[str, Any]:
    written = {**message.model_dump(exclude_none=True), "content": message.texts if message.content else ""}
    if message.role == "developer":
        written["role"] = "system"
    if not message.tool_calls:
        written.pop("tool_calls", None)
    return written
