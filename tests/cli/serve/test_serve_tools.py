"""tools.py: calls parsed from pieces of text, forced by grammars, written by chat templates."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from grammars import MARKS, accepts, add, allowed, byte_level, walk

from fastgen import Generator, SamplingParams
from fastgen.cli.serve.prompts import ModelFacts, prepare
from fastgen.cli.serve.protocol import ApiError, ChatMessage, ChatRequest, NamedTool, Tool, read_request
from fastgen.cli.serve.tools import (
    HELD,
    HERMES,
    LLAMA,
    MISTRAL,
    Calling,
    Syntax,
    ToolParser,
    find_syntax,
    new_call_id,
)
from fastgen.grammar import Compiler, json_rule
from fastgen.tokenizer import Tokenizer

SYNTAXES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}
NAMES = ("get_weather", "get", "add")

# Short forms of the models' own templates.
TEMPLATES = {
    "hermes": """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{{ ': ' + tool.function.description }}
{%- for name, value in tool.function.parameters.properties | items %} {{ name }}{% endfor %}{% endfor %}</tools>
<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>
{%- endfor %}{% if m.role == 'tool' and not m.name is defined %}{{ raise_exception('a name is needed') }}{% endif %}
{%- endfor %}""",
    "mistral": """{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]
{%- for call in m.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- '[TOOL_CALLS] [' if loop.first else ', ' }}{{ {'name': call.function.name, 'arguments': call.function.arguments,
'id': call.id} | tojson }}{{ ']' if loop.last }}{% else %}{{ m.content }}{% if m.role == 'tool' %}@{{ m.tool_call_id }}
{%- endif %}{% endfor %}{% endfor %}""",
    "llama": """{% if tools %}Environment: ipython\n{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}{% if m.tool_calls | length > 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{{ '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}
{{- call.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}{% endfor %}""",
}

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


# ------------------------------------------------------------------------------------------------- parsing


def parse(syntax: Syntax, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of an answer, and the names and arguments of its calls."""
    parser = ToolParser(syntax, NAMES)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.push("", last=True)
    assert all(delta.get("content") or delta.get("tool_calls") for delta in deltas)
    content, calls = add(deltas)
    assert parser.calls == len(calls) == len({call[0] for call in calls})
    return content, [call[1:] for call in calls]


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.choice([1, 2, 5, 40]))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def splits(text: str, rng: random.Random) -> list[list[str]]:
    """Return single characters, two pieces cut at every index or at some, and random pieces."""
    places = range(len(text) + 1) if len(text) < 60 else rng.sample(range(len(text) + 1), 30)
    return [list(text), *([text[:at], text[at:]] for at in places), *(cut(text, rng) for _ in range(20))]


def same(syntax: Syntax, text: str, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Parse a text; check that all ways to cut it give the same result."""
    whole = parse(syntax, [text])
    for pieces in splits(text, rng):
        assert parse(syntax, pieces) == whole, pieces
    return whole


def random_arguments(rng: random.Random) -> str:
    hard = ["", "x", 'a "quoted" } ]', "\\", "{[", "</tool_call>", "é\n\t", '{"name": "get", "arguments": {', "日本"]
    value: dict[str, Any] = {
        key: rng.choice([rng.choice(hard), 5, None, [rng.choice(hard)]]) for key in "abc"[: rng.randrange(4)]
    }
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 2]))


def written(name: str, arguments: str, syntax: Syntax, rng: random.Random) -> str:
    said, key = json.dumps(name), rng.choice(["arguments", "parameters"])
    forms = [
        f'{{"name": {said}, "{key}": {arguments}}}',
        f'{{ "type": "function", "name" : {said} ,\n"{key}":{arguments} }}',
        f'{{"name": {said}, "{key}": {arguments}, "id": "a}}\\"", "index": -1.5, "last" : null}}',
    ]
    return rng.choice(forms)


def random_answer(name: str, rng: random.Random) -> tuple[str, str, list[tuple[str, str]]]:
    """Return a random text, its content and its calls."""
    syntax = SYNTAXES[name]
    text = rng.choice(["", "", "Let me see: {x} [1] <b> <tool", " Well.\n\n* [a](b)"])
    calls = [(rng.choice(NAMES), random_arguments(rng)) for _ in range(rng.randrange(1, 4))]
    objects = [written(*call, syntax, rng) for call in calls]
    blank = rng.choice(["", " ", "\n"])
    if name == "hermes":
        told = blank.join(f"<tool_call>{blank}{said}{blank}</tool_call>" for said in objects)
    elif name == "mistral":
        told = rng.choice(["[TOOL_CALLS]", "[TOOL_CALLS] ", ""]) + f"[{blank}" + f",{blank}".join(objects) + f"{blank}]"
    else:
        told = ("<|python_tag|>" if text else rng.choice(["<|python_tag|>", ""])) + rng.choice(["; ", "\n"]).join(
            objects
        )
    after = rng.choice(["", "", "That is all.", "Done }"])
    gap = rng.choice(["", "\n\n"])
    return f"{text}{gap}{told}{blank}{after}", text + after, calls


@pytest.mark.parametrize("name", SYNTAXES)
def test_calls_and_content_are_parsed_from_any_pieces(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        text, content, calls = random_answer(name, rng)
        said, found = same(SYNTAXES[name], text, rng)
        assert said == content, text
        assert found == calls, text


@pytest.mark.parametrize("name", SYNTAXES)
def test_broken_answers_are_parsed_the_same_from_any_pieces(name: str) -> None:
    rng = random.Random(name)
    kept = 0
    for _ in range(120):
        text = random_answer(name, rng)[0]
        for _ in range(rng.randrange(1, 4)):
            at, end = sorted(rng.sample(range(len(text) + 1), 2))
            text = (
                text[:at]
                + rng.choice(["", '"', "}", "{", "[", "]", "<", ",", text[at:end] * 2])
                + text[min(end, at + 3) :]
            )
        content, calls = same(SYNTAXES[name], text, rng)
        kept += not calls
        assert calls or content == text, "what holds no call is content, all of it"
    assert kept > 10


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, "plain"),
        (HERMES, " plain, with white space \n"),
        (HERMES, "<tool_call>\nget(5)\n</tool_call>"),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "get"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "get", "arguments": "x"}</tool_call>'),
        (HERMES, '{"name": "get", "arguments": {}}'),
        (HERMES, '<tool_call>{"name": "get", "argum'),
        (HERMES, '<tool_call>{"arguments": {}, "name": "get"}</tool_call>'),
        (HERMES, '<tool_call>{"id": "' + "x" * HELD + '", "name": "get", "arguments": {}}</tool_call>'),
        (MISTRAL, "[1, 2]"),
        (MISTRAL, '[{"name": "unknown", "arguments": {}}]'),
        (MISTRAL, '{"name": "get", "arguments": {}}'),
        (MISTRAL, "[TOOL_CALLS] no"),
        (LLAMA, '{"name": "unknown", "parameters": {}}'),
        (LLAMA, 'Say {"name": "get", "parameters": {}}'),
        (LLAMA, '<|python_tag|>get.call(query="x")'),
        (LLAMA, '{"answer": 5}'),
    ],
)
def test_text_without_a_call_is_content(syntax: Syntax, text: str) -> None:
    assert same(syntax, text, random.Random(0)) == (text, [])


def test_a_call_with_its_mark_may_name_any_function() -> None:
    for syntax, text in [
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (MISTRAL, '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
        (LLAMA, '<|python_tag|>{"name": "unknown", "parameters": {}}'),
    ]:
        assert parse(syntax, [text]) == ("", [("unknown", "{}")])


def test_a_call_without_its_mark_may_follow_text_of_mistral() -> None:
    text = 'I will look. [{"name": "get", "arguments": {"a": [1]}}]'
    assert same(MISTRAL, text, random.Random(0)) == ("I will look.", [("get", '{"a": [1]}')])


def test_a_forgotten_bracket_costs_nothing_else() -> None:
    text = (
        '<tool_call>\n{"name": "get", "arguments": {"a": 1}\n</tool_call>\n<tool_call>{"name": "add", "arguments": {}}'
    )
    assert same(HERMES, text, random.Random(0)) == ("", [("get", '{"a": 1}'), ("add", "{}")])


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser(HERMES, NAMES)
    told = [
        parser.push(piece)
        for piece in ("Hi ", '<tool_call>{"name": "ge', 't", "arguments": ', '{"a"', ": 1", "}}", "x")
    ]
    assert told[0] == [{"content": "Hi"}]
    assert told[1:3] == [[], []], "nothing before the name and the beginning of the arguments are known"
    begin, first = told[3]
    (call,) = begin["tool_calls"]
    assert call == {"index": 0, "id": call["id"], "type": "function", "function": {"name": "get", "arguments": ""}}
    pieces = [first, *itertools.chain(*told[4:6])]
    assert [piece["tool_calls"][0] for piece in pieces] == [
        {"index": 0, "function": {"arguments": part}} for part in ('{"a"', ": 1", "}")
    ]
    assert told[6] == [{"content": "x"}]
    assert parser.push("", last=True) == []


def test_an_answer_that_is_cut_off_leaves_a_call_that_is() -> None:
    text = '[TOOL_CALLS] [{"name": "get", "arguments": {"a": "tw'
    assert same(MISTRAL, text, random.Random(0)) == ("", [("get", '{"a": "tw')])


def test_ids_are_what_mistral_takes() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in ids)


def test_only_text_that_may_become_a_call_is_held() -> None:
    """The work for a piece of text must not grow with the answer."""
    parser = ToolParser(LLAMA, NAMES)
    parser.push('{"name": "get", "parameters": {"a": "')
    for _ in range(20_000):
        parser.push("word ")
        assert len(parser._text) == 0
    for syntax in SYNTAXES.values():
        parser = ToolParser(syntax, NAMES)
        for _ in range(20_000):
            parser.push(" [word] <b> {x}")
            assert len(parser._text) < 5


# ------------------------------------------------------------------------------------------------- grammars

Model = tuple[str, Tokenizer, Compiler, int]


@pytest.fixture(scope="module", params=[(name, marks) for name in SYNTAXES for marks in (MARKS, ())], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Each syntax, with marks as tokens and with marks as text."""
    name, marks = request.param
    tokenizer = byte_level(tmp_path_factory.mktemp(name), marks, TEMPLATES[name])
    size = len(tokenizer.hf)
    return name, tokenizer, Compiler(tokenizer, size, [0, 1]), size


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.hf(text, add_special_tokens=False)["input_ids"])


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
    assert max(map(len, answers)) == 1 if model[0] == "llama" else max(map(len, answers)) > 1


def test_one_call_of_one_function(model: Model) -> None:
    rng = random.Random(1)
    only = NamedTool.model_validate({"type": "function", "function": {"name": "get_weather"}})
    for _ in range(6):
        ((name, arguments),) = forced(model, rng, choice=only, parallel=False)
        assert name == "get_weather"
        check(name, arguments)


def call_text(name: str, body: str) -> str:
    key = SYNTAXES[name].arguments
    said = f'{{"name": "get_weather", "{key}": {body}}}'
    return {"hermes": f"<tool_call>\n{said}\n</tool_call>", "mistral": f"[TOOL_CALLS] [{said}]", "llama": said}[name]


RIGHT, WRONG = '{"city": "Paris", "days": [3]}', '{"city": "Rome", "days": [3]}'


def test_calls_are_forced_as_templates_write_them(model: Model) -> None:
    name, tokenizer, compiler, size = model
    for tools, parallel in itertools.product((TOOLS, STRICT), (True, False)):
        grammar = calling_of(tokenizer, tools, choice="required", parallel=parallel).grammar()
        assert grammar is not None
        mask = compiler.compile(grammar)
        assert accepts(mask, ids_of(tokenizer, call_text(name, RIGHT)), size)
        assert {0, 1} <= set(allowed(mask, size))
        assert not accepts(compiler.compile(grammar), ids_of(tokenizer, call_text(name, WRONG)), size)
        assert not accepts(compiler.compile(grammar), ids_of(tokenizer, "Hello"), size)
        assert not set(allowed(compiler.compile(grammar), size)) & {0, 1}


@pytest.mark.parametrize("parallel", [True, False])
def test_strict_tools_leave_text_free_and_hold_calls_to_their_schema(model: Model, parallel: bool) -> None:
    name, tokenizer, compiler, size = model
    grammar = calling_of(tokenizer, STRICT, parallel=parallel).grammar()
    assert grammar is not None
    text = "Let me <see>: [x] é"
    mask = compiler.compile(grammar)
    assert {0, 1} <= set(allowed(mask, size))
    assert accepts(mask, ids_of(tokenizer, text), size)
    assert {0, 1} <= set(allowed(mask, size))
    before = "" if name == "llama" else text
    once = before + call_text(name, RIGHT)
    mask = compiler.compile(grammar)
    assert accepts(mask, ids_of(tokenizer, once), size)
    assert {0, 1} <= set(allowed(mask, size))
    assert not accepts(compiler.compile(grammar), ids_of(tokenizer, before + call_text(name, WRONG)), size)
    if name == "hermes":
        twice = ids_of(tokenizer, f"{once}\n{call_text(name, RIGHT)}")
        assert accepts(compiler.compile(grammar), [*twice, 0], size) == parallel


def test_without_a_promise_the_model_is_free(model: Model) -> None:
    assert calling_of(model[1], TOOLS).grammar() is None
    assert calling_of(model[1], TOOLS, parallel=False).grammar() is not None


def test_an_answer_with_a_grammar_may_be_a_call(model: Model) -> None:
    name, tokenizer, compiler, size = model
    rule = json_rule({"properties": {"x": {"type": "null"}}}, strict=False)
    grammar = calling_of(tokenizer, TOOLS).grammar(rule)
    assert grammar is not None
    mark = LLAMA.opens if name == "llama" else ""
    assert accepts(compiler.compile(grammar), [*ids_of(tokenizer, '{"x": null}'), 0], size)
    assert accepts(compiler.compile(grammar), [*ids_of(tokenizer, mark + call_text(name, RIGHT)), 0], size)
    assert not accepts(compiler.compile(grammar), ids_of(tokenizer, mark + call_text(name, WRONG)), size)
    assert not accepts(compiler.compile(grammar), ids_of(tokenizer, '{"x": 5}'), size)
    assert not accepts(compiler.compile(grammar), ids_of(tokenizer, "Hello"), size)
    for calling in (Calling(tokenizer, []), calling_of(tokenizer, TOOLS, choice="none")):
        assert calling.grammar(rule) == f"start: {rule}"
        assert calling.grammar() is None


def test_a_bad_schema_of_a_function_is_an_error(model: Model) -> None:
    _, tokenizer, compiler, _ = model
    parameters = {"type": "object", "properties": {"a": {"type": "objekt"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = calling_of(tokenizer, tools, choice="required").grammar()
    assert grammar is not None
    with pytest.raises(ValueError, match=r"^Invalid type: objekt$"):
        compiler.compile(grammar)
    with pytest.raises(ValueError, match="parameters of the function f must be"):
        calling_of(tokenizer, [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}])


def test_a_generator_calls(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gen.tokenizer is not None
    monkeypatch.setattr(gen.tokenizer.hf, "chat_template", TEMPLATES["hermes"])
    calling = calling_of(gen.tokenizer, TOOLS, choice="required", parallel=False)
    grammar = calling.grammar()
    assert grammar is not None
    params = SamplingParams(n=3, max_tokens=300, temperature=1, seed=0, grammar=grammar)
    for completion in gen.generate("hello", params)[0].completions:
        parser = calling.parser()
        assert parser is not None
        content, ((_, name, arguments),) = add(parser.push(completion.text, last=True))
        assert (content, completion.finish_reason) == ("", "stop")
        check(name, json.loads(arguments))


# ------------------------------------------------------------------------------------------------- templates

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1234567890", "type": "function", "function": {"name": "get_weather", "arguments": RIGHT}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1234567890", "content": "Yes."},
]


def read(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    return read_request(ChatRequest, json.dumps({"messages": messages}).encode()).messages


def rendered(tokenizer: Tokenizer, calling: Calling, messages: list[dict[str, Any]]) -> str:
    told = calling.template_messages(read(messages))
    return str(tokenizer.hf.apply_chat_template(told, tools=calling.template_tools, tokenize=False))


def test_the_template_reveals_the_syntax(model: Model, talker: Path) -> None:
    assert find_syntax(model[1]) is SYNTAXES[model[0]]
    assert find_syntax(Tokenizer(talker)) is None


def test_messages_as_templates_know_them(model: Model) -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "call_0123", "type": "function", "function": function}
    read_by_clients = {**call, "index": 0, "function": {**function, "parsed_arguments": {}}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "refusal": None, "parsed": {}, "tool_calls": [read_by_clients]},
        {"role": "tool", "content": "5", "tool_call_id": "call_0123"},
        {"role": "tool", "content": "6", "tool_call_id": "call_0123", "name": "g"},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None},
    ]
    told = Calling(model[1], []).template_messages(read(messages))
    id = told[3]["tool_call_id"]
    assert len(id) == 9
    assert told == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "id": id, "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "5", "tool_call_id": id, "name": "f"},
        {"role": "tool", "content": "6", "tool_call_id": id, "name": "g"},
        {"role": "assistant", "content": "x"},
    ]  # fmt: skip


def test_templates_get_tools_calls_and_results(model: Model) -> None:
    name, tokenizer, _, _ = model
    text = rendered(tokenizer, calling_of(tokenizer, TOOLS), CONVERSATION)
    assert "It rains." in text
    assert "strict" not in text
    assert "null" not in text
    assert "Yes." in text
    said = call_text(name, RIGHT)
    assert (said.removesuffix("}]") if name == "mistral" else said) in text
    if name == "mistral":
        (given,) = {word[:9] for word in text.split("@")[1:]}
        assert f'"id": "{given}"' in text, "both have got the same id"


def test_a_call_written_by_a_template_is_parsed(model: Model) -> None:
    name, tokenizer, _, _ = model
    text = rendered(tokenizer, Calling(tokenizer, []), CONVERSATION[1:2])
    _, ((function, arguments),) = parse(SYNTAXES[name], [text.partition("assistant")[2][1:]])
    assert (function, json.loads(arguments)) == ("get_weather", json.loads(RIGHT))


def test_without_a_choice_the_template_has_no_tools(model: Model) -> None:
    calling = calling_of(model[1], TOOLS, choice="none")
    assert calling.template_tools is None
    assert calling.parser() is None
    assert "It rains." not in rendered(model[1], calling, CONVERSATION)


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_come_back_as_text(model: Model, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    (told,) = Calling(model[1], []).template_messages(read(messages))
    assert told["tool_calls"][0]["function"] == {"name": "get", "arguments": arguments}
    assert json.dumps(arguments) in rendered(model[1], Calling(model[1], []), messages)


def test_a_model_without_tools_refuses_them(talker: Path) -> None:
    tokenizer = Tokenizer(talker)
    with pytest.raises(ValueError, match="tools are not supported"):
        calling_of(tokenizer, TOOLS)
    calling = Calling(tokenizer, [])
    assert calling.template_tools is None
    assert calling.template_messages(read(CONVERSATION[:1])) == CONVERSATION[:1]
    with pytest.raises(ValueError, match="messages of tools are not supported"):
        calling.template_messages(read(CONVERSATION))
    model = ModelFacts("x", tokenizer, None, SamplingParams(), 1000, 100)
    for param, fields in (("tools", {"tools": STRICT}), ("messages", {})):
        messages = CONVERSATION if param == "messages" else CONVERSATION[:1]
        request = read_request(ChatRequest, json.dumps({"messages": messages, **fields}).encode())
        with pytest.raises(ApiError, match="not supported") as refused:
            prepare(model, request)
        assert refused.value.param == param
