"""openai_output.py with events that a small model rarely produces; test_serve_openai.py has those that it does."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest
from grammars import add

from fastgen import Generator
from fastgen.cli.serve.openai_input import ChatRequest, CompletionRequest
from fastgen.cli.serve.openai_output import ChatReply, CompletionReply, PromptTokens, Vocabulary
from fastgen.cli.serve.validation import ApiError, check_request
from fastgen.request import Event
from fastgen.text.reasoning import AnswerParser
from fastgen.text.tools.formats import HERMES
from fastgen.text.tools.parser import Function

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def vocabulary(gen: Generator) -> Vocabulary:
    assert gen.tokenizer is not None
    return Vocabulary(gen.tokenizer)


@pytest.mark.parametrize("way", ["push", "whole"])
@pytest.mark.parametrize(
    ("reason", "error", "message", "status", "kind"),
    [
        ("error", "the logits are not finite", "not finite", 500, "server_error"),
        ("error", "the mask allowed no token", "the mask", 400, "invalid_request_error"),
        ("abort", None, "was aborted", 500, "server_error"),
    ],
)
def test_a_failed_sample_fails_the_request(
    vocabulary: Vocabulary, way: str, reason: Any, error: str | None, message: str, status: int, kind: str
) -> None:
    replies = (
        ChatReply(ChatRequest(messages=HELLO), "tiny", PromptTokens([1]), vocabulary),
        CompletionReply(CompletionRequest(prompt="a", echo=True, logprobs=1), "tiny", [PromptTokens([1])], vocabulary),
    )
    for reply in replies:
        with pytest.raises(ApiError, match=message) as raised:
            getattr(reply, way)([Event(0, 0, [], "", finish_reason=reason, error=error)])
        assert (raised.value.status, raised.value.body["error"]["type"]) == (status, kind)


@pytest.mark.parametrize(
    ("reason", "arguments"), [("stop", '{"a": "x\\n", "b": []}'), ("length", '{"a": "x\\n", "b": [')]
)
def test_the_arguments_of_a_call_are_json_unless_the_answer_was_cut_off(reason: Any, arguments: str) -> None:
    text = 'So: <tool_call>{"name": "get", "arguments": {"a": "x\n", "b": ['

    def reply() -> ChatReply:
        parser = partial(HERMES.parser, [Function("get")])
        return ChatReply(
            ChatRequest(messages=HELLO), "tiny", PromptTokens([1]), None, lambda: AnswerParser(None, tools=parser())
        )

    (whole,) = reply().whole([Event(0, 0, [1], text, reason)])["choices"]
    streamed = reply()
    chunks = [chunk for letter in text for chunk in streamed.push([Event(0, 0, [1], letter)])]
    chunks += streamed.push([Event(0, 0, [], "", reason)])
    content, ((_, name, said),) = add([chunk["choices"][0]["delta"] for chunk in chunks])
    assert (content, name, said) == ("So:", "get", arguments)
    (call,) = whole["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == (name, said)
    assert (
        chunks[-1]["choices"][0]["finish_reason"]
        == whole["finish_reason"]
        == {"stop": "tool_calls"}.get(reason, reason)
    )


def test_values_that_json_lacks_are_replaced(vocabulary: Vocabulary) -> None:
    """A logprob may be minus infinity; of tokens with equal names, the best counts."""
    request = CompletionRequest(prompt="a", logprobs=3)
    byte = next(token for token in range(300) if vocabulary.raw(token) == b"\xff")
    tops = {300: -0.5, byte: -1.0, 5000: -2.0, 5001: -3.0, 301: -math.inf}  # the last but one are no tokens at all
    event = Event(0, 0, [301], "x", "length", logprobs=[0.0], raw_logprobs=[-math.inf], top_logprobs=[tops])
    whole = CompletionReply(request, "tiny", [PromptTokens([1])], vocabulary).whole([event])
    (choice,) = json.loads(json.dumps(whole, allow_nan=False))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    top = choice["logprobs"]["top_logprobs"][0]
    assert (top["bytes:\\xff"], top[""], top[vocabulary.name(301)]) == (-1.0, -2.0, -9999.0)


@pytest.mark.parametrize("text", ["b", ""])
def test_the_last_chunk_of_a_chat_has_the_reason(text: str) -> None:
    """It is the chunk with the last text. If the end comes without text, it is a chunk with an empty delta."""
    reply = ChatReply(ChatRequest(messages=HELLO, stop="x"), "tiny", PromptTokens([1]), None)
    chunks = reply.push([Event(0, 0, [5], "a"), Event(0, 0, [6], text, "stop", "x")])
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"} if text else {}]
    assert [choice["delta"] for choice in choices] == deltas
    assert [(choice["finish_reason"], choice["stop_reason"]) for choice in choices] == [(None, None)] * 2 + [
        ("stop", "x")
    ]


def test_of_several_chunks_for_an_event_the_last_one_has_the_reason() -> None:
    parser = partial(HERMES.parser, [Function("get")])
    prompt, text = PromptTokens([1]), 'So: <tool_call>{"name": "get", "arguments": {}}</tool_call>'
    reply = ChatReply(ChatRequest(messages=HELLO), "tiny", prompt, None, lambda: AnswerParser(None, tools=parser()))
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in reply.push([Event(0, 0, [5], text, "stop")])]
    assert len(reasons) > 2
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


@pytest.mark.parametrize(("stop", "arguments"), [("2", '{"a":'), (None, '{"a": null}')])
def test_a_call_is_completed_unless_a_stop_string_cut_it_off(stop: str | None, arguments: str) -> None:
    parser = partial(HERMES.parser, [Function("get")])
    prompt, text = PromptTokens([1]), '<tool_call>{"name": "get", "arguments": {"a": '
    reply = ChatReply(ChatRequest(messages=HELLO), "tiny", prompt, None, lambda: AnswerParser(None, tools=parser()))
    (choice,) = reply.whole([Event(0, 0, [5], text, "stop", stop)])["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_answers_have_the_nulls_that_clients_read(kind: Any) -> None:
    event = Event(0, 0, [5], "a", "stop", 2)
    if kind is ChatReply:
        reply = ChatReply(ChatRequest(messages=HELLO), "tiny", PromptTokens([1]), None).whole([event])
        inner = reply
    else:
        reply = CompletionReply(CompletionRequest(prompt="a"), "tiny", [PromptTokens([1])], None).whole([event])
        inner = reply["choices"][0]
    assert [reply[name] for name in ("service_tier", "system_fingerprint")] == [None] * 2
    assert [inner[name] for name in ("prompt_logprobs", "prompt_token_ids")] == [None] * 2
    assert [reply["choices"][0][name] for name in ("stop_reason", "token_ids", "logprobs")] == [None] * 3


def test_chosen_alternatives_include_the_token(vocabulary: Vocabulary) -> None:
    """As in vLLM; without logprob_token_ids, the alternatives may lack the token."""
    event = Event(0, 0, [301], "x", "length", logprobs=[0.0], raw_logprobs=[-2.0], top_logprobs=[{300: -0.5}])
    for chosen, logprobs in (([300], [-2.0, -0.5]), (None, [-0.5])):
        request = ChatRequest(messages=HELLO, logprobs=None if chosen else True, logprob_token_ids=chosen)
        (choice,) = ChatReply(request, "tiny", PromptTokens([1]), vocabulary).whole([event])["choices"]
        (entry,) = choice["logprobs"]["content"]
        assert entry["logprob"] == -2.0
        assert [other["logprob"] for other in entry["top_logprobs"]] == logprobs
    for asked in ({"logprob_token_ids": [300]}, {"logprobs": 1}):
        completion = CompletionRequest.model_validate({"prompt": [1], **asked})
        (choice,) = CompletionReply(completion, "tiny", [PromptTokens([1])], vocabulary).whole([event])["choices"]
        assert list(choice["logprobs"]["top_logprobs"][0].values()) == [-2.0, -0.5]
    with pytest.raises(ApiError, match="logprob_token_ids needs logprobs, which is false"):
        check_request(ChatRequest, {"messages": HELLO, "logprobs": False, "logprob_token_ids": [300]})


def test_logprobs_need_names() -> None:
    with pytest.raises(ApiError, match="no tokenizer files") as raised:
        CompletionReply(CompletionRequest(prompt=[1], logprobs=0), "tiny", [PromptTokens([1])], None)
    assert raised.value.param == "logprobs"
