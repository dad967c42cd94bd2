"""Processes that this one starts: each shares a socket with it, ends with it, and is ended by it. This module does not
import torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

GRACE = 3.0  # seconds that a process has to end before it is killed


def spawn(program: Sequence[str], processes: list[subprocess.Popen[bytes]], *files: int) -> socket.socket:
    """Start Python on a program, whose last argument is the number of its socket; return the caller's end of it.

    processes: the process is appended here before anything can interrupt, so that it can be ended. files: numbers of
    open files that it inherits, at the same numbers.
    """
    ours, its = socket.socketpair()
    with its:
        try:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", *program, str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what NCCL logs, for one, is not to come between a program's results
                    pass_fds=(its.fileno(), *files),
                    start_new_session=True,  # else a Ctrl-C at the terminal would come to it too
                    env=_environment(),
                )
            )
        except BaseException:
            ours.close()
            raise
    return ours


def _environment() -> dict[str, str]:
    """Return this process's environment, in which Python finds this same fastgen."""
    home = Path(__file__).parent.parent.parent
    if home.name in ("site-packages", "dist-packages"):  # Python looks there, and its own modules must stay before it
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))}


def end(processes: Sequence[subprocess.Popen[bytes]], tell: Callable[[], None] = lambda: None) -> None:
    """Tell processes to end, and wait for them; kill any that live after GRACE."""
    try:
        tell()
        _wait(processes)
    finally:  # a second Ctrl-C ends the wait
        for process in processes:
            process.kill()
        _wait(processes)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended, or for GRACE."""
    deadline = time.monotonic() + GRACE
    with suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0))


def ending(status: int | None) -> str:
    """Say how a process ended that gave no reason. status: as Popen has it; None: it has not ended."""
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}{' (has the memory run out?)' if name == 'SIGKILL' else ''}"


def end_with_caller() -> None:
    """End this process when its parent is gone: a fork of the parent, which holds its sockets too, may keep the
    connection open. SIGINT and SIGTERM are left to the parent: a terminal or a service manager may send them to all
    processes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(os.getppid(),), name="fastgen-watch", daemon=True).start()


def _watch(caller: int) -> None:
    while os.getppid() == caller:
        time.sleep(1.0)
    os._exit(1)
