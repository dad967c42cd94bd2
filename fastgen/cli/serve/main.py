"""The command fgserve: one server in this process, or replicas on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from fastgen.async_engine.log_pipe import LOG_SECONDS, LogPipe
from fastgen.cli.command import note, run_tool
from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.http_server import HttpServer, configure, listen
from fastgen.cli.serve.options import ServeOptions, make_parser, note_address, read_options
from fastgen.cli.serve.service import Service, import_tokenizers

SHORTAGE_SECONDS = 60  # interval of log lines about connections that cannot be accepted
CLOSE_SECONDS = 7.0  # time for the engines to end; those still running end with this process


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


async def serve(options: ServeOptions) -> None:
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
    return run_tool("fgserve", options.server.verbose, lambda: _run(options), make_parser().in_flags)


def _run(options: ServeOptions) -> int:
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
