"""Replicas of fgserve on Ray Serve. Each replica is the application with its own engines.

Needs the extra `ray`. Functions import Ray themselves, since it reads the environment when it is imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette

from fastgen.cli.command import needed, note
from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.http_server import HttpServer, configure, listen
from fastgen.cli.serve.options import ServeOptions, gpus, make_options, note_address
from fastgen.cli.serve.service import Service, import_tokenizers

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

NAME = "fgserve"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
UNLIMITED = 1_000_000  # Ray's limit of requests per replica; fgserve has its own limit, with OpenAI's errors
GONE_SECONDS = 15.0  # a replica that has not renewed its address for this long is gone
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # addresses that stand for all of a machine's
HEALTH_SECONDS = 1.0  # interval of health checks; Ray ends a replica after three failures in a row


class Directory:
    """The actor of Ray Serve that knows the addresses of the replicas for a trainer. Each replica renews its own."""

    def __init__(self) -> None:
        self._renewed: dict[str, float] = {}

    async def renew(self, url: str) -> None:
        self._renewed[url] = time.monotonic()

    async def urls(self) -> list[str]:
        """Return the addresses that were renewed lately, the oldest replica's first."""
        limit = time.monotonic() - GONE_SECONDS
        self._renewed = {url: last for url, last in self._renewed.items() if last > limit}
        return list(self._renewed)


class Replica:
    """The actor of Ray Serve: the application of fgserve, whose engines are separate processes.

    A dead engine is not restarted. Its replica becomes unhealthy, and Ray replaces the replica.

    directory: handle of the Directory, for `rollout`. Replicas then have addresses of their own with the routes for a
    trainer, and the common address lists them.
    """

    def __init__(self, options: ServeOptions, directory: DeploymentHandle | None = None) -> None:
        self._directory = directory
        logging.getLogger("fastgen").setLevel(logging.INFO if options.server.verbose else logging.WARNING)
        server = replace(options.server, restart=False, replicas=options.server.replicas or 1)
        seeded = any("seed" in model.generator for model in options.models)
        self._service = Service(replace(options, server=server), _rank() if seeded else 0)

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application once its models are loaded. Ray calls this after the constructor and sends no requests
        before it returns. Raises the error of a model that cannot be loaded.
        """
        self._keeping = asyncio.create_task(self._service.run())
        loaded = asyncio.create_task(self._service.loaded.wait())
        await asyncio.to_thread(import_tokenizers)
        await asyncio.wait((self._keeping, loaded), return_when=asyncio.FIRST_COMPLETED)
        await self.check_health()
        directory = self._directory
        if directory is None:
            return make_app(self._service)
        url = self._listen()
        await directory.renew.remote(url)
        self._announcing = asyncio.create_task(_announce(directory, url))

        async def engines() -> list[str]:
            urls: list[str] = await directory.urls.remote()
            return urls

        return make_app(self._service, engines)

    def _listen(self) -> str:
        """Serve the routes for a trainer at a free port of this machine, and return its address."""
        import ray

        options = self._service.options
        listener = listen(options.host, 0)
        server = HttpServer(configure(options, make_app(self._service)))
        self._serving = asyncio.create_task(server.serve([listener]))
        host = ray.util.get_node_ip_address() if options.host in EVERYWHERE else options.host
        return replace(options, host=host).url(listener.getsockname()[1])

    async def check_health(self) -> None:
        """Raise an error if an engine is not healthy. Ray calls this periodically."""
        if self._keeping.done():
            await self._keeping
        if self._service.trouble is not None:
            raise RuntimeError(self._service.trouble)


def _rank() -> int:
    """Return the number of this replica among all of them."""
    from ray import serve

    rank: int = serve.get_replica_context().rank.rank
    return rank


async def _announce(directory: DeploymentHandle, url: str) -> None:
    """Keep the address of a replica in the directory, also after the directory has been restarted."""
    from ray.exceptions import RayError

    while True:
        await asyncio.sleep(HEALTH_SECONDS)
        try:
            await directory.renew.remote(url)
        except RayError as error:
            log.warning("the directory of replicas does not answer: %s", error)


def application(options: ServeOptions, tries: int = 20) -> Application:
    """Return the application for `serve.run`. Raises ValueError.

    options: of these, host, port and restart have no effect. tries: number of failed starts after which Ray gives up.

    Requests with equal X-Session-Id headers go to the same replica, so that a conversation finds its cached prefix.
    """
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    server = options.server
    least, most = server.replicas or 1, server.max_replicas
    count: dict[str, Any] = {"num_replicas": least}
    if most is not None:
        bounds = {"min_replicas": least, "max_replicas": most}
        count = {"autoscaling_config": {**bounds, "target_ongoing_requests": server.replica_requests}}
    num_gpus = server.replica_gpus
    if num_gpus is None:
        used = set[int]().union(*map(gpus, options.models))
        num_gpus = max(used, default=-1) + 1 if ray.cluster_resources().get("GPU") else 0
    logs = {"log_level": "INFO" if server.verbose else "WARNING", "enable_access_log": server.verbose}
    deployment = serve.deployment(
        serve.ingress()(Replica),
        ray_actor_options={"num_cpus": server.replica_cpus, "num_gpus": num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        max_ongoing_requests=UNLIMITED,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        logging_config=logs,
        max_constructor_retry_count=tries,
        **count,
    )
    if not server.rollout:
        return deployment.bind(options)
    directory = serve.deployment(
        Directory, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=UNLIMITED, logging_config=logs
    )
    return deployment.bind(options, directory.bind())


def build(args: dict[str, Any]) -> Application:
    """Return the application for the `import_path` of `serve deploy`. args: content of a YAML file of fgserve, which
    FASTGEN_API_KEY overrides. Raises ValueError."""
    return application(make_options(args, os.environ))


def connect() -> None:
    """Join the cluster at RAY_ADDRESS, or start a local cluster, which ends with this process.

    A local cluster listens only at 127.0.0.1, sends no usage reports, and accepts only clients with its random token,
    which is in the environment of its own processes only. This sets environment variables, which Ray reads when it is
    imported. Raises ValueError if Ray is not installed. Call it in the main thread; signal handlers are kept.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # without it, Ray listens at all addresses
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 starves engines
    ray = needed("ray", "ray", "replicas on Ray")
    terminated = signal.getsignal(signal.SIGTERM)
    ray.init(address=address or "local", include_dashboard=False, logging_level="WARNING")
    signal.signal(signal.SIGTERM, terminated)  # Ray has replaced it


def serve_replicas(options: ServeOptions, port: int) -> None:
    """Serve at a port until a SIGINT or SIGTERM. Raises OSError, ValueError or RuntimeError on failure. Call it in the
    main thread."""
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
            http = {"host": server.host, "port": port}
            serve.start(http_options=http, logging_config={"log_level": "INFO" if server.verbose else "ERROR"})
            note_address(server, port)
            try:
                _deploy(options)
                note("fgserve", f"ready: {', '.join(model.name for model in options.models)}")
                threading.Event().wait()
            finally:
                with suppress(KeyboardInterrupt):  # the second signal
                    serve.delete(NAME, _blocking=False)
                    while NAME in serve.status().applications:
                        time.sleep(0.1)
        finally:
            ray.shutdown()
    except (KeyboardInterrupt, SystemExit):
        pass


def _deploy(options: ServeOptions) -> None:
    """Deploy the replicas and wait until all are ready. Raises RuntimeError with the reason if one cannot start."""
    from ray import serve

    try:
        serve.run(application(options, tries=1), name=NAME)
    except RuntimeError as error:
        deployment = serve.status().applications[NAME].deployments[Replica.__name__]
        raise RuntimeError(deployment.message.strip().splitlines()[-1]) from error  # the error of the replica


def check_room(replicas: int, **each: float) -> None:
    """Raise ValueError if a local cluster is too small; another cluster may grow. each: Ray's resources per replica."""
    import ray

    for kind, amount in each.items():
        there = ray.cluster_resources().get(kind, 0)
        if "RAY_ADDRESS" not in os.environ and replicas * amount > there:
            raise ValueError(f"{replicas} replicas of {amount:g} {kind}s each need more than the {there:g} available")
