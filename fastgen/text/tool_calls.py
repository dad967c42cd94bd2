"""Tool calls in the text of answers: the syntax of a model's chat template, and an incremental parser.

A model writes a call as JSON in the syntax of its chat template:

    hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, one or more (Hermes, Qwen 2.5, Qwen 3)
    mistral   [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]                    (Mistral v3)
    llama     {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>         (Llama 3.1 to 3.3)
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import regex

from fastgen.text.reasoning import AnswerParser, find_reasoning, starts_open
from fastgen.text.tokenizer import Tokenizer

Pattern = Any  # a compiled pattern of `regex`, which has no types

BLANK = " \t\r\n"
HELD = 8192  # maximum number of characters of a call before its arguments, or after them
_BRACKETS = regex.compile(r'["\\{}\[\]]')
_WS = r"[ \t\r\n]*+"
_STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_OTHER = rf'(?:"(?:type|id)"{_WS}:{_WS}{_STRING}{_WS},{_WS})*+'
# The end of a call after its arguments: further fields (text, a number, true, false or null), and the bracket of the
# object, which small models forget.
_REST = rf"(?:{_WS},{_WS}{_STRING}{_WS}:{_WS}(?:{_STRING}|[-+.\w]++))*+{_WS}\}}?+"


@dataclass(frozen=True)
class Syntax:
    """The syntax in which a model writes calls: an object with "name" and arguments between two marks.

    opens, closes: the marks. arguments: name of the field with the arguments. bare: where a call without its opening
    mark is accepted, because the mark may be a special token that is not in the text; the call must then name a known
    function. listed: the objects are in one list.
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
    """Return the syntax of calls in a tokenizer's chat template, or None if it is unknown."""
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


def parse_message(
    text: str, tokenizer: Tokenizer | None, tools: Iterable[Any], prompt: Sequence[int] | str | None = None
) -> dict[str, Any]:
    """Return the message of an answer in the form for chat templates; see `Generator.parse_message`."""
    names = [_name_of(tool) for tool in tools]
    syntax = None if tokenizer is None else find_syntax(tokenizer)
    reasoning = None if tokenizer is None else find_reasoning(tokenizer)
    if syntax is None and (names or reasoning is None):
        raise ValueError("this model's chat template has no known format for tools, so that calls cannot be found")
    if prompt is not None and tokenizer is not None:
        inside = starts_open(tokenizer, prompt)
    else:
        inside = reasoning is not None and reasoning.begins_inside(text)
    calls = None if syntax is None else ToolParser(syntax, names)
    message = joined_message(AnswerParser(reasoning, inside, calls).push(text, last=True))
    message["content"] = message["content"] or ""
    for call in message.get("tool_calls", ()):
        with suppress(ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def _name_of(tool: Any) -> str:
    """Return the name of a tool, which is a function, its schema, or OpenAI's dict around the schema."""
    if isinstance(tool, Mapping):
        return str(tool.get("function", tool)["name"])
    return str(tool.__name__)


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


def new_call_id() -> str:
    """Return nine letters and digits, the only form of id that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(slots=True)
class _Nesting:
    """A position inside JSON. depth: number of open brackets. quoted: inside a string. escaped: after a backslash."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def end(self, text: str) -> int | None:
        """Return the index after the bracket that closes the outermost one, or None if `text` ends before it."""
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
    """An incremental parser of one answer.

    Text around calls is content, except white space next to a call; so is text that only resembles a call. A call is
    reported when its name is known and its arguments begin. The arguments follow as the model writes them, so the last
    call of a truncated answer may be incomplete. The result does not depend on how the text is cut into pieces.

    functions: the names that calls without a mark may have. calls: number of calls reported so far.
    """

    def __init__(self, syntax: Syntax, functions: Collection[str]) -> None:
        self.calls = 0
        self._text = ""  # text that is not reported yet
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
        # Patterns of the beginning of a call, and of the text after its arguments: {the call has its mark: pattern}.
        self._begins, self._goes_on = {}, {}
        for marked, name, opens in ((True, _STRING, regex.escape(syntax.opens) + _WS), (False, known, "")):
            head = _head(name)
            self._begins[marked] = regex.compile(rf"{opens}\[{_WS}{head}" if syntax.listed else opens + head)
            self._goes_on[marked] = regex.compile(_REST + _WS + _following(syntax, head))

    def push(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """Return the deltas that a piece of text adds. last: this is the last piece."""
        self._text += text
        while self._text and self._state(last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _match(self, pattern: Pattern, at: int, last: bool) -> Any:
        """Match a pattern at an index. The match is `partial` if it depends on later text, and None if later text
        cannot make it match."""
        found = pattern.match(self._text, at, at + HELD, partial=True)
        undecided = found is not None and found.partial
        return None if undecided and (last or len(self._text) >= at + HELD) else found

    # Each state consumes a part of the text, and returns False if it needs more text.

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
        """Match the beginning of a call with its mark or, where the syntax allows it, without."""
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
        found = self._match(self._goes_on[self._marked], 0, last=False)
        if found is not None and found.partial:
            self._text = "" if last else self._text  # if the answer ends here, the rest is a part of the closing mark
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
        """Report a new call. head: the match of its beginning, up to the opening bracket of the arguments."""
        function = {"name": json.loads(head["name"]), "arguments": ""}
        call = {"index": self.calls, "id": new_call_id(), "type": "function", "function": function}
        self._deltas.append({"tool_calls": [call]})
        self.calls += 1
        self._after_call = True
        self._text, self._state = self._text[head.end() - 1 :], self._read_arguments
        self._nesting = _Nesting()


def _head(name: str) -> str:
    """Return the pattern of a call's object up to the opening bracket of its arguments. name: pattern of the quoted
    names of functions."""
    arguments = rf'"(?:arguments|parameters)"{_WS}:{_WS}\{{'
    return rf'\{{{_WS}{_OTHER}"name"{_WS}:{_WS}(?P<name>{name}){_WS},{_WS}{_OTHER}{arguments}'


def _following(syntax: Syntax, head: str) -> str:
    """Return the pattern of the text after a call's object."""
    if syntax.closes:
        return re.escape(syntax.closes)
    return rf"(?:\]|,{_WS}{head})" if syntax.listed else rf";?+{_WS}{head}"
