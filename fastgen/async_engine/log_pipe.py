"""A stderr whose writers never wait, for a process whose log may go to a pipe that nobody reads."""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque

MAX_HELD = 2**20  # maximum number of characters that wait for the reader; further lines are dropped
LOG_SECONDS = 1.0  # time limit for the last lines when a process ends


class LogPipe(io.TextIOBase):
    """Text stream whose lines are written to a file descriptor by a thread. While MAX_HELD characters wait for the
    reader, further lines are dropped and counted."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._lock = threading.RLock()  # written in C: a thread that is stopped while it takes it does not keep it
        self._changed = threading.Condition(self._lock)
        self._lines: deque[str] = deque()
        self._line = ""  # incomplete
        self._held = self._dropped = 0
        threading.Thread(target=self._run, name="fastgen-log", daemon=True).start()

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._line = (self._line + text).rpartition("\n")
            if newline and self._held + len(whole) < MAX_HELD:
                self._lines.append(whole + newline)
                self._held += len(whole) + 1
                self._changed.notify_all()
            elif newline:
                self._dropped += whole.count("\n") + 1
        return len(text)

    def drain(self, seconds: float) -> None:
        """Wait until all lines are written, but no longer than `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held, seconds)

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                text = self._lines.popleft()
                told, self._dropped = self._dropped, 0
            note = f"{told} lines of the log were dropped: nobody read them in time\n" if told else ""
            self._write((text + note).encode(self.encoding, self.errors))
            with self._changed:
                self._held -= len(text)
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BlockingIOError:  # another process has made the pipe nonblocking
            time.sleep(0.1)
            self._write(data)
        except OSError:  # the reader has gone, and there is nowhere to report it
            pass
