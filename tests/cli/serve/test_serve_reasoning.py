"""Reasoning in all APIs, as the openai and anthropic packages read it, from engines that say a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import Message, RawMessageStreamEvent
from asking import named_events, save_caller, template
from openai import OpenAI
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serve_stub import SCRIPT
from serving import STUB, Server

from fastgen.cli.serve.engine_input import encode_chat
from fastgen.cli.serve.openai_input import ChatRequest
from fastgen.cli.serve.tools import Calling
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(120)

MESSAGE: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSE: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
THOUGHT = '12 and 30:\n<tool_call>{"name": "add"} is no call here'
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
ASKED: Any = [{"role": "user", "content": "what is 12 + 30?"}]

# {model: (end of its chat template, text of its answer)}
MODELS = {
    "thinker": (
        "{{ '<think>\n\n</think>\n\n' if enable_thinking is false }}",
        f"<think>\n{THOUGHT}\n</think>\n\n42{CALL}",
    ),
    "opener": ("<think>\n", f"{THOUGHT}\n</think>\n\n42{CALL}"),
}
NAMES = pytest.mark.parametrize("model", MODELS)


def save(name: str, folder: Path) -> Path:
    """Save a tokenizer whose chat template knows reasoning, and the script of a model."""
    end, text = MODELS[name]
    save_caller("hermes", folder, "<think>", "</think>")
    thinking = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    written = template("hermes").replace("{{ m.content }}", thinking + "{{ m.content }}").replace("{{ begun }}", "")
    written = written.replace("<|assistant|>{% endif %}", f"<|assistant|>{end}{{% endif %}}")
    (folder / "chat_template.jinja").write_text(written)
    tokenizer = Tokenizer(folder)
    detokenizer, ids = Detokenizer(tokenizer, ()), tokenizer.encode(text, special=False)
    pieces = [detokenizer.push([id], last=at == len(ids)) for at, id in enumerate(ids, 1)]
    assert "".join(pieces) == text
    (folder / SCRIPT).write_text(json.dumps(list(zip(ids, pieces, strict=True))))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("thinkers")
    return {name: save(name, folder / name) for name in MODELS}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [{"model": str(folder), "name": name} for name, folder in folders.items()]
    file = tmp_path_factory.mktemp("serve") / "serve.yaml"
    file.write_text(json.dumps({"models": models}))
    with Server(STUB, "--config", str(file)) as server:
        yield server.await_ready()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def thought_tokens(folder: Path) -> int:
    """Return the number of tokens of the scripted reasoning, without its marks."""
    text = Path(folder, SCRIPT).read_text()
    before = "".join(piece for _, piece in json.loads(text)).partition("</think>")[0].removeprefix("<think>")
    return len(Tokenizer(folder).encode(before, special=False))


def chat(client: OpenAI, model: str, stream: bool, **fields: Any) -> dict[str, Any]:
    """Return the parts of a chat's answer, complete or joined from its stream."""
    asked: dict[str, Any] = {"model": model, "messages": ASKED, "extra_body": fields}
    if not stream:
        reply = client.chat.completions.create(**asked)
        ChatCompletion.model_validate(reply.to_dict(), strict=True)
        choice, usage = reply.choices[0], reply.usage
        said = choice.message.to_dict()
        assert (
            said["reasoning_content"] == said["reasoning"] if "reasoning" in said else "reasoning_content" not in said
        )
        parts = {name: said.get(name) or "" for name in ("reasoning", "content")}
        calls = len(choice.message.tool_calls or ())
        scores = len((choice.logprobs and choice.logprobs.content) or ())
    else:
        parts, calls, scores, usage = {"reasoning": "", "content": ""}, 0, 0, None
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage
            for part in chunk.choices:
                delta = part.delta.to_dict()
                assert delta.get("reasoning") == delta.get("reasoning_content")
                parts = {name: parts[name] + str(delta.get(name) or "") for name in parts}
                calls += sum(call.id is not None for call in part.delta.tool_calls or ())
                scores += len((part.logprobs and part.logprobs.content) or ())
    assert usage is not None
    assert usage.completion_tokens_details is not None
    tokens = usage.completion_tokens_details.reasoning_tokens
    return {**parts, "calls": calls, "scores": scores, "tokens": usage.completion_tokens, "reasoning_tokens": tokens}


@NAMES
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_its_reasoning(client: OpenAI, folders: dict[str, Path], model: str, stream: bool) -> None:
    count = thought_tokens(folders[model])
    whole = chat(client, model, stream, logprobs=True)
    said = {"reasoning": THOUGHT, "content": f"42{CALL}", "calls": 0, "reasoning_tokens": count}
    assert whole == {**said, "scores": whole["tokens"], "tokens": whole["tokens"]}
    called = chat(client, model, stream, tools=[TOOL])
    assert called == {**whole, "content": "42", "calls": 1, "scores": 0}
    for without in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        assert chat(client, model, stream, **without) == {**whole, "reasoning": "", "scores": 0}
    written = f"{'' if model == 'opener' else '<think>'}"
    raw = chat(client, model, stream, separate_reasoning=False)
    assert raw["content"].startswith(written)
    assert raw["content"].endswith(f"{THOUGHT}\n</think>\n\n42{CALL}")
    cut = chat(client, model, stream, max_tokens=6)
    assert cut["content"] == ""
    assert cut["reasoning"]
    assert THOUGHT.startswith(cut["reasoning"])
    assert cut["reasoning_tokens"] == cut["tokens"] - (model == "thinker")


def prompt_of(server: Server, tokenizer: Tokenizer, path: str = "/v1/chat/completions", **fields: Any) -> str:
    fields = {"model": "thinker", "messages": ASKED, "max_tokens": 1, "return_token_ids": True, **fields}
    reply = server.post(path, fields)
    assert reply.status_code == 200, reply.text
    return tokenizer.decode(reply.json()["prompt_token_ids"], special=True)


def test_thinking_is_turned_off_and_earlier_reasoning_is_given_back(server: Server, folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["thinker"])
    plain, off = prompt_of(server, tokenizer), "<|assistant|><think>\n\n</think>\n\n"
    assert plain.endswith("<|assistant|>")
    for fields in (
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False, "max_tokens": 5}},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert prompt_of(server, tokenizer, **fields) == plain.removesuffix("<|assistant|>") + off
    for fields in ({"reasoning_effort": "low"}, {"reasoning": {"effort": "high"}}, {"enable_thinking": True}):
        assert prompt_of(server, tokenizer, **fields) == plain
    for effort, thinks in (("none", False), ("minimal", None), ("low", True), ("high", True), (None, None)):
        for asked in ({"reasoning_effort": effort}, {"reasoning": {"effort": effort}}):
            assert ChatRequest.model_validate({"messages": ASKED, **asked}).thinks is thinks
            assert ChatRequest.model_validate({"messages": ASKED, "enable_thinking": False, **asked}).thinks is False
    for kind, thinks in (("enabled", True), ("adaptive", None), ("disabled", False)):
        form = {"type": kind, "budget_tokens": 9}
        assert ChatRequest.model_validate({"messages": ASKED, "thinking": form}).thinks is thinks
    on = {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_of(server, tokenizer, **on) == plain, "the template's variable has the last word"
    details = [{"type": "reasoning.text", "text": "hm"}, {"type": "reasoning.encrypted", "data": "x"}]
    for earlier in ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_details": details}):
        said = {"role": "assistant", "content": "42", **earlier}
        assert "<|assistant|><think>hm</think>42<|end|>" in prompt_of(
            server, tokenizer, messages=[*ASKED, said, *ASKED]
        )


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning": {"effort": "xhigh"}}, "xhigh"),
        ({"reasoning_effort": "high"}, "usual"),  # which the template refuses
        ({"reasoning_effort": "minimal"}, "usual"),
        ({"enable_thinking": True}, "usual"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "off"),
        ({"reasoning_effort": "none"}, "off"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "xhigh"}}, "xhigh"),
    ],
)
def test_a_template_gets_an_effort_that_it_takes(folders: dict[str, Path], fields: dict[str, Any], passed: str) -> None:
    """As Qwen3.8's, which knows low, medium and xhigh."""
    tokenizer = Tokenizer(folders["opener"])
    refusal = "{{ raise_exception('no such effort') if reasoning_effort not in ('usual', 'low', 'xhigh') }}"
    tokenizer.hf.chat_template = (
        "{{ raise_exception('no tools') if not tools }}"
        + "{% if enable_thinking is false %}off{% else %}"
        + "{% set reasoning_effort = reasoning_effort | default('usual') %}"
        + refusal
        + "{{ reasoning_effort }}{% endif %}{# <tool_call> #}"
    )
    request = ChatRequest.model_validate({"messages": ASKED, "tools": [TOOL], **fields})
    calling = Calling(tokenizer, request.tools or [])
    assert tokenizer.decode(encode_chat(request, tokenizer, calling)) == passed


def test_a_template_with_only_an_effort_gets_none_as_well(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["opener"])
    first = "{{ raise_exception('system first') if messages[0].role != 'system' }}"
    tokenizer.hf.chat_template = first + "{{ reasoning_effort | default('usual') }}"
    for fields, passed in (({}, "usual"), ({"reasoning_effort": "none"}, "none"), ({"reasoning_effort": "low"}, "low")):
        request = ChatRequest.model_validate({"messages": [{"role": "system", "content": "a"}, *ASKED], **fields})
        assert tokenizer.decode(encode_chat(request, tokenizer, Calling(tokenizer, []))) == passed


# ------------------------------------------------------------------------------------------------- responses


@NAMES
def test_responses_have_reasoning_items(server: Server, client: OpenAI, folders: dict[str, Path], model: str) -> None:
    tool: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    fields: Any = {"model": model, "input": ASKED, "tools": [tool]}
    reply = client.responses.create(**fields, reasoning={"effort": "low", "summary": "auto"})
    Response.model_validate(reply.to_dict())
    thought, _, call = reply.output
    assert thought.type == "reasoning"
    assert [(part.type, part.text) for part in thought.content or ()] == [("reasoning_text", THOUGHT)]
    assert (thought.status, thought.id[:3], reply.output_text, call.type) == ("completed", "rs_", "42", "function_call")
    assert reply.usage is not None
    assert reply.usage.output_tokens_details.reasoning_tokens == thought_tokens(folders[model])
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert (len(pieces) > 1, "".join(pieces)) == (True, THOUGHT)
    done = next(event for event in events if event.type == "response.reasoning_text.done")
    assert (done.text, done.output_index, done.content_index) == (THOUGHT, 0, 0)
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    named = named_events(RESPONSE, server.post("/v1/responses", {**fields, "stream": True}).text)
    first = [event["type"].removeprefix("response.") for event in named[:5]]
    added = ["output_item.added", "content_part.added", "reasoning_text.delta"]
    assert first == ["created", "in_progress", *added]
    cut = client.responses.create(**{**fields, "max_output_tokens": 6})
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
    scored = server.post("/v1/responses", {**fields, "top_logprobs": 1}).json()
    assert "logprobs" not in scored["output"][0]["content"][0]
    assert len(scored["output"][1]["content"][0]["logprobs"]) > thought_tokens(folders[model])


def counted(server: Server, path: str, **fields: Any) -> int:
    found: int = server.post(path, {"model": "thinker", **fields}).json()["usage"]["input_tokens"]
    return found


def test_items_of_reasoning_are_given_back_and_effort_none_is_without(server: Server, client: OpenAI) -> None:
    items = [item.to_dict() for item in client.responses.create(model="thinker", input=ASKED).output]
    result = client.responses.create(model="thinker", input=[*ASKED, *items, *ASKED], max_output_tokens=1)
    without = counted(server, "/v1/responses", input=[*ASKED, items[1], *ASKED], max_output_tokens=1)
    assert result.usage is not None
    assert result.usage.input_tokens > without + 5
    summary = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": THOUGHT}]}
    same = counted(server, "/v1/responses", input=[*ASKED, summary, items[1], *ASKED], max_output_tokens=1)
    assert same == result.usage.input_tokens
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    assert counted(server, "/v1/responses", input=[*ASKED, sealed, items[1], *ASKED], max_output_tokens=1) == without
    plain = counted(server, "/v1/responses", input=ASKED, max_output_tokens=1)
    assert counted(server, "/v1/responses", input=ASKED, max_output_tokens=1, reasoning={"effort": "none"}) > plain


# ------------------------------------------------------------------------------------------------- messages


@NAMES
def test_messages_have_thinking_blocks(server: Server, claude: Anthropic, folders: dict[str, Path], model: str) -> None:
    tool: Any = {"name": "add", "input_schema": PARAMETERS}
    fields: Any = {"model": model, "max_tokens": 2000, "messages": ASKED, "tools": [tool]}
    reply = claude.messages.create(**fields, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text, call = reply.content
    assert thought.type == "thinking"
    assert (thought.thinking, text.type, call.type) == (THOUGHT, "text", "tool_use")
    assert thought.signature
    data = server.post("/v1/messages", fields).json()
    Message.model_validate(data)
    assert data["usage"]["output_tokens_details"] == {"thinking_tokens": thought_tokens(folders[model])}
    with claude.messages.stream(**fields) as stream:
        pieces = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert (len(pieces) > 1, "".join(pieces)) == (True, THOUGHT)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].type == "thinking"
    assert final.content[0].signature
    events = named_events(MESSAGE, server.post("/v1/messages", {**fields, "stream": True}).text)
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}


def test_thinking_blocks_are_given_back_and_thinking_can_be_disabled(server: Server, claude: Anthropic) -> None:
    def count(content: Any, **fields: Any) -> int:
        turns: Any = [*ASKED, {"role": "assistant", "content": content}, *ASKED]
        return claude.messages.count_tokens(model="thinker", messages=turns, **fields).input_tokens

    reply = claude.messages.create(model="thinker", max_tokens=2000, messages=ASKED)
    plain = count([reply.content[1]])
    assert count(reply.content) > plain + 5
    assert count([{"type": "redacted_thinking", "data": "x"}, reply.content[1]]) == plain
    assert count([reply.content[1]], thinking={"type": "disabled"}) > plain
    for kind in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        assert count([reply.content[1]], thinking=kind) == plain
    begun: Any = [*ASKED, {"role": "assistant", "content": [reply.content[0]]}]
    assert claude.messages.create(model="thinker", max_tokens=1, messages=begun).usage.output_tokens == 1
