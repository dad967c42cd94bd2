"""Calls in tags, as Qwen3-Coder writes them.

    <tool_call>
    <function=f>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A value is text, or the JSON of another type; the schema of the function tells which.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from fastgen.text.tools.parser import HELD, WS, Found, Function, Syntax, ToolParser, either
from fastgen.text.tools.values import TYPES, typed_json

_NAME = r"[^<>\r\n]++"
_PARAMETER = regex.compile(rf"{WS}(?:<parameter=(?P<key>{_NAME})>(?:\n|(?=[^\n]))|</function>|(?=</tool_call>))")
# The end of a value. A value may contain the closing tag, as text about XML does, if no other tag follows there.
_END = regex.compile(r"\n?+</parameter>(?=[ \t\r\n]*+(?:<parameter=|</function>|</tool_call>))")
_STRING = {"string"}
_CLOSES = regex.compile(rf"{WS}</tool_call>")


@dataclass(frozen=True)
class QwenCoder(Syntax):
    """Tags around each call and each of its arguments."""

    separate, typed = True, True

    def parser(self, functions: Collection[Function]) -> ToolParser:
        return XmlParser(self.opens, functions)

    def forms(self, arguments: Mapping[str, Any] | str) -> list[tuple[str | None, Any]]:
        """Templates write a tag for each argument, so a text becomes one."""
        return [("", {"arguments": arguments} if isinstance(arguments, str) else arguments)]


class XmlParser(ToolParser):
    """A parser of calls in tags. Arguments that are strings are reported as they are written, others when they are
    complete."""

    def __init__(self, mark: str, functions: Collection[Function]) -> None:
        super().__init__("<")
        self._functions = {function.name: function.argument_types for function in functions}
        self._marked = regex.compile(rf"{regex.escape(mark)}{WS}<function=(?P<name>{_NAME})>")
        self._bare = regex.compile(rf"<function=(?P<name>{either(self._functions)})>")
        self._arguments: Mapping[str, frozenset[str]] = {}  # types of each argument of the current call
        self._types = TYPES  # of the current argument
        self._value = ""  # text of the current argument, unless it is reported at once
        self._more = ""  # what comes before the next argument

    def _match_call(self, at: int, last: bool) -> Found:
        found = self._match(self._marked, at, last)
        return self._match(self._bare, at, last) if found is None else found

    def _begin(self, found: Found) -> None:
        self._call(found["name"])
        self._argue("{")
        self._arguments, self._more = self._functions.get(found["name"], {}), ""
        self._text, self._state = self._text[found.end() :], self._read_parameter

    def _read_parameter(self, last: bool) -> bool:
        """Read the tag of an argument, or the end of the call. Other text ends the call."""
        found = self._match(_PARAMETER, 0, last=False)
        if found is not None and found.partial:
            return False  # if the answer ends here, the rest is a part of a tag
        self._text = self._text if found is None else self._text[found.end() :]
        if found is None or found["key"] is None:
            self._argue("}")
            self._state = self._read_end
            return True
        self._types = self._arguments.get(found["key"], TYPES)
        self._argue(f"{self._more}{json.dumps(found['key'], ensure_ascii=False)}: ")
        self._more, self._value, self._state = ", ", "", self._read_value
        if self._types == _STRING:
            self._argue('"')
        return True

    def _read_value(self, last: bool) -> bool:
        found = _END.search(self._text, partial=True)
        if found is not None and found.partial and not last and len(self._text) - found.start() > HELD:
            found = None  # very much white space after a tag, which is a part of the value
        value = self._text if found is None else self._text[: found.start()]
        if self._types == _STRING:
            self._argue(json.dumps(value, ensure_ascii=False)[1:-1])
        else:
            self._value += value
        ended = found is not None and (not found.partial or (last and "</parameter>" in found[0]))
        if ended:
            self._argue('"' if self._types == _STRING else typed_json(self._value, self._types))
            self._state = self._read_parameter
        if found is None:
            self._text = ""
        else:  # if the answer ends in a part of a tag, that is left
            self._text = self._text[found.end() if ended else found.start() :]
        return ended

    def _read_end(self, last: bool) -> bool:
        """Read the mark after a call, if it is there."""
        found = self._match(_CLOSES, 0, last=False)
        if found is not None and found.partial:
            return False
        self._text = self._text if found is None else self._text[found.end() :]
        self._state = self._read_content
        return True
