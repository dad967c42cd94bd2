"""Calls in Python, as Llama 3.2 writes them if a template asks for it: [f(a=1, b="x"), g()].

OLMo 3 writes them on lines between two marks.

Values are literals of Python or JSON. A call is reported when it is complete, and only if all of it can be read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from fastgen.text.tools.parser import SAMPLE, WS, Found, Function, Scan, Syntax, ToolParser
from fastgen.text.tools.values import UNREADABLE, json_text, python_text, read_literal

_ARGUMENT = re.compile(r"\s*([^\W\d][\w-]*)\s*=(.*)", re.DOTALL)
_PLACES = regex.compile(r"""["'\\(){}\[\],]""")


@dataclass(frozen=True)
class Pythonic(Syntax):
    """A list of calls, perhaps after a mark; without the mark it must begin the answer. With a closing mark: calls on
    lines."""

    first = "["

    def parser(self, functions: Collection[Function]) -> ToolParser:
        return PythonParser(self, [function.name for function in functions])

    def forms(self, arguments: Mapping[str, Any] | str) -> list[tuple[str | None, Any]]:
        """Templates go through the arguments, so a text becomes an argument. Some write values without quotes; those
        get literals of Python."""
        named = {"arguments": arguments} if isinstance(arguments, str) else arguments
        return [("", named), ("", {name: python_text(value) for name, value in named.items()})]

    def shows(self, text: str) -> bool:
        return any(f"{name}={json_text(value)}" in text for name, value in SAMPLE[1].items())


@dataclass(frozen=True)
class _Call:
    """A call that was looked for. end: index after it. partial: it depends on later text."""

    name: str = ""
    arguments: str = ""
    end: int = 0
    partial: bool = False


class PythonParser(ToolParser):
    """A parser of a list of calls in Python. known: names of the functions that may be called."""

    def __init__(self, syntax: Pythonic, known: Collection[str]) -> None:
        super().__init__((syntax.opens[0], "[") if syntax.bare else syntax.opens[0])
        name, closes = rf"(?P<name>[\w.-]++){WS}\(", regex.escape(syntax.closes)
        bracket, comma = (rf"(?:\[{WS})?+", rf"(?:,{WS})?+") if closes else (rf"\[{WS}", rf",{WS}")
        self._bare, self._known = bool(syntax.bare), frozenset(known)
        self._opens = {
            True: regex.compile(rf"{regex.escape(syntax.opens)}{WS}{bracket}{name}"),
            False: regex.compile(rf"\[{WS}{name}"),
        }
        self._more = regex.compile(rf"{WS}{comma}{name}")
        self._ends = regex.compile(rf"{WS}(?:,{WS})?+" + (rf"(?:\]{WS})?+{closes}" if closes else r"\]"))
        self._follows = regex.compile(f"{self._ends.pattern}|{self._more.pattern}")
        self._scan = Scan(_PLACES)

    def _match_call(self, at: int, last: bool) -> Found:
        match = self._match(self._opens[True], at, last)
        if match is None and self._bare and self._is_first(at):
            match = self._match(self._opens[False], at, last)
        return match if match is None or match.partial else self._match_rest(match, last)

    def _is_known(self, match: Found) -> bool:
        """Return whether the function in a match, if there is one, may be called."""
        return match["name"] is None or match["name"] in self._known

    def _match_rest(self, head: Found, last: bool) -> _Call | None:
        """Match a call after its opening bracket. Another call or the end of the list or of the answer must follow."""
        if not self._is_known(head):
            return None
        start = head.end() - 1
        self._scan.run(self._text, start)
        follows = self._match(self._follows, start + self._scan.at, last=False) if self._scan.done else None
        if not last and (not self._scan.done or (follows is not None and follows.partial)):
            return _Call(partial=True)
        scan, self._scan = self._scan, Scan(_PLACES)
        if follows is None or not self._is_known(follows):
            return None
        arguments = self._read_call(start, scan)
        return None if arguments is None else _Call(head["name"], arguments, start + scan.at)

    def _read_call(self, start: int, scan: Scan) -> str | None:
        """Return the JSON text of a call's arguments; None if they are no literals with names."""
        ends = [start + place for place in (*scan.commas, scan.at - 1)]
        pieces = [self._text[a + 1 : b] for a, b in zip([start, *ends], ends, strict=False)]
        if not pieces[-1].strip():  # there are no arguments, or a comma ends them
            pieces.pop()
        arguments = {}
        for piece in pieces:
            match = _ARGUMENT.fullmatch(piece)
            value = read_literal(match[2].strip()) if match else UNREADABLE
            if match is None or value is UNREADABLE:
                return None
            arguments[match[1]] = value
        return json_text(arguments)

    def _begin(self, call: _Call) -> None:
        self._call(call.name)
        self._argue(call.arguments)
        self._text, self._state = self._text[call.end :], self._read_next

    def _close(self) -> None:
        """A call is reported when it is complete."""

    def _read_next(self, last: bool) -> bool:
        """Read the next call, or the end of the list or of the answer; one of them is there."""
        head = self._more.match(self._text)
        if head is None:
            end = self._ends.match(self._text)
            self._text, self._state = self._text[end.end() if end else len(self._text) :], self._read_content
            return True
        match = self._match_rest(head, last)
        if match is None:
            self._state = self._read_content
        elif not match.partial:
            self._begin(match)
        return match is None or not match.partial
