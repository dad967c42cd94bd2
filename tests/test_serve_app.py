"""fgserve as its clients see it: the openai client, and plain HTTP, over a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from serving import FGSERVE, Server, alive, request_bytes, until

import fastgen

pytestmark = pytest.mark.timeout(120)

SUM: list[Any] = [{"role": "user", "content": "what is 12 + 30?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It serves the bundled model, whose chat template has got tools."""
    folder = tmp_path_factory.mktemp("serve") / "fastgen-tiny"
    shutil.copytree(Path(fastgen.__file__).parent / "tiny", folder)
    template = folder / "chat_template.jinja"
    template.write_text("{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + template.read_text())
    file = folder.parent / "serve.yaml"
    file.write_text(f"models: [{{name: fastgen-tiny, model: {folder}}}]\nseed: 1\n")
    server = Server(FGSERVE, "--config", str(file))
    assert server.get("/ready").status_code == 503, "the port opens before the model is there"
    server.await_ready()
    (engine,) = server.engines()
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert not alive(engine)
    assert "Traceback" not in server.said


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


def test_tools_are_called(client: OpenAI) -> None:
    color = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"],
             "additionalProperties": False}  # fmt: skip
    tools: list[Any] = [{"type": "function", "function": {"name": name, "parameters": color}} for name in ("f", "g")]
    wanted: dict[str, Any] = {"model": "x", "messages": SUM, "tools": tools, "seed": 1, "parallel_tool_calls": False,
                              "tool_choice": {"type": "function", "function": {"name": "g"}}}  # fmt: skip
    choice = client.chat.completions.create(**wanted).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "g"
    assert json.loads(call.function.arguments)["color"] in ("red", "blue")
    name = arguments = ""
    for chunk in client.chat.completions.create(**wanted, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments) == ("g", call.function.arguments)


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


# ------------------------------------------------------------------------------------------------ load


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_gives_its_pages_back(server: Server, stream: bool) -> None:
    before = server.stats()
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    connection = server.send(request_bytes("/completions", body))
    until(lambda: server.stats()["running"] == 4)
    assert server.stats()["pages_used"] > 0
    connection.close()
    until(server.idle, 3)
    after = server.stats()
    assert after["aborted_total"] - before["aborted_total"] == 2
    assert after["generated_tokens_total"] - before["generated_tokens_total"] < 3900


def test_the_http_process_does_without_torch(server: Server) -> None:
    """It has a tokenizer from transformers by now."""
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "PyTorch" not in server.said
