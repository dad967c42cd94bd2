"""JSON as models write it, made valid as it arrives."""

from __future__ import annotations

import json
from functools import lru_cache

import regex

from fastgen.text.tools.parser import HELD, WS, Pattern
from fastgen.text.tools.values import TYPES, typed_json

_BLANK = regex.compile(WS)
_SCALAR = regex.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null")
_PLAIN = {quote: regex.compile(rf"[^{quote}\"\\\x00-\x1f]++") for quote in "\"'"}  # text that needs no change
_ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_QUOTED_KEY = rf'"(?:[^"\\]|\\.){{0,{HELD}}}+"{WS}:'
_KEY = rf"""(?:{_QUOTED_KEY}|(?:'(?:[^'\\]|\\.)*+'|[^\s"',:{{}}\[\]]++){WS}:)"""


@lru_cache(100)
class _Ends:
    """Patterns of what ends a value, a word that is a value or a key, and a string, by what is around the string."""

    def __init__(self, stops: str) -> None:
        after_element = rf"[}}\]]|{stops}"
        element = regex.compile(rf"{WS}(?:,|{after_element})")
        field = regex.compile(rf"{WS}(?:,{WS}(?:{_KEY}|[,{{]|{after_element})|{_QUOTED_KEY}|{after_element})")
        self.value = regex.compile(stops)
        self.word = regex.compile(rf"[,\]}}\r\n\"]|{stops}")
        self.key = regex.compile(rf"[:=,\]}}\r\n\"]|{stops}")
        self.strings = {"": field, "]": element, "}": field, "key": regex.compile(rf"{WS}(?:[:,]|{after_element})")}


class LooseJson:
    """A JSON value that is read in pieces and made valid.

    Valid JSON stays as it is written. Mended are line breaks, unknown escapes and quotation marks inside strings, words
    and strings of Python, words without quotes, missing, doubled and final commas, and missing brackets. So whatever
    follows, what was taken is the beginning of valid JSON, which `close` completes.

    stops: pattern of a mark that ends the value, unless it is inside a string. done: the value is complete. kind: its
    first character as JSON, or "" if nothing has been read.
    """

    def __init__(self, stops: str) -> None:
        self.done = False
        self.kind = ""
        self._ends = _Ends(stops)
        self._open: list[str] = []  # the brackets that close what is open, outermost first
        self._quote = ""  # of the string around the position
        self._is_key = False  # that string is a key
        self._looked = 0  # number of characters after the first of a word that do not end it
        self._gap = ""  # white space, and perhaps a comma, that the next element confirms
        self._made: list[str] = []
        self._state = self._read_value

    def read(self, text: str, at: int, last: bool) -> int:
        """Read on at an index of a text, and return the index after what was read. last: no more text follows."""
        while not self.done:
            if not self._quote:
                blank = _BLANK.match(text, at)
                at = int(blank.end())
                self._gap += blank[0] if self.kind else ""
            if at == len(text):
                break
            stop = None if self._quote else self._ends.value.match(text, at, partial=True)
            if stop is not None and not stop.partial:
                self.close()
                break
            following = None if stop is not None and not last else self._state(text, at, last)
            if following is None:
                break
            at = following
        return at

    def take(self) -> str:
        """Return what was made of the text since the last call."""
        made = "".join(self._made)
        self._made.clear()
        return made

    def close(self) -> None:
        """Complete the value, if it ends too early."""
        if self.done:
            return
        if self._quote:
            self._end_string()
        if self._state == self._read_colon:
            self._made.append(": null")
        elif self._state == self._read_value and (not self._open or self._open[-1] == "}"):
            self._emit("null")
        self._made += reversed(self._open)
        self._open.clear()
        self.done = True

    def _emit(self, token: str, confirms: bool = True) -> None:
        """Add a token, and what stands before it: without its comma if an element does not follow."""
        self._made.append((self._gap if confirms else self._gap.replace(",", "")) + token)
        self._gap, self.kind = "", self.kind or token[:1]

    def _end_element(self) -> None:
        self._state, self.done = self._read_next, not self._open

    # Each state reads a part of the text at an index that holds no white space, unless a string is around it. It
    # returns the index after that part, or None if it needs more text.

    def _read_value(self, text: str, at: int, last: bool) -> int | None:
        char = text[at]
        inside = self._open[-1] if self._open else ""
        if char in "\"'":
            self._emit('"')
            self._quote, self._state = char, self._read_string
        elif char in "{[":
            self._emit(char)
            self._open.append("}" if char == "{" else "]")
            self._state = self._read_key if char == "{" else self._read_value
        elif char in ",}]" and inside != "]":  # a value is missing
            self._emit("null")
            self._end_element()
            return at
        elif char in "}]":
            return self._read_bracket(char, at)
        elif char != ",":
            return self._read_word(text, at, last)
        return at + 1

    def _read_word(self, text: str, at: int, last: bool) -> int | None:
        end = self._end_of_word(self._ends.word, text, at, last)
        if end is not None:
            word = text[at:end].rstrip()
            self._emit(word if _SCALAR.fullmatch(word) else typed_json(word, TYPES))
            self._end_element()
        return end

    def _end_of_word(self, ends: Pattern, text: str, at: int, last: bool) -> int | None:
        """Return the index after a word of 1 to HELD characters; None if it depends on later text."""
        start, limit = at + 1 + self._looked, at + HELD
        longest = len(self._ends.value.pattern)  # of a mark, which may hold what ends a word
        match = ends.search(text, start, limit, partial=True)
        end = min(len(text), limit) if match is None or match.partial else int(match.start())
        stop = self._ends.value.search(text, start, end + longest, partial=True)
        begun = stop is not None and stop.partial and stop.start() < end
        waits = (end == len(text) or begun) and not last and len(text) < limit
        self._looked = max(self._looked, end - longest - at - 1) if waits else 0
        return None if waits else end

    def _read_key(self, text: str, at: int, last: bool) -> int | None:
        char = text[at]
        if char in "}]":
            return self._read_bracket(char, at)
        if char in "\"'":
            self._emit('"')
            self._quote, self._is_key, self._state = char, True, self._read_string
        elif char in ":=":
            self._emit('""')
            self._state = self._read_colon
            return at
        elif char != ",":
            end = self._end_of_word(self._ends.key, text, at, last)
            if end is not None:
                self._emit(json.dumps(text[at:end].rstrip(), ensure_ascii=False))
                self._state = self._read_colon
            return end
        return at + 1

    def _read_colon(self, text: str, at: int, last: bool) -> int | None:
        char = text[at]
        self._state = self._read_value
        if char in ":=":
            self._emit(":")
            return at + 1
        self._gap = self._gap or " "
        self._made.append(":")
        return at

    def _read_next(self, text: str, at: int, last: bool) -> int | None:
        """Read what follows an element: a comma, which may be missing, or a bracket."""
        char = text[at]
        if char in "}]":
            return self._read_bracket(char, at)
        self._gap = self._gap + "," if char == "," else "," + (self._gap or " ")
        self._state = self._read_key if self._open[-1] == "}" else self._read_value
        return at + (char == ",")

    def _read_bracket(self, char: str, at: int) -> int:
        """Read a closing bracket, before which others may be missing. One of what is around the value ends it."""
        if char not in self._open:
            self.close()
            return at
        while self._open:
            self._emit(closes := self._open.pop(), confirms=False)
            if closes == char:
                break
        self._end_element()
        return at + 1

    def _read_string(self, text: str, at: int, last: bool) -> int | None:
        """Read a part of a string: text without changes, or one character or escape."""
        if plain := _PLAIN[self._quote].match(text, at):
            self._made.append(plain[0])
            return int(plain.end())
        char = text[at]
        if char == "\\":
            return self._read_escape(text, at, last)
        if char == self._quote:
            around = "key" if self._is_key else self._open[-1] if self._open else ""
            ends = self._ends.strings[around].match(text, at + 1, partial=True)
            if ends is not None and ends.partial and not last:
                return None
            if ends is not None:
                self._end_string()
                return at + 1
        self._made.append(json.dumps(char)[1:-1])
        return at + 1

    def _end_string(self) -> None:
        self._made.append('"')
        self._quote = ""
        if self._is_key:
            self._state, self._is_key = self._read_colon, False
        else:
            self._end_element()

    def _read_escape(self, text: str, at: int, last: bool) -> int | None:
        match = _ESCAPE.match(text, at, partial=True)
        if match is not None and match.partial:
            return len(text) if last else None
        if match is None:
            quoted = text[at + 1] == "'"  # as Python and JavaScript write it
            self._made.append("'" if quoted else "\\\\")
            return at + 1 + quoted
        self._made.append(match[0])
        return int(match.end())
