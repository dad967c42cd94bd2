"""The common part of all parsers of tool calls: content around calls, and deltas of what was found."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import regex

from fastgen.text.tools.values import Schemas

Pattern = Any  # a compiled pattern of `regex`, which has no types
Found = Any  # a match of `regex`, or another object with `partial`

BLANK = " \t\r\n"
WS = r"[ \t\r\n]*+"
SAMPLE = ("sample_function", {"key": "a b"})  # name and arguments of a call that shows how a template takes calls
HELD = 8192  # maximum number of characters that wait for later text: of a call around its arguments, or of white space
FEW = 256  # of these characters, number above which they are matched again only when they have grown by an eighth


@dataclass(frozen=True)
class Function:
    """A function that a model may call. parameters: JSON schema of its arguments. strict: all of the schema holds."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @cached_property
    def argument_types(self) -> Mapping[str, frozenset[str]]:
        """The types of JSON that each argument may have."""
        schemas = Schemas(self.parameters)
        return {name: schemas.types(schema) for name, schema in schemas.arguments().items()}


@dataclass(frozen=True)
class Syntax(ABC):
    """The format in which a model writes calls.

    opens: mark before the first call. closes: mark after the last one, or "". bare: where a call without its opening
    mark is accepted, because the mark may be a special token that is not in the text, or because models leave it out;
    the call must then name a known function.
    """

    opens: str
    closes: str = ""
    bare: Literal["", "start", "anywhere"] = ""

    separate: ClassVar[bool] = False  # each call has both marks, so that text may stand between calls
    typed: ClassVar[bool] = False  # the parser reads arguments by the schemas of the functions
    short_ids: ClassVar[bool] = False  # the templates take only ids of nine letters and digits
    first: ClassVar[str] = ""  # the first character of a call without its mark, if it is accepted at the start

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of calls, which are special tokens in some models."""
        return (self.opens, self.closes) if self.closes else (self.opens,)

    @abstractmethod
    def parser(self, functions: Collection[Function]) -> ToolParser:
        """Return a parser of one answer. functions: those that calls without a mark may name."""

    def forms(self, arguments: Mapping[str, Any] | str) -> list[tuple[str | None, Any]]:
        """Return the forms in which chat templates of this format take an earlier call, the usual one first: the
        content of a message without text, and the arguments.

        arguments: an object, or a text that is no JSON object, as after a cut.
        """
        return [("", arguments)]

    def shows(self, text: str) -> bool:
        """Return whether the text of a conversation has the call SAMPLE, as a model would write it."""
        return SAMPLE[0] in text


class ToolParser(ABC):
    """An incremental parser of one answer.

    Text around calls is content, except white space next to a call; so is text that only resembles a call. A call is
    reported when its name is known and its arguments begin. The arguments follow as the model writes them; they are
    valid JSON, except in the last call of an answer that was cut off. The result does not depend on how the text is cut
    into pieces.

    starts: characters with which a call may begin. calls: number of calls reported so far.
    """

    def __init__(self, starts: Iterable[str]) -> None:
        self.calls = 0
        self._text = ""  # text that is not reported yet
        self._deltas: list[dict[str, Any]] = []
        self._said = False  # some content was reported
        self._after_call = False  # no content since the last call
        self._due = 0  # length of the text from which it is matched again
        self._cut = False  # the model has not ended the answer
        self._passed = 0  # index before which no call begins, after `_match_call` has found none
        self._starts = regex.compile("|".join(map(regex.escape, sorted(starts))))
        self._state: Callable[[bool], bool] = self._read_content

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[dict[str, Any]]:
        """Return the deltas that a piece of text adds. last: this is the last piece. cut: the answer was cut off after
        it; otherwise the arguments of the last call are completed, so that they are valid JSON."""
        self._text, self._cut = self._text + text, cut
        if len(self._text) < self._due and not last:
            return []
        self._due = 0
        while self._text and self._state(last):
            self._due = 0  # which only the state that waits for more text has set
        if last and not cut:
            self._close()
        deltas, self._deltas = self._deltas, []
        return deltas

    @abstractmethod
    def _match_call(self, at: int, last: bool) -> Found:
        """Match the beginning of a call at an index of the text; see `_match` for the result."""

    @abstractmethod
    def _begin(self, call: Found) -> None:
        """Report the call that was matched, consume its beginning, and set the state that reads on."""

    @abstractmethod
    def _close(self) -> None:
        """Complete the arguments of a call that the end of the answer leaves open."""

    def _match(self, pattern: Pattern, at: int, last: bool) -> Found:
        """Match a pattern at an index. The match is `partial` if it depends on later text, and None if later text
        cannot make it match."""
        match = pattern.match(self._text, at, at + HELD, partial=True)
        undecided, size = match is not None and match.partial, len(self._text) - at
        if undecided and (last or size >= HELD):
            return None
        if undecided and size > FEW:  # so that the work for all pieces is proportional to the text
            self._due = min(at + HELD, len(self._text) + size // 8)
        return match

    def _is_first(self, at: int) -> bool:
        """Return whether there is nothing but white space in the answer before an index of the text."""
        return not self._said and not self.calls and not self._text[:at].strip(BLANK)

    # Each state consumes a part of the text, and returns False if it needs more text.

    def _read_content(self, last: bool) -> bool:
        at = self._passed = 0
        while start := self._starts.search(self._text, at):
            at = start.start()
            call = self._match_call(at, last)
            if call is not None and not call.partial:
                self._say(self._text[:at].rstrip(BLANK))
                self._begin(call)
                return True
            if call is not None:
                break
            at = max(at + 1, self._passed)
        else:
            at = len(self._text)
        content = self._text[:at]
        content = content if last else without_blank(content)
        self._text = self._text[len(content) :]
        self._say(content)
        return False

    def _say(self, content: str) -> None:
        content = content.lstrip(BLANK) if self._after_call else content
        if content:
            self._deltas.append({"content": content})
            self._said, self._after_call = True, False

    def _call(self, name: str) -> None:
        """Report a new call."""
        function = {"name": name, "arguments": ""}
        call = {"index": self.calls, "id": new_call_id(), "type": "function", "function": function}
        self._deltas.append({"tool_calls": [call]})
        self.calls += 1
        self._after_call = True

    def _argue(self, arguments: str) -> None:
        """Report a piece of the arguments of the last call."""
        if arguments:
            piece = {"index": self.calls - 1, "function": {"arguments": arguments}}
            self._deltas.append({"tool_calls": [piece]})


@dataclass(slots=True)
class Scan:
    """A position inside the brackets around the arguments of a call, in a text that grows.

    places: pattern of one character, which matches brackets, quotation marks and backslashes, and commas where they are
    wanted. at: index of the position, relative to the first bracket; whoever drops the text before it subtracts its
    length. quote: the quotation mark of the string around it, or "". commas: indices of the commas inside no other
    brackets. done: `at` is the index after the last bracket.
    """

    places: Pattern
    at: int = 0
    depth: int = 0
    quote: str = ""
    commas: list[int] = field(default_factory=list)
    done: bool = False

    def run(self, text: str, start: int = 0) -> None:
        """Read on in a text whose first bracket is at `start`, up to the bracket that closes it."""
        while not self.done and (match := self.places.search(text, start + self.at)):
            char, end = match[0], int(match.end()) - start
            if self.quote and char == "\\":
                end += 1  # what it escapes may not be there yet
            elif char in "\"'":
                self.quote = "" if char == self.quote else self.quote or char
            elif not self.quote and char == ",":
                self.commas += [end - 1] if self.depth == 1 else []
            elif not self.quote and char != "\\":
                self.depth += 1 if char in "([{" else -1
                self.done = self.depth == 0
            self.at = end
        if not self.done:
            self.at = max(self.at, len(text) - start)


def without_blank(text: str) -> str:
    """Return a text without the white space at its end, or all of it if that is more than HELD characters."""
    stripped = text.rstrip(BLANK)
    return stripped if len(text) - len(stripped) <= HELD else text


def new_call_id() -> str:
    """Return nine letters and digits, the only form of id that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
