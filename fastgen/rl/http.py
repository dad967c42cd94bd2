"""The HTTP client of a server of `fgserve --rollout`: requests, their errors, and the wait for its model. No torch."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Generator as PyGenerator
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlencode, urlsplit

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
END_SECONDS = 0.02  # between two attempts to end connections or requests
POLL_SECONDS = 0.2  # between two looks at a server whose model is being loaded
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # notices in 35 s that a machine is gone
LOADING = "not_ready"  # code of the error while the model is loaded
UNAVAILABLE = (500, 502, 503)  # statuses of a server whose engine has ended or is not ready, or that is ending
REPORT_SECONDS = 10.0  # between two lines in the log about it

Json = dict[str, Any]
"""The body of a request or of a response."""


class UnavailableError(RuntimeError):
    """Error of a server that answers, but whose engine has ended or is not ready."""


class Connections(set[HTTPConnection]):
    """The connections of running requests. ended: True once their answers are no longer wanted."""

    ended = False


class ServerClient:
    """A client of one server. Threads may share it.

    url: address of the server. api_key: its key, or None. model: name of the model, if the server has several.
    ready_seconds: maximum time to wait before the first request until the server listens and its model is loaded.

    Methods raise ValueError if the server refuses a request, RuntimeError if its state does not allow the call or its
    model is not ready in time, and ConnectionError if it cannot be reached.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None, ready_seconds: float) -> None:
        self.url, self._model, self._ready_seconds = url, model, ready_seconds
        self._parsed = urlsplit(url)
        if self._parsed.scheme not in ("http", "https") or not self._parsed.hostname:
            raise ValueError(f"url is {url!r}; it must be like http://localhost:5678")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._ready = False

    @property
    def host(self) -> str:
        return self._parsed.hostname or ""

    def get(self, path: str) -> Json:
        """Return the body of the response to a GET about the model."""
        query = "" if self._model is None else "?" + urlencode({"model": self._model})
        return self._ask("GET", path + query)

    def post(self, path: str, body: Json, connections: set[HTTPConnection] | None = None) -> Json:
        """Return the body of the response to a post. connections: set that holds the connection while the request runs,
        so that another thread can `shut_down` it."""
        return self._ask("POST", path, self._data(body), connections)

    def lines(self, path: str, body: Json) -> PyGenerator[Json, None, None]:
        """Yield the lines of JSON of the response to a post, as they arrive. Closing the iterator ends the request."""
        self.await_ready()
        with self._asking("POST", path, self._data(body), set()) as response:
            if response.status != 200:
                self._fail(response.status, response.read().decode())
            while line := response.readline():
                value = json.loads(line)
                if "status" in value:  # the error of a request that failed after its beginning
                    self._fail(value["status"], line.decode())
                yield value

    def await_ready(self) -> None:
        """Wait until the model is loaded, the first time; log what it waits for, also if a server does not listen
        yet."""
        begun, report = time.monotonic(), 0.0
        while not self._ready and (reason := self._not_ready()) is not None:
            waited = time.monotonic() - begun
            if waited > self._ready_seconds:
                hint = f"the server was not ready within {self._ready_seconds:g} seconds (ready_timeout)"
                raise type(reason)(f"{reason}; {hint}")
            if waited >= report:
                report = waited + REPORT_SECONDS
                log.warning("waiting for %s (%.0f seconds so far): %s", self.url, waited, reason)
            time.sleep(POLL_SECONDS)
        self._ready = True

    def _not_ready(self) -> Exception | None:
        """Return the reason why the server is not ready yet, or None if it is. Raises RuntimeError if its model has
        failed."""
        try:
            status, text = self._exchange("GET", "/ready")
            if status != 503:
                return None
            healthy, trouble = self._exchange("GET", "/health")
        except ConnectionError as error:
            return error
        if healthy != 200 and _error(trouble).get("code") != LOADING:
            self._fail(healthy, trouble)
        return UnavailableError(_message(text))

    def _data(self, body: Json) -> str:
        return json.dumps({**body, "model": self._model}, default=_plain)

    def _ask(
        self, method: str, path: str, data: str | None = None, connections: set[HTTPConnection] | None = None
    ) -> Json:
        self.await_ready()
        status, text = self._exchange(method, path, data, connections)
        if status != 200:
            self._fail(status, text)
        body: Json = json.loads(text)
        return body

    def _exchange(
        self, method: str, path: str, data: str | None = None, connections: set[HTTPConnection] | None = None
    ) -> tuple[int, str]:
        """Return the status and the body of a response."""
        with self._asking(method, path, data, set() if connections is None else connections) as response:
            return response.status, response.read().decode()

    @contextmanager
    def _asking(
        self, method: str, path: str, data: str | None, connections: set[HTTPConnection]
    ) -> Iterator[HTTPResponse]:
        """Send a request; the block reads the response. Raises ConnectionError, also for errors of the connection in
        the block."""
        try:
            with asking(self._parsed, method, path, data, self._headers, connections) as response:
                yield response
        except (OSError, HTTPException) as error:
            raise ConnectionError(f"no answer from {self.url}: {error or type(error).__name__}") from None

    def _fail(self, status: int, text: str) -> NoReturn:
        """Raise the error that a response stands for."""
        message = _message(text)
        if status in (400, 413):
            raise ValueError(message)
        hint = "; start fgserve with --rollout, and give an address of replicas in a list" if status == 404 else ""
        kind = UnavailableError if status in UNAVAILABLE else RuntimeError
        raise kind(f"{self.url} answers {status}: {message}{hint}")


@contextmanager
def asking(
    url: SplitResult,
    method: str,
    path: str,
    data: str | None,
    headers: Mapping[str, str],
    connections: set[HTTPConnection],
) -> Iterator[HTTPResponse]:
    """Send a request to a server, and wait for its response as long as it takes; the block reads the response. path:
    what follows the path of the URL. connections: as of `ServerClient.post`. Raises OSError or HTTPException."""
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=CONNECT_SECONDS)
    with closing(connection):
        try:
            connection.connect()
            assert connection.sock is not None
            _set_patient(connection.sock)
            connections.add(connection)
            connection.request(method, url.path.rstrip("/") + path, data, headers)
            with connection.getresponse() as response:
                yield response
        finally:
            connections.discard(connection)


def _set_patient(connected: socket.socket) -> None:
    """Let a socket wait for an answer as long as it takes, unless the other machine is gone."""
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on all systems
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut_down(connections: set[HTTPConnection]) -> None:
    """End connections, from a thread other than the ones that wait for their answers."""
    for connection in list(connections):
        with suppress(OSError, AttributeError):  # the connection has ended already
            connection.sock.shutdown(socket.SHUT_RDWR)


def _message(text: str) -> str:
    """Return the message in the body of an error."""
    return str(_error(text).get("message", text[:300]))


def _error(text: str) -> Json:
    """Return the error in the body of a response; {} if the body has no error of fgserve."""
    with suppress(ValueError):
        match json.loads(text):
            case {"error": dict(error)}:
                return error
    return {}


def _plain(value: Any) -> Any:
    """Return an array, a set, a pydantic class and the like in a form that JSON can represent."""
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    return value.tolist() if hasattr(value, "tolist") else list(value)
