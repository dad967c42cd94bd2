"""Tool calls read from a growing text. How the text comes in pieces makes no difference to what is read."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fastgen.cli.serve.shapes import Delta, FunctionDelta, ToolCallDelta

BLANK = " \t\r\n"
HELD_ARGUMENTS = 8192  # characters at most of arguments that come before their function's name
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPEN_STRING = re.compile(r'"(?:[^"\\]|\\.)*\\?\Z', re.DOTALL)
_TURNS = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True)
class Syntax:
    """How a model writes calls: the mark `opens`, an object with "name" and `arguments`, and the mark `closes`.

    bare: where a call may stand without its mark: that is a special token, which the text of an answer leaves out.
    A bare call must be of a function that is known. listed: the objects are in one list.
    """

    opens: str
    closes: str
    arguments: str
    bare: Literal["", "start", "anywhere"]
    listed: bool = False


class _Unclear(Exception):  # noqa: N818
    """The text ends before it is clear what it is."""


class _NoCall(Exception):  # noqa: N818
    """The text is not a call, however it goes on."""


@dataclass(slots=True)
class _Nesting:
    """A place inside of JSON, behind `depth` brackets that are still open."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def end(self, text: str) -> int | None:
        """Index behind the bracket that closes the first one; None: it is not in this text, which is all inside."""
        at = 0
        if self.escaped and text:
            at, self.escaped = 1, False
        while turn := _TURNS.search(text, at):
            at, char = turn.end(), turn[0]
            if self.quoted and char == "\\":
                self.escaped = at == len(text)
                at += 1
            elif char == '"':
                self.quoted = not self.quoted
            elif not self.quoted and char in "{[":
                self.depth += 1
            elif not self.quoted and char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return at
        return None


@dataclass(frozen=True, slots=True)
class _Head:
    """Of a call: its arguments begin at an index; where they came before the name, they end at another, and the rest
    is `behind`."""

    name: str
    begins: int
    ends: int | None = None
    behind: int = 0


def new_call_id() -> str:
    """Nine letters and digits, which is what Mistral's templates insist on."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolParser:
    """Reads one answer. The text around calls is content, less the white space next to them, and so is what only looks
    like a call. A call is told when its name is known and its arguments begin, and its arguments as they come, as the
    model has written them: of an answer that is cut off the last call may be cut off.

    functions: the names that calls without a mark must have.
    """

    def __init__(self, syntax: Syntax, functions: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        self.calls = 0  # that have been told
        self._syntax, self._functions, self._new_id = syntax, frozenset(functions), new_id
        self._text = ""  # that is still to be told, or dropped
        self._deltas: list[Delta] = []
        self._said = False  # some content was told
        self._after_call = False  # and no content since
        self._marked = False  # the call being read had its mark
        self._nesting = _Nesting()
        self._state: Callable[[bool], bool] = self._read_content
        starts = {syntax.opens[0]} | ({"[" if syntax.listed else "{"} if syntax.bare else set())
        self._starts = re.compile("|".join(map(re.escape, sorted(starts))))

    def push(self, text: str, last: bool = False) -> list[Delta]:
        """What a piece of text adds; `last`: nothing more will come."""
        self._text += text
        while self._text and self._state(last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each state takes from the text what it understands; False: it needs more.

    def _read_content(self, last: bool) -> bool:
        at = 0
        while found := self._starts.search(self._text, at):
            at = found.start()
            try:
                head = self._head(at)
            except _NoCall:
                at += 1
            except _Unclear:
                if not last:
                    break
                at += 1
            else:
                self._say(self._text[:at].rstrip(BLANK))
                self._begin(head)
                return True
        else:
            at = len(self._text)
        content = self._text[:at]
        content = content if last else content.rstrip(BLANK)
        self._text = self._text[len(content) :]
        self._say(content)
        return False

    def _read_arguments(self, last: bool) -> bool:
        end = self._nesting.end(self._text)
        piece: ToolCallDelta = {"index": self.calls - 1, "function": {"arguments": self._text[:end]}}
        self._deltas.append({"tool_calls": [piece]})
        self._text = "" if end is None else self._text[end:]
        self._state = self._read_arguments if end is None else self._read_rest
        return end is not None

    def _read_rest(self, last: bool) -> bool:
        """Behind the arguments: the end of the object, or more of it, which is dropped."""
        self._text = self._text.lstrip(BLANK)
        if self._text.startswith(","):
            self._nesting, self._state = _Nesting(depth=1), self._drop_rest
        elif self._text:
            self._text = self._text.removeprefix("}")
            self._state = self._read_next
        return True

    def _drop_rest(self, last: bool) -> bool:
        end = self._nesting.end(self._text)
        self._text = "" if end is None else self._text[end:]
        self._state = self._drop_rest if end is None else self._read_next
        return end is not None

    def _read_next(self, last: bool) -> bool:
        """Behind a call's object: a mark that closes, or another object."""
        try:
            if self._syntax.closes:
                end = self._literal(self._blank(0), self._syntax.closes)
            else:
                found = self._following()
                if isinstance(found, _Head):
                    self._begin(found)
                    return True
                end = found
        except _NoCall:
            end = 0
        except _Unclear:
            if not last:
                return False
            end = 0
        self._text = self._text[end:]
        self._state = self._read_content
        return True

    def _following(self) -> _Head | int:
        """The next object, or the index behind the list."""
        at = self._blank(0)
        if self._syntax.listed:
            if self._text.startswith("]", at):
                return at + 1
            return self._object(self._blank(self._literal(at, ",")))
        return self._object(self._blank(at + self._text.startswith(";", at)))

    def _say(self, content: str) -> None:
        content = content.lstrip(BLANK) if self._after_call else content
        if content:
            self._deltas.append({"content": content})
            self._said, self._after_call = True, False

    def _begin(self, head: _Head) -> None:
        function: FunctionDelta = {"name": head.name, "arguments": ""}
        call: ToolCallDelta = {"index": self.calls, "id": self._new_id(), "type": "function", "function": function}
        self._deltas.append({"tool_calls": [call]})
        self.calls += 1
        self._after_call = True
        if head.ends is None:
            self._text = self._text[head.begins :]
            self._nesting, self._state = _Nesting(), self._read_arguments
        else:
            function["arguments"] = self._text[head.begins : head.ends]
            self._text = self._text[head.behind :]
            self._state = self._read_rest

    # Readers of the held text, from an index on. They raise _NoCall or _Unclear.

    def _head(self, at: int) -> _Head:
        begin, self._marked = at, True
        try:
            at = self._literal(at, self._syntax.opens)
        except _NoCall:
            first = not self._said and not self.calls and not self._text[:begin].strip(BLANK)
            if not (self._syntax.bare == "anywhere" or (self._syntax.bare == "start" and first)):
                raise
            self._marked = False
        at = self._blank(at)
        return self._object(self._blank(self._literal(at, "[")) if self._syntax.listed else at)

    def _object(self, at: int) -> _Head:
        at = self._blank(self._literal(at, "{"))
        name: str | None = None
        held: tuple[int, int] | None = None
        while True:
            key, at = self._string(at)
            at = self._blank(self._literal(self._blank(at), ":"))
            if key in ("arguments", "parameters") and held is None:
                self._literal(at, "{")
                if name is not None:
                    return _Head(name, at)
                held = at, self._held_end(at)
                at = held[1]
            else:
                value, at = self._string(at)
                if key == "name" and name is None and (self._marked or value in self._functions):
                    name = value
                elif key not in ("type", "id"):
                    raise _NoCall
            if name is not None and held is not None:
                return _Head(name, *held, behind=at)
            at = self._blank(self._literal(self._blank(at), ","))

    def _held_end(self, at: int) -> int:
        """Index behind the object that begins here."""
        end = _Nesting().end(self._text[at : at + HELD_ARGUMENTS])
        if end is None:
            raise _Unclear if len(self._text) < at + HELD_ARGUMENTS else _NoCall
        return at + end

    def _blank(self, at: int) -> int:
        while self._text[at : at + 1] in BLANK:
            if at >= len(self._text):
                raise _Unclear
            at += 1
        return at

    def _literal(self, at: int, wanted: str) -> int:
        there = self._text[at : at + len(wanted)]
        if there == wanted:
            return at + len(wanted)
        raise _Unclear if wanted.startswith(there) else _NoCall

    def _string(self, at: int) -> tuple[str, int]:
        found = _STRING.match(self._text, at)
        if found is None:
            raise _Unclear if _OPEN_STRING.match(self._text, at) or at == len(self._text) else _NoCall
        try:
            return str(json.loads(found[0])), found.end()
        except ValueError:
            raise _NoCall from None
