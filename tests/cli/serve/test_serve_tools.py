"""tools.py: calls forced by grammars, and written by chat templates; test_tool_calls.py has their parser."""

from __future__ import annotations

import itertools
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from asking import CALLS, template
from grammars import accepts, add, byte_level, walk
from serving import read_request

from fastgen import SamplingParams
from fastgen.cli.serve import tool_grammars
from fastgen.cli.serve.dialects.anthropic import MessageRequest
from fastgen.cli.serve.dialects.openai_responses import ResponseRequest
from fastgen.cli.serve.engine_input import ModelFacts, prepare
from fastgen.cli.serve.engine_input import calling_of as read_calling
from fastgen.cli.serve.openai_input import ChatMessage, ChatRequest, ChosenTools, Tool
from fastgen.cli.serve.tool_grammars import call_rules
from fastgen.cli.serve.tools import Calling
from fastgen.cli.serve.validation import ApiError
from fastgen.text.grammar import Compiler, json_rule
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tool_calls import parse_message
from fastgen.text.tools import values
from fastgen.text.tools.formats import FORMATS, LLAMA, MISTRAL
from fastgen.text.tools.parser import Function
from fastgen.text.tools.values import Schemas

SYNTAXES = {name: FORMATS[name] or MISTRAL if name != "llama" else LLAMA for name in CALLS}
BARE = ("llama", "pythonic")  # calls without a mark

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 30}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", 'a "}]" {\\']}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "It rains.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get", "description": None, "strict": False}},
]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]


def calling_of(tokenizer: Tokenizer, tools: list[dict[str, Any]], **asked: Any) -> Calling:
    return Calling(tokenizer, [Tool.model_validate(tool) for tool in tools], **asked)


# ------------------------------------------------------------------------------------------------- grammars

Model = tuple[str, Tokenizer, Compiler, int]


@pytest.fixture(scope="module", params=[(name, marks) for name in SYNTAXES for marks in (True, False)], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Each syntax, with marks as tokens and with marks as text."""
    name, marks = request.param
    tokenizer = byte_level(tmp_path_factory.mktemp(name), CALLS[name][0] if marks else (), template(name))
    size = len(tokenizer.hf)
    return name, tokenizer, Compiler(tokenizer, size, [0, 1]), size


def takes(model: Model, grammar: str | None, text: str, ended: bool = True) -> bool:
    """Return whether a grammar allows a text, followed by an end token if it is `ended`."""
    _, tokenizer, compiler, size = model
    assert grammar is not None
    ids = list(tokenizer.hf(text, add_special_tokens=False)["input_ids"])
    return accepts(compiler.compile(grammar), [*ids, 0] if ended else ids, size)


def forced(model: Model, rng: random.Random, **asked: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a random answer that a grammar allows, which has no other content."""
    _, tokenizer, compiler, size = model
    calling = calling_of(tokenizer, TOOLS, **asked)
    grammar, parser = calling.grammar(), calling.parser()
    assert grammar is not None
    assert parser is not None
    ids = walk(compiler.compile(grammar), size, (0, 1), rng)
    content, calls = add(parser.push(tokenizer.decode(ids), last=True))
    assert content == ""
    return [(call[1], json.loads(call[2])) for call in calls]


def check(name: str, arguments: dict[str, Any]) -> None:
    if name == "get":
        assert arguments == {}
    else:
        assert name == "get_weather"
        assert arguments["city"] in WEATHER["$defs"]["city"]["enum"]  # type: ignore[index]
        assert all(1 <= day <= 30 for day in arguments["days"])


def test_a_required_call_is_made(model: Model) -> None:
    rng = random.Random(0)
    answers = [forced(model, rng, choice="required") for _ in range(12)]
    for name, arguments in itertools.chain(*answers):
        check(name, arguments)
    assert {name for calls in answers for name, _ in calls} == {"get", "get_weather"}
    assert min(map(len, answers)) == 1
    assert model[0] != "llama" or max(map(len, answers)) == 1


def test_a_named_function_is_called_once_in_every_dialect(model: Model) -> None:
    name, function = "get_weather", {"name": "get_weather", "parameters": WEATHER}
    asked = {"messages": [{"role": "user", "content": "Rain?"}], "max_tokens": 9}
    tools = [{"type": "function", "function": function}]
    chat = {**asked, "tools": tools, "tool_choice": {"type": "function", "function": {"name": name}}}
    message = {
        **asked,
        "tools": [{"name": name, "input_schema": WEATHER}],
        "tool_choice": {"type": "tool", "name": name},
    }
    response = {"input": "Rain?", "tools": [{"type": "function", **function}]}
    response["tool_choice"] = {"type": "function", "name": name}
    first = ChatRequest.model_validate(chat)
    chats = [first, MessageRequest.model_validate(message).chat(), ResponseRequest.model_validate(response).chat()]
    (grammar,) = {read_calling(chat, model[1]).grammar() for chat in chats}
    assert grammar == calling_of(model[1], tools, choice="required", parallel=False).grammar()
    rng = random.Random(1)
    for _ in range(6):
        ((called, arguments),) = forced(model, rng, choice=first.tool_choice)
        assert called == name
        check(name, arguments)


def chosen(mode: str, name: str = "get") -> ChosenTools:
    tools = [{"type": "function", "function": {"name": name}}]
    return ChosenTools.model_validate({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})


def test_only_chosen_tools_are_called(model: Model) -> None:
    tokenizer, rng = model[1], random.Random(2)
    for _ in range(4):
        assert {function for function, _ in forced(model, rng, choice=chosen("required"))} == {"get"}
    calling = calling_of(tokenizer, TOOLS, choice=chosen("auto"))
    assert calling.template_tools == calling_of(tokenizer, TOOLS).template_tools, "the model is shown all"
    assert takes(model, calling.grammar(), "Hello")
    assert takes(model, calling.grammar(), written(tokenizer, ("get", "{}")))
    assert not takes(model, calling.grammar(), written(tokenizer, ("get_weather", RIGHT)), ended=False)


def written(tokenizer: Tokenizer, *calls: tuple[str, str]) -> str:
    """Return the text of calls (name and arguments) as the chat template writes them, without Mistral's ids in JSON."""
    said = [{"id": "a" * 9, "type": "function", "function": {"name": name, "arguments": body}} for name, body in calls]
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": said}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    return text.rpartition("<|assistant|>")[2].removesuffix("<|end|>").replace(', "id": "aaaaaaaaa"', "")


RIGHT, WRONG = '{"city": "Paris", "days": [3]}', '{"city": "Rome", "days": [3]}'


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_as_templates_write_them_and_strict_ones_leave_text_free(model: Model, parallel: bool) -> None:
    name, tokenizer, _, _ = model
    right, wrong = (written(tokenizer, ("get_weather", body)) for body in (RIGHT, WRONG))
    for tools in (TOOLS, STRICT):
        grammar = calling_of(tokenizer, tools, choice="required", parallel=parallel).grammar()
        assert takes(model, grammar, right)
        for other in (wrong, "Hello", ""):
            assert not takes(model, grammar, other, ended=not other)
        if name != "llama":
            assert takes(model, grammar, written(tokenizer, ("get_weather", RIGHT), ("get", "{}"))) == parallel
    grammar = calling_of(tokenizer, STRICT, parallel=parallel).grammar()
    text = "Let me <see>: [x] é"
    before = "" if name in BARE else text
    for answer in ("", text, before + right):
        assert takes(model, grammar, answer)
    assert not takes(model, grammar, before + wrong, ended=False)
    if SYNTAXES[name].separate:
        assert takes(model, grammar, f"{text}{right}\n{right}") == parallel
    assert (calling_of(tokenizer, TOOLS, parallel=parallel).grammar() is None) == parallel


def test_an_answer_with_a_grammar_may_be_a_call(model: Model) -> None:
    name, tokenizer, _, _ = model
    rule = json_rule({"properties": {"x": {"type": "null"}}}, strict=False)
    grammar = calling_of(tokenizer, TOOLS).grammar(rule)
    mark = LLAMA.opens if name in BARE else ""
    for right in ('{"x": null}', mark + written(tokenizer, ("get_weather", RIGHT))):
        assert takes(model, grammar, right)
    for wrong in (mark + written(tokenizer, ("get_weather", WRONG)), '{"x": 5}', "Hello"):
        assert not takes(model, grammar, wrong, ended=False)
    for calling in (Calling(tokenizer, []), calling_of(tokenizer, TOOLS, choice="none")):
        assert calling.grammar(rule) == f"start: {rule}"
        assert calling.grammar() is None


def function(strict: bool = False, **properties: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": properties, "required": [name for name in properties if name != "b"]}
    return [{"type": "function", "function": {"name": "get", "parameters": schema, "strict": strict}}]


def test_arguments_one_by_one(model: Model) -> None:
    """Arguments in tags and in Python are those of the schema, and what the grammar takes is parsed again."""
    name, tokenizer, _, _ = model
    if name not in ("qwen3_coder", "pythonic"):
        return
    nullable: Any = {"anyOf": [{"enum": ["x", "null"]}, {"type": "null"}]}
    truth, number = {"type": "boolean"}, {"type": "integer"}
    tools = function(True, a={"type": "string"}, b={"type": ["string", "null"]}, c=truth, d=number, e=nullable)
    calling = calling_of(tokenizer, tools, choice="required")
    hard = {"a": 'two\n"lines" </parameter> é', "b": "null, }", "c": True, "d": 5, "e": "x"}
    for arguments in (hard, {"a": "", "c": False, "d": -1, "e": None}):
        text = written(tokenizer, ("get", json.dumps(arguments)))
        assert takes(model, calling.grammar(), text)
        parser = calling.parser()
        assert parser is not None
        ((_, _, found),) = add(parser.push(text, last=True))[1]
        assert json.loads(found) == arguments
    for arguments in ({"a": ""}, {**hard, "d": "x"}, {**hard, "f": 1}, {**hard, "e": "y"}):
        assert not takes(model, calling.grammar(), written(tokenizer, ("get", json.dumps(arguments))))
    optional = calling_of(tokenizer, function(True, b={"type": "string"}), choice="required").grammar()
    for arguments in ({}, {"b": "x"}):
        assert takes(model, optional, written(tokenizer, ("get", json.dumps(arguments))))
    itself: Any = function(a={"$ref": "#/$defs/a"})
    itself[0]["function"]["parameters"]["$defs"] = {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}
    deep = calling_of(tokenizer, itself, choice="required").grammar()
    assert takes(model, deep, written(tokenizer, ("get", '{"a": "x"}')))
    free = calling_of(
        tokenizer, [{"type": "function", "function": {"name": "get", "parameters": {}}}], choice="required"
    )
    for arguments in ({}, {"x": "1", "y": "z"}):
        assert takes(model, free.grammar(), written(tokenizer, ("get", json.dumps(arguments))))


def test_what_a_format_cannot_enforce_is_an_error(model: Model) -> None:
    name, tokenizer, _, _ = model
    limited = {"a": {"type": "string", "maxLength": 5}}
    merged = {"type": "object", "anyOf": [{"properties": {"a": {"type": "string"}}}]}
    cases = [
        ("qwen3_coder", function(True, **limited), "the text 'a' of the strict function get has limits"),
        ("qwen3_coder", function(**{"a>b": {}}), "cannot be in a tag"),
        ("pythonic", function(**{"a b": {}}), "is not a Python name"),
        *((each, [{"type": "function", "function": {"name": "get", "parameters": merged, "strict": True}}], "anyOf")
          for each in ("qwen3_coder", "pythonic")),
    ]  # fmt: skip
    for wrong in ({"enum": 5}, {"anyOf": 5}, {"type": "string", "oneOf": [5]}):  # are no limits
        calling_of(tokenizer, function(a=wrong), choice="required").grammar()
    for each, tools, message in cases:
        if each == name:
            with pytest.raises(ValueError, match=message):
                calling_of(tokenizer, tools, choice="required").grammar()
    assert calling_of(tokenizer, function(**limited), choice="required").grammar() is not None


def test_parameters_are_of_an_object(model: Model) -> None:
    with pytest.raises(ValueError, match="parameters of the function f must be"):
        calling_of(model[1], [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}])


# ------------------------------------------------------------------------------------------------- templates

CALL = {"id": "call_1234567890", "type": "function", "function": {"name": "get_weather", "arguments": RIGHT}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1234567890", "content": "Yes."},
]


def read(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    return read_request(ChatRequest, json.dumps({"messages": messages}).encode()).messages


def test_parts_of_messages_reach_a_template_that_reads_parts(talker: Path) -> None:
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    asked = [{"role": "developer", "content": "brief"}, {"role": "user", "content": parts}]
    asked.append({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})
    tokenizer = Tokenizer(talker)
    for written, expected in (
        ("{% for p in m.content %}{{ p.text }}{% endfor %}", "[system]brief[user]ab[assistant]no"),
        ("{{ m.content }}", "[system]brief[user]a\nb[assistant]no"),
    ):
        tokenizer.hf.chat_template = "{% for m in messages %}[{{ m.role }}]" + written + "{% endfor %}"
        messages = Calling(tokenizer, []).template_messages(read(asked))
        assert tokenizer.render_chat(messages, add_generation_prompt=False) == expected


def test_the_template_reveals_the_format(model: Model, talker: Path) -> None:
    assert model[1].tool_syntax is SYNTAXES[model[0]]
    assert Tokenizer(talker).tool_syntax is None


HARD = {
    "city": 'a "}]\'" {\\ é',
    "days": [1, {"x": None}],
    "text": "two\nlines </b> `",
    "no": None,
    "yes": True,
    "n": -1.5,
}
TYPED = {"type": "object", "properties": {"city": {"type": "string"}, "text": {"type": ["string", "null"]}}}


def test_what_a_template_writes_is_parsed_again(model: Model) -> None:
    """The calls of an answer, in the history of the next prompt, are written as they were, also after a cut."""
    name, tokenizer, _, _ = model
    tools = [{"name": "get", "parameters": TYPED}, {"name": "get_weather"}]
    calls = [("get", json.dumps(HARD)), ("get_weather", "{}")][: 1 if name == "llama" else 2]
    text = written(tokenizer, *calls)
    message = parse_message(text, tokenizer, tools)
    assert message["content"] == ""
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert found == [(name, json.loads(body)) for name, body in calls]
    again = written(tokenizer, *((name, json.dumps(arguments)) for name, arguments in found))
    assert again == text
    assert json.dumps("Par")[:-1] in json.dumps(written(tokenizer, ("get", '{"city": "Par')))


def test_a_model_without_tools_refuses_them(talker: Path) -> None:
    model = ModelFacts("x", Tokenizer(talker), None, SamplingParams(), 1000, 100)
    for param, messages, tools in (("tools", CONVERSATION[:1], STRICT), ("messages", CONVERSATION, [])):
        request = read_request(ChatRequest, json.dumps({"messages": messages, "tools": tools}).encode())
        with pytest.raises(ApiError, match="not supported") as refused:
            prepare(model, request)
        assert refused.value.param == param
    assert Calling(Tokenizer(talker), []).template_messages(read(CONVERSATION[:1])) == CONVERSATION[:1]


# ------------------------------------------------------------------------------------------------- large schemas


def union(count: int, part: dict[str, Any], wrapped: bool) -> dict[str, Any]:
    """Return a schema of many arguments, each of which may be one of many parts. wrapped: each has a schema of its own
    that leads there."""
    to_parts = {"$ref": "#/$defs/parts"}
    parts = {"anyOf": [{**part, "title": str(number)} for number in range(count)]}
    arguments = {f"a{number}": {"anyOf": [to_parts]} if wrapped else to_parts for number in range(count)}
    return {"type": "object", "properties": arguments, "$defs": {"parts": parts}}


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("part", [{"type": "string"}, {"type": "integer"}, {"enum": ["a", 5]}], ids=str)
def test_work_for_a_schema_is_linear_or_has_a_limit(
    name: str, strict: bool, part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is the number of schemas that are looked at, and of characters of the grammar."""
    syntax = SYNTAXES[name]
    work, resolved = 0, Schemas.resolved

    def counted(self: Schemas, schema: Any) -> Any:
        nonlocal work
        work += 1
        return resolved(self, schema)

    def work_for(schema: dict[str, Any]) -> int:
        nonlocal work
        work = 0
        function = Function("f", schema, strict)
        syntax.parser([function])
        return work + sum(map(len, call_rules(syntax, [function], lambda mark: mark)))

    monkeypatch.setattr(Schemas, "resolved", counted)
    assert work_for(union(400, part, False)) < 4.5 * work_for(union(100, part, False))
    monkeypatch.setattr(tool_grammars, "MAX_GRAMMAR", 100_000)
    monkeypatch.setattr(values, "MAX_ALTERNATIVES", 10_000)
    with suppress(ValueError):  # of one of the limits
        work_for(union(400, part, True))
    assert work < 20_000
