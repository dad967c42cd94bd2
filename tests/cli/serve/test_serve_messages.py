"""anthropic.py: /messages as the anthropic package reads it, over a real socket."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.pagination import SyncPage
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter
from serving import Server, read_request

from fastgen.cli.serve.dialects.anthropic import MessageReply, MessageRequest, error_body
from fastgen.cli.serve.openai_output import PromptTokens
from fastgen.cli.serve.validation import ApiError
from fastgen.request import Event
from fastgen.text.tools.formats import HERMES
from fastgen.text.tools.parser import Function

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"name": "add", "description": "adds", "input_schema": SCHEMA, "strict": True, "cache_control": {}}
ASKED: Any = [{"role": "user", "content": "what is 12 + 30?"}]
EXACT: Any = {"model": "any", "max_tokens": 50, "extra_body": {"temperature": 0}}  # the package has no temperature


@pytest.fixture(scope="module")
def client(caller: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=caller.url, api_key="secret", max_retries=0) as client:
        yield client


def post(server: Server, **fields: Any) -> Any:
    data = {"messages": ASKED, "max_tokens": 50, "temperature": 0, **fields}
    return server.post("/v1/messages", data, headers={"x-api-key": "secret"})


def test_an_answer_is_that_of_a_chat(caller: Server, client: Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    reply = client.messages.create(**EXACT, messages=ASKED, system=system, thinking={"type": "adaptive"}, metadata={})
    turns: Any = [{"role": "system", "content": "Be brief."}, *ASKED]
    chat = caller.client("secret").chat.completions.create(model="any", messages=turns, temperature=0)
    assert chat.usage is not None
    (block,) = reply.content
    assert block.type == "text"
    assert block.text == chat.choices[0].message.content == "42"
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.output_tokens == chat.usage.completion_tokens
    counted = client.messages.count_tokens(model="any", messages=ASKED, system=system)
    read = (reply.usage.input_tokens, reply.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == sum(read) == chat.usage.prompt_tokens
    Message.model_validate(post(caller).json())


def test_models_are_listed_as_the_package_reads_them(caller: Server, client: Anthropic) -> None:
    (model,) = listed = list(client.models.list())
    assert (model.id, model.type, model.max_input_tokens) == ("fastgen-tiny", "model", 512)
    assert client.models.retrieve("fastgen-tiny") == listed[0]
    assert abs(time.time() - model.created_at.timestamp()) < 3600
    for path in ("/v1/models", "/v1/models/fastgen-tiny"):
        ours = caller.get(path, headers={"authorization": "Bearer secret"}).json()
        theirs = caller.get(path, headers={"x-api-key": "secret", "anthropic-version": "2023-06-01"}).json()
        assert ours["object"] in ("list", "model")
        TypeAdapter(ModelInfo if theirs.get("type") else SyncPage[ModelInfo]).validate_python(theirs)
    with pytest.raises(anthropic.AuthenticationError) as raised, Anthropic(base_url=caller.url, api_key="x") as wrong:
        wrong.models.list()
    assert raised.value.body["error"]["type"] == "authentication_error"


def test_an_agent_calls_and_gets_the_result(client: Anthropic) -> None:
    fields: Any = {"model": "any", "max_tokens": 4000, "tools": [ADD]}
    asked: Any = [{"role": "user", "content": "add some"}]
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(messages=asked, tool_choice=one, **fields) as stream:
        kinds = [event.type for event in stream]
        reply = stream.get_final_message()
    assert "input_json" in kinds
    assert reply.stop_reason == "tool_use"
    call = next(block for block in reply.content if block.type == "tool_use")
    assert (call.name, set(call.input)) == ("add", {"a", "b"})
    whole = client.messages.create(messages=asked, tool_choice={**one, "type": "tool", "name": "add"}, **fields)
    assert whole.content[0].type == "tool_use"
    content = [{"type": "text", "text": "7", "cache_control": {"type": "ephemeral"}}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": False}
    turns: Any = [
        *asked,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": ""}, *reply.content]},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(messages=turns, tool_choice={"type": "none"}, **fields)
    assert after.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="any", messages=turns, tools=[ADD])
    assert counted.input_tokens > client.messages.count_tokens(model="any", messages=turns).input_tokens


def test_why_an_answer_ends_and_one_that_is_begun_goes_on(caller: Server) -> None:
    cut = post(caller, max_tokens=2).json()
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    stopped = post(caller, stop_sequences=["!", "="]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "=")
    assert stopped["content"][0]["text"] == "12 + 30 "
    assert post(caller, max_tokens=100_000).json()["stop_reason"] == "end_turn"
    long = [{"role": "user", "content": "a " * 470}]
    json_object = {"format": {"type": "json_schema", "schema": {"type": "array", "minItems": 9999}}}
    full = post(caller, messages=long, max_tokens=100_000, output_config=json_object).json()
    assert full["stop_reason"] == "model_context_window_exceeded"
    begun = [*ASKED, {"role": "assistant", "content": "12 + 30 ="}]
    assert post(caller, messages=begun).json()["content"][0]["text"].strip() == "42."


def test_structured_output(client: Anthropic) -> None:
    class Answer(BaseModel):
        good: bool

    reply = client.messages.parse(model="any", max_tokens=50, messages=ASKED, output_format=Answer)
    assert isinstance(reply.parsed_output, Answer)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
        r"messages\[0\]\.content\[1\] is a block of the type 'image'; give blocks of the types text",
    ),
    "image in a result": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
                }
            ]
        },
        r"messages\[0\]\.content\[0\]\.content\[0\] has content of the type 'image'",
    ),
    "system": ({"system": [{"type": "tool_use"}]}, r"system\[0\] has content of the type 'tool_use'"),
    "unknown": ({"n": 2}, "n is not supported"),
    "tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
        r"tools.0..type is 'web_search_20250305': Anthropic's own tools are not supported; give",
    ),
    "choice": ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "f"}}, "not among the tools"),
    "thread": ({"thread": {"type": "create"}}, "thread is not supported"),
    "max_tokens": ({"max_tokens": None}, "max_tokens is required"),
    "long": ({"messages": [{"role": "user", "content": "a b " * 2048}]}, "prompt is too long: This model's maximum"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_has_the_form_of_the_api(client: Anthropic, case: str) -> None:
    fields, message = WRONG[case]
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        client.messages.create(model="any", max_tokens=50, messages=ASKED, stream=True, extra_body=fields)
    assert isinstance(caught.value.body, dict)
    assert (caught.value.body["type"], caught.value.type) == ("error", "invalid_request_error")


def test_a_wrong_key_is_an_authentication_error(caller: Server) -> None:
    with Anthropic(base_url=caller.url, api_key="no") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**EXACT, messages=ASKED)
    with Anthropic(base_url=caller.url, auth_token="secret") as client:
        assert client.messages.create(**EXACT, messages=ASKED).content


# ------------------------------------------------------------------------------------------------ without a server


def reply_of(**fields: Any) -> MessageReply:
    request = read_request(MessageRequest, json.dumps({"messages": ASKED, "max_tokens": 9, **fields}).encode())
    chat = request.chat()
    return MessageReply(request, chat, "m", PromptTokens([1, 2]), None, lambda: HERMES.parser([Function("add")]))


def test_text_and_calls_are_blocks_in_their_order() -> None:
    text = (
        'so: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\nthen <tool_call>\n{"name": "add", "argu'
    )
    reply = reply_of(tools=[ADD])
    events = [event for letter in text for event in reply.push([Event(0, 0, [1], letter)])]
    events += reply.push([Event(0, 0, [1], 'ments": {"a": 12, "b": "x', "length")]) + reply.end()
    for event in events:
        EVENT.validate_python(event)
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]
    content = reply.body()["content"]
    assert [block.get("text") or block["input"] for block in content] == ["so:", {"a": 1}, "then", {"a": 12, "b": "x"}]
    deep = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {"[" * 1000}{"]" * 1000}}}}}\n</tool_call>'
    for broken, read in (('<tool_call>\n{"name": "add", "arguments": {a: 1', {"a": 1}), (deep, {})):
        assert reply_of(tools=[ADD]).whole([Event(0, 0, [1], broken, "stop")])["content"][0]["input"] == read


def test_a_request_of_claude_code() -> None:
    """Its fields as version 2.1 sends them, with short texts and few tools."""
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "Bash", "description": "a", "input_schema": {"$schema": "https://json-schema.org/a", **SCHEMA}}
    text = [{"type": "text", "text": "reminder"}, {"type": "text", "text": "list the folder", **cached}]
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": text}, {"role": "system", "content": "agents"}],
        "system": [{"type": "text", "text": "version"}, {"type": "text", "text": "rules", **cached}],
        "tools": [tool],
        "metadata": {"user_id": "a"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    chat = read_request(MessageRequest, json.dumps(body).encode()).chat()
    messages = [(message.role, message.text) for message in chat.messages]
    assert messages == [("system", "version\nrules"), ("user", "reminder\n\nlist the folder\n\nagents")]
    assert (chat.limit, chat.max_tokens) == (None, 32000)


def test_what_else_claude_code_and_older_packages_send() -> None:
    """References to tools that it has searched, text documents, and the earlier place of the schema."""
    use = {"type": "tool_use", "id": "1", "name": "ToolSearch", "input": {}, "caller": {"type": "direct"}}
    found = [{"type": "tool_reference", "tool_name": "Bash"}, {"type": "tool_reference", "tool_name": "Read"}]
    source = {"type": "text", "media_type": "text/plain", "data": "a page"}
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "document", "source": source}, {"type": "text", "text": "look"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": found}]},
        ],
        "tools": [{"name": "Bash", "input_schema": SCHEMA, "defer_loading": True, "allowed_callers": ["direct"]}],
        "max_tokens": 5,
        "mcp_servers": [],
        "output_format": {"type": "json_schema", "schema": SCHEMA},
    }
    chat = read_request(MessageRequest, json.dumps(body).encode()).chat()
    assert [message.text for message in chat.messages] == ["a page\n\nlook", None, "Bash\nRead"]
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == SCHEMA
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "a"}}
    refused = {**body, "messages": [{"role": "user", "content": [pdf]}]}
    with pytest.raises(ApiError, match="the model reads text only"):
        read_request(MessageRequest, json.dumps(refused).encode()).chat()


def test_errors_have_types() -> None:
    kinds = [error_body(ApiError(status, "a"))["error"]["type"] for status in (400, 405, 404, 500, 503)]
    assert kinds == [*["invalid_request_error"] * 2, "not_found_error", "api_error", "overloaded_error"]
    late = reply_of().error(ApiError(504, "late", code="timeout"))[0]
    assert late["error"] == {"type": "timeout_error", "message": "late", "details": {"error_code": "timeout"}}
