"""Calls in tags, as Qwen3-Coder writes them, and Seed-OSS with other marks.

    <tool_call>
    <function=f>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A value is text, or the JSON of another type; the schema of the function tells which. Models leave out tags or misspell
them (</parameter/>, </parameterfunction>), so a value also ends before the tag of another known argument, and where the
call clearly does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from fastgen.text.tools.loose_json import LooseJson
from fastgen.text.tools.parser import BLANK, HELD, WS, Found, Function, Syntax, ToolParser
from fastgen.text.tools.values import TYPES, typed_json

_IS = r"(?:[ \t]++name)?+[ \t]*+=[ \t]*+"  # between the kind of a tag and its name: "=", as it should be, or " name="
_FUNCTION = rf"<function{_IS}[\"']?(?P<name>[^<>\"'\s]++)[\"']?[ \t]*+(?:>|(?=[\r\n]))"
# The tag of an argument: as it should be, or with quotation marks, or with another sign at its end.
_TAG = (
    rf"<param(?:(?:eter)?+=(?P<key>[^<>\"'\r\n]++)>|eter{_IS}[\"']?(?P<loose>[^<>\"'\r\n:=]++)[\"']?[ \t]*+"
    r"(?:>|(?=[\r\n])|[:=](?=[^<>\r\n]*+[\r\n<])))"
)
_OTHER_TAG = r"<parameter[^<>\r\n]*+(?:>|(?=[\r\n<]))"
_CLOSING = r"<[ \t]*+/[ \t]*+(?i:para|parm|pram)[^<>\r\n]*+>?+|<parameter>"
_LINE = r"(?:\r?\n|(?=[^\r\n]))"  # the line break after a tag, if there is one
_STRING = {"string"}


@dataclass(frozen=True)
class QwenCoder(Syntax):
    """Tags around each call and each of its arguments. lines: line breaks around values, which are not part of them."""

    lines: bool = True
    separate, typed = True, True

    def parser(self, functions: Collection[Function]) -> ToolParser:
        return XmlParser(self, functions)

    def forms(self, arguments: Mapping[str, Any] | str) -> list[tuple[str | None, Any]]:
        """Templates write a tag for each argument, so a text becomes one."""
        return [("", {"arguments": arguments} if isinstance(arguments, str) else arguments)]


class XmlParser(ToolParser):
    """A parser of calls in tags. Arguments that are strings are reported as they are written, others when they are
    complete."""

    def __init__(self, syntax: QwenCoder, functions: Collection[Function]) -> None:
        super().__init__("<")
        self._functions = {function.name: function.argument_types for function in functions}
        self._opens, self._closes = re.escape(syntax.opens), re.escape(syntax.closes)
        opens, closes, function_end = self._opens, self._closes, r"</func[^<>\r\n]*+>"
        self._marked, self._bare = regex.compile(opens + WS + _FUNCTION), regex.compile(_FUNCTION)
        self._after = regex.compile(rf"{WS}(?:{function_end}|{closes})")
        other_end = rf"</[^<>\s]++>(?={WS}{closes})"  # another tag instead of </function>
        self._parameter = regex.compile(
            rf"{WS}(?:(?:{_TAG}|{_OTHER_TAG}){_LINE}|{function_end}|{other_end}|(?={closes}))"
        )
        # A value may have a closing tag in it, as text about XML does, if no other tag follows there.
        # Without a mark, the tag of a function begins a call only if what calls have follows.
        call, bare = rf"{opens}{WS}<function{_IS}", rf"{_FUNCTION}(?={WS}(?:<param(?:eter)?[= \t]|</func|{closes}))"
        closing = rf"{_CLOSING}|(?!{closes}|</func)</(?P<tag>[^<>/\s]++)>"
        closed = rf"(?:{closing})(?={WS}(?:<parameter[^<>]|<param=|</func|{other_end}|{closes}|{call}|{bare}))"
        ends = rf"{function_end}{WS}{closes}|(?:{function_end}|{closes}){WS}(?:{opens}{WS})?+<function{_IS}"
        others = rf"{_TAG}|{ends}|{opens}{WS}{_FUNCTION}|{bare}"
        self._end = regex.compile(rf"(?:\r?\n)?+(?:{closed}|(?={others}))")  # the end of a value; see `_ends_value`
        self._arguments: Mapping[str, frozenset[str]] = {}  # types of each argument of the current call
        self._key: str | None = None  # of the current argument; None: its tag cannot be read
        self._types = TYPES  # of the current argument
        self._value = ""  # text of the current argument, unless it is reported at once
        self._more = ""  # what comes before the next argument
        self._object = LooseJson("")  # arguments that are not in tags

    def _match_call(self, at: int, last: bool) -> Found:
        match = self._match(self._marked, at, last)
        if match is None:
            match = self._match(self._bare, at, last)
            if match is not None and not match.partial and match["name"] not in self._functions:
                match = None
        return match

    def _begin(self, match: Found) -> None:
        self._call(match["name"])
        self._argue("{")
        self._arguments, self._more = self._functions.get(match["name"], {}), ""
        self._text, self._state = self._text[match.end() :], self._read_parameter

    def _ends_value(self, match: Found) -> bool:
        """Return whether a match of `_end` ends the value. Without its closing tag, a value ends only before what the
        call may have."""
        if match["tag"]:
            return match["tag"] in self._arguments
        if match["name"]:
            return match["name"] in self._functions
        key = _key_of(match)
        return key is None or (key in self._arguments if self._arguments else match[0].endswith("\n"))

    def _read_parameter(self, last: bool) -> bool:
        """Read the tag of an argument, or the end of the call. Other text ends the call."""
        match = self._match(self._parameter, 0, last=False)
        if match is not None and match.partial:
            return False  # if the answer ends here, the rest is a part of a tag
        if match is None and not self._more and (begun := self._text.lstrip(BLANK)).startswith("{"):
            self._object = LooseJson(f"</func|{self._closes}|{self._opens}")
            self._object.read("{", 0, last=False)
            self._object.take()  # which was reported
            self._text, self._state = begun[1:], self._read_object
            return True
        self._text = self._text if match is None else self._text[match.end() :]
        if match is None or not match[0].lstrip().startswith("<param"):
            self._argue("}")
            self._state = self._read_end
            return True
        self._key, self._value, self._state = _key_of(match), "", self._read_value
        if self._key is None:
            self._types = TYPES
            return True
        self._types = self._arguments.get(self._key, TYPES)
        self._argue(f"{self._more}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._more = ", "
        if self._types == _STRING:
            self._argue('"')
        return True

    def _read_value(self, last: bool) -> bool:
        match = self._end.search(self._text, partial=True)
        while match is not None and not match.partial and not self._ends_value(match):
            match = self._end.search(self._text, match.end() + 1, partial=True)
        if match is not None and match.partial and not last and len(self._text) - match.start() > HELD:
            match = None  # very much white space after a tag, which is a part of the value
        value = self._text if match is None else self._text[: match.start()]
        if self._types == _STRING:
            self._argue(json.dumps(value, ensure_ascii=False)[1:-1])
        else:
            self._value += value
        ended = match is not None and (not match.partial or (last and "</parameter>" in match[0]))
        if ended:
            self._end_value()
        if match is None:
            self._text = ""
        else:  # if the answer ends in a part of a tag, that is left
            self._text = self._text[match.end() if ended else match.start() :]
        return ended

    def _end_value(self) -> None:
        if self._types == _STRING:
            self._argue('"')
        elif self._key is not None:
            self._argue(typed_json(self._value, self._types))
        self._state = self._read_parameter

    def _read_object(self, last: bool) -> bool:
        """Read all arguments, written as an object in JSON."""
        at = self._object.read(self._text, 0, last and not self._cut)
        self._text = self._text[at:]
        self._argue(self._object.take())
        if self._object.done:
            self._state = self._read_end
        return self._object.done

    def _read_end(self, last: bool) -> bool:
        """Read the tags and marks after a call."""
        match = self._match(self._after, 0, last=False)
        if match is not None and match.partial:
            return False
        if match is None:
            self._state = self._read_content
        else:
            self._text = self._text[match.end() :]
        return True

    def _close(self) -> None:
        if self._state == self._read_value:
            self._end_value()
        if self._state == self._read_parameter:
            self._argue("}")
        elif self._state == self._read_object:
            self._object.close()
            self._argue(self._object.take())


def _key_of(match: Found) -> str | None:
    """Return the name of the argument in a tag that was found, or None if there is none."""
    key = match["key"] or match["loose"]
    return key.strip() if key else None
