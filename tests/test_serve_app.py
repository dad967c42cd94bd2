"""fgserve as its clients see it: the openai client, and plain HTTP, over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

import fastgen

pytestmark = pytest.mark.timeout(120)

LONG: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
SUM: list[Any] = [{"role": "user", "content": "what is 12 + 30?"}]


class Server:
    """A process of fgserve, at a port of its own."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FASTGEN_PORT": "0", "FASTGEN_NUM_PAGES": "300"}
        command = [sys.executable, "-m", "fastgen.cli.serve.main", "--page-size", "16", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        while not self.url:
            found = re.search(r"listening at (\S+)", self._lines.get(timeout=30))
            self.url = found[1] if found else ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **options)

    def post(self, path: str, data: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=data, timeout=30, **options)

    def client(self, key: str = "foo", retries: int = 0) -> OpenAI:
        return OpenAI(base_url=self.url, api_key=key, max_retries=retries)

    def stats(self) -> dict[str, float]:
        """The numbers of /metrics, of the first model."""
        found: dict[str, float] = {}
        for name, value in re.findall(r'^fastgen_(\w+)\{model="[^"]*"\} (\S+)$', self.get("/metrics").text, re.M):
            found.setdefault(name, float(value))
        return found

    def engines(self) -> list[int]:
        """The processes of its engines, as they were started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(child) for child in children.read_text().split()]

    def signal_engines(self, number: signal.Signals) -> None:
        for engine in self.engines():
            os.kill(engine, number)

    def end(self) -> tuple[int, str]:
        """Wait for its end: its status, and what it has said."""
        status = self.process.wait(30)
        self._reader.join(10)
        said = ""
        while not self._lines.empty():
            said += self._lines.get()
        return status, said

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.02)


class Servers:
    """Two servers, that are started together, and again where a test has ended them: a plain one, and one with a key,
    small limits and two models."""

    def __init__(self, file: Path) -> None:
        self._arguments = (("--shutdown-timeout", "2"), ("--config", str(file)))
        self.running: list[Server] = []
        for arguments in self._arguments:
            self.running.append(Server(*arguments))
            assert self.running[-1].get("/ready").status_code == 503, "the port opens before the model is there"

    def get(self, place: int) -> Server:
        if self.running[place].process.poll() is not None:
            self.running[place] = Server(*self._arguments[place])
        until(lambda: self.running[place].get("/ready").status_code == 200, 60)
        return self.running[place]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("serve")
    caller = shutil.copytree(Path(fastgen.__file__).parent / "tiny", folder / "caller")
    template = caller / "chat_template.jinja"
    template.write_text("{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + template.read_text())
    file = folder / "serve.yaml"
    file.write_text(
        "api_key: secret\nmax_body_mb: 0.01\nmax_queued_tokens: 100\nrequest_timeout: 4\nmax_seqs: 1\n"
        f"models: [{{name: one}}, {{name: two, model: {caller}, max_model_len: 512}}]\n"
    )
    servers = Servers(file)
    yield servers
    for server in servers.running:
        server.kill()


@pytest.fixture
def server(servers: Servers) -> Server:
    return servers.get(0)


@pytest.fixture
def limited(servers: Servers) -> Server:
    return servers.get(1)


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


# ------------------------------------------------------------------------------------------------ answers


def test_the_program_of_the_documentation(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="gpt-4o-mini",
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Write a haiku about recursion in programming."},
        ],
    )
    assert completion.choices[0].message.content
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_sync_async_and_streams_say_the_same(server: Server, prefix: str) -> None:
    wanted: dict[str, Any] = {"model": "any", "messages": SUM, "temperature": 0.7, "seed": 3, "n": 2, "logprobs": True}

    async def asynchronous() -> Any:
        async with AsyncOpenAI(base_url=server.url + prefix, api_key="foo") as client:
            return await client.chat.completions.create(**wanted)

    whole = OpenAI(base_url=server.url + prefix, api_key="foo").chat.completions.create(**wanted)
    other = asyncio.run(asynchronous())
    said, counted, usage = ["", ""], [0, 0], None
    stream = server.client().chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            counted[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert said == [choice.message.content for choice in whole.choices]
    assert said == [choice.message.content for choice in other.choices]
    assert counted == [len(choice.logprobs.content) for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(counted)
    assert usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts(client: OpenAI, stream: bool) -> None:
    wanted: dict[str, Any] = {"model": "x", "prompt": ["one two", "three"], "n": 2, "max_tokens": 3, "seed": 1,
                              "echo": True, "logprobs": 2, "extra_body": {"ignore_eos": True}}  # fmt: skip
    whole = client.completions.create(**wanted)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    for choice in whole.choices:
        assert choice.text.startswith(["one two", "three"][choice.index // 2])
        assert choice.logprobs.token_logprobs[0] is None
    if stream:
        said = [""] * 4
        for chunk in client.completions.create(**wanted, stream=True):
            said[chunk.choices[0].index] += chunk.choices[0].text
        assert said == [choice.text for choice in whole.choices]


def test_an_answer_that_follows_a_schema(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
              "additionalProperties": False}  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="x", messages=SUM, response_format=wanted, max_tokens=200, seed=1)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["sum"], int)
    wanted["json_schema"]["schema"] = {"type": "no such type"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="x", messages=SUM, response_format=wanted)
    assert caught.value.param == "response_format"


def test_tools_are_called(server: Server, limited: Server) -> None:
    """The penalties are against the blanks that JSON allows, in which a model that has not learned it gets lost."""
    color = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"],
             "additionalProperties": False}  # fmt: skip
    tools: list[Any] = [{"type": "function", "function": {"name": name, "parameters": color}} for name in ("f", "g")]
    wanted: dict[str, Any] = {"model": "two", "messages": SUM, "tools": tools, "seed": 1, "parallel_tool_calls": False,
                              "temperature": 0, "presence_penalty": 2, "frequency_penalty": 2,
                              "tool_choice": {"type": "function", "function": {"name": "g"}}}  # fmt: skip
    choice = limited.client("secret").chat.completions.create(**wanted).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "g"
    assert json.loads(call.function.arguments)["color"] in ("red", "blue")
    name = arguments = ""
    for chunk in limited.client("secret").chat.completions.create(**wanted, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments) == ("g", call.function.arguments)
    with pytest.raises(openai.BadRequestError, match="tools are not supported") as caught:
        server.client().chat.completions.create(**wanted)
    assert caught.value.param == "tools"


def test_tokens_and_models(server: Server, client: OpenAI) -> None:
    assert client.models.list().data[0].id == "fastgen-tiny"
    told = server.post("/tokenize", {"prompt": "hello you"}).json()
    assert told["count"] == len(told["tokens"])
    assert "hello you" in server.post("/v1/detokenize", {"tokens": told["tokens"]}).json()["prompt"]
    assert server.get("/tokenizer_info").json()["eos_token"]
    assert server.get("/health").json() == {"status": "ok"}
    described = server.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions"} <= described["paths"].keys()
    for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)):
        assert reference in described["components"]["schemas"]


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "not_found"),
        ("GET", "/v1/chat/completions", None, 405, "method_not_allowed"),
        ("POST", "/completions", b"{", 400, "invalid_json"),
        ("POST", "/completions", b"{}", 400, "missing_required_parameter"),
        ("POST", "/completions", b'{"prompt": "a", "best_of": 3}', 400, "unsupported_parameter"),
        ("POST", "/completions", b'{"prompt": "a", "max_tokens": 5000}', 400, "context_length_exceeded"),
        ("POST", "/completions", b'{"prompt": [9999]}', 400, "invalid_value"),
        ("POST", "/detokenize", b'{"tokens": [9999]}', 400, "invalid_value"),
        ("POST", "/completions", b" " * 9_000_000, 413, "request_too_large"),
    ],
)  # fmt: skip
def test_errors_have_one_shape(server: Server, method: str, path: str, body: bytes, status: int, code: str) -> None:
    reply = httpx.request(method, server.url + path, content=body)
    assert reply.status_code == status
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    assert reply.json()["error"]["code"] == code


def test_the_key_and_the_models(limited: Server) -> None:
    client = limited.client("secret")
    with pytest.raises(openai.AuthenticationError):
        limited.client("wrong").models.list()
    for path in ("/health", "/v1/ready", "/metrics"):
        assert limited.get(path).status_code == 200
    assert limited.get("/openapi.json").status_code == 401
    assert [(model.id, getattr(model, "max_model_len")) for model in client.models.list()] == [  # noqa: B009
        ("one", 2048),
        ("two", 512),
    ]
    assert client.completions.create(model="two", prompt="a", max_tokens=1).model == "two"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="three", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="one", prompt="a" * 20_000)
    assert large.value.status_code == 413


# ------------------------------------------------------------------------------------------------ load


def idle(server: Server) -> bool:
    stats = server.stats()
    return stats["requests_total"] == stats["finished_total"] + stats["aborted_total"] and not stats["pages_used"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts(server: Server, stream: bool) -> None:
    before = server.stats()
    body = {"prompt": ["a", "b"], "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", server.url + "/completions", json=body) as reply:
            next(reply.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/completions", json=body, timeout=0.5)
    until(lambda: idle(server), 3)
    after = server.stats()
    assert after["aborted_total"] - before["aborted_total"] == 2
    assert after["generated_tokens_total"] - before["generated_tokens_total"] < 2900


def test_time_and_room_are_limited(limited: Server) -> None:
    """One lane: what comes second waits, what comes third finds no room, and the first two take too long."""
    client = limited.client("secret")
    told: list[str | None] = []
    with client.completions.create(model="one", prompt="a", stream=True, **LONG) as stream:
        next(stream)
        limited.signal_engines(signal.SIGSTOP)
        waiting = threading.Thread(target=_wait_in_vain, args=(client, told))
        waiting.start()
        time.sleep(0.5)
        key = {"Authorization": "Bearer secret"}
        refused = limited.post("/completions", {"model": "one", "prompt": [5] * 20}, headers=key)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        with pytest.raises(openai.APIError, match="more than 4 seconds"):
            for _ in stream:
                pass
    waiting.join()
    limited.signal_engines(signal.SIGCONT)
    assert told == ["timeout"]
    assert client.completions.create(model="one", prompt=[5] * 90, max_tokens=1).choices, "there is room again"


def _wait_in_vain(client: OpenAI, told: list[str | None]) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="one", prompt=[5] * 90, max_tokens=1)
    told.append(caught.value.code)


# ------------------------------------------------------------------------------------------------ ends


def test_a_sigterm_lets_requests_finish_or_tells_them(server: Server, client: OpenAI) -> None:
    with client.completions.create(model="x", prompt="a", stream=True, **LONG) as long:
        next(long)
        short = client.completions.create(model="x", prompt="b", stream=True, max_tokens=20,
                                          extra_body={"ignore_eos": True}, seed=1)  # fmt: skip
        next(short)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
        assert list(short)[-1].choices[0].finish_reason == "length"
        server.signal_engines(signal.SIGSTOP)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            for _ in long:
                pass
        server.signal_engines(signal.SIGCONT)
    status, said = server.end()
    assert (status, "error" in said.lower()) == (0, False), said


def test_an_engine_that_dies_is_started_again_once(limited: Server) -> None:
    client = limited.client("secret")
    for last in (False, True):
        with client.completions.create(model="one", prompt="a", stream=True, **LONG) as stream:
            next(stream)
            os.kill(limited.engines()[-1 if last else 0], signal.SIGKILL)
            with pytest.raises(openai.APIError, match="the engine of one was killed by SIGKILL"):
                for _ in stream:
                    pass
        if not last:
            assert limited.get("/health").status_code == 503
            assert client.completions.create(model="two", prompt="a", max_tokens=1).choices, "the other goes on"
            until(lambda: limited.get("/ready").status_code == 200, 30)
            assert limited.get("/health").status_code == 200
    status, said = limited.end()
    assert status == 1
    assert "fgserve: error: the engine of one was killed by SIGKILL" in said
