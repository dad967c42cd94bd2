"""The command fgserve: one server in this process, or replicas on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fastgen.cli.command import note, run_tool
from fastgen.cli.serve.answers import FAREWELL_SECONDS
from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.options import Options, read_options
from fastgen.cli.serve.service import Service, import_tokenizers

MAX_HEAD = 65536  # bytes of a request's first line and headers
UNREAD_SECONDS = 120  # a connection ends if the client has read nothing for so long
KEEP_ALIVE_SECONDS = 120  # longer than clients keep an idle connection, so that they close it


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # the class depends on the installed packages
    """The HTTP protocol of uvicorn, with a limit on the head of a request, which httptools does not have. h11 has one,
    and calls none of the methods here."""

    _head = 0.0  # bytes of the head so far, without its first chunk; -inf behind the head

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self._head > MAX_HEAD:
            self._head = -math.inf
            self.send_400_response(f"the head of the request is larger than {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        self._head = 0.0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = -math.inf
        super().on_headers_complete()


class _Server(uvicorn.Server):
    """A uvicorn server without its signal handlers, which would raise the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    # Connections inherit TCP_NODELAY. asyncio does not set it if the listener's protocol is 0, which means TCP as well.
    # Without it, each small write waits for the acknowledgement of the one before, often 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; elsewhere a client that reads nothing stays connected
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    return listener


def _allow_connections() -> None:
    """Raise the soft limit of open files, often 1024, to the hard one: each connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(options: Options) -> None:
    """Serve until a SIGINT or SIGTERM. Raises OSError, ValueError or RuntimeError if that is not possible."""
    server_options = options.server
    listener = listen(server_options.host, server_options.port)
    _allow_connections()
    service = Service(options)
    farewell = math.ceil(server_options.shutdown_timeout + 2 * FAREWELL_SECONDS)
    config = uvicorn.Config(
        make_app(service),
        http=_Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=farewell,
    )
    server, stopping, loop = _Server(config), asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():  # the second signal: running requests end now
            service.expire()
        stopping.set()

    loop.run_in_executor(None, import_tokenizers)  # while the first engine loads
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    note("fgserve", f"listening at {server_options.url(listener.getsockname()[1])}")
    serving = asyncio.create_task(server.serve([listener]))
    keeping = asyncio.create_task(service.run())
    loaded = asyncio.create_task(_report_loaded(service))
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((serving, keeping, stopped), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        loop.call_later(server_options.shutdown_timeout, service.expire)
        await serving
        if keeping.done():
            await keeping
    finally:
        for task in (keeping, loaded, stopped):
            task.cancel()
        await asyncio.wait((keeping, loaded, stopped))
        await service.close()


async def _report_loaded(service: Service) -> None:
    await service.loaded.wait()
    note("fgserve", f"ready: {', '.join(service.models)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0: ended by a signal; 1: an error. Bad options: 2."""
    options = read_options(argv)
    return run_tool("fgserve", options.server.verbose, lambda: _run(options))


def _run(options: Options) -> int:
    if options.server.replicas or options.server.max_replicas:
        from fastgen.cli.serve.ray import serve_replicas

        serve_replicas(options)
    else:
        asyncio.run(serve(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
