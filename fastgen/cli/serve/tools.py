"""Tool calling: variables for chat templates, grammars that make a model call, and parsers for its calls.

A model writes a call as JSON, in the form of its chat template:

    hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, one or more (Hermes, Qwen 2.5, Qwen 3)
    mistral   [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]                    (Mistral v3)
    llama     {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>         (Llama 3.1 to 3.3)
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from fastgen.cli.serve.protocol import ChatMessage, NamedTool, Tool, ToolCall
from fastgen.grammar import json_rule, quoted
from fastgen.tokenizer import Tokenizer

Pattern = Any  # a compiled pattern of `regex`, which has no types

BLANK = " \t\r\n"
HELD = 8192  # maximum characters of a call before its arguments, or after them
_BRACKETS = regex.compile(r'["\\{}\[\]]')
_WS = r"[ \t\r\n]*+"
_STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_OTHER = rf'(?:"(?:type|id)"{_WS}:{_WS}{_STRING}{_WS},{_WS})*+'
# Behind the arguments: further fields (text, a number, true, false or null), and the bracket of the object, which small
# models forget.
_REST = rf"(?:{_WS},{_WS}{_STRING}{_WS}:{_WS}(?:{_STRING}|[-+.\w]++))*+{_WS}\}}?+"


@dataclass(frozen=True)
class Syntax:
    """The form in which a model writes calls: a mark that `opens`, an object with "name" and `arguments`, and a mark
    that `closes`.

    bare: where a call may stand without its mark, which may be a special token and then is not in the text. A bare call
    must be of a known function. listed: the objects are in one list.
    """

    opens: str
    closes: str
    arguments: str
    bare: Literal["", "start", "anywhere"]
    listed: bool = False


HERMES = Syntax(opens="<tool_call>", closes="</tool_call>", arguments="arguments", bare="")
MISTRAL = Syntax(opens="[TOOL_CALLS]", closes="", arguments="arguments", bare="anywhere", listed=True)
LLAMA = Syntax(opens="<|python_tag|>", closes="", arguments="parameters", bare="start")


def find_syntax(tokenizer: Tokenizer) -> Syntax | None:
    """Return the syntax of calls in a tokenizer's chat template; None for an unknown one."""
    if tokenizer.hf.chat_template is None:
        return None
    template = tokenizer.hf.get_chat_template(tools=[{}])  # some tokenizers have a separate template for tools
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "ipython" in template and '"parameters": ' in template:
        return LLAMA
    return None


class Calling:
    """The tool calling of one request.

    tools, choice: the request's; a named tool must be called, and no other. parallel: an answer may have several calls.
    Raises ValueError where the model has no known syntax of calls, or a function's parameters are not an object.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        *,
        choice: Literal["auto", "none", "required"] | NamedTool = "auto",
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
        named = choice.function.name if isinstance(choice, NamedTool) else None
        self._required, self._parallel = choice == "required" or named is not None, parallel
        self._callable = [tool.function for tool in self._tools if named in (None, tool.function.name)]
        assert self._callable or not self._required, "a required call has no function"

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The variable `tools` of the chat template; None if the model must not call any."""
        return [tool.for_template() for tool in self._tools] or None

    def template_messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return messages for the chat template: content is one string, the role developer becomes system, and the
        arguments of earlier calls become objects, or stay text where they are none, as of a call that was cut off."""
        calls = [call for message in messages for call in message.tool_calls or ()]
        if self._syntax is None and (calls or any(message.role == "tool" for message in messages)):
            raise ValueError("messages of tools are not supported: this model's chat template has no format for them")
        names = {call.id: call.function.name for call in calls}
        return [self._template_message(message, names) for message in messages]

    def _template_message(self, message: ChatMessage, names: Mapping[str, str]) -> dict[str, Any]:
        """names: functions by the ids of calls; the template of Hermes requires the name in a result."""
        role = "system" if message.role == "developer" else message.role
        written: dict[str, Any] = {"role": role, "content": message.text or ""}
        if message.name is not None:
            written["name"] = message.name
        if message.tool_call_id is not None:
            written["tool_call_id"] = self._template_id(message.tool_call_id)
            if message.tool_call_id in names:
                written.setdefault("name", names[message.tool_call_id])
        if message.tool_calls:
            written["tool_calls"] = [self._template_call(call) for call in message.tool_calls]
        return written

    def _template_call(self, call: ToolCall) -> dict[str, Any]:
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        given = arguments if isinstance(arguments, dict) else call.function.arguments
        function = {"name": call.function.name, "arguments": given}
        return {"type": "function", "id": self._template_id(call.id), "function": function}

    def _template_id(self, id: str) -> str:
        """Return an id that Mistral's templates accept, also for a call that another server made."""
        if self._syntax is not MISTRAL or re.fullmatch("[a-zA-Z0-9]{9}", id):
            return id
        return hashlib.sha256(id.encode()).hexdigest()[:9]

    def parser(self) -> ToolParser | None:
        """Return a parser for the calls of one answer; None if it can have none."""
        if not self._tools or self._syntax is None:
            return None
        return ToolParser(self._syntax, {tool.name for tool in self._callable})

    def grammar(self, answer: str | None = None) -> str | None:
        """Return the grammar of an answer; None if the model is free.

        A required call allows calls alone. Otherwise the answer is text or calls; it has a grammar if a tool is strict,
        calls may not be parallel, or the text has a rule (`answer`, see answer_rule). The schema of a tool that is not
        strict is enforced as far as possible.
        """
        syntax = self._syntax
        if not self._tools or syntax is None:
            return None if answer is None else f"start: {answer}"
        mark = self._mark(syntax.opens)
        if self._required:
            rules = [f"start: {self._calls('' if syntax is LLAMA else mark)}"]
        elif answer is not None:  # it may be JSON too, so only a mark begins a call
            rules = [f"start: {self._calls(mark)} | answer", f"answer: {answer}"]
        elif any(tool.strict for tool in self._callable) or not self._parallel:
            rules = self._text_or_calls()
        else:
            return None
        return "\n".join([*rules, *self._call_rules()])

    def _call_rules(self) -> list[str]:
        """Return the rule `call`: the name and arguments of one function, spelled as in the templates."""
        assert self._syntax is not None
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self._callable)))]
        for i, tool in enumerate(self._callable):
            begins = quoted(f'{{"name": {json.dumps(tool.name)}, "{self._syntax.arguments}": ')
            rules.append(f'call_{i}: {begins} {json_rule(tool.takes, strict=bool(tool.strict))} "}}"')
        return rules

    def _calls(self, mark: str) -> str:
        """Return the right side of a rule for all calls of an answer. mark: of the first call."""
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
        """Return rules for text in which calls may begin anywhere; for Llama, text or a call."""
        assert self._syntax is not None
        if self._syntax is LLAMA:
            return [f"start: TEXT? | {self._mark(LLAMA.opens)}? call", r"TEXT: /[^{](.|\n)*/"]
        token = self._token(self._syntax.opens)
        if token is not None:
            rules = [f"text: <[^{token}]>*", f"before: text <[{token}]>"]
        else:  # a lazy rule ends at the first occurrence of its end
            rules = ["text: TEXT", f"before[lazy]: TEXT {quoted(self._syntax.opens)}", r"TEXT: /(.|\n)*/"]
        if self._syntax is HERMES and self._parallel:
            return [f"start: ({self._one('before')})* text", *rules]
        return [f"start: {self._calls('before')} | text", *rules]

    def _token(self, mark: str) -> int | None:
        token: int | None = self._tokenizer.hf.backend_tokenizer.token_to_id(mark)
        return token

    def _mark(self, mark: str) -> str:
        """Return a mark for a grammar: by its id if it is a token, since llguidance does not match tokens as text."""
        token = self._token(mark)
        return quoted(mark) if token is None else f"<[{token}]>"


# ------------------------------------------------------------------------------------------------- parsing


def new_call_id() -> str:
    """Return nine letters and digits, the only form of id that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(slots=True)
class _Nesting:
    """A position inside JSON. depth: open brackets."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def end(self, text: str) -> int | None:
        """Return the index behind the bracket that closes the outermost one, or None if `text` ends before it."""
        at = 0
        if self.escaped and text:
            at, self.escaped = 1, False
        while found := _BRACKETS.search(text, at):
            at, char = int(found.end()), found[0]
            if self.quoted and char == "\\":
                self.escaped = at == len(text)
                at += 1
            elif char == '"':
                self.quoted = not self.quoted
            elif not self.quoted:
                self.depth += 1 if char in "{[" else -1
                if self.depth == 0:
                    return at
        return None


class ToolParser:
    """Parses one answer. Text around calls is content, without the white space next to a call, and so is text that only
    resembles a call. A call is reported when its name is known and its arguments begin; the arguments follow as the
    model writes them, so that the last call of a truncated answer may be incomplete. The pieces in which the text comes
    make no difference to the result.

    functions: the names that calls without a mark must have.
    """

    def __init__(self, syntax: Syntax, functions: Collection[str]) -> None:
        self.calls = 0  # reported so far
        self._text = ""  # not reported yet
        self._deltas: list[dict[str, Any]] = []
        self._said = False  # some content was reported
        self._after_call = False  # no content since the last call
        self._marked = True  # the current call has its mark
        self._nesting = _Nesting()
        self._state: Callable[[bool], bool] = self._read_content
        self._bare = syntax.bare
        starts = {syntax.opens[0]} | ({"[" if syntax.listed else "{"} if syntax.bare else set())
        self._starts = regex.compile("|".join(map(regex.escape, sorted(starts))))
        known = "|".join(regex.escape(json.dumps(name)) for name in functions) or "(?!)"
        # Patterns at the beginning of a call and behind its arguments, by whether it has a mark.
        self._begins, self._goes_on = {}, {}
        for marked, name, opens in ((True, _STRING, regex.escape(syntax.opens) + _WS), (False, known, "")):
            head = _head(name)
            self._begins[marked] = regex.compile(rf"{opens}\[{_WS}{head}" if syntax.listed else opens + head)
            self._goes_on[marked] = regex.compile(_REST + _WS + _following(syntax, head))

    def push(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """Return the deltas that a piece of text adds. last: the text ends here."""
        self._text += text
        while self._text and self._state(last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _match(self, pattern: Pattern, at: int, last: bool) -> Any:
        """Match a pattern at an index; None: no match, however the text goes on. A match is `partial` where more text
        decides."""
        found = pattern.match(self._text, at, at + HELD, partial=True)
        undecided = found is not None and found.partial
        return None if undecided and (last or len(self._text) >= at + HELD) else found

    # Each state consumes a part of the text; it returns False where it needs more.

    def _read_content(self, last: bool) -> bool:
        at = 0
        while start := self._starts.search(self._text, at):
            at = start.start()
            found = self._match_call(at, last)
            if found is not None and not found.partial:
                self._say(self._text[:at].rstrip(BLANK))
                self._begin(found)
                return True
            if found is not None:
                break
            at += 1
        else:
            at = len(self._text)
        content = self._text[:at]
        content = content if last else content.rstrip(BLANK)
        self._text = self._text[len(content) :]
        self._say(content)
        return False

    def _match_call(self, at: int, last: bool) -> Any:
        """Match the beginning of a call, with its mark or, where that is allowed, without."""
        self._marked = True
        found = self._match(self._begins[True], at, last)
        nothing_before = not self._said and not self.calls and not self._text[:at].strip(BLANK)
        if found is None and (self._bare == "anywhere" or (self._bare == "start" and nothing_before)):
            self._marked = False
            found = self._match(self._begins[False], at, last)
        return found

    def _read_arguments(self, last: bool) -> bool:
        end = self._nesting.end(self._text)
        piece = {"index": self.calls - 1, "function": {"arguments": self._text[:end]}}
        self._deltas.append({"tool_calls": [piece]})
        self._text = "" if end is None else self._text[end:]
        self._state = self._read_arguments if end is None else self._read_next
        return end is not None

    def _read_next(self, last: bool) -> bool:
        """Read the end of a call's object, then the mark that closes it, the end of a list, or the next object."""
        found = self._match(self._goes_on[self._marked], 0, last)
        if found is not None and found.partial:
            return False
        if found is not None and found.groupdict().get("name"):
            self._begin(found)
        else:
            found = found or regex.match(_REST, self._text)
            self._text, self._state = self._text[found.end() :], self._read_content
        return True

    def _say(self, content: str) -> None:
        content = content.lstrip(BLANK) if self._after_call else content
        if content:
            self._deltas.append({"content": content})
            self._said, self._after_call = True, False

    def _begin(self, head: Any) -> None:
        """Report a new call. head: the match of its beginning, which ends behind the bracket of the arguments."""
        function = {"name": json.loads(head["name"]), "arguments": ""}
        call = {"index": self.calls, "id": new_call_id(), "type": "function", "function": function}
        self._deltas.append({"tool_calls": [call]})
        self.calls += 1
        self._after_call = True
        self._text, self._state = self._text[head.end() - 1 :], self._read_arguments
        self._nesting = _Nesting()


def _head(name: str) -> str:
    """Return the pattern of a call's object up to the bracket of its arguments. name: pattern of the functions' names,
    in quotes."""
    arguments = rf'"(?:arguments|parameters)"{_WS}:{_WS}\{{'
    return rf'\{{{_WS}{_OTHER}"name"{_WS}:{_WS}(?P<name>{name}){_WS},{_WS}{_OTHER}{arguments}'


def _following(syntax: Syntax, head: str) -> str:
    """Return the pattern of the text behind a call's object."""
    if syntax.closes:
        return re.escape(syntax.closes)
    return rf"(?:\]|,{_WS}{head})" if syntax.listed else rf";?+{_WS}{head}"
