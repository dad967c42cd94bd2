"""Child processes: each is connected to this process by a socket, and ends when this process ends it or is gone. This
module does not import torch."""

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

GRACE = 3.0  # seconds in which a process has to end before it is killed


def spawn(program: Sequence[str], processes: list[subprocess.Popen[bytes]], *files: int) -> socket.socket:
    """Start a Python process, and return this process's end of a socket pair.

    program: arguments for Python; the file descriptor of the process's end is appended as the last one. processes: the
    new process is appended here at once, so that it can be ended after an interrupt. files: open file descriptors that
    the process inherits, with the same numbers. Raises RuntimeError on Windows, where processes do not inherit them.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            "on Windows, fastgen runs in one process: use Generator there, or WSL for AsyncGenerator and several GPUs"
        )
    ours, its = socket.socketpair()
    with its:
        try:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", *program, str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # stderr, to keep NCCL's log, for example, out of this program's output
                    pass_fds=(its.fileno(), *files),
                    start_new_session=True,  # otherwise a Ctrl-C in the terminal would reach it too
                    env=_environment(),
                )
            )
        except BaseException:
            ours.close()
            raise
    return ours


def _environment() -> dict[str, str]:
    """Return this process's environment, changed if needed so that Python imports the same fastgen."""
    home = Path(__file__).parent.parent.parent
    if home.name in ("site-packages", "dist-packages"):  # Python finds it there, and its own modules must come first
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))}


def end_processes(processes: Sequence[subprocess.Popen[bytes]], disconnect: Callable[[], None] = lambda: None) -> None:
    """Disconnect processes, which makes them end, and wait for them. Kill those that still run after GRACE seconds."""
    try:
        disconnect()
        _wait(processes)
    finally:  # a second Ctrl-C ends the wait
        for process in processes:
            process.kill()
        _wait(processes)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended, for at most GRACE seconds."""
    deadline = time.monotonic() + GRACE
    with suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0))


def describe_exit(status: int | None) -> str:
    """Return how a process ended that gave no reason. status: Popen's returncode; None if it has not ended."""
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}{' (has the memory run out?)' if name == 'SIGKILL' else ''}"


def end_with_parent() -> None:
    """End this process when its parent is gone, even if a fork of the parent keeps the connection open. Ignore SIGINT
    and SIGTERM, which a terminal or a service manager may send to all processes: the parent handles them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    watch_parent()


def watch_parent() -> None:
    """End this process when its parent is gone."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="fastgen-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
