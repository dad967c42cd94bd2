"""fgchat: a conversation with a model, in the terminal or through a pipe.

A round is a message and its answer; each round sends the whole conversation again. Slow imports (torch, prompt_toolkit)
are made where they are needed, so that --help answers at once and Ctrl-C works from the start.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fastgen.cli.chat_backends import THINKING, Backend, LocalBackend, ServerBackend
from fastgen.cli.chat_commands import BANNER, obey
from fastgen.cli.chat_console import Console
from fastgen.cli.chat_files import Conversation, load
from fastgen.cli.chat_session import Chat
from fastgen.cli.command import loading_model, one_line, run_tool
from fastgen.cli.options import API_KEY, MODEL, SAMPLING, TEMPLATE, Parser, add_flag, flag, given, read_text
from fastgen.cli.tab_completion import completed
from fastgen.model.config import BUNDLED_NAME
from fastgen.request import SamplingParams

# Options of a model that runs in this process.
LOCAL = (
    "model", "reasoning_parser", "adapter", "quantization", "kv_cache_dtype", "kv_cache_gb", "memory_fraction",
    "max_model_len", "speculate", "dtype", "device", "tensor_parallel", "generation_config",
)  # fmt: skip
SAMPLED = ("temperature", "top_p", "max_tokens")  # sampling parameters
MODEL_NAMES = ("model", "url", "name")  # options that name the model
SERVED = ("api_key", "name")  # options of a model on the server at --url
QUIT = ("quit", "exit")  # typed in a terminal by people who do not remember /q


def obey_lines(chat: Chat) -> None:
    """Obey commands and answer messages until /q or the end of input."""
    while True:
        try:
            line = chat.console.read(f"{len(chat.rounds) + 1}> ")
            if chat.console.interactive and line in QUIT:
                return
            if line.startswith("/") and "\n" not in line:  # only a pasted message has several lines
                obey(chat, line)
            else:
                chat.ask(line.strip())
        except EOFError:
            return
        except KeyboardInterrupt:
            if not chat.console.interactive:
                raise
            chat.console.note("(/q or Ctrl-D quits)")


def run(backend: Backend, conversation: Conversation | None = None) -> int:
    """Chat on stdin, stdout and stderr. Return the exit status: in a pipe, 1 if anything was refused.

    Raises ValueError or OSError if no message can be answered: the model has no chat template, the template does not
    accept a system prompt, or there is no server.
    """
    console = Console(completed)
    chat = Chat(backend, console, conversation or Conversation())
    backend.check(chat.messages("hello"))  # shows an error now instead of after the first message
    if console.interactive:
        console.note(BANNER.removesuffix("\n"))
        if chat.rounds:
            console.note(f"(a conversation of {len(chat.rounds)} rounds goes on)")
    with console.typing_ahead():
        obey_lines(chat)
    return int(chat.refused and not console.interactive)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 error, 2 wrong options, 130 Ctrl-C, 141 closed stdout."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        conversation = _conversation(args)
        _check_place(args)
        template = (
            None if args.chat_template is None else read_text(TEMPLATE.name, Path(args.chat_template).expanduser())
        )
        SamplingParams(**given(args, (*SAMPLED, "seed"))).validate(vocab_size=1)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a stray byte or a locale without Unicode must not end a chat
    return run_tool("fgchat", args.verbose, lambda: _chat(args, conversation, template), parser.in_flags)


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


def _chat(args: argparse.Namespace, conversation: Conversation, template: str | None) -> int:
    if args.url is not None:
        key = args.api_key or os.environ.get(API_KEY) or None
        return run(ServerBackend(args.url, key, args.name, conversation.settings), conversation)
    with loading_model():
        from fastgen import Generator  # importing torch takes seconds

        # One lane, since there is one conversation, and each further decode batch size would take time to prepare.
        gen = Generator(max_seqs=1, **given(args, (*LOCAL, "seed")))
    with gen:
        if template is not None and gen.tokenizer is not None:
            gen.tokenizer.hf.chat_template = template
        status = run(LocalBackend(gen, conversation.settings), conversation)
        if args.verbose:
            print(gen.stats, file=sys.stderr)
    return status


def _check_place(args: argparse.Namespace) -> None:
    """Raise ValueError for an option of a local model if --url is given, or of a server if it is not."""
    for name in SERVED if args.url is None else (*LOCAL, TEMPLATE.name):
        if getattr(args, name) is not None:
            option = {"model": "MODEL", "name": "--model"}.get(name, flag(name))
            needed = "a local model; leave it or --url out"
            if args.url is None:
                needed = "a server; give its --url" + "; a local model needs no flag" * (name == "name")
            raise ValueError(f"{option} needs {needed}")


def _parser() -> Parser:
    parser = Parser(
        prog="fgchat",
        usage="fgchat [MODEL] [options]",
        description="Chat with a model. A terminal gets line editing and a history. In a pipe, each line of stdin is a"
        " message, and only the answers are written to stdout.",
        examples={
            "fgchat Qwen/Qwen3-8B --temperature 0": "chat with a model of the hub",
            "fgchat --url http://localhost:5678": "chat with the model of a running fgserve",
        },
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
    add_flag(parser, TEMPLATE)
    option("--url", help="URL of an OpenAI-style server with the model, such as fgserve (default: load the model here)")
    option("--api-key", metavar="KEY", help=f"API key of the server (default: the environment variable {API_KEY})")
    option("--model", dest="name", metavar="NAME", help="name of the model on the server (default: its only model)")
    verbose_help = "log what happens, and show tracebacks and final statistics of the engine (default: off)"
    option("-v", "--verbose", action="store_true", help=verbose_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
