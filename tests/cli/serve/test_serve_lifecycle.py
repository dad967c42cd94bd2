"""fgserve with stub engines: limits, disconnects, engines that hang or die, and signals."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import serve_stub
from serve_stub import BAD, STEP_SECONDS
from serving import STUB, Server, alive, request_bytes, until
from starlette.testclient import TestClient

from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.main import main
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.service import MAX_COMPUTED, Service
from fastgen.cli.serve.validation import ApiError
from fastgen.processes import spawning as processes

pytestmark = pytest.mark.timeout(60)

LONG: dict[str, Any] = {"model": "x", "prompt": [5], "max_tokens": 4000}

Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts servers; they end with the test, and their engines too."""
    servers: list[Server] = []
    engines: set[int] = set()

    def start(*arguments: str) -> Server:
        servers.append(Server(STUB, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        engines.update(server.engines() if server.process.poll() is None else ())
        server.kill()
    until(lambda: not any(map(alive, engines)))


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    limits = "--max-queued-tokens=100 --max-queued-requests=3 --max-body-mb=0.001 --request-timeout=3"
    server = Server(STUB, *limits.split(), "--stall-timeout=0.3", "--max-seqs=1")
    yield server.await_ready()
    server.kill()


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """A server with one lane and small limits, which a test must leave idle and healthy."""
    said = shared.said
    yield shared
    until(shared.idle)
    assert shared.get("/health").status_code == 200
    assert "Traceback" not in shared.said[len(said) :]
    assert shared.post("/completions", {"prompt": [5] * 100, "max_tokens": 1}).status_code == 200, "all has its room"


def reply(connection: socket.socket) -> bytes:
    """Read until the other end closes."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_the_engine_gets_the_priority(server: Server) -> None:
    """The stub answers with an id of 7 plus the priority."""
    for fields, id in (({}, 7), ({"priority": 5}, 12), ({"priority": -3}, 4)):
        body = {"prompt": [5], "max_tokens": 1, "return_token_ids": True, **fields}
        assert server.post("/completions", body).json()["choices"][0]["token_ids"] == [id]
    assert server.post("/completions", {"prompt": [5], "priority": 0.5}).json()["error"]["param"] == "priority"


# ------------------------------------------------------------------------------------------------ limits


def test_a_full_queue_answers_503_with_retry_after(server: Server) -> None:
    def post(prompt: Any, **more: Any) -> httpx.Response:
        return server.post("/completions", {"prompt": prompt, "max_tokens": 1, **more})

    with server.client().completions.create(stream=True, **LONG) as running:
        next(iter(running))
        waiting = server.send(request_bytes("/completions", {"prompt": [5] * 60}))
        until(lambda: server.stats()["waiting"] == 1)
        refused = post([5] * 41)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["Retry-After"] == "1"
        assert "1 samples of prompts of 60 tokens are waiting" in refused.json()["error"]["message"]
        assert post([[5], [5], [5]]).status_code == 503, "it would be four"
        assert post([5], n=3).status_code == 503, "and here too"
        never = post([[5]] * 4)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        never = post([[5], [5]], n=2)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert "2 prompts with n=2 are 4 samples; one request may have 3" in never.json()["error"]["message"]
        waiting.close()
        until(lambda: server.stats()["aborted_total"] >= 1)


def test_requests_have_an_end(server: Server) -> None:
    """A running request, a waiting one, and one with an incomplete body reach the time limit."""
    late: list[httpx.Response] = []
    stream = server.client().completions.create(stream=True, **LONG)
    next(iter(stream))
    waiting = threading.Thread(target=lambda: late.append(server.post("/completions", LONG)))
    waiting.start()
    half = server.send(request_bytes("/completions", LONG)[:-5])
    with pytest.raises(openai.APIError, match=r"more than 3 seconds"):
        list(stream)
    waiting.join()
    assert (late[0].status_code, late[0].json()["error"]["code"]) == (504, "timeout")
    half.settimeout(5)
    assert b"504" in half.recv(65536).split(b"\r\n")[0]
    half.close()


def test_a_trainer_waits_until_the_model_is_loaded() -> None:
    """Trainers of vLLM and SGLang ask /health, as the ports of these servers open when a model is loaded."""
    for flags, status in ((["--rollout"], 503), ([], 200)):
        client = TestClient(make_app(Service(read_options(["one", *flags], {}))))
        assert client.get("/health").status_code == status


def test_each_client_of_engines_gets_a_seed_that_depends_on_theirs() -> None:
    def drawn(*flags: str, rank: int = 0) -> list[int]:
        (model,) = Service(read_options(["one", "--rollout", *flags], {}), rank).models.values()
        return [model.fleet_seed() for _ in range(3)]

    assert drawn("--seed", "0") == drawn("--seed", "0") == drawn("--seed", "0", rank=1)
    assert len({*drawn("--seed", "0"), *drawn("--seed", "1"), *drawn(), *drawn()}) == 12


def test_the_key_and_the_model_are_checked() -> None:
    """The checks work before any model is loaded."""
    client = TestClient(make_app(Service(read_options(["one", "two", "--api-key", "secret", "--strict"], {}))))
    for path, status in (("/health", 200), ("/v1/ready", 503), ("/metrics", 200), ("/models", 401)):
        assert client.get(path).status_code == status
    assert client.get("/v1/version").json()["error"]["code"] == "invalid_api_key"
    assert client.get("/openapi.json").json()["security"] == [{"key": []}]
    client.headers["Authorization"] = "Bearer secret"
    assert client.get("/v1/models").json()["data"] == []
    for name, status in (("one", 503), ("three", 404), (None, 400)):
        told = client.post("/completions", json={"model": name, "prompt": "a"})
        assert told.status_code == status
        assert told.json()["error"]["param"] == (None if name == "one" else "model")
    told = client.post("/completions", json={"model": "one", "prompt": "a", "store": False})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "store"), "the server is strict"


OPENED = "--allow-origin=http://page.example"
HERE = ("localhost:5678", "127.0.0.1", "[::1]:5678", "a.localhost")
THERE = ("evil.example:5678", "127.0.0.1.evil.example")


@pytest.mark.parametrize(
    ("method", "path", "hosts", "options", "status"),
    [
        ("POST", "/v1/completions", HERE, "", 503),  # the model is not loaded
        ("POST", "/v1/completions", THERE, "", 403),
        ("POST", "/v1/completions", THERE, "--host=0.0.0.0", 503),  # names of this machine are in use
        ("POST", "/v1/completions", ("page.example",), OPENED, 503),
        ("POST", "/v1/completions", THERE, "--api-key=secret", 401),
        ("GET", "/v1/version", (*HERE, "box", "host.docker.internal:5678"), "", 200),
        ("GET", "/v1/version", (*THERE, "[", ""), "", 403),
        *(("GET", path, THERE, "", 403) for path in ("/", "/openapi.json", "/metrics", "/v1/models")),
        ("GET", "/v1/health", THERE, "", 200),  # as a proxy asks
        *(("GET", "/v1/version", ("page.example",), own, 200) for own in (OPENED, "--host=::", "--allow-origin=*")),
        ("GET", "/health", THERE, "--api-key=secret", 200),
    ],
)  # fmt: skip
def test_a_name_that_leads_here_opens_no_local_server(
    method: str, path: str, hosts: tuple[str, ...], options: str, status: int
) -> None:
    """DNS rebinding: a page's own name leads to 127.0.0.1, so that its browser asks nobody. A post has its origin."""
    client = TestClient(make_app(Service(read_options(["one", *options.split()], {}))), "http://x")
    for host in hosts:
        headers = {"Host": host, **({"Origin": f"http://{host}"} if method == "POST" else {})}
        told = client.request(method, path, json={"model": "one", "prompt": "a"}, headers=headers)
        assert told.status_code == status


@pytest.mark.parametrize("size", [1001, 20_000])
def test_a_body_that_is_too_large_is_refused(server: Server, size: int) -> None:
    data = b"POST /completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
    told = reply(server.send(data + b" " * min(size, 9000)))
    assert told.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in told
    for begun in (b"", b"POST /completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"):
        assert reply(server.send(begun + b"no such thing\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "begun", [b"GET /health?", b"GET /health HTTP/1.1\r\nA: ", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /"]
)
def test_a_head_that_does_not_end_is_refused(server: Server, begun: bytes) -> None:
    with server.send(begun) as connection:
        for _ in range(1000):
            try:
                connection.sendall(b"a" * 1000)
            except OSError:
                return
            time.sleep(0.0001)
    raise AssertionError("the server takes all of it")


def test_a_large_body_is_no_large_head(server: Server) -> None:
    first = request_bytes("/completions", {"prompt": "a" * 800_000})
    told = reply(server.send(first + b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"))
    assert told.startswith(b"HTTP/1.1 413 ")
    assert told.endswith(b'{"status":"ok"}')


def test_too_many_connections_are_a_line_in_the_log(server: Server) -> None:
    process = server.process.pid
    before, held = resource.prlimit(process, resource.RLIMIT_NOFILE), len(os.listdir(f"/proc/{process}/fd"))
    resource.prlimit(process, resource.RLIMIT_NOFILE, (held + 3, before[1]))
    many = [server.send(b"") for _ in range(20)]
    server.await_said("fgserve: WARNING: no more connections: Too many open files; raise the hard limit")
    for connection in many:
        connection.close()
    assert server.get("/health", timeout=10).status_code == 200
    resource.prlimit(process, resource.RLIMIT_NOFILE, before)
    assert server.said.count("no more connections") == 1


# ------------------------------------------------------------------------------------------------ clients that go


def test_a_client_that_goes_while_it_waits_or_sends_leaves_nothing(server: Server) -> None:
    before = server.stats()
    running = server.send(request_bytes("/completions", {**LONG, "stream": True}))
    until(lambda: server.stats()["running"] == 1)
    waits = server.send(request_bytes("/completions", {"prompt": [5] * 90}))
    until(lambda: server.stats()["waiting"] == 1)
    server.send(request_bytes("/completions", LONG)[:-5]).close()
    server.send(b"POST /comp").close()
    waits.close()
    running.close()
    until(server.idle)
    assert server.stats()["aborted_total"] - before["aborted_total"] == 2


def test_the_time_in_the_queue_is_measured(server: Server) -> None:
    """The second request waits until the first one has ended; its time in the queue ends before its first token."""
    before = server.stats()
    with server.client().completions.create(stream=True, **{**LONG, "max_tokens": 40}) as first:
        next(iter(first))
        assert server.post("/completions", {"prompt": [5], "max_tokens": 1}).status_code == 200
    after = server.stats()
    found = {name: after[name] - before[name] for name in after}
    assert found["queue_seconds_count"] == found["first_token_seconds_count"] == 2
    assert 10 * STEP_SECONDS < found["queue_seconds_sum"] < found["first_token_seconds_sum"] - STEP_SECONDS


# ------------------------------------------------------------------------------------------------ engines


def test_a_stall_is_unhealthy_until_it_is_over(server: Server) -> None:
    with server.client().completions.create(stream=True, **LONG) as stream:
        next(iter(stream))
        server.signal_engines(signal.SIGSTOP)
        until(lambda: server.get("/health").status_code == 503)
        told = server.get("/health").json()["error"]
        assert told["code"] == "unhealthy"
        assert told["message"].startswith("the engine of fastgen-tiny has finished no step for ")
        server.signal_engines(signal.SIGCONT)
        next(iter(stream))  # which may have arrived before the stall
        until(lambda: server.get("/health").status_code == 200)


def test_models_start_one_after_another_and_one_that_dies_is_started_again_once(start: Start, tmp_path: Path) -> None:
    file, there = tmp_path / "serve.yaml", tmp_path / "slow"
    file.write_text(f"models: [{{name: one, model: {there}}}, {{name: two, model: slow}}]\nport: 0\n")
    server = start("--config", str(file))
    assert server.get("/ready").status_code == 503
    assert server.get("/health").status_code == 200
    two = {"model": "two", "prompt": [5], "max_tokens": 1}
    there.touch()
    while server.get("/ready").status_code == 503:
        running, loaded = len(server.engines()), len(server.get("/models").json()["data"])
        assert running <= loaded + 1
    first, second = server.engines()
    client = server.client()
    for dying in (first, None):
        there.unlink()
        with client.completions.create(stream=True, **{**LONG, "model": "one"}) as stream:
            next(iter(stream))
            os.kill(dying or next(pid for pid in server.engines() if pid != second), signal.SIGKILL)
            with pytest.raises(openai.APIError, match="the engine of one was killed by SIGKILL"):
                list(stream)
        if dying:
            told = server.post("/completions", two | {"model": "one"}).json()
            assert server.get("/health").status_code == 503
            assert server.get("/ready").status_code == 503
            assert "one was killed" in told["error"]["message"]
            assert server.post("/completions", two).status_code == 200, "the other goes on"
            there.touch()
            server.await_ready()
            assert server.get("/health").status_code == 200
    status, said = server.end()
    assert status == 1
    assert said.endswith("fgserve: error: the engine of one was killed by SIGKILL (has the memory run out?)\n")
    assert not alive(second)


def test_without_a_restart_the_first_death_is_the_end(start: Start) -> None:
    server = start("--no-restart").await_ready()
    told = server.post("/completions", {"prompt": [BAD]})
    reason = "the engine of fastgen-tiny failed with RuntimeError: bad luck"
    assert (told.status_code, told.json()["error"]["code"]) == (500, "engine_error")
    assert reason in told.json()["error"]["message"]
    status, said = server.end()
    assert status == 1
    assert said.endswith(f"fgserve: error: {reason}\n")


def test_a_failed_start_reports_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(processes, "spawn", serve_stub.spawn)
    assert main(["a-broken-one", "--port", "0"]) == 1
    assert capsys.readouterr().err.endswith("fgserve: error: a-broken-one is broken; mend it\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == main(["--port", str(port), "--replicas=1"]) == 1
    place = f"127.0.0.1, port {port}: Address already in use; give another --port or --host"
    assert capsys.readouterr().err == 2 * f"fgserve: error: cannot listen at {place}\n"
    assert main(["--port=0", f"--ssl-certfile={__file__}"]) == 1
    where = f"no certificate and key in --ssl-certfile {__file__}"
    assert capsys.readouterr().err.startswith(f"fgserve: error: {where}: [SSL]")
    assert main(["--port=0", "--ssl-keyfile=a"]) == 1
    assert capsys.readouterr().err == "fgserve: error: --ssl-keyfile needs --ssl-certfile\n"


# ------------------------------------------------------------------------------------------------ signals


def test_a_sigterm_lets_requests_finish_or_fail_with_an_error(start: Start) -> None:
    server = start("--shutdown-timeout=3").await_ready()
    engines, client = server.engines(), server.client()
    with client.completions.create(stream=True, **LONG) as long:
        next(iter(long))
        short = client.completions.create(stream=True, **{**LONG, "max_tokens": 20})
        next(iter(short))
        half = server.send(request_bytes("/completions", LONG)[:-5])
        server.signal_engines(signal.SIGTERM)  # a service manager sends it to all
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server))
        assert list(short)[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(long)
    assert b'"code":"shutting_down"' in reply(half)
    status, said = server.end()
    assert status == 0
    assert "error" not in said.lower()
    assert not any(map(alive, engines))
    socket.create_server(server.address).close()


def refuses(server: Server) -> bool:
    try:
        server.get("/health")
    except httpx.TransportError:
        return True
    return False


def test_a_second_signal_does_not_wait(start: Start) -> None:
    server = start("--shutdown-timeout=60").await_ready()
    with server.client().completions.create(stream=True, **LONG) as stream:
        next(iter(stream))
        server.signal_engines(signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        server.await_said("fgserve: finishing 1 requests; a second Ctrl-C ends them at once\n")
        until(lambda: refuses(server))
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        server.signal_engines(signal.SIGCONT)
    assert server.end()[0] == 0


def test_a_signal_ends_a_server_whose_worker_threads_are_all_busy() -> None:
    busy = "from fastgen.cli.serve import http_responses as module; module.prepare = lambda *args: time.sleep(1000)"
    program = f"import sys, time; sys.path.insert(0, 'tests'); import serve_stub; {busy}; serve_stub.serve()"
    with Server(("-c", program), "--port=0", "--shutdown-timeout=0.2") as server:
        server.await_ready()
        waiting = [server.send(request_bytes("/completions", LONG)) for _ in range(40)]
        time.sleep(0.5)  # they reach the threads
        server.process.send_signal(signal.SIGTERM)
        assert b"shutting_down" in reply(waiting[0])
        assert server.end()[0] == 0


# ------------------------------------------------------------------------------------------------ routes about tokens


def test_routes_about_tokens_have_a_bound() -> None:
    async def main() -> None:
        service, release, begun = Service(read_options(["one"], {})), threading.Event(), list[int]()

        def work(number: int) -> int:
            begun.append(number)
            release.wait(30)
            return number

        calls = [asyncio.create_task(service.compute(True, work, number)) for number in range(MAX_COMPUTED)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="try again later") as refused:
            await service.compute(False, work, -1)
        assert refused.value.status == 503
        calls[-1].cancel()
        await asyncio.wait(calls[-1:])
        release.set()
        assert await asyncio.gather(*calls[:-1]) == list(range(MAX_COMPUTED - 1))
        assert MAX_COMPUTED - 1 not in begun, "the client had gone before"
        assert await service.compute(True, work, 7) == 7

    asyncio.run(main())


def test_a_signal_while_a_model_loads_ends_that(start: Start) -> None:
    server = start("a-slow-one")
    until(server.engines)
    engines = server.engines()
    server.process.send_signal(signal.SIGTERM)
    status, said = server.end()
    assert (status, said.count("\n")) == (0, 2), said
    assert not any(map(alive, engines))
