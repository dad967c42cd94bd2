"""fgchat: a conversation with a model, in the terminal or through a pipe.

A round is a message and its answer; each round sends the whole conversation again. Slow imports (torch, prompt_toolkit)
are made where they are needed, so that --help answers at once and Ctrl-C works from the start.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from fastgen.cli.chat_backends import THINKING, Backend, LocalBackend, RefusedError, Reply, ServerBackend, ServerError
from fastgen.cli.chat_commands import BANNER, obey
from fastgen.cli.chat_console import Console
from fastgen.cli.chat_files import Conversation, Round, load, message
from fastgen.cli.command import loading_model, one_line, run_tool
from fastgen.cli.options import API_KEY, MODEL, SAMPLING, Parser, add_flag, flag, given
from fastgen.engine.interrupts import DeferredInterrupt
from fastgen.model.config import BUNDLED_NAME
from fastgen.request import SamplingParams

LOCAL = (
    "model",
    "reasoning_parser",
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
MODEL_NAMES = ("model", "url", "name")  # options that name the model
SERVED = ("api_key", "name")  # options of a model on the server at --url
QUIT = ("quit", "exit")  # typed in a terminal by people who do not remember /q


@dataclass
class Chat:
    """A conversation that goes on. refused: True once a command or message was refused."""

    backend: Backend
    console: Console
    conversation: Conversation = field(default_factory=Conversation)
    refused: bool = False

    @property
    def rounds(self) -> list[Round]:
        return self.conversation.rounds

    def loop(self) -> None:
        """Read and obey lines until /q or the end of input."""
        while True:
            try:
                self.obey(self.console.read(f"{len(self.rounds) + 1}> "))
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self.console.interactive:
                    raise
                self.console.note("(/q or Ctrl-D quits)")

    def obey(self, line: str) -> None:
        """Obey a command or answer a message. Raises EOFError to quit."""
        if self.console.interactive and line in QUIT:
            raise EOFError
        if line.startswith("/") and "\n" not in line:  # only a pasted message has several lines
            obey(self, line)
        else:
            self.ask(line.strip())

    def ask(self, text: str) -> None:
        """Run one round. It is added to the conversation if there is any text of an answer.

        The first Ctrl-C ends the answer, and later ones do nothing. Without a terminal, KeyboardInterrupt is raised
        after the answer has been reported.
        """
        if not text:
            return
        interrupt, reply, stopped, started = DeferredInterrupt(), Reply(), False, time.perf_counter()
        try:
            with interrupt, closing(self.backend.stream(self.messages(text), reply)) as pieces:
                for piece, thinking in interrupt.reading(pieces):
                    if thinking:
                        reply.reasoning += piece
                    else:
                        reply.text += piece
                    self.console.say(piece, thinking)
        except RefusedError as error:
            wrong = one_line(error).rstrip(".")
            self.refuse(wrong + ("; /r N goes back before round N" if self.rounds else ""))
            return
        except ServerError as error:
            reply.error = str(error)
        except KeyboardInterrupt:
            stopped = True
        if reply.text:
            self.rounds.append(Round(text, reply.text, reply.reasoning))
        self.report(reply, time.perf_counter() - started)
        if stopped and not self.console.interactive:
            raise KeyboardInterrupt

    def messages(self, text: str) -> list[dict[str, str]]:
        """Return the messages of the conversation, followed by a new one."""
        return [*self.conversation.messages(), message("user", text)]

    def report(self, reply: Reply, seconds: float) -> None:
        """Show the end of an answer: its error or its speed, and the limit that cut it."""
        self.console.end_answer(line=reply.error is None)
        if reply.error is not None:
            self.refuse(f"error: {one_line(reply.error)}")
            if not reply.text and not reply.reasoning:
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
        if reply.reasoning and not reply.text:
            self.console.note("(ended while the model was thinking; without an answer, this round is dropped)")

    def refuse(self, why: str) -> None:
        self.refused = True
        self.console.note(why)


def run(backend: Backend, conversation: Conversation | None = None) -> int:
    """Chat on stdin, stdout and stderr. Return the exit status: in a pipe, 1 if anything was refused.

    Raises ValueError or OSError if no message can be answered: the model has no chat template, the template does not
    accept a system prompt, or there is no server.
    """
    console = Console()
    chat = Chat(backend, console, conversation or Conversation())
    backend.check(chat.messages("hello"))  # shows an error now instead of after the first message
    if console.interactive:
        console.note(BANNER.removesuffix("\n"))
        if chat.rounds:
            console.note(f"(a conversation of {len(chat.rounds)} rounds goes on)")
    with console.typing_ahead():
        chat.loop()
    return int(chat.refused and not console.interactive)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 error, 2 wrong options, 130 Ctrl-C, 141 closed stdout."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        conversation = _conversation(args)
        _check_place(args)
        SamplingParams(**given(args, (*SAMPLED, "seed"))).validate(vocab_size=1)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a stray byte or a locale without Unicode must not end a chat
    return run_tool("fgchat", args.verbose, lambda: _chat(args, conversation))


def _conversation(args: argparse.Namespace) -> Conversation:
    """Return the conversation of --resume, or a new one, as the other options change it. Raises ValueError or OSError.

    Without a model on the command line, the model of the conversation is taken over into `args`.
    """
    saved = Conversation() if args.resume is None else load(Path(args.resume).expanduser())
    own = given(args, MODEL_NAMES)
    vars(args).update({name: saved.model.get(name) for name in MODEL_NAMES} if not own else {})
    seed = () if args.url is None else ("seed",)  # a local model has it for all answers together
    settings = {**saved.settings, **given(args, (*SAMPLED, "thinking", *seed))}
    system = saved.system if args.system is None else args.system
    return Conversation(given(args, MODEL_NAMES), settings, system, saved.rounds)


def _chat(args: argparse.Namespace, conversation: Conversation) -> int:
    if args.url is not None:
        key = args.api_key or os.environ.get(API_KEY) or None
        return run(ServerBackend(args.url, key, args.name, conversation.settings), conversation)
    with loading_model():
        from fastgen import Generator  # importing torch takes seconds

        # One lane, since there is one conversation, and each further decode batch size would take time to prepare.
        gen = Generator(max_seqs=1, **given(args, (*LOCAL, "seed")))
    with gen:
        status = run(LocalBackend(gen, conversation.settings), conversation)
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
    add_flag(parser, THINKING)
    resume_help = "go on with a conversation that /save has written, with its model and settings (default: a new one)"
    option("--resume", metavar="FILE", help=resume_help)
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
