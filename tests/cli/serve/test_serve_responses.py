"""openai_responses.py and translation.py: /responses as the openai package reads it, over a real socket."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from asking import named_events
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from serving import HTTP, Server, read_request

from fastgen.cli.serve.dialects.openai_responses import ResponseReply, ResponseRequest
from fastgen.cli.serve.openai_input import ChatRequest
from fastgen.cli.serve.openai_output import PromptTokens
from fastgen.cli.serve.validation import ApiError, FieldPolicy
from fastgen.request import Event, SamplingParams
from fastgen.text.tools.formats import HERMES
from fastgen.text.tools.parser import Function

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}
ASKED = "what is 12 + 30?"


@pytest.fixture(scope="module")
def client(caller: Server) -> OpenAI:
    return caller.client("secret")


KEY = {"authorization": "Bearer secret"}


def post(caller: Server, **fields: Any) -> Any:
    return caller.post("/v1/responses", fields, headers=KEY)


def events_of(caller: Server, **fields: Any) -> list[dict[str, Any]]:
    events = named_events(EVENT, post(caller, stream=True, **fields).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_an_answer_is_that_of_a_chat(caller: Server, client: OpenAI) -> None:
    idle: Any = {"metadata": {"a": "b"}, "store": True, "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
    reply = client.responses.create(model="any", instructions="Be brief.", input=ASKED, temperature=0, **idle)
    turns: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    chat = client.chat.completions.create(model="any", messages=turns, temperature=0)
    assert reply.output_text == chat.choices[0].message.content == "42"
    assert reply.usage is not None
    assert chat.usage is not None
    counts = (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens)
    assert counts == (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens)
    assert (reply.status, reply.incomplete_details, reply.metadata) == ("completed", None, {"a": "b"})
    data = post(caller, input=ASKED).json()
    Response.model_validate(data)
    count = client.responses.input_tokens.count
    assert count(model="any", instructions="Be brief.", input=ASKED, text=idle["text"]).input_tokens == counts[0]
    assert count(model="any", instructions="Be brief.", input=ASKED, tools=[ADD]).input_tokens > counts[0]
    with pytest.raises(openai.BadRequestError, match="maximum context length of 512") as raised:
        count(model="any", input="a b " * 600)
    assert raised.value.param == "input"
    assert (data["object"], data["tools"], data["tool_choice"], data["store"]) == ("response", [], "auto", False)
    assert (data["temperature"], data["top_p"], reply.temperature) == (0.2, 1.0, 0), "the model's"


def test_an_answer_ends_where_the_context_ends(client: OpenAI) -> None:
    """max_tokens may exceed the context of 512 tokens in every API."""
    said = "a " * 400 + "please count from 1 to 100"
    fields: Any = {"model": "any", "temperature": 0}
    forever: Any = {**fields, "max_tokens": 10**30, "extra_body": {"ignore_eos": True}}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": said}], **forever)
    text = client.completions.create(prompt=said, **forever)
    reply = client.responses.create(input=said, max_output_tokens=10**12, extra_body={"ignore_eos": True}, **fields)
    assert [each.choices[0].finish_reason for each in (chat, text)] == ["length"] * 2
    assert [each.usage and each.usage.total_tokens for each in (chat, text, reply)] == [512] * 3
    assert (reply.status, reply.incomplete_details and reply.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert chat.choices[0].message.content is not None
    assert chat.choices[0].message.content.startswith(reply.output_text)


SCHEMA_TEXT: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [7]}}}


def test_sampling_fields_of_responses_are_those_of_chats(caller: Server) -> None:
    def said(path: str, **fields: Any) -> str:
        reply = caller.post(path, fields, headers=KEY).json()
        if path == "/responses":
            return "".join(part["text"] for part in reply["output"][0]["content"])
        return str(reply["choices"][0]["message"]["content"])

    joke: Any = [{"role": "user", "content": "tell me a joke"}]
    for fields in (
        {"seed": 4, "temperature": 2},
        {"seed": 4, "temperature": 2, "top_k": 2},
        {"seed": 4, "temperature": 2, "min_p": 0.3},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5},
        {"structured_outputs": {"choice": ["yes"]}},
        {"regex": "ab"},
    ):
        most: Any = {"max_tokens": 12, "messages": joke}
        answer = said("/responses", input="tell me a joke", max_output_tokens=12, **fields)
        assert answer == said("/chat/completions", **most, **fields)
    assert answer == "ab"
    assert post(caller, input="a", regex="a", text={"format": {"type": "json_object"}}).status_code == 400


def test_a_prompt_that_is_too_long_can_be_cut(caller: Server, client: OpenAI) -> None:
    ids = [5 + place % 200 for place in range(600)]
    for side, kept in ((None, ids[-9:]), ("left", ids[-9:]), ("right", ids[:9])):
        more: Any = {"truncate_prompt_tokens": 9, "truncation_side": side, "return_token_ids": True}
        reply = client.completions.create(model="any", prompt=ids, max_tokens=2, extra_body=more)
        assert reply.choices[0].prompt_token_ids == kept  # type: ignore[attr-defined]
    bare = caller.post("/tokenize", {"prompt": "a b c d e", "add_special_tokens": False}, headers=KEY).json()["tokens"]
    for side, kept in ((None, [1, *bare[-2:]]), ("left", bare[-3:]), ("right", [1, *bare[:2]])):
        more = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
        reply = client.completions.create(model="any", prompt="a b c d e", max_tokens=2, extra_body=more)
        assert reply.choices[0].prompt_token_ids == kept  # type: ignore[attr-defined]
    more = {"truncate_prompt_tokens": -1}
    cut = client.completions.create(model="any", prompt=ids, max_tokens=100, extra_body=more)
    assert cut.usage is not None
    assert cut.usage.prompt_tokens == 412
    long = "a b " * 600
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model="any", input=long, truncation="disabled")
    response = client.responses.create(model="any", input=long, truncation="auto", max_output_tokens=12)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.truncation) == (500, "auto")
    short = client.responses.create(model="any", input=ASKED, truncation="auto", temperature=0)
    assert "42" in short.output_text


def test_small_fields_of_chats_and_completions(caller: Server, client: OpenAI) -> None:
    text = client.completions.create(model="any", prompt="a", extra_body={"response_format": SCHEMA_TEXT})
    assert text.choices[0].text == "7"
    said: Any = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "It is"}]
    fields: Any = {"model": "any", "messages": said, "temperature": 0}
    begun: Any = {"add_generation_prompt": False, "continue_final_message": True}
    plain = client.chat.completions.create(**fields, extra_body=begun)
    echoed = client.chat.completions.create(**fields, extra_body={**begun, "echo": True})
    assert echoed.choices[0].message.content == f"It is{plain.choices[0].message.content}"
    stream = client.chat.completions.create(**fields, stream=True, extra_body={**begun, "echo": True})
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == echoed.choices[0].message.content
    more: Any = {"return_token_ids": True, "max_tokens": 1}
    bare, special = (
        client.chat.completions.create(**fields, extra_body={**more, "add_special_tokens": on}) for on in (False, True)
    )
    assert special.prompt_token_ids == [1, *bare.prompt_token_ids]  # type: ignore[attr-defined]
    with_bos, without = (
        client.completions.create(model="any", prompt="the fox", extra_body={**more, "add_special_tokens": on})
        for on in (True, False)
    )
    ids = with_bos.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    assert ids == [1, *without.choices[0].prompt_token_ids]  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="template of this model takes none") as raised:
        client.chat.completions.create(**fields, extra_body={"documents": [{"text": "a"}]})
    assert raised.value.param == "documents"
    echo = client.completions.create(model="any", prompt=[1, 300], echo=True, max_tokens=1)
    assert echo.choices[0].text.startswith("<s>")


def test_small_routes(caller: Server, client: OpenAI) -> None:
    key = {"authorization": "Bearer secret"}

    def ask(path: str, body: Any) -> Any:
        return caller.post(path, body, headers=key).json()

    messages = [{"role": "user", "content": ASKED}]
    tool = {"type": "function", "function": {name: ADD[name] for name in ADD if name != "type"}}
    chat: Any = client.chat.completions.create
    used = chat(model="any", messages=messages, tools=[tool], max_tokens=1).usage
    assert ask("/tokenize", {"messages": messages, "tools": [tool]})["count"] == used.prompt_tokens
    assert ask("/tokenize", {"prompt": "a b " * 20_000})["count"] > 40_000
    assert caller.get("/load", headers=key).json() == {"server_load": 0}
    assert HTTP.post(f"{caller.url}/ping").json() == caller.get("/ping").json() == {"status": "ok"}
    assert ask("/invocations", {"messages": messages, "max_tokens": 1})["object"] == "chat.completion"
    assert ask("/invocations", {"prompt": "a", "max_tokens": 1})["object"] == "text_completion"
    assert "embeddings" in ask("/invocations", {"input": "a"})["error"]["message"]


def test_an_agent_calls_and_gets_the_result(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "add some"}]
    fields: Any = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(model="any", input=asked, **fields) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        reply = stream.get_final_response()
    call = next(item for item in reply.output if item.type == "function_call")
    assert (call.name, call.status, call.arguments) == ("add", "completed", "".join(pieces))
    assert set(json.loads(call.arguments)) == {"a", "b"}
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "7"}],
    }
    thought: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
    items = [
        *asked,
        thought,
        {**thought, "content": "a"},
        {**thought, "content": [5]},
        *(item.to_dict() for item in reply.output),
        result,
    ]
    after = client.responses.create(model="any", input=items, tools=[ADD], temperature=0)
    called = {"type": "function", "id": call.call_id, "function": {"name": "add", "arguments": call.arguments}}
    turns: Any = [*asked, {"role": "assistant", "tool_calls": [called]}]
    turns.append({"role": "tool", "tool_call_id": call.call_id, "content": "7"})
    tool: Any = {"type": "function", "function": {name: ADD[name] for name in ADD if name != "type"}}
    chat = client.chat.completions.create(model="any", messages=turns, tools=[tool], temperature=0)
    message = chat.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert after.output_text == (message.content or "")
    assert [(item.name, item.arguments) for item in after.output if item.type == "function_call"] == calls
    assert after.usage is not None
    assert chat.usage is not None
    assert after.usage.input_tokens == chat.usage.prompt_tokens


def test_a_named_function_of_a_namespace_is_called(caller: Server) -> None:
    space = {"type": "namespace", "name": "files", "description": "of files", "tools": [{**ADD, "name": "read"}]}
    search = {"type": "web_search", "external_web_access": False}
    fields = {"tools": [ADD, space, search], "tool_choice": {"type": "function", "name": "files__read"}}
    fields["parallel_tool_calls"] = False
    events = events_of(caller, input="read", **fields)
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "read", "files")
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [fields["tool_choice"]]}
    reply = post(caller, input="read", **{**fields, "tool_choice": chosen}).json()
    assert [call["name"] for call in reply["output"]] == ["read"]
    assert reply["tool_choice"] == chosen
    again = post(caller, input=[item, {**item, "type": "function_call_output", "output": "1"}])
    assert again.json()["status"] == "completed"


def test_structured_output(client: OpenAI) -> None:
    class Answer(BaseModel):
        good: bool

    assert isinstance(client.responses.parse(model="any", input=ASKED, text_format=Answer).output_parsed, Answer)
    text: Any = {"format": {"type": "json_object"}}
    assert client.responses.create(model="any", input=ASKED, text=text, max_output_tokens=3).output_text[0] == "{"


def test_a_cut_answer_is_incomplete(caller: Server) -> None:
    events = events_of(caller, input=ASKED, max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    reply = events[-1]["response"]
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (reply["output"][0]["status"], reply["usage"]["output_tokens"]) == ("incomplete", 2)


def test_ids_of_the_prompt_and_of_the_answer(caller: Server) -> None:
    asked = {"temperature": 0, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    more = {"return_token_ids": True, "return_prompt_text": True}
    chat = caller.post("/v1/chat/completions", {**asked, **more}, headers=KEY).json()
    fields: dict[str, Any] = {"temperature": 0, "max_output_tokens": 5, "input": "hi"}
    answer = post(caller, **fields, enable_response_messages=True).json()
    (choice,), (given,), (written,) = chat["choices"], answer["input_messages"], answer["output_messages"]
    kind = {"type": "raw_message_tokens"}
    assert given == {**kind, "message": chat["prompt_text"], "tokens": chat["prompt_token_ids"]}
    assert written == {**kind, "message": choice["message"]["content"], "tokens": choice["token_ids"]}
    assert "input_messages" not in post(caller, **fields).json()


def test_logprobs(caller: Server) -> None:
    fields = {"input": ASKED, "temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    data = post(caller, **fields).json()
    Response.model_validate(data)
    scores = data["output"][0]["content"][0]["logprobs"]
    assert len(scores) == data["usage"]["output_tokens"]
    assert [len(score["top_logprobs"]) for score in scores] == [2] * len(scores)
    deltas = [event for event in events_of(caller, **fields) if event["type"] == "response.output_text.delta"]
    assert [score for event in deltas for score in event["logprobs"]] == scores


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
BAD_TEXT = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "stored": ({"previous_response_id": "resp_1"}, "previous_response_id", "send all earlier items as input"),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
    "unknown": ({"n": 2}, "n", "is not supported"),
    "background": ({"background": True}, "background", "wait for the answer"),
    "reference": ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "must have the type message.*store"),
    "image": ({"input": [IMAGE]}, "input[0].content[0]", "content of the type 'input_image'; give text"),
    "empty": ({"input": []}, "input", "at least one message"),
    "search": ({"tools": [{"type": "web_search"}]}, "tools[0]", "function or namespace"),
    "same": ({"tools": [ADD, ADD]}, "tools", "same name"),
    "other": ({"tools": [ADD], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not among"),
    "schema": ({"text": BAD_TEXT}, "text.format", "nothing"),
    "long": ({"input": "a b " * 2048}, "input", "maximum context length"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_names_the_field(client: OpenAI, case: str) -> None:
    fields, param, message = WRONG[case]
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.responses.create(model="any", input="a", stream=True, extra_body=fields)
    assert caught.value.param == param


# ------------------------------------------------------------------------------------------------ without a server


def reply_of(**fields: Any) -> ResponseReply:
    request = read_request(ResponseRequest, json.dumps({"input": "a", **fields}).encode())
    chat = request.chat()
    reply = ResponseReply(request, chat, "m", PromptTokens([1, 2]), None, lambda: HERMES.parser([Function("add")]))
    reply.params = chat.sampling_params(SamplingParams(temperature=0.2))
    return reply


def test_text_and_calls_are_items_in_their_order() -> None:
    text = (
        'so: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\nthen <tool_call>\n{"name": "add", "argu'
    )
    reply = reply_of(tools=[ADD])
    events = [event for letter in text for event in reply.push([Event(0, 0, [1], letter)])]
    events += reply.push([Event(0, 0, [1], 'ments": {"b', "length")]) + reply.end()
    for event in events:
        EVENT.validate_python(event)
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    output = events[-1]["response"]["output"]
    assert [event["item"] | {"status": item["status"]} for event, item in zip(done, output, strict=True)] == output
    said = [item.get("arguments") or item["content"][0]["text"] for item in output]
    assert said == ["so:", '{"a": 1}', "then", '{"b']
    assert [item["status"] for item in output] == ["completed"] * 3 + ["incomplete"]
    assert reply_of(tools=[ADD]).whole([Event(0, 0, [1], text, "stop")])["status"] == "completed"
    empty = reply_of().whole([Event(0, 0, [1], "", "stop")])
    assert empty["output"][0]["content"][0]["text"] == ""


def test_an_error_ends_the_stream_for_every_client() -> None:
    reply = reply_of()
    reply.push([Event(0, 0, [1], "a")])
    events = reply.error(ApiError(504, "too late", code="timeout"))
    assert [EVENT.validate_python(event).type for event in events] == ["error", "response.failed"]
    assert events[0]["error"]["message"] == events[1]["response"]["error"]["message"] == "too late"


def test_a_request_of_codex() -> None:
    """Its fields as version 0.169 sends them, with short texts and few tools."""
    run = {"type": "function", "name": "exec_command", "description": "a", "strict": False, "parameters": SCHEMA}
    agents = {"type": "namespace", "name": "agents", "description": "a", "tools": [{**run, "name": "close"}]}
    said = [("developer", "rules"), ("developer", "more"), ("user", "where"), ("user", "list the folder")]
    body = {
        "model": "any",
        "stream": True,
        "input": [
            {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": text}]}
            for role, text in said
        ],
        "tools": [run, agents, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "client_metadata": {"session_id": "a"},
    }
    chat = read_request(ResponseRequest, json.dumps(body).encode()).chat()
    messages = [(message.role, message.text) for message in chat.messages]
    assert messages == [("system", "rules\n\nmore"), ("user", "where\n\nlist the folder")]
    assert [tool.function.name for tool in chat.tools or ()] == ["exec_command", "agents__close"]


def test_fields_without_effect_are_refused_where_that_is_wanted() -> None:
    with pytest.raises(ApiError, match="store is not supported"):
        read_request(ResponseRequest, b'{"input": "a", "store": true}', FieldPolicy(strict=True))
    assert isinstance(read_request(ResponseRequest, b'{"input": "a"}', FieldPolicy(strict=True)).chat(), ChatRequest)
