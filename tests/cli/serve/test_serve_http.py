"""HTTP itself, with stub engines: other clients' habits, keys, web pages, slow clients, logs, and HTTPS."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_stub import STEP_SECONDS
from serving import HTTP, STUB, Server, request_bytes, until

from fastgen.cli.serve.app import read_head

pytestmark = pytest.mark.timeout(60)

ASKED: dict[str, Any] = {"model": "x", "prompt": [5, 6], "max_tokens": 3}
KEY = {"Authorization": "Bearer secret"}
PAGE = "https://page.example"

# The head that the HttpClient of Java 17 sends by default; the body comes in a packet of its own.
JAVA = b"""POST /v1/completions HTTP/1.1\r
Connection: Upgrade, HTTP2-Settings\r
%s\r
Host: 127.0.0.1:36659\r
HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r
Upgrade: h2c\r
User-Agent: Java-http-client/17.0.15\r
Authorization: bearer secret\r
Content-Type: application/json\r
\r
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(STUB, "--api-key=secret", f"--allow-origin={PAGE}", "--read-timeout=1") as server:
        yield server.await_ready()
    assert "Traceback" not in server.said


def headers(**given: str) -> dict[str, str]:
    return KEY | {name.replace("_", "-"): value for name, value in given.items()}


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_http2_does_not_lose_the_body(server: Server, chunked: bool) -> None:
    body = request_bytes("/", ASKED).partition(b"\r\n\r\n")[2]
    length = b"Transfer-encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    with server.send(JAVA % length) as connection:
        for _ in range(2):  # the connection stays
            connection.sendall(sent)
            told = b""
            while not told.endswith(b"}"):
                told += connection.recv(65536)
            assert told.startswith(b"HTTP/1.1 200 ")
            assert b'"completion_tokens":3' in told
            connection.sendall(JAVA % length)


def test_keys_paths_and_methods_as_clients_write_them(server: Server) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert server.get("/v1/models", headers={"Authorization": f"{scheme} secret"}).status_code == 200
    for wrong in ("Bearer wrong", "Basic secret", "secret", "Bearer"):
        assert server.get("/v1/models", headers={"Authorization": wrong}).status_code == 401
    for path in ("/health", "/ready", "/ping", "/v1/health"):
        assert HTTP.head(server.url + path).status_code == server.get(path).status_code == 200
    assert server.get("/v1/models/", headers=KEY).json() == server.get("/v1/models", headers=KEY).json()
    assert server.get("/version", headers=KEY).json()["version"]
    for path in ("//v1//completions", "/v1/completions/", "/completions//"):
        assert server.post(path, ASKED, headers=KEY).json()["choices"][0]["text"] == "xxx"
        assert server.post(path, ASKED).status_code == 401
    assert server.get("//v1//health/").status_code == 200
    assert server.get("//v1//models").status_code == 401


def test_a_web_page_of_another_server_cannot_post(server: Server) -> None:
    def post(kind: str, **given: str) -> int:
        content = b'{"prompt": [5], "max_tokens": 1}'
        said = headers(content_type=kind, **given)
        return HTTP.post(f"{server.url}/completions", content=content, headers=said).status_code

    assert post("text/plain") == 200, "a program"
    for origin in ("https://other.example", "null", "http://["):
        assert post("text/plain", origin=origin) == 403
        assert post("", origin=origin) == 403
        assert post("application/json; charset=utf-8", origin=origin) == 200, "the browser has asked before"
    assert post("text/plain", origin=PAGE) == 200
    assert post("text/plain", origin=server.url) == 200


def test_pages_of_allowed_origins_are_answered(server: Server) -> None:
    def ask(origin: str) -> httpx.Response:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        return HTTP.options(f"{server.url}/v1/chat/completions", headers={"origin": origin, **asked})

    allowed = ask(PAGE)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    assert allowed.headers["access-control-allow-headers"] == "authorization"
    assert "access-control-allow-origin" not in ask("https://other.example").headers
    told = server.post("/v1/completions", {}, headers={"origin": PAGE})
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (401, PAGE)


# ------------------------------------------------------------------------------------------------ slow clients


WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"POST /completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("begun", [b"", b"GET /hea", HALF, JAVA[:-2], WHOLE + b"GET /hea", WHOLE + HALF])
def test_a_request_that_does_not_come_ends(server: Server, begun: bytes) -> None:
    with server.send(begun) as connection:
        until(lambda: not connection.recv(65536))


def test_a_slow_body_and_a_slow_answer_do_not_end(server: Server) -> None:
    data = request_bytes("/completions", {**ASKED, "max_tokens": 120}).replace(
        b"Host: x", b"Host: x\r\nAuthorization: bearer secret"
    )
    with server.send(data[:-30]) as connection:
        for at in range(30, 0, -10):
            time.sleep(0.4)
            connection.sendall(data[-at : -at + 10 or None])
        told = b""
        while not told.endswith(b"}}}"):  # head and body may come apart
            told += connection.recv(65536)
        assert told.startswith(b"HTTP/1.1 200 "), "it takes 1.2 s to generate"
        time.sleep(1.2)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 "), "an idle connection stays longer"


# ------------------------------------------------------------------------------------------------ logs


def test_each_request_has_an_id_and_a_line_in_the_log(server: Server) -> None:
    def count(status: int) -> float:
        found = re.search(rf'^fastgen_responses_total{{status="{status}"}} (\S+)$', server.get("/metrics").text, re.M)
        return float(found[1]) if found else 0

    before = count(200), count(401)
    for stream in (False, True):
        asked = {**ASKED, "stream": stream, "request_id": "mine"}
        told = server.post("/v1/completions?a=b", asked, headers=headers(x_request_id="abc:1"))
        assert told.headers["x-request-id"] == "abc:1"
        assert '"id":"cmpl-abc:1"' in told.text
    assert '"id":"cmpl-mine"' in server.post("/v1/completions", asked, headers=headers()).text
    wrong = server.post("/v1/completions", ASKED, headers={"x-request-id": "a b"})
    assert re.fullmatch("[0-9a-f]{32}", wrong.headers["x-request-id"])
    assert (count(200) - before[0], count(401) - before[1]) == (5, 1), "two were for the metrics"
    line = (
        r"fgserve: [-0-9T:+]+ POST /v1/completions 200 0\.\d{3}s client=127\.0\.0\.1 id=abc:1 "
        r"model=fastgen-tiny prompt_tokens=2 completion_tokens=3 queue=0\.\d{3}s first_token=0\.\d{3}s"
    )
    assert len(re.findall(f"^{line}$", server.said, re.M)) == 2
    assert re.search(rf"POST /v1/completions 401 \S+ client=\S+ id={wrong.headers['x-request-id']}$", server.said, re.M)
    assert "secret" not in server.said
    assert "GET /metrics" not in server.said, "no line for a successful probe"
    assert server.get("/v1/readier").status_code == 401
    server.await_said("GET /v1/readier 401")


def test_a_client_that_goes_has_a_status_of_its_own(server: Server) -> None:
    for stream in (False, True):
        before = server.stats()
        data = request_bytes("/completions", {**ASKED, "max_tokens": 4000, "stream": stream})
        key = b"Host: x\r\nX-Request-Id: gone-%d\r\nAuthorization: bearer secret" % stream
        connection = server.send(data.replace(b"Host: x", key))
        until(lambda: server.stats()["running"] == 1)
        connection.close()
        server.await_said(f"id=gone-{stream:d} ")
        until(server.idle)
        after = server.stats()
        assert after["aborted_total"] - before["aborted_total"] == 1
        assert after["generated_tokens_total"] - before["generated_tokens_total"] < 2 / STEP_SECONDS
        assert re.search(rf"POST /completions 499 \S+ client=\S+ id=gone-{stream:d} ", server.said)


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    command = [sys.executable, *STUB]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        try:
            for _ in range(32):  # 1.9 MB of lines
                assert HTTP.get(f"{url}/{'a' * 60_000}").status_code == 404
            process.terminate()
            said = process.stderr.read()
        finally:
            process.kill()
    assert re.search(r"^\d+ lines of the log were dropped: nobody read them in time$", said, re.M)
    assert said.count("aaa 404") > 10


def test_a_path_leads_to_no_file_and_cannot_forge_a_line(server: Server) -> None:
    for path in ("/../../etc/passwd", "/..%2f..%2fetc/passwd", "/docs/../../etc/passwd", "//etc/passwd"):
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: bearer secret\r\nConnection: close\r\n\r\n"
        with server.send(head.encode()) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
    assert server.get("/a%0Afgserve:%20b", headers=KEY).status_code == 404
    server.await_said("GET /a%0Afgserve%3A%20b 404")


# ------------------------------------------------------------------------------------------------ heads

JSON = b'{"prompt": [5], "max_tokens": 1}'
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(JSON), JSON)
LENGTH = b"Content-Length: %d\r\n" % len(CHUNKED)
CODING = b"Transfer-Encoding: chunked\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: bearer secret\r\n%s\r\n%s"
GET = b"GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: bearer secret\r\n\r\n"


@pytest.mark.parametrize(
    "wrong",
    [
        POST % (LENGTH + CODING, CHUNKED),
        POST % (CODING + LENGTH, CHUNKED),
        POST % (b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n", CHUNKED),
        (POST % (CODING, CHUNKED)).replace(b"HTTP/1.1", b"HTTP/1.0"),
        *(
            GET % target
            for target in (b"v1/models", b"http:///v1/models", b"http://a@b/v1/models", b"ftp://x/v1/models")
        ),
        (GET % b"/v1/models").replace(b"Host: x", b"Host: x y"),
    ],
)
def test_a_malformed_head_ends_the_connection(server: Server, wrong: bytes) -> None:
    """Another server on the way may see other requests in what follows (RFC 9112, 3.2 and 6.1)."""
    with server.send(wrong + GET % b"/v1/models") as connection:
        told = b""
        while part := connection.recv(65536):
            told += part
    assert told.startswith(b"HTTP/1.1 400 ")
    assert told.count(b"HTTP/1.1 ") == 1
    assert b'"code":"malformed_request"' in told


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://x/v1/models", "/v1/models"),
        (b"HTTP://x:99/v1/models?a=b", "/v1/models"),
        (b"https://[::1]:5678//v1/models/", "/v1/models"),
        (b"http://x/v1/models/a%2Fb%20c", "/v1/models/a/b c"),
        (b"http://x/health", "/health"),
    ],
)
def test_a_target_may_be_a_url(server: Server, target: bytes, path: str) -> None:
    expected = server.get(path, headers=KEY).content
    with server.send(GET % target) as connection:
        told = b""
        while not told.endswith(expected):
            told += connection.recv(65536)
    assert told.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("target", "host"), [("http://evil.example/", "localhost"), ("http://localhost/", "evil.example")]
)
def test_the_host_of_a_url_replaces_the_header(target: str, host: str) -> None:
    """RFC 9112, 3.2.2; so a page's own name does not open a local server (DNS rebinding)."""
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": target, "raw_path": target.encode()}
    scope |= {"headers": [(b"host", host.encode()), (b"a", b"b")], "http_version": "1.1"}
    read_head(scope)
    assert scope["headers"] == [(b"a", b"b"), (b"host", target.split("/")[2].encode())]
    assert (scope["path"], scope["raw_path"]) == ("/", b"/")


# ------------------------------------------------------------------------------------------------ HTTPS


def test_https() -> None:
    file = Path(__file__).parents[2] / "localhost.pem"  # a certificate and its key
    with Server(STUB, f"--ssl-certfile={file}") as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(file))
        assert httpx.get(f"{server.url}/health", verify=trusted).status_code == 200
