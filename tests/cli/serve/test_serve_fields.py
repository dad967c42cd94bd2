"""validation.py: fields of other servers, unknown fields, and what the log says about them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fastgen.cli.serve.app import plain_path
from fastgen.cli.serve.dialects.anthropic import MessageRequest
from fastgen.cli.serve.dialects.openai_responses import ResponseRequest
from fastgen.cli.serve.openai_input import ChatRequest, CompletionRequest
from fastgen.cli.serve.sampling_fields import STRUCTURE_ALIASES
from fastgen.cli.serve.validation import (
    MAX_NAMED,
    NEUTRAL,
    NOTED,
    UNUSED,
    ApiError,
    FieldPolicy,
    Strict,
    check_request,
    parse,
)
from fastgen.request import SamplingParams

HELLO = [{"role": "user", "content": "Hello"}]
NEEDED: dict[type[Strict], dict[str, Any]] = {
    ChatRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "Hello"},
    ResponseRequest: {"input": "Hello"},
    MessageRequest: {"messages": HELLO, "max_tokens": 5},
}
KINDS = pytest.mark.parametrize("kind", NEEDED)


def read(kind: Any, policy: FieldPolicy | None = None, **fields: Any) -> Any:
    return check_request(kind, {**NEEDED[kind], **fields}, policy)


def error_of(kind: Any, policy: FieldPolicy | None = None, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(kind, policy, **fields)
    assert raised.value.status == 400
    return raised.value


@KINDS
def test_fields_of_other_servers_are_accepted_where_they_change_nothing(kind: Any) -> None:
    said: list[str] = []
    policy = FieldPolicy(say=said.append)
    fields = dict.fromkeys((UNUSED | NOTED.keys()) & kind.without_effect, "any value")
    fields |= {name: NEUTRAL[name][0] for name in NEUTRAL.keys() & kind.neutral}
    for _ in range(2):
        assert read(kind, policy, **fields) == read(kind)
    assert sorted(line.split("'")[1] for line in said) == sorted(NOTED), "each once, and the others never"
    assert any(line.endswith("'num_ctx' of a request is ignored: " + NOTED["num_ctx"]) for line in said)


@KINDS
def test_a_value_that_would_change_the_answer_is_an_error_that_says_so(kind: Any) -> None:
    special = error_of(kind, no_stop_trim=True)
    assert (special.param, special.code) == ("no_stop_trim", "unsupported_parameter")
    assert special.message == "no_stop_trim is only supported as false: use include_stop_str_in_output"
    for name in NEUTRAL:
        assert error_of(kind, **{name: "other"}).param == name
    assert error_of(kind, typical_p=True).param == "typical_p", "true is not 1"
    assert read(kind, typical_p=1.0, top_a=0.0) == read(kind)


def test_the_neutral_value_depends_on_the_endpoint() -> None:
    assert read(CompletionRequest, suffix="") == read(CompletionRequest)
    assert error_of(CompletionRequest, suffix="b").message.startswith(
        'suffix is only supported as "": write the tokens'
    )
    assert read(CompletionRequest, echo=True).echo


@KINDS
def test_any_api_takes_a_priority(kind: Any) -> None:
    request = read(kind, priority=-4)
    assert (request.chat() if hasattr(request, "chat") else request).priority == -4


@KINDS
def test_unknown_fields_are_errors_unless_the_server_ignores_them(kind: Any) -> None:
    assert "nearest field is temperature" in error_of(kind, temprature=0.5).message
    if "structured_outputs" in kind.model_fields:
        for name in ("jsn", "json_"):
            hint = error_of(kind, structured_outputs={name: {}})
            assert hint.message == (
                f"structured_outputs.{name} is not supported; leave it out (the nearest field is json)"
            )
    assert "use max_tokens" in error_of(kind, num_predict=5).message
    said: list[str] = []
    policy = FieldPolicy(ignore_unknown=True, say=said.append)
    for _ in range(2):
        assert read(kind, policy, temprature=0.5, no_stop_trim=True, functions=[]) == read(kind)
    assert [line.split("'")[1] for line in said] == ["temprature", "no_stop_trim", "functions"]
    assert read(kind, policy, **{f"field{number}": 1 for number in range(2 * MAX_NAMED)}) == read(kind)
    assert len(said) == MAX_NAMED
    assert ["further" in line for line in said] == [False] * (len(said) - 1) + [True]
    assert error_of(kind, policy, temperature="hot").param == "temperature"
    if kind is ChatRequest:
        audio = [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]
        assert error_of(kind, policy, messages=audio).param == "messages[0].audio", "a part of what was said"


@KINDS
def test_a_server_has_openais_limit_of_temperatures(kind: Any) -> None:
    """The limit of Anthropic's API is another one, and is not checked."""
    assert read(kind, temperature=2.5).temperature == 2.5, "in a file of fggen"
    limited = FieldPolicy(limited=True)
    assert read(kind, limited, temperature=2).temperature == 2
    if kind is MessageRequest:
        assert read(kind, limited, temperature=2.5).chat().temperature == 2.5
    else:
        error = error_of(kind, limited, temperature=2.5)
        assert (error.param, error.code) == ("temperature", "invalid_value")
        assert error.message.endswith("or start fgserve with --ignore-limits")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_schema_describes_what_is_accepted(kind: Any) -> None:
    schema = kind.model_json_schema()
    described = [*schema["properties"].items(), *schema["patternProperties"].items()]
    for name in kind.without_effect | kind.neutral.keys() | kind.model_fields.keys():
        (found,) = [each for pattern, each in described if re.fullmatch(pattern, name)]
        assert found.get("enum", [None])[0] == kind.neutral.get(name, [None])[0]


# ------------------------------------------------------------------------------------------------- other names


def params_of(**fields: Any) -> SamplingParams:
    params: SamplingParams = read(CompletionRequest, **fields).sampling_params(SamplingParams())
    return params


def test_other_names_of_a_penalty_and_of_structures() -> None:
    assert params_of(repeat_penalty=1.5) == params_of(repetition_penalty=1.5)
    assert error_of(ChatRequest, repeat_penalty=1.5, repetition_penalty=1.4).param == "repeat_penalty"
    assert error_of(ChatRequest, repeat_penalty=0).param == "repeat_penalty"
    values: dict[str, Any] = {"json": {"type": "object"}, "regex": "a+", "choice": ["a"], "grammar": 'start: "a"'}
    for name, part in STRUCTURE_ALIASES.items():
        (structure,) = read(ChatRequest, **{name: values[part]}).structures.values()
        assert structure == read(ChatRequest, structured_outputs={part: values[part]}).structured_outputs
        assert error_of(ChatRequest, **{name: values[part]}, response_format={"type": "text"}).message.endswith(
            f"is given together with {name}; give one of them"
        )
        assert params_of(**{name: values[part]}) == params_of(), "the grammar is added after the tokenizer is known"
        for other in (values[part], values["choice"] if part == "choice" else "b"):  # guidance sends both, and equal
            both = read(ChatRequest, **{name: other}, structured_outputs={part: values[part]})
            assert both.structures == {"structured_outputs": structure}
    assert list(read(ChatRequest, regex="a", guided_regex="a").structures) == ["regex"]
    assert "given together with regex" in error_of(CompletionRequest, regex="a", ebnf="b").message
    assert error_of(CompletionRequest, guided_choice=[]).param == "guided_choice"
    assert read(ChatRequest, json_schema=json.dumps(values["json"])).structures["json_schema"].params.json_schema


# ------------------------------------------------------------------------------------------------- habits


def test_integers_may_have_a_point_and_a_stop_may_be_empty() -> None:
    assert params_of(max_tokens=3.0, seed=2.0, top_k=4.0) == params_of(max_tokens=3, seed=2, top_k=4)
    assert read(MessageRequest, max_tokens=7.0).max_tokens == 7
    for value in (3.5, "3", True, [3.0]):
        assert error_of(ChatRequest, max_tokens=value).param == "max_tokens"
    assert error_of(ChatRequest, max_tokens=-1.0).param == "max_tokens"
    assert params_of(stop="") == params_of()


def test_what_an_assistant_may_have_said() -> None:
    refusal = [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "never"}]
    said = [{"role": "assistant", "content": content} for content in (None, [], "", refusal)]
    assert [message.text or "" for message in read(ChatRequest, messages=said).messages] == ["", "", "", "no\nnever"]
    assert read(ResponseRequest, input=[{"role": "assistant", "content": refusal}]).chat().messages[0].text
    assert error_of(ChatRequest, messages=[{"role": "user", "content": None}]).param == "messages[0].content"
    thinking = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "never"}]
    thought = read(ChatRequest, messages=[{"role": "assistant", "content": thinking}]).messages[0]
    assert (thought.text, thought.reasoning_content) == ("never", "Hm.")
    error = error_of(ChatRequest, messages=[{"role": "user", "content": thinking}])
    assert error.param == "messages[0].content[0].type"


def test_what_vllm_takes_and_openai_does_not() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "mcp.add", "arguments": "{}"}}
    answers = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    messages = [{"role": "user", "content": [], "tool_calls": []}, *answers]
    assert [message.text for message in read(ChatRequest, messages=messages).messages] == ["", None, "5"]
    described = {"name": "mcp.add", "return": {"type": "integer"}}  # as transformers' get_json_schema writes it
    chosen = {"function": {"name": "mcp.add"}}
    chat = read(ChatRequest, tools=[{"function": described, "cache_control": {}}], tool_choice=chosen)
    assert chat == read(ChatRequest, tools=[{"type": "function", **chosen}], tool_choice={"type": "function", **chosen})
    form = {"type": "json_schema", "json_schema": {"name": "a person", "schema": {}}}
    assert read(ChatRequest, response_format=form).response_format.json_schema.name == "a person"
    for kind, logprobs in ((ChatRequest, {"logprobs": True, "top_logprobs": 3}), (CompletionRequest, {"logprobs": 3})):
        params = read(kind, **logprobs, logprob_token_ids=[7]).sampling_params(SamplingParams())
        assert (params.logprobs, params.logprob_token_ids) == (0, [7]), "chosen ids replace the best ones"
    kwargs = {"enable_thinking": False}
    assert read(MessageRequest, chat_template_kwargs=kwargs).chat().chat_template_kwargs == kwargs
    assert not read(ResponseRequest, include_reasoning=False).chat().shows_reasoning


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file"])
def test_a_part_that_is_not_text_is_an_error_that_says_why(part: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": part}]
    error = error_of(ChatRequest, messages=[{"role": "user", "content": content}])
    assert error.param == "messages[0].content[1].type"
    assert "the model reads text only" in error.message
    nothing = error_of(ChatRequest, messages=[{"role": "user", "content": [{"text": "a"}]}])
    assert nothing.message == "messages[0].content[0].type is required"
    for kind, field in ((MessageRequest, "messages"), (ResponseRequest, "input")):
        with pytest.raises(ApiError, match="the model reads text only"):
            read(kind, **{field: [{"role": "user", "content": content}]}).chat()


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("//v1//chat/completions//", "/v1/chat/completions"),
        ("/", "/"),
        ("//", "/"),
        ("/v1/models/", "/v1/models/"),
        ("//v1//models//tmp//x/", "/v1/models//tmp//x/"),
    ],
)
def test_slashes(path: str, plain: str) -> None:
    assert plain_path(path) == plain


def test_parts_have_any_name_of_text_that_vllm_takes() -> None:
    parts = ["a", {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    (message,) = read(ChatRequest, messages=[{"role": "user", "content": parts}]).messages
    assert message.texts == [{"type": "text", "text": text} for text in "abc"]


def test_parts_of_other_clients_that_change_nothing() -> None:
    """Tools of transformers' get_json_schema, and structures as vLLM's class writes all its fields."""
    function = {"name": "get", "description": "a", "parameters": {"type": "object", "properties": {}}}
    plain, documented = (
        read(ChatRequest, tools=[{"type": "function", "function": {**function, **more}}])
        for more in ({}, {"return": {"type": "string"}})
    )
    assert plain == documented
    whole = {"json": None, "regex": "a", "disable_any_whitespace": False, "disable_additional_properties": False}
    assert read(ChatRequest, structured_outputs=whole) == read(ChatRequest, structured_outputs={"regex": "a"})
    message = error_of(ChatRequest, structured_outputs={"json": {}, "disable_additional_properties": True}).message
    assert message.endswith("only supported as false: put additionalProperties: false into the schema")
    call = {"id": "1", "function": {"name": "get", "arguments": "{}"}}
    (said,) = read(ChatRequest, messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert said.tool_calls[0].type == "function"


def test_a_part_of_another_type_is_told_which_there_are() -> None:
    """It is not told that a field of its type is unknown."""
    error = error_of(ChatRequest, response_format={"type": "regex", "value": "a"})
    assert error.param == "response_format.type"
    assert error.message.endswith("type is 'regex', which is not supported; give text or json_object or json_schema")
    error = error_of(ChatRequest, tools=[{"type": "custom", "custom": {"name": "a"}}])
    assert error.message == "tools[0].type is 'custom', which is not supported; give function"
    assert error_of(ChatRequest, response_format={"type": "text", "value": "a"}).param == "response_format.value"


def test_what_open_webui_sends() -> None:
    """A chat with the parameters of its settings and a call of a tool, and the task that makes a title."""
    call = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "get", "arguments": "{}"}}
    history = [
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
    ]
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
    settings = {
        "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "max_tokens": 128, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "repeat_penalty": 1.1, "repeat_last_n": -1, "mirostat": 0, "mirostat_eta": 0.1,
        "mirostat_tau": 5.0, "tfs_z": 1, "seed": 0, "stop": [], "logit_bias": {}, "reasoning_effort": "medium",
        "num_ctx": 2048, "num_batch": 512, "num_keep": 24, "num_thread": 2, "num_gpu": 0, "use_mmap": True,
        "use_mlock": True, "keep_alive": "5m", "response_format": None,
    }  # fmt: skip
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chat = read(ChatRequest, model="any", messages=history, tools=[tool], **settings, **streamed)
    assert [message.text for message in chat.messages] == ["", "look", "", "5"]
    assert chat.sampling_params(SamplingParams()).repetition_penalty == 1.1
    title = read(ChatRequest, model="any", stream=False, max_completion_tokens=1000)
    assert title.limit == 1000


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_body_may_begin_with_a_byte_order_mark(mark: bytes) -> None:
    assert parse(mark + b'{"a": 1}') == parse(bytearray(mark + b'{"a": 1}')) == {"a": 1}
