"""Tool calls, parsed from a growing text. The pieces in which the text comes make no difference to the result."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import regex

if TYPE_CHECKING:
    from fastgen.cli.serve.shapes import Delta, FunctionDelta, ToolCallDelta

Pattern = Any  # a compiled pattern of `regex`, which has no types

BLANK = " \t\r\n"
HELD = 8192  # maximum characters of a call's beginning: up to its arguments, or with them where they precede the name
_BRACKETS = regex.compile(r'["\\{}\[\]]')
_WS = r"[ \t\r\n]*+"
_STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_OTHER = rf'(?:"(?:type|id)"{_WS}:{_WS}{_STRING}{_WS},{_WS})*+'
_ARGUMENTS = rf'"(?:arguments|parameters)"{_WS}:{_WS}'


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
    model writes them, so that the last call of a truncated answer may be incomplete.

    functions: the names that calls without a mark must have.
    """

    def __init__(self, syntax: Syntax, functions: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        self.calls = 0  # reported so far
        self._new_id = new_id
        self._text = ""  # not reported yet
        self._deltas: list[Delta] = []
        self._said = False  # some content was reported
        self._after_call = False  # no content since the last call
        self._marked = True  # the current call has its mark
        self._nesting = _Nesting()
        self._state: Callable[[bool], bool] = self._read_content
        self._bare = syntax.bare
        starts = {syntax.opens[0]} | ({"[" if syntax.listed else "{"} if syntax.bare else set())
        self._starts = regex.compile("|".join(map(regex.escape, sorted(starts))))
        known = "|".join(regex.escape(json.dumps(name)) for name in functions) or "(?!)"
        self._patterns = {True: _patterns(syntax, _STRING), False: _patterns(syntax, known)}  # with and without a mark

    def push(self, text: str, last: bool = False) -> list[Delta]:
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
        found = self._match(self._patterns[True].marked, at, last)
        nothing_before = not self._said and not self.calls and not self._text[:at].strip(BLANK)
        if found is None and (self._bare == "anywhere" or (self._bare == "start" and nothing_before)):
            self._marked = False
            found = self._match(self._patterns[False].bare, at, last)
        return found

    def _read_arguments(self, last: bool) -> bool:
        end = self._nesting.end(self._text)
        piece: ToolCallDelta = {"index": self.calls - 1, "function": {"arguments": self._text[:end]}}
        self._deltas.append({"tool_calls": [piece]})
        self._text = "" if end is None else self._text[end:]
        self._state = self._read_arguments if end is None else self._read_rest
        return end is not None

    def _read_rest(self, last: bool) -> bool:
        """Read the end of a call's object, or further fields, which are dropped."""
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
        """Read the mark that closes a call, the end of a list, or the next object."""
        found = self._match(self._patterns[self._marked].next, 0, last)
        if found is not None and found.partial:
            return False
        if found is not None and "name" in found.groupdict() and found["name"]:
            self._begin(found)
        else:
            self._text = self._text[found.end() :] if found is not None else self._text
            self._state = self._read_content
        return True

    def _say(self, content: str) -> None:
        content = content.lstrip(BLANK) if self._after_call else content
        if content:
            self._deltas.append({"content": content})
            self._said, self._after_call = True, False

    def _begin(self, head: Any) -> None:
        """Report a new call. head: the match of its beginning."""
        held = head["held"] or ""
        function: FunctionDelta = {"name": json.loads(head["name"]), "arguments": held}
        call: ToolCallDelta = {"index": self.calls, "id": self._new_id(), "type": "function", "function": function}
        self._deltas.append({"tool_calls": [call]})
        self.calls += 1
        self._after_call = True
        if held:
            self._text, self._state = self._text[head.end() :], self._read_rest
        else:
            self._text, self._state = self._text[head.end() - 1 :], self._read_arguments
            self._nesting = _Nesting()


class _Patterns(NamedTuple):
    """Patterns at the beginning of a call with its mark and without, and behind a call."""

    marked: Pattern
    bare: Pattern
    next: Pattern


def _patterns(syntax: Syntax, name: str) -> _Patterns:
    """Compile the patterns of a syntax. name: pattern of the functions' names, in quotes.

    The group `held` has arguments that precede the name; otherwise a match ends behind the bracket of the arguments.
    """
    named = rf'"name"{_WS}:{_WS}(?P<name>{name})'
    held = rf'(?P<held>\{{(?:[^{{}}"]|{_STRING}|(?&held))*+\}})'
    order = rf"{named}{_WS},{_WS}{_OTHER}{_ARGUMENTS}\{{|{_ARGUMENTS}{held}{_WS},{_WS}{_OTHER}{named}"
    call = rf"\{{{_WS}{_OTHER}(?:{order})"
    first = rf"\[{_WS}{call}" if syntax.listed else call
    if syntax.closes:
        following = _WS + regex.escape(syntax.closes)
    else:
        following = rf"{_WS}(?:\]|,{_WS}{call})" if syntax.listed else rf"{_WS};?+{_WS}{call}"
    marked = rf"{regex.escape(syntax.opens)}{_WS}{first}"
    return _Patterns(*map(regex.compile, (marked, first, following)))
