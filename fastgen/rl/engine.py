"""RemoteEngine: one engine of `fgserve --rollout`. Engines: what a RemoteGenerator asks of one, or of several.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Generator as PyGenerator
from typing import Protocol, TypedDict

from fastgen.rl.http import Connections, Json, ServerClient
from fastgen.rl.options import RemoteGeneratorOptions
from fastgen.rl.weights import RemoteUpdate, WeightSender


class WeightStatus(TypedDict):
    """The version of an engine's weights, and whether they are torn by an update that failed."""

    weight_version: int
    torn: bool


class Engines(Protocol):
    """Protocol of an engine (RemoteEngine), or of several with the same weights (Fleet). They raise the errors of a
    RemoteGenerator."""

    def begin(self) -> int:
        """Prepare for requests. Return the maximum number of requests that one stream may have in flight."""

    def seeded(self, body: Json, number: int, connections: Connections) -> Json:
        """Return the body of a request with a seed, if it has none and its engine is not to choose it. number: of the
        request, in the order in which a RemoteGenerator begins them."""

    def generate(self, body: Json, connections: Connections, is_aborted: Callable[[], bool]) -> Json | None:
        """Return the output of a request; None if `is_aborted` returns True before it is sent, or before it is sent
        again because its engine has ended. connections: see `ServerClient.post`."""

    def lines(self, body: Json) -> PyGenerator[Json, None, None]:
        """Yield the events of a request as they arrive. Closing the iterator ends the request."""

    def score(self, bodies: list[Json]) -> list[Json]:
        """Return the answers to requests to /score."""

    def update(self, update: RemoteUpdate) -> int | None:
        """Make an update, and return the version of the weights; None on ranks of the trainer that only gather."""

    def post(self, path: str, body: Json) -> list[Json]:
        """Post to each engine, and return the answers."""

    def weight_version(self) -> int: ...
    def close(self) -> None: ...


class RemoteEngine:
    """An engine at one address. See Engines for the methods."""

    def __init__(self, url: str, options: RemoteGeneratorOptions) -> None:
        self._client = ServerClient(url, options.api_key, options.model, options.ready_timeout)
        self._max_requests, self._sender = options.max_requests, WeightSender(self._client, options)

    def begin(self) -> int:
        return self._max_requests

    def seeded(self, body: Json, number: int, connections: Connections) -> Json:
        return body

    def generate(self, body: Json, connections: Connections, is_aborted: Callable[[], bool]) -> Json | None:
        return None if is_aborted() else self._client.post("/generate", body, connections)

    def lines(self, body: Json) -> PyGenerator[Json, None, None]:
        return self._client.lines("/generate", {**body, "stream": True})

    def score(self, bodies: list[Json]) -> list[Json]:
        return [self._client.post("/score", body) for body in bodies]

    def update(self, update: RemoteUpdate) -> int | None:
        return self._sender.update(update)

    def state(self) -> WeightStatus:
        body = self._client.get("/weight_version")
        return WeightStatus(weight_version=body["weight_version"], torn=body["torn"])

    def fleet_seed(self) -> int:
        """Return a number that the engine has given to no other client."""
        return int(self._client.post("/fleet_seed", {})["seed"])

    def weight_version(self) -> int:
        return self.state()["weight_version"]

    def post(self, path: str, body: Json) -> list[Json]:
        return [self._client.post(path, body)]

    def close(self) -> None:
        self._sender.close()
