"""Calls whose arguments are JSON: in an object with the name, or after a head with the name and marks.

    Hermes        <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, one or more
    ObjectList    <|tool_call|>[{"name": "f", "arguments": {...}}, ...]
    Mistral       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
    Llama         {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>
    MistralHeads  [TOOL_CALLS]f[ARGS]{...}, one or more; with an id: [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}
    DeepSeek      <|tool▁calls▁begin|>, one or more calls, <|tool▁calls▁end|>, each call one of
                  <|tool▁call▁begin|>function<|tool▁sep|>f\\n```json\\n{...}\\n```<|tool▁call▁end|>
                  <|tool▁call▁begin|>f<|tool▁sep|>{...}<|tool▁call▁end|>

DeepSeek's marks have fullwidth bars.

Models deviate from these forms. As long as the meaning is clear, a call is found: see `CallReader` and `LooseJson`.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import regex

from fastgen.text.tools.call_reader import CallReader
from fastgen.text.tools.parser import HELD, SAMPLE, WS, Found, Function, Syntax, ToolParser

_FENCE = rf"(?:```(?:json)?+{WS})?+"  # the beginning of a block of code in Markdown
_OBJECT = r"(?=\{)"
_LIST = rf"\[{WS}{_OBJECT}"
_MISTRAL_HEAD = rf"(?P<name>[\w.-]++){WS}(?:\[CALL_ID\]{WS}\w++{WS})?+(?:\[ARGS\]|(?=\{{{WS}[\"'}}]))"


@dataclass(frozen=True)
class JsonSyntax(Syntax):
    """A format whose arguments are JSON."""

    def parser(self, functions: Collection[Function]) -> ToolParser:
        return JsonParser(self, [function.name for function in functions])

    @abstractmethod
    def begins(self, marked: bool) -> str:
        """Return the pattern of the text before the first call's object or, after a group `name`, its arguments.
        marked: it has the opening mark."""

    @property
    def stops(self) -> str:
        """The pattern of marks that end a call, however incomplete it is."""
        return re.escape(self.opens)

    @property
    def ends(self) -> str:
        """The pattern of a mark after a call, or ""."""
        return re.escape(self.closes)


# ------------------------------------------------------------------------------------------------- objects


@dataclass(frozen=True)
class ObjectSyntax(JsonSyntax):
    """A format whose calls are objects with "name" and arguments. arguments: name of the field with the arguments."""

    arguments: str = "arguments"
    first = "{"

    def begins(self, marked: bool) -> str:
        mark = re.escape(self.opens) + WS + _FENCE if marked else ""
        return f"{mark}(?:{_LIST}|{_OBJECT})"


class Hermes(ObjectSyntax):
    """Objects that each have two marks."""

    separate = True

    @property
    def stops(self) -> str:
        return f"```|{re.escape(self.opens)}|{re.escape(self.closes)}"


class ObjectList(ObjectSyntax):
    """A format whose calls are one list of objects after a mark."""


class Mistral(ObjectList):
    """The format of Mistral v3, which also calls without the mark."""

    short_ids = True

    def begins(self, marked: bool) -> str:
        return rf"{re.escape(self.opens)}{WS}{_FENCE}(?:{_LIST}|{_OBJECT}|{_MISTRAL_HEAD})" if marked else _LIST


class Llama(ObjectSyntax):
    """Objects, perhaps after a mark."""


# ------------------------------------------------------------------------------------------------- heads


@dataclass(frozen=True)
class MistralHeads(JsonSyntax):
    """A mark, the name and the arguments, for each call. ids: the model also writes an id."""

    ids: bool = False
    short_ids = True

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opens, "[CALL_ID]", "[ARGS]")

    def begins(self, marked: bool) -> str:
        return rf"{re.escape(self.opens)}{WS}{_FENCE}(?:{_LIST}|{_OBJECT}|{_MISTRAL_HEAD})"


@dataclass(frozen=True)
class DeepSeek(JsonSyntax):
    """Two marks around all calls, and two around each. fenced: the arguments are a block of code in Markdown."""

    fenced: bool = True
    each: ClassVar = ("<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>")

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opens, self.closes, *self.each)

    @property
    def stops(self) -> str:
        return "```|" + "|".join(self.marks)

    @property
    def ends(self) -> str:
        return rf"{self.each[2]}|{self.closes}"

    def begins(self, marked: bool) -> str:
        begins, middle, ends = self.each
        name = rf"(?:function{WS}{middle}{WS})?(?P<name>[\w.-]++){WS}(?:{middle}{WS})?+{_FENCE}"
        return rf"(?:{self.opens}{WS})?+{begins}{WS}{name}(?=[{{\"]|null|```|{ends})"

    def forms(self, arguments: Mapping[str, Any] | str) -> list[tuple[str | None, Any]]:
        """DeepSeek's templates concatenate the text of the arguments, and some write a call only without content."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [("", arguments), ("", text), (None, arguments), (None, text)]

    def shows(self, text: str) -> bool:
        pieces = self.parser([]).push(text, last=True)
        return json.dumps(SAMPLE[1]) in text and any("tool_calls" in delta for delta in pieces)


# ------------------------------------------------------------------------------------------------- the parser

_AGAIN = regex.compile(rf"{WS}(?:[,;]{WS})?+(?:\[{WS})?+(?=\{{)")  # before another object


class JsonParser(ToolParser):
    """A parser of calls with arguments in JSON, which it reports as they are written. known: names of functions that
    calls without a mark may have."""

    def __init__(self, syntax: JsonSyntax, known: Collection[str]) -> None:
        super().__init__({syntax.opens[0]} | ({"{", "["} if syntax.bare else set()))
        self._bare, self._separate, self._stops, self._known = syntax.bare, syntax.separate, syntax.stops, known
        self._begins = {marked: regex.compile(syntax.begins(marked)) for marked in (True, False)}
        self._ends = regex.compile(rf"{WS}(?:[}}\]]|```(?=\W)|(?P<mark>{syntax.ends or '(?!)'}))")
        self._marked = True  # the current call has its mark
        self._reader: CallReader | None = None  # of the current call, or of what may be one
        self._start = 0  # index of that call

    def _match_call(self, at: int, last: bool) -> Found:
        if self._reader is None:
            match = self._match(self._begins[True], at, last)
            self._marked = match is not None
            if match is None and (self._bare == "anywhere" or (self._bare == "start" and self._is_first(at))):
                match = self._match(self._begins[False], at, last)
            if match is None or match.partial:
                return match
            self._new_reader(at, match)
        self._read_call(at, last)
        if last and self._reader is not None and self._reader.partial:
            self._drop_reader()
        return self._reader

    def _new_reader(self, at: int, match: Found) -> None:
        names, name = None if self._marked else self._known, match.groupdict().get("name") or ""
        self._reader, self._start = CallReader(self._stops, names, name, match.end()), at

    def _drop_reader(self) -> None:
        """Give up what may have been a call. No other is looked for in its arguments."""
        assert self._reader is not None
        self._passed = self._reader.at if self._reader.has_arguments else 0
        self._reader = None

    def _read_call(self, at: int, last: bool) -> None:
        """Read on in what may be a call, and give it up if it is none."""
        reader, last = self._reader, last and not self._cut
        assert reader is not None
        reader.at, self._start = reader.at + at - self._start, at
        if not reader.has_arguments:
            head = self._text[: at + HELD]
            reader.read(head, last and len(head) == len(self._text))
        if reader.has_arguments:
            reader.read(self._text, last)
        too_long = not reader.has_arguments and len(self._text) >= at + HELD
        if reader.failed or (reader.partial and too_long):
            self._drop_reader()

    def _begin(self, reader: CallReader) -> None:
        self._call(reader.name)
        self._text, reader.at, self._state = self._text[reader.at :], 0, self._read_arguments
        self._argue(reader.take())

    def _read_arguments(self, last: bool) -> bool:
        reader = self._reader
        assert reader is not None
        reader.read(self._text, last and not self._cut)
        self._text, reader.at = self._text[reader.at :], 0
        self._argue(reader.take())
        if reader.done:
            self._reader, self._state = None, self._read_next
        return reader.done

    def _close(self) -> None:
        if self._reader is not None and self._reader.begun:
            self._reader.finish()
            self._argue(self._reader.take())

    def _read_next(self, last: bool) -> bool:
        """Read what follows a call: another one, brackets and marks that close it, or content."""
        again = _AGAIN.match(self._text, partial=True)
        if again is not None and again.partial:
            return False
        if again is not None:
            if self._reader is None:
                self._new_reader(0, again)
            self._read_call(0, last)
            if self._reader is not None and not self._reader.partial:
                self._begin(self._reader)
                return True
            if self._reader is not None and (not last or self._cut):
                return False
        ends = self._ends.match(self._text, partial=True)
        if ends is not None and ends.partial:
            return False  # if the answer ends here, the rest is a part of the closing mark
        ended = ends is None or (self._separate and ends["mark"] is not None)
        self._text = self._text if ends is None else self._text[ends.end() :]
        self._reader, self._state = None, self._read_content if ended else self._read_next
        return True
