"""Helpers for tests of fgserve: processes of servers, and requests."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from openai import OpenAI

ROOT = Path(__file__).parents[1]
FGSERVE = ("-m", "fastgen.cli.serve.main", "--page-size", "16", "--num-pages", "300", "--port=0")
STUB = (str(Path(__file__).parent / "serve_stub.py"), "--port=0")
# One client for all, since each would read the system's certificates; each request has a connection of its own.
HTTP = httpx.Client(verify=False, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))


def read_request(kind: Any, body: bytes, policy: Any = None) -> Any:
    """Return a request of the class `kind`, parsed and checked as fgserve does. Raises ApiError, which names the wrong
    field."""
    from fastgen.cli.serve.validation import check_request, parse  # which need the extra `serve`

    return check_request(kind, parse(body), policy)


class Server:
    """A process of fgserve, of the stub, or of another program that prints `listening` within `seconds` seconds.
    key: that of requests."""

    def __init__(
        self,
        program: Sequence[str],
        *arguments: str,
        key: str = "",
        listening: str = r"listening at (\S+)",
        seconds: float = 30,
    ) -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        command = [sys.executable, *program, *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        self.said = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        while not self.url:
            found = re.search(listening, self._lines.get(timeout=seconds))
            self.url = found[1] if found else ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            self._lines.put(line)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return HTTP.get(self.url + path, **{"headers": self._headers, **options})

    def post(self, path: str, data: Any, **options: Any) -> httpx.Response:
        return HTTP.post(self.url + path, json=data, **{"headers": self._headers, **options})

    def post_bytes(self, path: str, data: bytes, **options: Any) -> httpx.Response:
        return HTTP.post(self.url + path, content=data, **{"headers": self._headers, **options})

    def send(self, data: bytes) -> socket.socket:
        """Open a connection and send these bytes."""
        connection = socket.create_connection(self.address, timeout=60)
        connection.sendall(data)
        return connection

    def client(self, key: str = "foo") -> OpenAI:
        from openai import OpenAI  # not where GPU tests run

        return OpenAI(base_url=self.url, api_key=key, max_retries=0, http_client=httpx.Client(verify=False))

    def await_said(self, text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.said:
            assert time.monotonic() < deadline, f"no {text!r} in its output: {self.said}"
            time.sleep(0.02)

    def await_ready(self) -> Server:
        try:
            until(lambda: self.get("/ready").status_code == 200, 120)
        except httpx.ConnectError:
            raise AssertionError(f"the server ended with {self.end()}") from None
        return self

    def stats(self, model: str = '[^"]*') -> dict[str, float]:
        """Return the numbers of /metrics for a model, or for the first one."""
        found: dict[str, float] = {}
        lines = re.findall(rf'^fastgen_(\w+)\{{model="{model}"\}} (\S+)$', self.get("/metrics").text, re.M)
        for name, value in lines:
            found.setdefault(name, float(value))
        return found

    def idle(self) -> bool:
        """Return whether the engine has no request and holds no page."""
        stats = self.stats()
        return stats["requests_total"] == stats["finished_total"] + stats["aborted_total"] and not stats["pages_used"]

    def engines(self) -> list[int]:
        """Return the process ids of the engines in the order of their starts."""
        return children(self.process.pid)

    def signal_engines(self, number: signal.Signals) -> None:
        for engine in self.engines():
            os.kill(engine, number)

    def end(self) -> tuple[int, str]:
        """Wait for the process to end. Return its exit status and its stderr."""
        status = self.process.wait(30)
        self._reader.join(10)
        return status, self.said

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def children(process: int) -> list[int]:
    """Return the ids of the children of a process, started by any of its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def descendants(process: int) -> list[int]:
    """Return the ids of the children of a process, their children, and so on."""
    return [found for child in children(process) for found in (child, *descendants(child))]


def alive(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    stat = Path(f"/proc/{process}/stat")
    try:
        return " Z " not in stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_called(process: int, name: bytes) -> bool:
    """Return whether a process runs and its command line begins with `name`."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().startswith(name)
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition stays false"
        time.sleep(0.02)


def request_bytes(path: str, data: Any) -> bytes:
    """Return the bytes of a POST request."""
    body = json.dumps(data).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
