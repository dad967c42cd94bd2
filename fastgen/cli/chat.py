"""fgchat: a conversation with a model, in the terminal or through a pipe.

A round is a message and its answer; each round sends the whole conversation again. Slow imports (torch, prompt_toolkit)
are made where they are needed, so that --help answers at once and Ctrl-C works from the start.
"""

from __future__ import annotations

import argparse
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from fastgen.cli.chat_backends import Backend, LocalBackend, RefusedError, Reply, ServerBackend, ServerError
from fastgen.cli.command import loading_model, one_line, run_tool
from fastgen.cli.options import API_KEY, MODEL, SAMPLING, Parser, add_flag, flag, given
from fastgen.engine.interrupts import DeferredInterrupt
from fastgen.model.config import BUNDLED_NAME
from fastgen.request import SamplingParams

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

COMMANDS = """\
  Available commands:
    /r <N> -- reset conversation before round N
    /m     -- input a multiline message, end your input
              with a single line containing '.'
    /q     -- quit
"""
BANNER = f"Ready to chat!\n{COMMANDS}\n---\n"

LOCAL = (
    "model",
    "adapter",
    "quantization",
    "kv_cache_dtype",
    "speculate",
    "dtype",
    "device",
    "tensor_parallel",
    "generation_config",
)  # options of a model that runs in this process
SAMPLED = ("temperature", "top_p", "max_tokens")  # sampling parameters
SERVED = ("api_key", "name")  # options of a model on the server at --url
THERE_ARE = "there are /r <N>, /m and /q (for a message, put a space before the /)"
QUIT = ("quit", "exit")  # typed in a terminal by people who do not remember /q

BLOCK_PROMPT = "... "  # prompt for each line of a multiline message

# Control characters, which a terminal would obey: an answer must not move the cursor, rename the window or hide text.
_PRINTABLE: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_PRINTABLE |= {ord("\r"): None, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


class Console:
    """The standard streams of a chat, and what is written to them.

    stdin     stdout         banner, prompt, notes    answers
    terminal  terminal       stdout                   stdout, with control characters made visible
    terminal  file or pipe   stderr                   stdout, unchanged
    other     any            stderr, only notes       stdout (made visible if it is a terminal)
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self.screen: TextIO = sys.stdout if self.interactive and sys.stdout.isatty() else sys.stderr
        self._lines: PromptSession[str] | None = None
        if self.interactive and self.screen.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
            self._lines = _editor(self.screen)

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

    def say(self, text: str) -> None:
        """Show a piece of an answer."""
        _write(sys.stdout, text.translate(_PRINTABLE) if sys.stdout.isatty() else text)

    def note(self, line: str) -> None:
        """Show a line that is not part of an answer."""
        _write(self.screen, line.translate(_PRINTABLE) + "\n")


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _editor(screen: TextIO) -> PromptSession[str]:
    """Return a line editor with a history."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output

    class History(FileHistory):
        """A history in a file. If the file cannot be read or written, the chat goes on without it."""

        def load_history_strings(self) -> Iterator[str]:
            with suppress(OSError):
                yield from super().load_history_strings()

        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeError):
                os.makedirs(os.path.dirname(self.filename), mode=0o700, exist_ok=True)
                super().store_string(string)

    return PromptSession(history=History(_history_file()), output=create_output(screen), enable_suspend=True)


def _history_file() -> str:
    """Return the path of the history, in the XDG state folder; os.devnull for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.expanduser("~/.local/state")
    return os.path.join(state, "fastgen", "chat_history") if os.path.isabs(state) else os.devnull


@dataclass
class Chat:
    """A conversation.

    system: the system prompt. rounds: (message, answer) of each round so far. refused: True once a command or message
    was refused.
    """

    backend: Backend
    console: Console
    system: str | None = None
    rounds: list[tuple[str, str]] = field(default_factory=list)
    refused: bool = False

    def loop(self) -> None:
        """Read and obey lines until /q or the end of input."""
        while True:
            try:
                if not self.obey(self.console.read(f"{len(self.rounds) + 1}> ")):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self.console.interactive:
                    raise
                self.console.note("(/q or Ctrl-D quits)")

    def obey(self, line: str) -> bool:
        """Obey a command or answer a message. Return False to quit."""
        if self.console.interactive and line in QUIT:
            return False
        if not line.startswith("/") or "\n" in line:  # only a pasted message has several lines
            self.ask(line.strip())
            return True
        match line.split():
            case ["/q"]:
                return False
            case ["/m"]:
                self.ask(self.console.read_block().rstrip())
            case ["/help" | "/?"]:
                self.console.note(COMMANDS.rstrip())
            case ["/r", number]:
                self.reset(number)
            case [word, *_]:
                wrong = "/r takes one number" if word == "/r" else f"no command {word[:20]}"
                self.refuse(f"{wrong}; {THERE_ARE}")
        return True

    def reset(self, number: str) -> None:
        """Drop the rounds from the given number on."""
        current = len(self.rounds) + 1
        if number in map(str, range(1, current + 1)):
            del self.rounds[int(number) - 1 :]
        else:
            self.refuse(f"/r {number[:20]}: no such round; N goes from 1 to {current}, which is this round")

    def ask(self, message: str) -> None:
        """Run one round. It is added to the conversation if there is any text of an answer.

        The first Ctrl-C ends the answer, and later ones do nothing. Without a terminal, KeyboardInterrupt is raised
        after the answer has been reported.
        """
        if not message:
            return
        interrupt, reply, stopped, started = DeferredInterrupt(), Reply(), False, time.perf_counter()
        try:
            with interrupt, closing(self.backend.stream(self.messages(message), reply)) as pieces:
                for piece in interrupt.reading(pieces):
                    reply.text += piece
                    self.console.say(piece)
        except RefusedError as error:
            wrong = one_line(error).rstrip(".")
            self.refuse(wrong + ("; /r N goes back before round N" if self.rounds else ""))
            return
        except ServerError as error:
            reply.error = str(error)
        except KeyboardInterrupt:
            stopped = True
        if reply.text:
            self.rounds.append((message, reply.text))
        self.report(reply, time.perf_counter() - started)
        if stopped and not self.console.interactive:
            raise KeyboardInterrupt

    def messages(self, message: str) -> list[dict[str, str]]:
        """Return the messages of the conversation, followed by a new one."""
        turns = [("system", self.system)] if self.system else []
        for asked, answered in self.rounds:
            turns += [("user", asked), ("assistant", answered)]
        turns.append(("user", message))
        # Bytes that are not UTF-8 arrive as lone surrogates, which no tokenizer accepts.
        return [{"role": role, "content": text.encode("utf-8", "replace").decode()} for role, text in turns]

    def report(self, reply: Reply, seconds: float) -> None:
        """Show the end of an answer: its error or its speed, and the limit that cut it."""
        if (reply.text or reply.error is None) and not reply.text.endswith("\n"):
            self.console.say("\n")
        if reply.error is not None:
            self.refuse(f"error: {one_line(reply.error)}")
            if not reply.text:
                return
        rate = reply.num_tokens / max(seconds, 1e-9)
        if not sys.stdout.isatty():
            self.console.note("")  # starts a new line, since with `| tee` the answer may not have been shown yet
        self.console.note(f"--- [{reply.num_tokens} tokens, {rate:.1f} tok/s]")
        if reply.finish_reason == "length" and reply.num_tokens == self.backend.max_tokens:
            self.console.note(f"(cut at --max-tokens {self.backend.max_tokens})")
        elif reply.finish_reason == "length":
            context = self.backend.max_model_len
            full = "the server's limit" if context is None else f"the context of {context} tokens is full"
            self.console.note(f"(cut: {full}; /r N goes back)")

    def refuse(self, why: str) -> None:
        self.refused = True
        self.console.note(why)


def run(backend: Backend, system: str | None = None) -> int:
    """Chat on stdin, stdout and stderr. Return the exit status: in a pipe, 1 if anything was refused.

    Raises ValueError or OSError if no message can be answered: the model has no chat template, the template does not
    accept a system prompt, or there is no server.
    """
    console = Console()
    chat = Chat(backend, console, system)
    backend.check(chat.messages("hello"))  # shows an error now instead of after the first message
    if console.interactive:
        _write(console.screen, BANNER)
    with console.typing_ahead():
        chat.loop()
    return int(chat.refused and not console.interactive)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 error, 2 wrong options, 130 Ctrl-C, 141 closed stdout."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _check_place(args)
        SamplingParams(**given(args, (*SAMPLED, "seed"))).validate(vocab_size=1)
    except ValueError as error:
        parser.error(str(error))
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a stray byte or a locale without Unicode must not end a chat
    return run_tool("fgchat", args.verbose, lambda: _chat(args))


def _chat(args: argparse.Namespace) -> int:
    if args.url is not None:
        key = args.api_key or os.environ.get(API_KEY) or None
        return run(ServerBackend(args.url, key, args.name, given(args, (*SAMPLED, "seed"))), args.system)
    with loading_model():
        from fastgen import Generator  # importing torch takes seconds

        # One lane, since there is one conversation, and each further decode batch size would take time to prepare.
        gen = Generator(max_seqs=1, **given(args, (*LOCAL, "seed")))
        params = replace(gen.default_params, **given(args, SAMPLED))
    with gen:
        status = run(LocalBackend(gen, params), args.system)
        if args.verbose:
            print(gen.stats, file=sys.stderr)
    return status


def _check_place(args: argparse.Namespace) -> None:
    """Raise ValueError for an option of a local model if --url is given, or of a server if it is not."""
    for name in SERVED if args.url is None else LOCAL:
        if getattr(args, name) is not None:
            option = {"model": "MODEL", "name": "--model"}.get(name, flag(name))
            needed = "a server; give its --url" if args.url is None else "a local model; leave it or --url out"
            raise ValueError(f"{option} needs {needed}")


def _parser() -> Parser:
    parser = Parser(
        prog="fgchat",
        description="Chat with a model. A terminal gets line editing and a history. In a pipe, each line of stdin is a"
        " message, and only the answers are written to stdout.",
    )
    option = parser.add_argument
    option("model", nargs="?", metavar="MODEL", help=f"a hub id or a folder (default: {BUNDLED_NAME}, fastgen's own)")
    for name in SAMPLED:
        add_flag(parser, SAMPLING[name])
    option("--system", metavar="TEXT", help="system prompt (default: none)")
    for name in ("seed", *LOCAL[1:]):
        add_flag(parser, MODEL[name])
    option("--url", help="URL of an OpenAI-style server with the model, such as fgserve (default: load the model here)")
    option("--api-key", metavar="KEY", help=f"API key of the server (default: the environment variable {API_KEY})")
    option("--model", dest="name", metavar="NAME", help="name of the model on the server (default: its only model)")
    verbose_help = "log what happens, and show tracebacks and final statistics of the engine (default: no)"
    option("-v", "--verbose", action="store_true", help=verbose_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
