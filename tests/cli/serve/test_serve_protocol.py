"""openai_input.py and engine_input.py: accepted fields, their sampling parameters, and errors that name a field."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError
from serving import ROOT, read_request

from fastgen.cli.serve.dialects.anthropic import MessageRequest
from fastgen.cli.serve.dialects.openai_responses import ResponseRequest
from fastgen.cli.serve.engine_input import ModelFacts, prepare
from fastgen.cli.serve.openai_input import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from fastgen.cli.serve.validation import NEUTRAL, NOTED, ApiError, FieldPolicy, Strict, check_request
from fastgen.cli.serve.validation import UNUSED as FOREIGN
from fastgen.request import SamplingParams

HELLO = [{"role": "user", "content": "Hello"}]
NEEDED: dict[type[Strict], dict[str, Any]] = {
    ChatRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "Hello"},
    TokenizeRequest: {"prompt": "Hello"},
    DetokenizeRequest: {"tokens": [1, 2]},
}
KINDS = pytest.mark.parametrize("kind", NEEDED)


def read(kind: Any, **fields: Any) -> Any:
    return read_request(kind, json.dumps({**NEEDED[kind], **fields}).encode())


def error_of(kind: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(kind, **fields)
    error = raised.value
    assert error.status == 400
    assert set(error.body["error"]) == {"message", "type", "param", "code"}
    assert error.body["error"]["type"] == "invalid_request_error"
    return error


def refusal(check: Callable[[], Any]) -> ApiError | None:
    """Return the error of a check, or None."""
    try:
        check()
    except ApiError as error:
        return error
    return None


def params_of(kind: Any, defaults: SamplingParams | None = None, **fields: Any) -> SamplingParams:
    params: SamplingParams = read(kind, **fields).sampling_params(defaults or SamplingParams())
    params.validate(vocab_size=1000)
    return params


def refused_by(
    facts: ModelFacts, kind: Any = CompletionRequest, strict: bool = False, **fields: Any
) -> ApiError | None:
    """Return the error of a valid request that does not suit the model, or None."""
    return refusal(partial(prepare, facts, read(kind, **fields), strict=strict))


def facts(context: int = 10**6, vocab_size: int = 1000) -> ModelFacts:
    """A model without a tokenizer. vocabulary: not None, so that logprobs are allowed."""
    return ModelFacts("x", None, cast(Any, object()), SamplingParams(), vocab_size, context)


# ------------------------------------------------------------------------------------------------- what is taken


@pytest.mark.parametrize(
    ("kind", "documented"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, text_params.CompletionCreateParamsBase),
    ],
)
def test_a_field_of_openai_is_taken_or_named(kind: Any, documented: Any) -> None:
    others = {*documented.__annotations__, "suffix", "functions", "nonsense"}
    others -= kind.model_fields.keys() | kind.without_effect
    assert {"nonsense", "suffix"} < others
    for name in others:
        error = error_of(kind, **{name: 1})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert name in error.message
        assert read(kind, **{name: None}) == read(kind), "null is the default, which is nothing"


UNUSED: dict[str, Any] = {
    "best_of": 1, "metadata": {"a": "b"}, "modalities": ["text"], "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "x", "prompt_cache_options": {}, "prompt_cache_retention": "24h", "reasoning_effort": "low",
    "safety_identifier": "x", "service_tier": "auto", "store": True, "verbosity": "low",
}  # fmt: skip


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_field_without_effect_is_taken_unless_the_server_is_strict(kind: Any) -> None:
    own = {"reasoning_effort"} if kind is ChatRequest else {"include_reasoning", "separate_reasoning"}
    assert UNUSED.keys() ^ own == kind.without_effect - FOREIGN - NOTED.keys()
    unused = {name: UNUSED.get(name, "x") for name in kind.without_effect}
    assert params_of(kind, **unused, stream=True, stream_options={"include_obfuscation": False}, user="x") == params_of(
        kind
    )
    strict = partial(check_request, kind, policy=FieldPolicy(strict=True))
    for name, value in unused.items():
        error = refusal(partial(strict, {**NEEDED[kind], name: value}))
        assert error is not None
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert strict({**NEEDED[kind], name: None}) == read(kind)
    error = refusal(partial(strict, {**NEEDED[kind], "stream": True, "stream_options": {"include_obfuscation": True}}))
    assert error is not None
    assert error.param == "stream_options.include_obfuscation"
    assert strict({**NEEDED[kind], "stream": True, "stream_options": {"include_usage": True}}).streamed.include_usage
    assert read(kind, n=2, best_of=2) is not None


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_documentation_lists_every_field(kind: Any) -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    own = kind.without_effect | kind.neutral.keys()
    listed = FOREIGN | NOTED.keys() | NEUTRAL.keys()  # in names.toml, which the page links to
    names = kind.model_fields.keys() | (own - listed)
    assert [name for name in names if f"`{name}`" not in text and name != "model"] == []


# What litellm 1.106 sends in a second turn, to a call that max_tokens had cut off, and keys that others add.
SENT_BACK: list[dict[str, Any]] = [
    {"role": "assistant", "tool_calls": [
        {"function": {"arguments": '{"x": 1', "name": "f"}, "id": "abcdefghi", "type": "function"}],
     "provider_specific_fields": {"refusal": None}},
    {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "reasoning_content": "y",
     "cache_control": {"type": "ephemeral"}, "prefix": True, "function_call": None, "parsed": {"a": 1}},
    {"role": "assistant", "content": None, "tool_calls": [
        {"index": 0, "id": "a", "type": "function",
         "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}]},
    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
]  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
def test_keys_that_others_add_to_messages_are_dropped(strict: bool) -> None:
    request = check_request(ChatRequest, {"messages": [*HELLO, *SENT_BACK]}, FieldPolicy(strict))
    _, cut, plain, called, parts = (message.model_dump(exclude_none=True) for message in request.messages)
    function = {"name": "f", "arguments": '{"x": 1'}
    assert cut == {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}]}
    assert plain == {"role": "assistant", "content": "x", "reasoning_content": "y"}
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert parts == {"role": "user", "content": [{"type": "text", "text": "x"}]}


@KINDS
def test_null_means_left_out(kind: Any) -> None:
    optional = {name: None for name in kind.model_fields if name not in NEEDED[kind]}
    assert read(kind, **optional) == read(kind)
    for name in NEEDED[kind]:
        assert error_of(kind, **{name: None}).status == 400


def said(role: str, **more: Any) -> list[Any]:
    return [{"role": role, **more}]


CALLED = {"name": "f", "arguments": "{}"}
CALL = {"id": "a", "type": "function", "function": CALLED}
NO_TOOLS = {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}
WRONG: dict[Any, list[tuple[str, Any, str]]] = {
    ChatRequest: [
        ("messages", [*HELLO, *said("king", content="x")], "messages[1].role"),
        ("messages", said("user", content=[{"type": "image_url"}]), "messages[0].content[0].type"),
        ("messages", said("assistant", content="x", audio={"id": "a"}), "messages[0].audio"),
        ("messages", said("assistant", content="", function_call=CALLED), "messages[0].function_call"),
        ("messages", said("user"), "messages[0].content"),
        ("messages", said("user", content="x", tool_calls=[CALL]), "messages[0].tool_calls"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [], "messages"),
        ("max_tokens", 0, "max_tokens"),
        ("top_logprobs", 3, "top_logprobs"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", NO_TOOLS, "tool_choice.allowed_tools.mode"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ("structured_outputs", {"structural_tag": "a"}, "structured_outputs.structural_tag"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}},
         "response_format.json_schema.schema"),
        ("response_format", {"type": "text", "strict": True}, "response_format.strict"),
        ("logit_bias", {"5": 101}, "logit_bias.5"),
        ("logit_bias", {str(token): 1 for token in range(4097)}, "logit_bias"),
        ("stop", ["a", ""], "stop[1]"),
        ("modalities", ["text", "audio"], "modalities[1]"),
    ],
    CompletionRequest: [
        ("structured_outputs", {"choice": []}, "structured_outputs.choice"),
        ("bad_words", ["a", " "], "bad_words[1]"),
        ("prompt", [1, "a"], "prompt[1]"),
        ("prompt", ["a", 1], "prompt[1]"),
        ("prompt", [[1], []], "prompt[1]"),
        ("prompt", [], "prompt"),
        ("prompt", [1, True], "prompt[1]"),
        ("prompt", [2.0], "prompt[0]"),
        ("max_tokens", 0, "max_tokens"),
        ("logprobs", True, "logprobs"),
    ],
    TokenizeRequest: [("messages", HELLO, "prompt")],
    DetokenizeRequest: [("tokens", ["a"], "tokens[0]")],
}  # fmt: skip


@KINDS
def test_an_error_names_its_place(kind: Any) -> None:
    for field, value, param in WRONG[kind]:
        error = error_of(kind, **{field: value})
        assert error.param == param
        assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True, "messages": said("assistant", content="")}, "continue_final_message"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"n": 2, "best_of": 3}, "best_of"),
    ],
)
def test_fields_that_contradict_each_other_are_named(fields: dict[str, Any], param: str) -> None:
    assert error_of(ChatRequest, **fields).param == param


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ChatRequest, "logit_bias", {f"x{number}": "y" for number in range(5000)}),
        (ChatRequest, "modalities", [5] * 5000),
        (ResponseRequest, "include", [5] * 5000),
        (MessageRequest, "system", [5] * 5000),
        (MessageRequest, "stop_sequences", [5] * 5000),
    ],
)
def test_not_each_wrong_entry_of_a_large_body_is_reported(kind: type[Strict], field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate({field: value})
    assert 0 < sum(field in each["loc"] for each in error.value.errors()) <= 2


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b"\xff", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 10**6,
     b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}"],
)  # fmt: skip
def test_a_malformed_body_is_an_error(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        read_request(CompletionRequest, body)
    assert raised.value.status == 400


# ------------------------------------------------------------------------------------------------- what it means


def test_a_missing_field_means_the_default() -> None:
    assert params_of(ChatRequest) == SamplingParams()
    assert params_of(CompletionRequest) == SamplingParams(max_tokens=16), "as OpenAI has it"
    own = SamplingParams(temperature=0.2, top_p=0.8, top_k=3)
    assert params_of(ChatRequest, own, top_p=None) == own


def test_tools_and_formats_are_as_they_were_sent() -> None:
    function = {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {"a": {"x": None}}}}
    tools = [{"type": "function", "function": function}]
    request = read(ChatRequest, tools=tools, tool_choice={"type": "function", "function": {"name": "f"}})
    assert [tool.for_template() for tool in request.tools] == tools
    assert (request.tool_choice.names, request.tool_choice.required) == (["f"], True)
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert read(ChatRequest, response_format=wanted).response_format.json_schema.schema_ == schema


# ------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("strict", [False, True])
def test_a_request_that_has_no_room_is_refused(strict: bool) -> None:
    model = facts(100)
    for limit, echo in ((None, False), (0, True), (1, False), (5, False), (10**30, False)):
        for length in (94, 95, 96, 99, 100, 101):
            needed = 1 if limit is None else limit if strict else min(limit, 1)
            error = refused_by(model, strict=strict, prompt=[5] * length, max_tokens=limit, echo=echo)
            assert (error is not None) == (length + needed > 100)
            if error is not None:
                assert (error.code, error.param) == ("context_length_exceeded", "prompt")
                assert f"length is 100 tokens. However, you requested {length + needed} tokens" in error.message
    cut = refused_by(model, strict=strict, prompt=[5] * 1101, max_tokens=5)
    assert cut is not None
    assert f"requested at least {1106 if strict else 1102} tokens" in cut.message


def test_values_that_a_model_does_not_have_are_named() -> None:
    ids: list[tuple[dict[str, Any], str]] = [({"prompt": ids}, "prompt") for ids in ([5, 1000], [5, -1], [10**30])]
    ids += [({name: [1000]}, name) for name in ("stop_token_ids", "allowed_token_ids")]
    for fields, param in (*ids, ({"logit_bias": {"1000": 1}}, "logit_bias"), ({"min_tokens": 17}, "min_tokens")):
        error = refused_by(facts(), **{"prompt": [5], **fields})
        assert error is not None
        assert (error.status, error.param) == (400, param)


def test_an_echo_that_would_fill_the_memory_is_refused() -> None:
    whole = {"echo": True, "logprobs": 19, "max_tokens": 1}
    ids = {"return_token_ids": True}
    for fields, length, param in (
        (whole, 200_000, None),
        ({"n": 20, "echo": True}, 200_000, None),
        ({"n": 20, "logprobs": 20, **ids}, 200_000, None),
        ({"n": 128, "logprobs": 20}, 200_000, None),
        (whole, 200_001, "echo"),
        ({**whole, "n": 2}, 150_000, "echo"),
        ({"echo": True, "n": 128}, 200_000, "echo"),
        ({**ids, "n": 128}, 200_000, "return_token_ids"),
        ({"prompt_logprobs": 9}, 200_000, None),
        ({"prompt_logprobs": 9}, 200_001, "prompt_logprobs"),
        ({"prompt_logprobs": 4, "n": 3}, 150_000, "prompt_logprobs"),
    ):
        error = refused_by(facts(), prompt=[5] * length, **fields)
        assert (error and (error.status, error.param)) == (param and (400, param))
