"""The commands of fgchat: lines that begin with a slash."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastgen.cli.chat_backends import SETTINGS
from fastgen.cli.chat_files import save
from fastgen.cli.chat_session import Chat
from fastgen.cli.command import one_line
from fastgen.cli.options import read, written

DEFAULT = "default"  # value that takes a setting back
HINT = "/help lists the commands (for a message, put a space before the /)"


@dataclass(frozen=True)
class Command:
    """A command. argument: what follows its name, in brackets if it may be left out. help: lines that say what it does.
    obey: function that obeys it, with the text after its name; it raises EOFError to quit."""

    name: str
    argument: str
    help: str
    obey: Callable[[Chat, str], None]

    def wrong(self, argument: str) -> str:
        """Return why this argument cannot be used, or ""."""
        if argument and not self.argument:
            return f"{self.name} takes nothing after it"
        needed = self.argument and not self.argument.startswith("[")
        return f"{self.name} needs {self.argument}" if needed and not argument else ""


def obey(chat: Chat, line: str) -> None:
    """Obey the command in a line, or refuse it. Raises EOFError to quit."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    command = _BY_NAME.get(name)
    wrong = f"no command {name[:20]}" if command is None else command.wrong(argument)
    if command is None or wrong:
        chat.refuse(f"{wrong}; {HINT}")
    else:
        command.obey(chat, argument)


def _reset(chat: Chat, number: str) -> None:
    """Drop the rounds from the given number on."""
    current = len(chat.rounds) + 1
    if number in map(str, range(1, current + 1)):
        del chat.rounds[int(number) - 1 :]
    else:
        chat.refuse(f"/r {number[:20]}: no such round; N goes from 1 to {current}, which is this round")


def _ask_block(chat: Chat, _: str) -> None:
    chat.ask(chat.console.read_block().rstrip())


def _regenerate(chat: Chat, _: str) -> None:
    """Replace the last answer. It is kept if there is no new one."""
    if not chat.rounds:
        chat.refuse("/regen: there is no answer yet")
        return
    count, last = len(chat.rounds), chat.rounds.pop()
    chat.ask(last.message)
    if len(chat.rounds) < count:
        chat.rounds.append(last)


def _set_system(chat: Chat, text: str) -> None:
    """Set or remove the system prompt."""
    before, chat.conversation.system = chat.conversation.system, text or None
    try:
        chat.backend.check(chat.messages("hello"))
    except (ValueError, OSError) as error:
        chat.conversation.system = before
        chat.refuse(f"/system: {one_line(error)}")
        return
    chat.console.note(f"(system prompt: {text})" if text else "(no system prompt)")


def _set(chat: Chat, argument: str) -> None:
    """Change a setting, or list all."""
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    name, value = name.lstrip("-").replace("-", "_"), value.strip()
    if name and name not in SETTINGS:
        chat.refuse(f"/set: there is no setting {name[:40]}; there are {', '.join(SETTINGS)}")
        return
    if value:
        try:
            chat.backend.change(_changed(chat.backend.settings, name, value))
        except (ValueError, TypeError) as error:
            chat.refuse(f"/set: {one_line(error)}")
            return
    for each in [name] if name else SETTINGS:
        chat.console.note(f"({each} = {_shown(chat, each)})" if name else f"  {each:<20} {_shown(chat, each)}")


def _changed(settings: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return settings of which one is read from a text. Raises ValueError."""
    others = {each: value for each, value in settings.items() if each != name}
    try:
        return others if text == DEFAULT else {**others, name: read(SETTINGS[name], text)}
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _shown(chat: Chat, name: str) -> str:
    """Return the value of a setting in words."""
    value, default = chat.backend.settings.get(name), chat.backend.default(name)
    if value is not None:
        return written(value)
    return f"{SETTINGS[name].unset or 'not set' if default in (None, ()) else written(default)} ({DEFAULT})"


def _save(chat: Chat, name: str) -> None:
    path = Path(name).expanduser()
    try:
        save(replace(chat.conversation, settings=chat.backend.settings), path)
    except (ValueError, OSError) as error:
        chat.refuse(f"/save: {one_line(error)}")
        return
    chat.console.note(f"(saved; fgchat --resume {shlex.quote(name)} goes on from here)")


def _help(chat: Chat, _: str) -> None:
    chat.console.note(listed(COMMANDS).rstrip())


def _quit(chat: Chat, _: str) -> None:
    raise EOFError


def listed(commands: Iterable[Command]) -> str:
    """Return the list of commands with their help."""
    rows = [(f"{command.name} {command.argument}".rstrip(), command.help) for command in commands]
    width = max(len(usage) for usage, _ in rows)
    indented = "\n" + " " * (width + 8)
    lines = [f"    {usage:<{width}} -- {help.replace(chr(10), indented)}\n" for usage, help in rows]
    return "  Available commands:\n" + "".join(lines)


_RESET = Command("/r", "<N>", "reset conversation before round N", _reset)
_BLOCK = Command("/m", "", "input a multiline message, end your input\nwith a single line containing '.'", _ask_block)
_QUIT = Command("/q", "", "quit", _quit)
_HELP = Command("/help", "", "list all commands", _help)
COMMANDS = (
    _RESET,
    _BLOCK,
    Command("/regen", "", "answer the last message again", _regenerate),
    Command("/system", "[TEXT]", "set the system prompt; without TEXT, remove it", _set_system),
    Command(
        "/set",
        "[NAME VALUE]",
        f"set temperature or another parameter; without\nNAME, list all; the VALUE {DEFAULT} takes one back",
        _set,
    ),
    Command("/save", "FILE", "save the conversation, for fgchat --resume FILE", _save),
    _HELP,
    _QUIT,
)
_BY_NAME = {command.name: command for command in COMMANDS} | {"/?": _HELP}

BANNER = f"Ready to chat!\n{listed((_RESET, _BLOCK, _HELP, _QUIT))}\n---\n"
