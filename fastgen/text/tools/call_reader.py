"""Reads one tool call in JSON as it arrives, in any form whose meaning is clear."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache

import regex

from fastgen.text.tools.loose_json import LooseJson
from fastgen.text.tools.parser import WS, Pattern

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "function")
_USUAL = {*_ARGUMENTS, *_NAMES, "type", "id"}
# The beginning of a field, up to its value; an opening bracket, perhaps as the value of "function"; a closing bracket.
_FIELD = regex.compile(
    rf"""{WS}(?:
    (?P<opens>\{{|(?:,{WS})?+["']function["']{WS}:{WS}\{{) | (?P<closes>(?:,{WS})?+\}}) |
    (?:,{WS})?+(?:"(?P<a>[^"\\]*+)"|'(?P<b>[^'\\]*+)'|(?P<c>\w++)){WS}:{WS}(?=[^\ \t\r\n])
    )""",
    regex.VERBOSE,
)
_UNESCAPED = regex.compile(rf'{WS}"(?={WS}\{{{WS}")')  # a quotation mark around an object that is not escaped
_QUOTE = regex.compile(rf'{WS}(?:"|(?=[^"]))')
_OBJECT_TEXT = regex.compile(r'"(?: |\\[nrt])*+\{')  # the beginning of an object's text, as JSON
_EMPTY = ("", "null", "none", "[]")  # what models write for no arguments


@lru_cache(100)
def _after_blank(pattern: str) -> Pattern:
    return regex.compile(f"{WS}(?:{pattern})")


class CallReader:
    """The reader of one call: of an object with its name and arguments or, if the name is given, of the arguments.

    The fields of the object may have any order, and there may be others. Arguments are an object, the text of an
    object, or null; they may be absent if `names` is None and no other field may stand for them. The object may be in
    another one: {"function": {...}}, {{...}}.

    stops: pattern of the marks that end a call. names: names that the call may have; None: any. at: index up to which
    the text was read. begun: it is a call, whose name is known. failed: it is not a call. done: it was read completely.
    has_arguments: the arguments have begun.
    """

    def __init__(self, stops: str, names: Collection[str] | None, name: str, at: int) -> None:
        self.name, self.at = name, at
        self.begun = self.failed = self.done = False
        self.has_arguments = bool(name)
        self._stops, self._names = stops, names
        self._depth = 0  # number of brackets around the field
        self._field = _ARGUMENTS[0]
        self._value = LooseJson(stops) if name else None  # of the field
        self._text = ""  # of the value as JSON, unless it is the object of the arguments
        self._arguments = ""  # as JSON, as far as they were not taken
        self._complete = False  # the object of the arguments was read
        self._odd = False  # there was a field that calls do not have
        self._unescaped = False  # the next quotation mark belongs to the arguments

    @property
    def partial(self) -> bool:
        """True if later text decides whether this is a call."""
        return not self.begun

    def read(self, text: str, last: bool) -> None:
        """Read on in the text. last: no more text follows."""
        going = True
        while going and not (self.done or self.failed):
            going = self._read_field(text, last) if self._value is None else self._read_value(text, last)

    def take(self) -> str:
        """Return the arguments that were read since the last time: a part of the JSON of an object."""
        taken, self._arguments = self._arguments, ""
        return taken

    def finish(self) -> None:
        """Complete the arguments of a call that ends too early."""
        if self._value is not None and self._is_argument:
            self._value.close()
            self._add_arguments(self._value)
            self._end_value(self._value)

    @property
    def _is_argument(self) -> bool:
        return self._field in _ARGUMENTS and not self._complete

    # Each of these reads a part of the text, and returns whether the next can go on.

    def _read_field(self, text: str, last: bool) -> bool:
        if self._unescaped:
            quote = _QUOTE.match(text, self.at, partial=True)
            if quote.partial and not last:
                return False
            self.at, self._unescaped = quote.end(), False
        match = _FIELD.match(text, self.at, partial=True)
        if match is not None and match["opens"] == "{" and (self.name or self.has_arguments):
            match = None  # another call begins: the bracket that closes this one was forgotten
        stop = _after_blank(self._stops).match(text, self.at, partial=True) if match is None else None
        if any(each is not None and each.partial for each in (match, stop)) and not last:
            return False
        if match is None or match.partial:
            self._end(seen=stop is not None and not stop.partial)
            return False
        self.at = match.end()
        if match["opens"] or match["closes"]:
            self._depth += 1 if match["opens"] else -1
            if not self._depth:
                self._end(seen=True)
        else:
            self._field = match["a"] or match["b"] or match["c"] or ""
            self._value, self._text = LooseJson(self._stops), ""
            self.has_arguments |= self._field in _ARGUMENTS
            self._odd |= self._field not in _USUAL
            self.failed = self._odd and not self.begun and self._names is not None
        return True

    def _read_value(self, text: str, last: bool) -> bool:
        assert self._value is not None
        if self._is_argument and not self._value.kind:
            quote = _UNESCAPED.match(text, self.at, partial=True)
            if quote is not None and quote.partial and not last:
                return False
            if quote is not None and not quote.partial:
                self.at, self._unescaped = quote.end(), True
        self.at = self._value.read(text, self.at, last)
        if last and not self._value.kind:  # nothing is there
            self._value.close()
        self._add_arguments(self._value)
        if self._value.done:
            self._end_value(self._value)
        return self._value is None

    def _add_arguments(self, value: LooseJson) -> None:
        """Keep what was made of a value."""
        if self._is_argument and value.kind == "{":
            self._arguments += value.take()
        else:
            self._text += value.take()
        if self._is_argument and (value.kind == "{" or _OBJECT_TEXT.match(self._text)):
            self.begun = bool(self.name)

    def _end_value(self, value: LooseJson) -> None:
        text = json.loads(self._text) if value.kind == '"' else None
        if self._is_argument:
            self._complete = value.kind == "{"
            if text is not None and text.lstrip().startswith("{"):
                inner = LooseJson("(?!)")
                inner.read(text, 0, last=True)
                inner.close()
                self._arguments, self._complete = inner.take(), True
            elif not self._complete:
                self.failed = (self._text if text is None else text.strip()).lower() not in _EMPTY
        elif self._field in _NAMES and not self.begun:
            self.name = text or ""
            self.failed = not self.name or (self._names is not None and self.name not in self._names)
        self.begun |= bool(self.name) and self._complete
        self._value = None
        if not self._depth:
            self._end(seen=True)

    def _end(self, seen: bool) -> None:
        """End the call. seen: its end is in the text, so that it may lack a field of arguments."""
        self.done = True
        if self.begun or self.failed:
            return
        self.begun = bool(self.name) and (self.has_arguments or (seen and not self._odd and self._names is None))
        self.failed = not self.begun
        self._arguments = "{}"
