"""fgserve --replicas: two replicas of the bundled model on Ray Serve, the loss of one, and the files for clusters."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import serve_stub
import yaml
from serving import FGSERVE, ROOT, Server, alive, children, descendants, is_called, until

from fastgen.cli.serve import ray as ray_backend
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.ray import Replica
from fastgen.processes import spawning as processes

pytestmark = pytest.mark.timeout(600)

DEPLOY = ROOT / "scripts" / "deploy"

CHAT: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "what is 12 + 30?"}],
    "temperature": 0,
    "logprobs": True,
    "stream_options": {"include_usage": True},
}
TEXT: dict[str, Any] = {"model": "any", "prompt": ["tell me", "once"], "n": 2, "seed": 3, "max_tokens": 24}
SHORT: dict[str, Any] = {"model": "any", "prompt": [5, 6, 7], "max_tokens": 16, "extra_body": {"ignore_eos": True}}
ASKING = httpx.Client(timeout=30)  # one for all, as each takes 30 ms to make
OWN = {"id", "created", "system_fingerprint", "cached_tokens"}  # fields that differ between two answers to one request


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with two replicas, on less than two cores."""
    pytest.importorskip("ray", reason="needs the extra ray")
    with Server(FGSERVE, "--replicas=2", "--replica-cpus=0.4", seconds=240) as server:
        server.await_said("fgserve: ready", 240)  # until then, requests wait
        yield server
        started = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        server.end()
    until(lambda: not any(map(alive, started)))


def replicas(server: Server) -> list[int]:
    """Return the processes of the replicas."""
    found = descendants(server.process.pid)
    return [one for one in found if is_called(one, b"ray::ServeReplica")]


def requests_of(server: Server, session: str) -> float:
    """Return the number of requests so far to the engine that serves a session."""
    return count_of(server, session, "requests_total")


def count_of(server: Server, session: str, name: str) -> float:
    text = ASKING.get(server.url + "/metrics", headers={"X-Session-Id": session}).raise_for_status().text
    return float(text.split(f'fastgen_{name}{{model="fastgen-tiny"}} ')[1].split()[0])


def plain(value: Any) -> Any:
    """Return an answer, or a part of it, without ids and times."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if name not in OWN}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def answers(server: Server) -> list[Any]:
    """Return complete answers, a streamed one and an error for the same requests."""
    client = server.client()
    chat = {name: value for name, value in CHAT.items() if name != "stream_options"}
    whole = [client.chat.completions.create(**chat), client.completions.create(**TEXT)]
    text, reasons = "", []
    for chunk in client.chat.completions.create(stream=True, **CHAT):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == whole[0].choices[0].message.content == "12 + 30 = 42."
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(extra_body={"beam_width": 2}, **TEXT)
    return [*(plain(answer.model_dump()) for answer in whole), text, reasons[-1], refused.value.body]


def test_answers_are_those_of_fgserve(server: Server) -> None:
    with Server(FGSERVE) as plain_server:
        assert answers(server) == answers(plain_server.await_ready())
    assert len(replicas(server)) == 2


def test_a_request_has_one_id(server: Server) -> None:
    given = ASKING.get(server.url + "/health", headers={"X-Request-Id": "abc"})
    assert given.headers.get_list("x-request-id") == ["abc"]
    assert len(ASKING.get(server.url + "/health").headers.get_list("x-request-id")) == 1


def test_a_session_keeps_to_its_replica(server: Server) -> None:
    client = server.client()
    before = {str(session): requests_of(server, str(session)) for session in range(8)}
    for _ in range(30):
        client.completions.create(extra_headers={"X-Session-Id": "0"}, **{**SHORT, "max_tokens": 1})
    more = [requests_of(server, session) - count for session, count in before.items()]
    assert more[0] == 30
    assert set(more) == {0, 30}, "some sessions are of this replica, some of the other"
    conversation = {"model": "any", "messages": [{"role": "user", "content": "tell me of the sea. " * 12}]}
    told = [client.chat.completions.create(extra_headers={"X-Session-Id": "new"}, **conversation) for _ in range(5)]
    assert all(answer.usage.prompt_tokens_details.cached_tokens > 0 for answer in told[1:])  # type: ignore[union-attr]


def test_a_client_that_goes_away_ends_its_request(server: Server) -> None:
    before = count_of(server, "0", "aborted_total")
    long = {**SHORT, "max_tokens": 1900, "extra_headers": {"X-Session-Id": "0"}}
    with server.client().completions.create(stream=True, **long) as stream:
        next(iter(stream))
    until(lambda: count_of(server, "0", "aborted_total") == before + 1)
    assert count_of(server, "0", "running") == 0


def fewest(server: Server) -> float:
    """Return the number of requests so far to the replica with the fewest. The pause limits the load of the queries."""
    time.sleep(0.3)
    return min(requests_of(server, str(session)) for session in range(8))


class Load:
    """Clients that send requests repeatedly, each in its own session."""

    def __init__(self, server: Server, clients: int) -> None:
        self.answered: list[tuple[int, float]] = []  # the session, and when the request began
        self.failed: list[tuple[int, float]] = []
        self._server, self._ended = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]

    def _ask(self, session: int) -> None:
        client = self._server.client()
        while not self._ended.wait(0.1):
            begun = time.monotonic()
            try:
                asked = {**SHORT, "max_tokens": 48, "extra_headers": {"X-Session-Id": str(session)}}
                chunks = list(client.completions.create(stream=True, **asked))
                assert chunks[-1].choices[0].finish_reason == "length"
                self.answered.append((session, begun))
            except (openai.APIError, AssertionError, IndexError):
                self.failed.append((session, begun))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def test_a_replica_that_is_lost_takes_along_only_what_it_answers(server: Server) -> None:
    client = server.client()
    while fewest(server) < 40:
        for _ in range(20):
            client.completions.create(**{**SHORT, "max_tokens": 1})
    with Load(server, 4) as load:
        until(lambda: len(load.answered) > 10)
        first, engines = replicas(server)[0], children(replicas(server)[0])
        killed = time.monotonic()
        os.kill(first, signal.SIGKILL)
        # A new engine has had few requests.
        until(lambda: fewest(server) < 40)
        replaced = time.monotonic()
        until(lambda: {session for session, begun in load.answered if begun > replaced} == set(range(4)))
    assert len(load.failed) == len({session for session, _ in load.failed}) < 4, "one of a session at most"
    assert all(begun < killed for _, begun in load.failed), "what came later is answered by the others"
    assert not any(alive(engine) for engine in engines)
    assert len(replicas(server)) == 2
    print(f"replaced in {replaced - killed:.1f} s; {len(load.answered)} answered, {len(load.failed)} lost")


def test_a_sigterm_lets_requests_finish_and_leaves_nothing(server: Server) -> None:
    started = descendants(server.process.pid)
    stream = server.client().completions.create(stream=True, **{**SHORT, "max_tokens": 100})
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    status, said = server.end()
    assert status == 0
    assert "Traceback" not in said
    until(lambda: not any(map(alive, started)))


def test_health_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "spawn", serve_stub.spawn)

    async def watch(replica: Replica) -> None:
        while True:
            await replica.check_health()
            await asyncio.sleep(0.02)

    async def live(name: str) -> None:
        before = children(os.getpid())
        replica = Replica(read_options([name, "--replicas", "2"], {}))
        await replica.__serve_build_asgi_app__()
        await replica.check_health()
        (engine,) = {*children(os.getpid())} - {*before}
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the engine of one was killed by SIGKILL"):
            await asyncio.wait_for(watch(replica), 10)

    asyncio.run(live("one"))
    with pytest.raises(ValueError, match="a-broken-one is broken; mend it"):
        asyncio.run(live("a-broken-one"))


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # so that no variable is set
    with pytest.raises(ValueError, match=r"the package ray is not installed; run: pip install -e '.*\[ray\]'"):
        ray_backend.connect()


def test_replicas_that_have_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    ray_backend.check_room(4, CPU=0.5, GPU=0)
    with pytest.raises(ValueError, match="4 replicas of 1 CPUs each need more than the 2 available"):
        ray_backend.check_room(4, CPU=1)
    with pytest.raises(ValueError, match="2 replicas of 1 GPUs each need more than the 0 available"):
        ray_backend.check_room(2, CPU=0.5, GPU=1)


def test_the_deployment_files_match_rays_schema() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs the extra ray").ServeDeploySchema
    config = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    manifest = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    inner = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    assert schema.model_validate(config).applications == schema.model_validate(inner).applications
    (application,) = config["applications"]
    assert application["import_path"] == f"{ray_backend.__name__}:{ray_backend.build.__name__}"
    deployment = ray_backend.build(application["args"])._bound_deployment
    bounds = deployment._deployment_config.autoscaling_config
    assert (bounds.min_replicas, bounds.max_replicas, deployment.ray_actor_options["num_gpus"]) == (2, 8, 1)
    cluster = manifest["spec"]["rayClusterConfig"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert [len(group["template"]["spec"]["containers"]) for group in groups] == [1, 1]


def test_the_image_is_built_as_its_linter_wants_it() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert not done.returncode, done.stdout
    copied = re.findall("^COPY (.*) ", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for names in copied for name in names.split())
