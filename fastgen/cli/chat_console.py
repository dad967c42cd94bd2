"""The standard streams of fgchat: line editing, answers that are shown as they grow, and notes."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from fastgen.cli.wrapping import Wrapper

BLOCK_PROMPT = "... "  # prompt for each line of a multiline message
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

# Control characters, which a terminal would obey: an answer must not move the cursor, rename the window or hide text.
_PRINTABLE: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_PRINTABLE |= {ord("\r"): None, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


class Console:
    """The standard streams of a chat, and what is written to them.

    stdin     stdout         banner, prompt, notes    answers
    terminal  terminal       stdout                   stdout, with control characters made visible
    terminal  file or pipe   stderr                   stdout, unchanged
    other     any            stderr, only notes       stdout (made visible if it is a terminal)

    On a terminal lines are wrapped at words, and the thinking before an answer is shown, dimmed. complete: returns the
    completions of a line, for TAB.
    """

    def __init__(self, complete: Callable[[str], Iterable[str]] = lambda line: ()) -> None:
        self.interactive = sys.stdin.isatty()
        self.screen: TextIO = sys.stdout if self.interactive and sys.stdout.isatty() else sys.stderr
        self._lines: PromptSession[str] | None = None
        self._dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        if self.interactive and self.screen.isatty() and not self._dumb:
            self._lines = _editor(self.screen, complete)
        self._wrapper: Wrapper | None = None  # of the answer that is being shown on a terminal
        self._thinking = False  # the last piece of this answer was thinking
        self._line_open: bool | None = None  # this answer has a line without its end; None: nothing was shown

    def read(self, prompt: str) -> str:
        """Return the next line. Raises EOFError at the end of input (Ctrl-D), KeyboardInterrupt for Ctrl-C."""
        if self._lines is not None:
            # Without a style, the trailing space of the prompt gets lost, which scripts that drive a terminal wait for.
            return self._lines.prompt([("fg:default", prompt)])
        if self.interactive:
            _write(self.screen, prompt)
        line = ""
        try:
            line = sys.stdin.readline()
        finally:
            if self.interactive and not line:
                self.note("")  # Ctrl-D and Ctrl-C leave the cursor on the line of the prompt
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def read_block(self) -> str:
        """Return the lines before a line that is just '.', or before the end of input (Ctrl-D)."""
        lines = []
        with suppress(EOFError):
            while (line := self.read(BLOCK_PROMPT)) != ".":
                lines.append(line)
        return "\n".join(lines)

    @contextmanager
    def typing_ahead(self) -> Iterator[None]:
        """Keep what the user types between two calls of `read` for the next call, and do not echo it into the answers.

        The terminal passes on single keys instead of lines, so that the editor also gets Ctrl-D and the arrow keys.
        Ctrl-C still sends a signal. A terminal without line editing keeps its echo, since nothing else would show what
        is typed.
        """
        if self._lines is None:
            yield
            return
        before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

    def say(self, text: str, thinking: bool = False) -> None:
        """Show a piece of an answer, or of the thinking before it. `end_answer` must follow the last piece."""
        if not sys.stdout.isatty():
            self._put("" if thinking else text)
            return
        if self._wrapper is None:
            self._wrapper = _wrapper(sys.stdout)
        if text and thinking != self._thinking:
            self._put(self._wrapper.push("\n\n") if self._thinking else self._wrapper.flush())
            self._thinking = thinking
        self._put(self._wrapper.push(text.translate(_PRINTABLE)))

    def _put(self, text: str) -> None:
        if text:
            dim = self._thinking and not self._dumb
            _write(sys.stdout, f"{DIM}{text}{PLAIN}" if dim else text)
            self._line_open = not text.endswith("\n")

    def end_answer(self, line: bool) -> None:
        """End an answer and its line. line: write a line end even if nothing of the answer was shown."""
        if self._wrapper is not None:
            self._put(self._wrapper.flush())
        if self._line_open or (line and self._line_open is None):
            _write(sys.stdout, "\n")
        self._wrapper, self._thinking, self._line_open = None, False, None

    def note(self, line: str) -> None:
        """Show a line that is not part of an answer."""
        line = line.translate(_PRINTABLE) + "\n"
        _write(self.screen, _wrapper(self.screen).push(line) if self.screen.isatty() else line)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _wrapper(screen: TextIO) -> Wrapper:
    """Return a Wrapper for a terminal's width."""
    from fastgen.cli.wrapping import Wrapper

    return Wrapper(lambda: os.get_terminal_size(screen.fileno()).columns or sys.maxsize)


def _editor(screen: TextIO, complete: Callable[[str], Iterable[str]]) -> PromptSession[str]:
    """Return a line editor with a history. complete: see Console."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    class Lines(Completer):
        """Completes the line up to the cursor. A list of several completions shows only their last words."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            line = document.text_before_cursor
            for each in complete(line):
                yield Completion(each, -len(line), display=each[line.rfind(" ") + 1 :])

    class History(FileHistory):
        """A history in a file. If the file cannot be read or written, the chat goes on without it."""

        def load_history_strings(self) -> Iterator[str]:
            with suppress(OSError):
                yield from super().load_history_strings()

        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeError):
                os.makedirs(os.path.dirname(self.filename), mode=0o700, exist_ok=True)
                super().store_string(string)

    return PromptSession(
        history=History(_history_file()),
        output=create_output(screen),
        enable_suspend=True,
        completer=Lines(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
    )


def _history_file() -> str:
    """Return the path of the history, in the XDG state folder; os.devnull for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.expanduser("~/.local/state")
    return os.path.join(state, "fastgen", "chat_history") if os.path.isabs(state) else os.devnull
