"""Calls whose arguments are JSON: in an object with the name, or after a head with the name and marks.

    Hermes        <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, one or more
    Mistral       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
    Llama         {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>
    MistralHeads  [TOOL_CALLS]f[ARGS]{...}, one or more; with an id: [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}
    DeepSeek      <|tool▁calls▁begin|>, one or more calls, <|tool▁calls▁end|>, each call one of
                  <|tool▁call▁begin|>function<|tool▁sep|>f\\n```json\\n{...}\\n```<|tool▁call▁end|>
                  <|tool▁call▁begin|>f<|tool▁sep|>{...}<|tool▁call▁end|>

DeepSeek's marks have fullwidth bars.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import regex

from fastgen.text.tools.parser import SAMPLE, WS, Found, Function, Scan, Syntax, ToolParser, either

_PLACES = regex.compile(r'["\\{}\[\]]')
_STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_OTHER = rf'(?:"(?:type|id)"{WS}:{WS}{_STRING}{WS},{WS})*+'
# The end of a call after its arguments: further fields (text, a number, true, false or null), and the bracket of the
# object, which small models forget.
_REST = rf"(?:{WS},{WS}{_STRING}{WS}:{WS}(?:{_STRING}|[-+.\w]++))*+{WS}\}}?+"


@dataclass(frozen=True)
class JsonSyntax(Syntax):
    """A format whose arguments are JSON."""

    def parser(self, functions: Collection[Function]) -> ToolParser:
        return JsonParser(self, [function.name for function in functions])

    @abstractmethod
    def head(self, known: Collection[str] | None) -> str:
        """Return the pattern of a call up to the opening bracket of its arguments, with a group `name`. known: the
        names that it may have; None: any."""

    def begins(self, known: Collection[str] | None) -> str:
        """Return the pattern of the beginning of the first call: with its mark, or without it if `known` is given."""
        return ("" if known is not None else re.escape(self.opens) + WS) + self.head(known)

    @abstractmethod
    def goes_on(self, head: str) -> str:
        """Return the pattern of the text after a call's arguments: the end of the calls, or the next call's head."""

    @property
    def rest(self) -> str:
        """The pattern of the text after a call's arguments that is no content if `goes_on` does not match."""
        return ""


# ------------------------------------------------------------------------------------------------- objects


@dataclass(frozen=True)
class ObjectSyntax(JsonSyntax):
    """A format whose calls are objects with "name" and arguments. arguments: name of the field with the arguments."""

    arguments: str = "arguments"

    @property
    def rest(self) -> str:
        return _REST

    @property
    def first(self) -> str:
        return "{"

    def head(self, known: Collection[str] | None) -> str:
        name = _STRING if known is None else either(map(json.dumps, known))
        arguments = rf'"(?:arguments|parameters)"{WS}:{WS}\{{'
        return rf'\{{{WS}{_OTHER}"name"{WS}:{WS}(?P<name>{name}){WS},{WS}{_OTHER}{arguments}'


class Hermes(ObjectSyntax):
    """Objects that each have two marks."""

    separate = True

    def goes_on(self, head: str) -> str:
        return self.rest + WS + re.escape(self.closes)


class Mistral(ObjectSyntax):
    """The format of Mistral v3: one list of objects, after a mark."""

    short_ids = True

    @property
    def first(self) -> str:
        return "["

    def begins(self, known: Collection[str] | None) -> str:
        return ("" if known is not None else re.escape(self.opens) + WS) + rf"\[{WS}" + self.head(known)

    def goes_on(self, head: str) -> str:
        return self.rest + WS + rf"(?:\]|,{WS}{head})"


class Llama(ObjectSyntax):
    """Objects, perhaps after a mark."""

    def goes_on(self, head: str) -> str:
        return self.rest + WS + rf";?+{WS}{head}"


# ------------------------------------------------------------------------------------------------- heads


@dataclass(frozen=True)
class MistralHeads(JsonSyntax):
    """A mark, the name and the arguments, for each call. ids: the model writes an id, too."""

    ids: bool = False
    short_ids = True

    def head(self, known: Collection[str] | None) -> str:
        return rf"(?P<name>[\w.-]++){WS}(?:\[CALL_ID\]\w++)?+{WS}\[ARGS\]{WS}\{{"

    def goes_on(self, head: str) -> str:
        return ""


@dataclass(frozen=True)
class DeepSeek(JsonSyntax):
    """Two marks around all calls, and two around each. fenced: the arguments are a block of code in Markdown."""

    fenced: bool = True
    each: ClassVar = ("<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>")

    @property
    def rest(self) -> str:
        return rf"(?:{WS}```)?+(?:{WS}{self.each[2]})?+"

    def head(self, known: Collection[str] | None) -> str:
        begins, middle, _ = self.each
        if self.fenced:
            return rf"{begins}{WS}function{WS}{middle}{WS}(?P<name>[\w.-]++){WS}```(?:json)?+{WS}\{{"
        return rf"{begins}{WS}(?P<name>[\w.-]++){WS}{middle}{WS}\{{"

    def begins(self, known: Collection[str] | None) -> str:
        return rf"(?:{self.opens}{WS})?+" + self.head(known)

    def goes_on(self, head: str) -> str:
        fence = f"{WS}```" if self.fenced else ""
        return rf"{fence}{WS}{self.each[2]}{WS}(?:{self.closes}|{head})"

    def forms(self, arguments: Mapping[str, Any] | str) -> list[tuple[str | None, Any]]:
        """DeepSeek's templates concatenate the text of the arguments, and some write a call only without content."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [("", arguments), ("", text), (None, arguments), (None, text)]

    def shows(self, text: str) -> bool:
        pieces = self.parser([]).push(text, last=True)
        calls = [call["function"] for delta in pieces for call in delta.get("tool_calls", ())]
        return json.dumps(SAMPLE[1]) in "".join(call["arguments"] for call in calls)


# ------------------------------------------------------------------------------------------------- the parser


class JsonParser(ToolParser):
    """A parser of calls with arguments in JSON, which it reports as they are written. known: names of functions that
    calls without a mark may have."""

    def __init__(self, syntax: JsonSyntax, known: Collection[str]) -> None:
        super().__init__({syntax.opens[0]} | ({syntax.first} if syntax.bare else set()))
        self._marked = True  # the current call has its mark
        self._scan = Scan(_PLACES)
        self._bare = syntax.bare
        # Patterns of the beginning of a call, and of the text after its arguments: {the call has its mark: pattern}.
        names = {True: None, False: known}
        self._begins = {marked: regex.compile(syntax.begins(each)) for marked, each in names.items()}
        self._goes_on = {marked: regex.compile(syntax.goes_on(syntax.head(each))) for marked, each in names.items()}
        self._rest = regex.compile(syntax.rest)

    def _match_call(self, at: int, last: bool) -> Found:
        self._marked = True
        found = self._match(self._begins[True], at, last)
        if found is None and (self._bare == "anywhere" or (self._bare == "start" and self._is_first(at))):
            self._marked = False
            found = self._match(self._begins[False], at, last)
        return found

    def _begin(self, found: Found) -> None:
        name = found["name"]
        self._call(json.loads(name) if name.startswith('"') else name)
        self._text, self._state = self._text[found.end() - 1 :], self._read_arguments
        self._scan = Scan(_PLACES)

    def _read_arguments(self, last: bool) -> bool:
        self._scan.run(self._text)
        piece = self._text[: self._scan.at]
        self._argue(piece)
        self._text = self._text[len(piece) :]
        self._scan.at -= len(piece)
        if self._scan.done:
            self._state = self._read_next
        return self._scan.done

    def _read_next(self, last: bool) -> bool:
        """Read the end of a call, then the mark that closes it, the end of a list, or the beginning of the next."""
        found = self._match(self._goes_on[self._marked], 0, last=False)
        if found is not None and found.partial:
            return False  # if the answer ends here, the rest is a part of the closing mark
        if found is not None and found.groupdict().get("name"):
            self._begin(found)
        else:
            found = found or self._rest.match(self._text)
            self._text, self._state = self._text[found.end() :], self._read_content
        return True
