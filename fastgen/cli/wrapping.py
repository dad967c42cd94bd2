"""Word wrap for text that is shown while it grows."""

from __future__ import annotations

from collections.abc import Callable

from prompt_toolkit.utils import get_cwidth

FENCES = ("```", "~~~")  # marks of Markdown around code blocks
TAB = 8


class Wrapper:
    """Breaks lines between words so that they fit a terminal. Lines of code blocks stay as they are.

    A word is held back until its end is known, so `flush` must be called after the last piece. Wide characters, as in
    Chinese, may be separated anywhere.

    width: function that returns the number of columns, which may change.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0  # of the cursor, after everything that was returned
        self._blanks = self._word = ""  # white space and a word that were not returned yet
        self._line_begins = True  # no word of this line was returned
        self._fence = ""  # the mark that ends the current code block; "" outside code
        self._code = ""  # the current line of code

    def push(self, text: str) -> str:
        """Return the text to show after a piece has arrived."""
        return "".join(map(self._take, text))

    def flush(self) -> str:
        """Return the text that was held back."""
        text, self._blanks = self._place(), ""
        return text

    def _take(self, char: str) -> str:
        if char == "\n":
            return self._end_line()
        if self._fence:
            self._code += char
            return char
        if char in " \t":
            placed = self._place()
            self._blanks += char
            return placed
        if get_cwidth(char) < 2 and len(self._word) < self._width():
            self._word += char
            return ""
        placed, self._word = self._place(), char
        return placed + self._place() if get_cwidth(char) == 2 else placed

    def _end_line(self) -> str:
        if self._fence and self._code.strip().startswith(self._fence):
            self._fence = ""
        placed = self.flush()
        self._column, self._line_begins, self._code = 0, True, ""
        return placed + "\n"

    def _place(self) -> str:
        """Return the white space and the word that are held back, with a line break if they do not fit."""
        if not self._word:
            return ""
        size, blanks, word = get_cwidth(self._word), self._blanks, self._word
        before = self._column
        for blank in blanks:
            before += TAB - before % TAB if blank == "\t" else 1
        if self._line_begins and word.startswith(FENCES):
            self._fence = word[:3]
        if not self._line_begins and before + size > self._width():
            before, blanks = 0, "\n"
        self._column, self._line_begins, self._blanks, self._word = before + size, False, "", ""
        return blanks + word
