"""Generators on Ray: each replica of Ray Serve is the application of fgserve with engines of its own.

Needs the extra `ray`, which is imported where it is used: Ray reads its environment when it is imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from fastgen.cli.command import needed
from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.lean import import_tokenizers
from fastgen.cli.serve.models import Service
from fastgen.cli.serve.options import Options, gpus, make_options

if TYPE_CHECKING:
    from ray.serve import Application

NAME = "fgserve"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
UNLIMITED = 1_000_000  # requests of a replica, for Ray: fgserve sheds, and says so as OpenAI does
HEALTH_SECONDS = 1.0  # between two looks; the third bad one in a row is a replica's end


class Replica:
    """What Ray Serve runs, in an actor: the application of fgserve, over engines in processes of their own.

    An engine that dies is not started again here: the replica is unhealthy then, and Ray puts another in its place.
    """

    def __init__(self, options: Options) -> None:
        logging.getLogger("fastgen").setLevel(logging.INFO if options.server.verbose else logging.WARNING)
        self._service = Service(replace(options, server=replace(options.server, restart=False)))

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """The application; Ray calls this once, after the constructor, and sends requests when it has returned.

        Raises what keeps a model from being loaded.
        """
        self._keeping = asyncio.create_task(self._service.run())
        loaded = asyncio.create_task(self._service.loaded.wait())
        await asyncio.to_thread(import_tokenizers)
        await asyncio.wait((self._keeping, loaded), return_when=asyncio.FIRST_COMPLETED)
        await self.check_health()
        return make_app(self._service)

    async def check_health(self) -> None:
        """Ray calls this again and again. Raises what ails an engine."""
        if self._keeping.done():
            await self._keeping
        if self._service.trouble is not None:
            raise RuntimeError(self._service.trouble)


def application(options: Options, tries: int = 20) -> Application:
    """The replicas of these options, for `serve.run`; host, port and restart have no meaning here. Raises ValueError.
    tries: how often they may fail to start before Ray gives up.

    Requests with equal X-Session-Id headers come to one replica, so that a conversation meets its cached prefix.
    """
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    server = options.server
    least, most = server.replicas or 1, server.max_replicas
    count: dict[str, Any] = {"num_replicas": least}
    if most is not None:
        if most < least:
            raise ValueError(f"max_replicas is {most}; it must be at least replicas, {least}")
        bounds = {"min_replicas": least, "max_replicas": most}
        count = {"autoscaling_config": {**bounds, "target_ongoing_requests": server.replica_requests}}
    num_gpus = server.replica_gpus
    if num_gpus is None:
        used = set[int]().union(*map(gpus, options.models))
        num_gpus = max(used, default=-1) + 1 if ray.cluster_resources().get("GPU") else 0
    deployment = serve.deployment(
        serve.ingress()(Replica),
        ray_actor_options={"num_cpus": server.replica_cpus, "num_gpus": num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        max_ongoing_requests=UNLIMITED,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        logging_config={"log_level": "INFO" if server.verbose else "WARNING", "enable_access_log": server.verbose},
        max_constructor_retry_count=tries,
        **count,
    )
    return deployment.bind(options)


def build(args: dict[str, Any]) -> Application:
    """For the `import_path` of `serve deploy`: the replicas of `args`, which are what a YAML file of fgserve holds.
    Environment variables go before them. Raises ValueError."""
    return application(make_options(args, os.environ))


def connect() -> None:
    """Join the cluster at RAY_ADDRESS, or start one in this machine, which ends with this process.

    That one listens at 127.0.0.1 alone, takes only who has its token, which is new and nowhere but in the environment
    of its processes, and reports to nobody. Sets environment variables, which Ray reads when it is imported; raises
    ValueError where it is not installed. For the main thread, whose signal handlers stay.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on any system: without it, Ray listens everywhere
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 leaves engines what nobody else wants
    ray = needed("ray", "ray", "replicas on Ray")
    terminated = signal.getsignal(signal.SIGTERM)
    ray.init(address=address or "local", include_dashboard=False, logging_level="WARNING")
    signal.signal(signal.SIGTERM, terminated)  # Ray has a handler of its own


def serve_replicas(options: Options, say: Callable[[str], None]) -> None:
    """Serve until a SIGINT or SIGTERM. say: tells somebody how it goes. Raises what keeps it from that, such as
    OSError, ValueError, RuntimeError. For the main thread."""
    server = options.server
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        connect()
        import ray
        from ray import serve

        if not server.verbose:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            check_room(server.replicas or 1, CPU=server.replica_cpus)
            port = _free_port(server.host, server.port)
            http = {"host": server.host, "port": port}
            serve.start(http_options=http, logging_config={"log_level": "INFO" if server.verbose else "ERROR"})
            say(f"listening at http://{f'[{server.host}]' if ':' in server.host else server.host}:{port}")
            try:
                _deploy(options)
                say(f"ready: {', '.join(model.name for model in options.models)}")
                threading.Event().wait()
            finally:
                with suppress(KeyboardInterrupt):  # the second one: somebody is in a hurry
                    serve.delete(NAME, _blocking=False)
                    while NAME in serve.status().applications:
                        time.sleep(0.1)
        finally:
            ray.shutdown()
    except (KeyboardInterrupt, SystemExit):
        pass


def _deploy(options: Options) -> None:
    """Returns when all replicas are ready. Raises RuntimeError, saying why, where one can not start."""
    from ray import serve

    try:
        serve.run(application(options, tries=1), name=NAME)
    except RuntimeError as error:
        (deployment,) = serve.status().applications[NAME].deployments.values()
        raise RuntimeError(deployment.message.strip().splitlines()[-1]) from error  # that of what the replica raised


def check_room(replicas: int, **each: float) -> None:
    """each: what a replica takes of Ray's resources. Raises ValueError where it would wait for them for ever; on a
    cluster, others may come."""
    import ray

    for kind, amount in each.items():
        there = ray.cluster_resources().get(kind, 0)
        if "RAY_ADDRESS" not in os.environ and replicas * amount > there:
            raise ValueError(f"{replicas} replicas of {amount:g} {kind}s each are more than the {there:g} there are")


def _free_port(host: str, port: int) -> int:
    """The port, or a free one where it is 0, which Ray would not tell. Raises OSError where it is taken."""
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        return int(listener.getsockname()[1])
