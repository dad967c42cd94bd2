"""Options of the command-line tools, given as flags or as keys of a YAML file."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from fastgen import __version__
from fastgen.cli.command import needed, one_line
from fastgen.engine.options import OPTIONS
from fastgen.model.generation_config import GENERATION_CONFIG
from fastgen.names import advice, nearest
from fastgen.option import Option
from fastgen.request import SAMPLING_OPTIONS

API_KEY = "FASTGEN_API_KEY"  # environment variable with the key of a server
EXCERPT = 300  # maximum number of characters of an unexpected response in an error message

SUBCOMMANDS = ("serve", "chat", "run", "start", "launch", "gen", "generate", "complete", "batch")  # of other programs

Value = str | int | float | bool
SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}

MODEL = {name: option for name, option in OPTIONS.items() if name not in ("model", "tp_group", "adapter_base")}
"""The options of a Generator that a command line or a file can set."""


def default_text(option: Option) -> str:
    """Return the default of an option as its flag would be given."""
    return written(option.default) if isinstance(option.default, bool) else option.default_text


def written(value: Any) -> str:
    """Return the text that `read` reads as this value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


_OWN = "the model's generation_config.json, else "
SAMPLING = {
    name: replace(option, default=None, unset=(_OWN if name in GENERATION_CONFIG else "") + default_text(option))
    for name, option in SAMPLING_OPTIONS.items()
    if option.help
}
"""The sampling parameters that a command line or a file can set."""


TEMPLATE = Option(
    "chat_template", str, None, "file with a chat template in Jinja", unset="the tokenizer's own template"
)


class _PrintCompletion(argparse.Action):
    """Prints a script that completes the command's options in a shell, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        _, shell, _ = args
        try:
            shtab = needed("shtab", "completion", self.option_strings[0])
        except ValueError as error:
            parser.error(str(error))
        for action in parser._actions:
            if action.nargs != 0 and action.choices is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell))
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description, but not those that begin with a space."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if part[0] == " " else fill(part, width, indent) for part in text.split("\n\n"))


class Parser(argparse.ArgumentParser):
    """A command-line parser with --version, --print-completion and one-line errors, which suggest the right flag for an
    unknown one. examples: command lines with what they do, which the help shows at its end."""

    def __init__(self, examples: Mapping[str, str], epilog: str = "", **kwargs: Any) -> None:
        width = max(map(len, examples))
        lines = "\n".join(f"  {command:{width}}  {effect}" for command, effect in examples.items())
        parts = [epilog, "Examples:", lines] if epilog else ["Examples:", lines]
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, epilog="\n\n".join(parts), **kwargs)
        self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")
        help = "print a script that completes options with TAB in this shell, and exit"
        self.add_argument("--print-completion", action=_PrintCompletion, choices=("bash", "zsh", "tcsh"), help=help)
        help = "accepted as in vLLM, and without effect: fastgen runs only the text model of a vision model"
        self.add_argument("--language-model-only", action="store_true", help=help)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        word = next(iter(sys.argv[1:] if args is None else args), "")
        if word in SUBCOMMANDS and not Path(word).exists():
            self.error(f"{self.prog} has no subcommands; leave {word!r} out")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"unrecognized arguments:.*? (--[\w-]+)", message):
            message = self._unknown(unknown[1])
        message = re.sub(r"^argument ([^:]+): (?=is |has )", r"\1 ", message)  # errors of `read` continue a sentence
        self.exit(2, f"{self.prog}: error: {one_line(self.in_flags(message))}; {self.prog} --help lists the options\n")

    def in_flags(self, message: str) -> str:
        """Return an error that names options as in Python with the flags of this command instead. What it says of the
        keys of a YAML file, with whose name it begins, or of the columns of a row stays."""
        if re.match(r"[^:]*\.ya?ml: ", message):
            return message
        flags = {text[2:].replace("-", "_") for text in self._option_string_actions if text.startswith("--")}
        every, long = ("|".join(sorted(names)) for names in (flags, {name for name in flags if "_" in name}))
        pattern = (
            r"(?<![\w./'\"-])(?<![\]\d]: )"
            rf"(?:(?P<set>{every})=(?P<value>'[^']*'|\w[\w.]*\w|\w)"
            rf"|(?P<long>{long})(?![\w/=])"
            # Words that are no options elsewhere: where the name begins the sentence, or its advice.
            rf"|(?:(?<!.)|(?<=; )|(?<=and ))(?P<first>{every})(?=:| (?:is|are|has|must|needs|and)\b)"
            rf"|(?:(?<=leave )|(?<=or ))(?P<out>{every})(?= out\b))"
        )

        def flagged(match: re.Match[str]) -> str:
            name, value = match["set"] or match["long"] or match["first"] or match["out"], match["value"]
            if value == "False":
                return flag(f"no_{name}")
            return flag(name) + ("" if value in (None, "True") else f" {value.strip(chr(39))}")

        return re.sub(pattern, flagged, re.sub(r" \(in Python[^)]*\)", "", message))

    def _unknown(self, given: str) -> str:
        name = given[2:]  # without the dashes, which would make all flags alike
        if place := next((action.metavar for action in self._get_positional_actions() if action.dest == name), None):
            return f"there is no {given}; give {place} without it"
        if (parameter := name.replace("-", "_")) in SAMPLING_OPTIONS:
            return f"there is no {given}; {parameter} is a parameter of each request (SamplingParams in Python)"
        near = nearest(name, (option[2:] for option in self._option_string_actions))
        ours = advice("argument").get(name.replace("-", "_"), f"use --{near}" if near else "")
        ours = re.sub(r"[a-z]+(_[a-z]+)+", lambda name: flag(name[0]), ours)
        return f"there is no {given}" + (f"; {ours}" if ours else "")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the named options that are given on the command line."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def api_url(url: str) -> str:
    """Return the URL of the API of the server at --url: at /v1, unless the URL has a path. Raises ValueError."""
    try:
        parsed = urlsplit(url)
        _ = parsed.port  # checks it
    except ValueError as error:
        raise ValueError(f"--url {url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise ValueError(f"--url is {url!r}; it must be like http://localhost:5678")
    return url.rstrip("/") + ("/v1" if parsed.path in ("", "/") else "")


def error_message(body: Any) -> str:
    """Return the message of a server's error in OpenAI's form; for another body, return its beginning."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or json.dumps(body)[:EXCERPT])


def read_text(option: str, path: Path) -> str:
    """Return the text of the file that an option names. Raises ValueError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{option}: {error.strerror}: {str(path)!r}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8; save it in that encoding") from None


def read(option: Option, text: str) -> Value:
    """Return the value of an option from its text.

    Raises ValueError with a message that continues a sentence after the option's name.
    """
    if not text:
        raise ValueError("is empty; give it a value, or leave it out")
    if option.kind is bool:
        if text.lower() not in SWITCH:
            raise ValueError(f"is {text!r}; it must be on or off")
        return SWITCH[text.lower()]
    kind = option.kind if option.kind in (int, float) else str
    try:
        value: Value = kind(text)
    except ValueError:
        raise ValueError(f"is {text!r}; it must be a {'whole ' if kind is int else ''}number") from None
    if wrong := option.wrong(value):
        raise ValueError(wrong)
    return value


def read_yaml(option: Option, value: Any) -> Value:
    """Return the value of an option from its value in a YAML file. Raises ValueError, as `read` does."""
    if value is False and "off" in option.choices:
        value = "off"  # which YAML reads as False
    if option.kind is str and not isinstance(value, str):
        raise ValueError(f"is {value!r}; it must be a string, so put it in quotes")
    if option.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"is {value!r}; it must be true or false")
        return value
    if value is False:
        value = "off"
    if not isinstance(value, str | int | float):
        raise ValueError(f"is {value!r}; it must be a single value")
    return read(option, str(value))


def add_flag(group: argparse._ActionsContainer, option: Option) -> None:
    """Add the flag of an option to a parser. Its value is None if the flag is not given."""
    help = re.sub("; in Python also [^;()]*[^;() ]", "", f"{option.help} (default: {default_text(option)})")
    help = help.replace("%", "%%")
    if option.kind is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(flag(option.name), action=action, default=None, help=help)
        return

    def reader(text: str) -> Value:
        try:
            return read(option, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    metavar = option.kind.__name__.upper() if option.kind in (int, float) else "TEXT"
    metavar = f"{{{','.join(option.choices)}}}" if option.choices else metavar
    group.add_argument(flag(option.name), type=reader, help=help, metavar=metavar)
