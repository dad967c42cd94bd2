"""The HTTP server of fgserve: uvicorn with limits of time and size."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastgen.cli.serve.http_responses import FAREWELL_SECONDS
from fastgen.cli.serve.options import ServerOptions

UNREAD_SECONDS = 120  # a connection is closed if the client has read nothing for this long
MAX_HEAD = 65536  # maximum size in bytes of a request's first line and headers
KEEP_ALIVE_SECONDS = 120  # longer than clients keep idle connections, so that the clients close them


class _Protocol(H11Protocol):
    """HTTP/1.1 on one connection. The connection is closed if a request's head is not complete `read_timeout` seconds
    after its first byte (for the first request, after connecting), or if a body makes no progress for that long.

    httptools would save 3 us per chunk and 0.1 ms per request, but it loses the body of a request that offers an
    upgrade to HTTP/2, as Java's HttpClient does.
    """

    read_timeout: float
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(self.read_timeout, transport.close)

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        super().data_received(data)
        if not before is self.conn.their_state is h11.IDLE:
            self._unset_late()
        self._set_late()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (
            self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY
        ):  # a part of the next request has arrived
            self._set_late()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_late()

    def _set_late(self) -> None:
        """Start the timer for an incomplete request unless it is running."""
        if self._late is None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._late = self.loop.call_later(self.read_timeout, self.transport.close)

    def _unset_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpServer(uvicorn.Server):
    """A uvicorn server without uvicorn's signal handlers, which would raise the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise OSError(f"cannot listen at {host}, port {port}: {reason}; give another --port or --host") from None
    # Connections inherit TCP_NODELAY. asyncio does not set it if the listener's protocol number is 0, which also means
    # TCP. Without it, each small write waits for the acknowledgement of the previous one, often 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # only on Linux; elsewhere a client that reads nothing stays connected
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    return listener


def configure(options: ServerOptions, app: Starlette) -> uvicorn.Config:
    """Return the configuration of uvicorn. Raises ValueError if the certificate cannot be read."""
    if options.ssl_keyfile and not options.ssl_certfile:
        raise ValueError("ssl_keyfile needs ssl_certfile")
    config = uvicorn.Config(
        app,
        http=type("Protocol", (_Protocol,), {"read_timeout": options.read_timeout}),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",  # it would warn about each offered upgrade and each malformed request
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout + 2 * FAREWELL_SECONDS),
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
    )
    try:
        config.load()
    except OSError as error:  # the message of ssl does not name the file
        files = f"ssl_certfile {options.ssl_certfile}"
        files += f" and ssl_keyfile {options.ssl_keyfile}" if options.ssl_keyfile else ""
        raise ValueError(f"no certificate and key in {files}: {error.strerror or error}") from None
    return config
