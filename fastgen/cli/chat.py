"""fgchat: a conversation with a model, in the terminal or through a pipe.

A round is a message and its answer; each round sends the whole conversation again. Slow imports (torch, prompt_toolkit)
come where they are needed, so that --help answers at once and Ctrl-C works from the start.
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
)  # options of a model in this process
SAMPLED = ("temperature", "top_p", "max_tokens")  # sampling parameters
SERVED = ("api_key", "name")  # options of a model behind --url
THERE_ARE = "there are /r <N>, /m and /q (for a message, put a space before the /)"
QUIT = ("quit", "exit")  # what people type in a terminal who do not remember /q

BLOCK_PROMPT = "... "  # in front of each line of a multiline message

# A terminal would obey these characters: an answer must not move the cursor, retitle the window or hide text.
_PRINTABLE: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_PRINTABLE |= {ord("\r"): None, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


class Console:
    """The standard streams of a chat.

    stdin     stdout         banner, prompt, notes    answers
    terminal  terminal       stdout                   stdout, control characters made visible
    terminal  file or pipe   stderr                   stdout as they are
    else      any            notes only, on stderr    stdout (made visible on a terminal)
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
            # Only text that has a style keeps its trailing space, which a script that drives the terminal waits for.
            return self._lines.prompt([("fg:default", prompt)])
        if self.interactive:
            _write(self.screen, prompt)
        line = ""
        try:
            line = sys.stdin.readline()
        finally:
            if self.interactive and not line:
                self.note("")  # Ctrl-D and Ctrl-C leave the cursor behind the prompt
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def read_block(self) -> str:
        """Return the lines up to a single '.' or the end of input (Ctrl-D)."""
        lines = []
        with suppress(EOFError):
            while (line := self.read(BLOCK_PROMPT)) != ".":
                lines.append(line)
        return "\n".join(lines)

    @contextmanager
    def typing_ahead(self) -> Iterator[None]:
        """Keep what is typed between two calls of `read` for the next one, and out of the answers (no echo).

        The terminal keeps keys as they come, not lines, so that the editor gets Ctrl-D and the arrows too. Ctrl-C is
        still a signal. A terminal without line editing echoes, since nothing else shows what was typed there.
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
        """A history in a file; if the file cannot be read or written, the chat goes on without it."""

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
    """A conversation. rounds: (message, answer) of each. refused: a command or message could not be obeyed."""

    backend: Backend
    console: Console
    system: str | None = None
    rounds: list[tuple[str, str]] = field(default_factory=list)
    refused: bool = False

    def loop(self) -> None:
        """Obey line after line, until /q or the end of input."""
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
        """Obey a command, or answer a message. Return False to quit."""
        if self.console.interactive and line in QUIT:
            return False
        if not line.startswith("/") or "\n" in line:  # several lines can only be a pasted message
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
        """Drop the rounds from this number on."""
        current = len(self.rounds) + 1
        if number in map(str, range(1, current + 1)):
            del self.rounds[int(number) - 1 :]
        else:
            self.refuse(f"/r {number[:20]}: no such round; N goes from 1 to {current}, which is this round")

    def ask(self, message: str) -> None:
        """Run one round, which joins the conversation if an answer was begun.

        The first Ctrl-C ends the answer, and further ones do nothing; without a terminal, it is raised at the end.
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
        """Return the conversation with one more message."""
        turns = [("system", self.system)] if self.system else []
        for asked, answered in self.rounds:
            turns += [("user", asked), ("assistant", answered)]
        turns.append(("user", message))
        # Bytes that are not UTF-8 arrive as lone surrogates, which no tokenizer takes.
        return [{"role": role, "content": text.encode("utf-8", "replace").decode()} for role, text in turns]

    def report(self, reply: Reply, seconds: float) -> None:
        """Show the end of an answer: its error, its speed, and the limit that cut it."""
        if (reply.text or reply.error is None) and not reply.text.endswith("\n"):
            self.console.say("\n")
        if reply.error is not None:
            self.refuse(f"error: {one_line(reply.error)}")
            if not reply.text:
                return
        rate = reply.num_tokens / max(seconds, 1e-9)
        if not sys.stdout.isatty():
            self.console.note("")  # `| tee` may show this before the end of the answer
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

    Raises ValueError or OSError if no message can be answered: there is no chat template, or it takes no system prompt,
    or there is no server.
    """
    console = Console()
    chat = Chat(backend, console, system)
    backend.check(chat.messages("hello"))  # an error now is better than one after the first message
    if console.interactive:
        _write(console.screen, BANNER)
    with console.typing_ahead():
        chat.loop()
    return int(chat.refused and not console.interactive)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0: done; 1: an error; 130: Ctrl-C; 141: the reader of stdout has gone. Bad options: 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _check_place(args)
        SamplingParams(**given(args, (*SAMPLED, "seed"))).validate(vocab_size=1)
    except ValueError as error:
        parser.error(str(error))
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a stray byte or a narrow locale must not end a chat
    return run_tool("fgchat", args.verbose, lambda: _chat(args))


def _chat(args: argparse.Namespace) -> int:
    if args.url is not None:
        key = args.api_key or os.environ.get(API_KEY) or None
        return run(ServerBackend(args.url, key, args.name, given(args, (*SAMPLED, "seed"))), args.system)
    with loading_model():
        from fastgen import Generator  # importing torch takes seconds

        # One lane: there is one conversation, and each size of decode step would take time to prepare.
        gen = Generator(max_seqs=1, **given(args, (*LOCAL, "seed")))
        params = replace(gen.default_params, **given(args, SAMPLED))
    with gen:
        status = run(LocalBackend(gen, params), args.system)
        if args.verbose:
            print(gen.stats, file=sys.stderr)
    return status


def _check_place(args: argparse.Namespace) -> None:
    """Raise ValueError for an option of a local model with --url, and for an option of a server without --url."""
    for name in SERVED if args.url is None else LOCAL:
        if getattr(args, name) is not None:
            option = {"model": "MODEL", "name": "--model"}.get(name, flag(name))
            needed = "a server; give its --url" if args.url is None else "a local model; leave it or --url out"
            raise ValueError(f"{option} needs {needed}")


def _parser() -> Parser:
    parser = Parser(
        prog="fgchat",
        description="Chat with a model. In a terminal, with line editing and history; through a pipe, each line is a"
        " message, and only the answers go to stdout.",
    )
    option = parser.add_argument
    option("model", nargs="?", metavar="MODEL", help=f"a hub id or a folder (default: {BUNDLED_NAME}, fastgen's own)")
    for name in SAMPLED:
        add_flag(parser, SAMPLING[name])
    option("--system", metavar="TEXT", help="system prompt (default: none)")
    for name in ("seed", *LOCAL[1:]):
        add_flag(parser, MODEL[name])
    option("--url", help="OpenAI-style server that has the model, such as fgserve (default: a model loaded here)")
    option("--api-key", metavar="KEY", help=f"key for the server (default: {API_KEY} of the environment)")
    option("--model", dest="name", metavar="NAME", help="name of the model on the server (default: its only model)")
    verbose_help = "log what happens, show tracebacks, and the engine's statistics at the end (default: no)"
    option("-v", "--verbose", action="store_true", help=verbose_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
