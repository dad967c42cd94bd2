"""Code shared by the command-line tools: optional packages, notes, exit statuses, and Ctrl-C while a model loads."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from fastgen.text.tokenizer import import_transformers


def needed(module: str, extra: str, what: str) -> Any:
    """Return a module that imports packages of an extra. Raises ValueError if one of them is not installed.

    what: name of the feature that needs the module, for the message.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "fastgen":
            raise
        clone = Path(__file__).parents[2]
        package = f"-e '{clone}[{extra}]'" if (clone / "pyproject.toml").exists() else f"'fastgen[{extra}]'"
        raise ValueError(
            f"{what} cannot be used: the package {error.name} is not installed; run: pip install {package}"
        ) from None


def note(tool: str, text: str) -> None:
    """Print a line on stderr."""
    print(f"{tool}: {text}", file=sys.stderr, flush=True)


class UsageError(ValueError):
    """An error of the command line itself."""


class _LogFormatter(logging.Formatter):
    """Names options in warnings by their flags; see `Parser.in_flags`."""

    def __init__(self, in_flags: Callable[[str], str]) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")
        self._in_flags = in_flags

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name of logging)
        if record.levelno >= logging.WARNING:
            record.message = self._in_flags(record.message)
        return super().formatMessage(record)


def run_tool(name: str, verbose: bool, run: Callable[[], int], in_flags: Callable[[str], str]) -> int:
    """Run a tool and return its exit status. in_flags: `Parser.in_flags` of its command line.

    An exception prints one line on stderr and returns 1 (2 for a UsageError). Ctrl-C returns 130. If the reader of
    stdout has gone, as in `| head`, the status is 141, as after a SIGPIPE.
    """
    if sys.stderr is None:  # closed by the shell; print would write to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter(in_flags))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("fastgen").setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        return run()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at exit
        return 141
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the terminal has shown ^C
        return 130
    except Exception as error:
        if verbose:
            logging.getLogger(__name__).exception("traceback:")
        kind = "" if isinstance(error, ValueError | OSError | RuntimeError) else f"{type(error).__name__}: "
        note(name, f"error: {kind}{in_flags(one_line(error))}")
        return 2 if isinstance(error, UsageError) else 1


def one_line(error: object) -> str:
    """Return the text of an error in one line, without the number of an error of the system."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.strerror}: {error.filename!r}"
    return " ".join(str(error).split())


@contextmanager
def loading_model() -> Iterator[None]:
    """Import transformers in a thread while the block imports torch and loads a model. Ctrl-C ends the process.

    Both imports read thousands of files and mostly wait for the disk. The process ends without a KeyboardInterrupt,
    which may get lost in a __del__ during an import or wait for the threads of a download; there is no state to save.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        os.write(2, b"\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, leave)
    try:
        threading.Thread(target=import_transformers).start()
        yield
    finally:
        signal.signal(signal.SIGINT, before)
