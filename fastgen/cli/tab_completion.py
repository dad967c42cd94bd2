"""Completion with TAB in fgchat: of commands, settings and paths."""

from __future__ import annotations

from pathlib import Path

from fastgen.cli.chat_backends import SETTINGS
from fastgen.cli.chat_commands import COMMANDS, DEFAULT


def completed(line: str) -> list[str]:
    """Return the lines that complete the last word of a line. Messages are not completed."""
    name, space, argument = line.partition(" ")
    if not space:
        names = [command.name + " " * bool(command.argument) for command in COMMANDS]
    elif name == "/set":
        names = [f"{name} {words}" for words in _settings(argument)]
    elif name == "/save":
        names = [f"{name} {path}" for path in _paths(argument)]
    else:
        names = []
    return sorted(each for each in names if each.startswith(line))


def _settings(argument: str) -> list[str]:
    """Return the names of the settings or, if the argument has one, the words that may follow it."""
    setting, space, _ = argument.partition(" ")
    if not space:
        return [f"{each} " for each in SETTINGS]
    switch = setting in SETTINGS and SETTINGS[setting].kind is bool
    return [f"{setting} {value}" for value in (DEFAULT, *(("on", "off") if switch else ()))]


def _paths(start: str) -> list[str]:
    """Return the paths that begin with a text. Folders end with a slash; hidden files need their dot."""
    folder, slash, name = start.rpartition("/")
    try:
        entries = [each for each in Path(folder + slash).expanduser().iterdir() if each.name.startswith(name)]
        shown = [each for each in entries if name or not each.name.startswith(".")]
        return [f"{folder}{slash}{each.name}{'/' * each.is_dir()}" for each in shown]
    except (OSError, RuntimeError):  # RuntimeError: ~ of a user without a home
        return []
