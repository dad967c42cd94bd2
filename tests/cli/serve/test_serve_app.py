"""fgserve with the bundled model: the openai client and plain HTTP over a real socket."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import OpenAI
from serving import Server, descendants, request_bytes, until
from starlette.testclient import TestClient

from fastgen.cli.serve import app
from fastgen.cli.serve.http_server import UNREAD_SECONDS, listen
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.service import ServedModel, Service

pytestmark = pytest.mark.timeout(120)

SUM: list[Any] = [{"role": "user", "content": "what is 12 + 30?"}]


@pytest.fixture(scope="module")
def server(bundled_server: Server) -> Server:
    return bundled_server


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


def test_the_start_says_what_runs_without_torch_in_this_process(server: Server) -> None:
    """The tokenizer of the HTTP process comes from transformers."""
    server.await_said("ready: fastgen-tiny")
    kinds = r"context of \d+ tokens, KV cache of 4800 tokens, kernels: torch, attention: cpu, deterministic"
    assert re.search(rf"^fgserve: fastgen-tiny: cpu, (bfloat16|float32) \(.+\), {kinds}$", server.said, re.M)
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "PyTorch" not in server.said


# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(("flags", "status"), [([], 400), (["--ignore-limits"], 503)])
def test_temperatures_above_openais_limit(flags: list[str], status: int) -> None:
    """The model is not loaded, so an accepted request is answered with a 503."""
    client = TestClient(app.make_app(Service(read_options(flags, {}))))
    prompts = {"chat/completions": {"messages": SUM}, "completions": {"prompt": "a"}, "responses": {"input": "a"}}
    for path, said in prompts.items():
        answers = [client.post(f"/v1/{path}", json={**said, "temperature": value}) for value in (2, 2.1)]
        assert [answer.status_code for answer in answers] == [503, status]


def test_the_client_of_the_documentation(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "gpt-4o-mini", "messages": SUM}
    completion = client.chat.completions.create(**asked)
    assert completion.choices[0].message.content
    assert completion.choices[0].finish_reason == "stop"


def test_an_agent_with_the_bundled_model(client: OpenAI) -> None:
    """Two calls at once, their arguments as text, and an answer that has both results."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": city}
    tools: Any = [{"type": "function", "function": weather}]
    ask = partial(client.chat.completions.create, model="any", temperature=0, tools=tools)
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris and London?"}]
    asked = ask(messages=messages).choices[0]
    calls: list[Any] = asked.message.tool_calls or []
    cities = [json.loads(call.function.arguments)["city"] for call in calls]
    assert (asked.finish_reason, cities) == ("tool_calls", ["Paris", "London"])
    messages.append(asked.message)
    for call, city_name in zip(calls, cities, strict=True):
        result = {"Paris": "sunny, 18 degrees", "London": "rain, 9 degrees"}[city_name]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    told = ask(messages=messages).choices[0].message
    assert (told.tool_calls, told.content) == (None, "Paris: Sunny, 18 degrees. London: Rain, 9 degrees.")
    assert not ask(messages=[{"role": "user", "content": "hello"}]).choices[0].message.tool_calls


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Anna is 31 and lives in Oslo.", {"name": "Anna", "age": 31, "city": "Oslo"}),
        ("Bob and Eve go to a concert on Friday.", {"event": "concert", "day": "Friday", "people": ["Bob", "Eve"]}),
        ("What is the capital of France?", {"answer": "Paris"}),
        ("Is 8 even?", {"is_even": True}),
    ],
)
def test_the_bundled_model_answers_with_json(client: OpenAI, question: str, answer: dict[str, Any]) -> None:
    """Only the grammar knows the keys, or only the prompt does; the same question without either gets a sentence."""
    types = {str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}}
    types[list] = {"type": "array", "items": {"type": "string"}}
    properties = {key: types[type(value)] for key, value in answer.items()}
    schema = {"type": "object", "properties": properties, "required": [*answer], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    told = f"Reply with JSON that fits this schema: {json.dumps(schema)}"

    def ask(system: str = "", **options: Any) -> str:
        messages: list[Any] = [{"role": "system", "content": system}] * bool(system)
        messages.append({"role": "user", "content": question})
        asked = client.chat.completions.create(model="any", messages=messages, temperature=0, max_tokens=100, **options)
        assert asked.choices[0].finish_reason == "stop"
        return asked.choices[0].message.content or ""

    assert json.loads(ask(response_format=wanted)) == json.loads(ask(told)) == answer
    assert not ask().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_ends_when_its_budget_is_used_up(server: Server, client: OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "any", "temperature": 0, "messages": [{"role": "user", "content": "17 * 23?"}]}
    whole, *short = (
        client.chat.completions.create(**asked, extra_body={"enable_thinking": True, **budget})
        for budget in (
            {}, {"thinking_token_budget": 4}, {"thinking_budget": 4}, {"reasoning": {"max_tokens": 4}},
            {"thinking": {"type": "enabled", "budget_tokens": 4}},
        )
    )  # fmt: skip
    thought: str = whole.choices[0].message.to_dict()["reasoning_content"]  # type: ignore[assignment]
    for reply in short:
        begun: str = reply.choices[0].message.to_dict()["reasoning_content"]  # type: ignore[assignment]
        assert thought.startswith(begun)
        assert reply.choices[0].message.content
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        assert reply.usage.completion_tokens_details.reasoning_tokens == 5 < len(thought)
    fields = {"thinking_token_budget": 4, "enable_thinking": True, "stream": True}
    chunks = [
        json.loads(line[6:])
        for line in server.post("/v1/chat/completions", {**asked, **fields}).text.split("\n")
        if line.startswith("data: {")
    ]
    assert "".join(chunk["choices"][0]["delta"].get("reasoning_content") or "" for chunk in chunks) == begun
    claude = {"model": "any", "max_tokens": 200, "temperature": 0, "messages": asked["messages"]}
    reply = server.post("/v1/messages", {**claude, "thinking": {"type": "enabled", "budget_tokens": 4}}).json()
    assert reply["usage"]["output_tokens_details"] == {"thinking_tokens": 5}
    item = {
        "model": "any",
        "input": asked["messages"],
        "temperature": 0,
        "reasoning": {"effort": "low", "max_tokens": 4},
    }
    reply = server.post("/v1/responses", item).json()
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}


def test_answers_end_where_they_repeat_themselves(server: Server) -> None:
    limits = {"max_pattern_size": 1, "min_count": 3}
    fields = {"model": "any", "max_tokens": 50, "logit_bias": {"598": 100}, "repetition_detection": limits}
    for path, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": SUM})):
        reply = server.post(f"/v1/{path}", {**fields, **prompt}).json()
        assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["stop_reason"]) == ("stop", "repetition")
        assert reply["usage"]["completion_tokens"] == 3
    reply = server.post("/v1/responses", {**fields, "max_tokens": None, "input": "a", "max_output_tokens": 50}).json()
    assert (reply["status"], reply["usage"]["output_tokens"]) == ("completed", 3)
    for wrong in ({"max_pattern_size": 3}, {"size": 3}, {"max_pattern_size": -1, "min_count": 2}):
        refused = server.post("/v1/completions", {**fields, "prompt": "a", "repetition_detection": wrong})
        assert (refused.status_code, refused.json()["error"]["param"][:20]) == (400, "repetition_detection")
    assert re.search(r'fastgen_repeated_total\{model="fastgen-tiny"\} 3', server.get("/metrics").text)


def test_connections_send_small_pieces_at_once_and_to_those_that_take_them() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if sys.platform == "linux":
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * UNREAD_SECONDS


LONG = "a" * 7_900_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
        ("/detokenize", {"tokens": [300] * 400_000}),
    ],
)
def test_a_text_beyond_the_context_is_not_tokenized(server: Server, path: str, fields: dict[str, Any]) -> None:
    before = memory(server)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.post(path, fields), range(4)))
    assert {answer.status_code for answer in answers} == {400}
    assert re.search(r"has (at least )?\d+ tokens, above this model's maximum", answers[0].text)
    assert memory(server) - before < 0.5e9  # four parsed bodies; the texts' encodings took 4 GB


def memory(server: Server) -> int:
    """Return the largest memory so far of the HTTP process, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", status)[0])


def test_requests_about_tokens_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(app, "tokenize", lambda *_: answered.wait(50))
    monkeypatch.setattr(ServedModel, "check_ready", lambda _: None)
    monkeypatch.setattr(ServedModel, "facts", SimpleNamespace(max_model_len=100, vocab_size=100), raising=False)
    client = TestClient(app.make_app(Service(read_options(["--request-timeout=0.1"], {}))), "http://localhost")
    late = client.post("/tokenize", json={"prompt": "a"})
    answered.set()
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")


def test_unknown_fields_can_be_ignored(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(app, "tokenize", lambda wanted, _: {"count": len(wanted.prompt)})
    monkeypatch.setattr(ServedModel, "check_ready", lambda _: None)
    monkeypatch.setattr(ServedModel, "facts", SimpleNamespace(max_model_len=100, vocab_size=100), raising=False)
    for flag, status in ((), 400), (("--ignore-unknown",), 200):
        client = TestClient(app.make_app(Service(read_options(flag, {}))), "http://localhost")
        told = [client.post("/tokenize", json={"prompt": "abc", "colour": "red"}) for _ in range(2)]
        assert [reply.status_code for reply in told] == [status] * 2
        described = client.get("/openapi.json").json()["components"]["schemas"]["TokenizeRequest"]
        assert described["additionalProperties"] == (True if flag else {"type": "null"})
    assert told[0].json() == {"count": 3}
    assert capfd.readouterr().err.count("fgserve: the field 'colour' of a request is ignored") == 1


def test_tokens_and_models(server: Server, client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "fastgen-tiny"
    assert client.models.retrieve("any/name at all") == model
    told = server.post("/tokenize", {"prompt": "hello you"}).json()
    assert told["count"] == len(told["tokens"])
    assert "hello you" in server.post("/v1/detokenize", {"tokens": told["tokens"]}).json()["prompt"]
    assert server.get("/tokenizer_info").json()["eos_token"]
    assert server.get("/health").json() == {"status": "ok"}
    described = server.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions"} <= described["paths"].keys()
    assert "security" not in described
    for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)):
        assert reference in described["components"]["schemas"]


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "not_found"),
        ("POST", "/v1/audio/speech", b'{"input": "a"}', 404, "not_found"),
        ("GET", "/v1/chat/completions", None, 405, "method_not_allowed"),
        ("POST", "/completions", b"{", 400, "invalid_json"),
        ("POST", "/completions", b"{}", 400, "missing_required_parameter"),
        ("POST", "/completions", b'{"prompt": "a", "best_of": 3}', 400, "unsupported_parameter"),
        ("POST", "/completions", b'{"prompt": "%s"}' % (b"a " * 5000), 400, "context_length_exceeded"),
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


def test_a_model_without_embeddings_says_so(server: Server) -> None:
    reply = server.post("/v1/embeddings", {"input": "hello"})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert "this model has no embeddings" in message
    assert message.endswith("(there is no modules.json)")


# ------------------------------------------------------------------------------------------------ load


def cpu_seconds(server: Server) -> float:
    """Return the CPU time of all processes of a server, and of those that have ended."""
    ticks = 0
    for pid in (server.process.pid, *descendants(server.process.pid)):
        with suppress(FileNotFoundError):  # it has ended since, which its parent's time then includes
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
def test_schemas_that_take_too_long_delay_nobody(server: Server) -> None:
    """Of two dozen requests with schemas that never compile, most go away, and the others get a 400."""

    def asked(schema: dict[str, Any]) -> dict[str, Any]:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        return {"messages": SUM, "response_format": wanted, "max_tokens": 50}

    before = cpu_seconds(server)
    never = asked({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]})
    gone = [server.send(request_bytes("/v1/chat/completions", never)) for _ in range(20)]
    stays = [server.send(request_bytes("/v1/chat/completions", never)) for _ in range(2)]
    until(lambda: len(descendants(server.process.pid)) > 2)
    for connection in gone:
        connection.close()
    assert server.post("/v1/chat/completions", asked({"type": "boolean"})).json()["choices"][0]["finish_reason"]
    assert cpu_seconds(server) - before < 15, "at 1 s each, 20 of them would take 20 s"
    for connection in stays:
        with connection:
            told = b""
            while not told.endswith(b"}}"):
                told += connection.recv(65536)
        assert told.startswith(b"HTTP/1.1 400 ")
        assert b"takes more than 1 seconds of CPU time to compile; simplify it" in told
        assert b'"param":"response_format"' in told
