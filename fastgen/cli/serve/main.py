"""The command fgserve: one server in this process, or replicas on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastgen.async_engine.log_pipe import LOG_SECONDS, LogPipe
from fastgen.cli.command import note, run_tool
from fastgen.cli.serve.answers import FAREWELL_SECONDS
from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.options import Options, ServerOptions, note_address, read_options
from fastgen.cli.serve.service import Service, import_tokenizers

UNREAD_SECONDS = 120  # a connection is closed if the client has read nothing for this long
MAX_HEAD = 65536  # maximum size in bytes of a request's first line and headers
SHORTAGE_SECONDS = 60  # interval of log lines about connections that cannot be accepted
KEEP_ALIVE_SECONDS = 120  # longer than clients keep idle connections, so that the clients close them
CLOSE_SECONDS = 7.0  # time for the engines to end; those still running end with this process


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


class _Shortage:
    """Handler of the event loop's errors. If connections cannot be accepted, it logs at most one line per
    SHORTAGE_SECONDS; asyncio would log a traceback for each attempt, thousands per second."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + SHORTAGE_SECONDS
            note("fgserve", f"WARNING: no more connections: {error.strerror}; raise the hard limit (ulimit -Hn)")


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
        files = f"ssl_certfile {options.ssl_certfile} and ssl_keyfile {options.ssl_keyfile}"
        raise ValueError(f"no certificate and key in {files}: {error}") from None
    return config


async def serve(options: Options) -> None:
    """Serve until a SIGINT or SIGTERM. Raises OSError, ValueError or RuntimeError on failure."""
    server_options = options.server
    service = Service(options)
    config = configure(server_options, make_app(service))
    listener = listen(server_options.host, server_options.port)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # each connection is a file, and the soft limit is often 1024
    server, stopping, loop = HttpServer(config), asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():  # the second signal ends running requests now
            service.expire()
        elif running := len(service.deadlines):
            note("fgserve", f"finishing {running} requests; a second Ctrl-C ends them at once")
        stopping.set()

    loop.set_exception_handler(_Shortage())
    loop.run_in_executor(None, import_tokenizers)  # while the first engine loads
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    note_address(server_options, listener.getsockname()[1])
    serving = asyncio.create_task(server.serve([listener]))
    keeping = asyncio.create_task(service.run())
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((serving, keeping, stopped), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        loop.call_later(server_options.shutdown_timeout, service.expire)
        await serving
        if keeping.done():
            await keeping
    finally:
        for task in (keeping, stopped):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):  # engines are closed in worker threads, all of which may be busy
                await asyncio.wait((keeping, stopped))
                await service.close()


def command() -> NoReturn:
    """Run the command as the whole process, which ends with it even if a worker thread is busy, for example with a chat
    template. Its log may be a pipe that nobody reads."""
    sys.stderr = log = LogPipe()
    try:
        status = main()
    finally:  # also after argparse's SystemExit
        log.drain(LOG_SECONDS)
        sys.stderr = sys.__stderr__
    sys.stdout.flush()
    os._exit(status)  # a normal exit would wait for all threads


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 ended by a signal, 1 error, 2 wrong options."""
    options = read_options(argv)
    return run_tool("fgserve", options.server.verbose, lambda: _run(options))


def _run(options: Options) -> int:
    if options.server.replicas or options.server.max_replicas:
        from fastgen.cli.serve.ray import serve_replicas

        with listen(
            options.server.host, options.server.port
        ) as listener:  # since Ray does not report the port that it chooses
            port = listener.getsockname()[1]
        serve_replicas(options, port)
    else:
        loop = asyncio.new_event_loop()  # asyncio.run would wait for busy worker threads
        try:
            loop.run_until_complete(serve(options))
        finally:
            loop.close()
    return 0


if __name__ == "__main__":
    command()
