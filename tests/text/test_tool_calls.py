"""tool_calls.py: calls parsed from pieces of text; for forced calls and templates see test_serve_tools.py."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from grammars import add

from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tool_calls import joined_message, parse_message
from fastgen.text.tools.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_V11,
    MISTRAL_V13,
    PYTHONIC,
    QWEN_CODER,
)
from fastgen.text.tools.parser import HELD, Function, Syntax, new_call_id

SYNTAXES = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "mistral_v11": MISTRAL_V11,
    "mistral_v13": MISTRAL_V13,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "qwen3_coder": QWEN_CODER,
    "pythonic": PYTHONIC,
}
TEXT = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {}, "c": {"anyOf": [{"type": "null"}, {"type": "array"}]}},
}
FUNCTIONS = [Function(name, TEXT) for name in ("get_weather", "get", "add")]


def parse(syntax: Syntax, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of an answer, and the names and arguments of its calls."""
    parser = syntax.parser(FUNCTIONS)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.push("", last=True)
    assert all(delta.get("content") or delta.get("tool_calls") for delta in deltas)
    content, calls = add(deltas)
    assert parser.calls == len(calls) == len({call[0] for call in calls})
    return content, [call[1:] for call in calls]


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.choice([1, 2, 5, 40]))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def splits(text: str, rng: random.Random) -> list[list[str]]:
    """Return ways to cut a text: into characters, in two at every index (at 30 of a long text), and at random."""
    places = range(len(text) + 1) if len(text) < 60 else rng.sample(range(len(text) + 1), 30)
    return [
        list(text) if len(text) < HELD else [text],
        *([text[:at], text[at:]] for at in places),
        *(cut(text, rng) for _ in range(20)),
    ]


def parsed(syntax: Syntax, text: str, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Parse a text; check that the result does not depend on how it is cut."""
    whole = parse(syntax, [text])
    for pieces in splits(text, rng):
        assert parse(syntax, pieces) == whole, pieces
    return whole


def random_arguments(rng: random.Random) -> dict[str, Any]:
    hard = [
        "",
        "x",
        'a "quoted" } ]',
        "\\",
        "{[",
        "</tool_call>",
        "é\n\t",
        '{"name": "get", "arguments": {',
        "日本",
        "'",
        "a\n",
    ]
    hard += ['say "', "</parameter>\n x", "<", "`" * 3, "[TOOL_CALLS]"]
    values: dict[str, Any] = {
        "a": rng.choice(hard),
        "b": rng.choice([5, None, -1.5, [rng.choice(hard)], {"k": True}]), "c": [rng.choice(hard)]
    }  # fmt: skip
    return {key: values[key] for key in "abc"[: rng.randrange(4)]}


def json_of(arguments: dict[str, Any], rng: random.Random) -> str:
    return json.dumps(arguments, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 2]))


def written(name: str, arguments: dict[str, Any], syntax: Syntax, rng: random.Random) -> str:
    """Return a call, without what is around all calls of an answer."""
    said, key, body = json.dumps(name), rng.choice(["arguments", "parameters"]), json_of(arguments, rng)
    blank = rng.choice(["", " ", "\n"])
    objects = [
        f'{{"name": {said}, "{key}": {body}}}',
        f'{{ "type": "function", "name" : {said} ,\n"{key}":{body} }}',
        f'{{"name": {said}, "{key}": {body}, "id": "a}}\\"", "index": -1.5, "last" : null}}',
    ]
    begins, middle, ends = DEEPSEEK_V3.each
    if syntax is QWEN_CODER:
        tags = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json_of(value, rng)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<function={name}>\n{tags}</function>"
    if syntax is PYTHONIC:
        values = (rng.choice([repr, json.dumps])(value) for value in arguments.values())
        return f"{name}({', '.join(f'{key}={value}' for key, value in zip(arguments, values, strict=True))})"
    heads = {
        MISTRAL_V11: f"[TOOL_CALLS]{name}[CALL_ID]abcABC123[ARGS]{body}",
        MISTRAL_V13: f"[TOOL_CALLS]{blank}{name}[ARGS]{blank}{body}",
        DEEPSEEK_V3: f"{begins}function{middle}{name}\n```json\n{body}\n```{ends}",
        DEEPSEEK_V31: f"{begins}{name}{middle}{body}{blank}{ends}",
    }
    return heads[syntax] if syntax in heads else rng.choice(objects)


def random_answer(name: str, rng: random.Random) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """Return a random text, its content and its calls."""
    syntax = SYNTAXES[name]
    text = rng.choice(["", "", "Let me see: {x} [1] <b> <tool", " Well.\n\n* [a](b)"])
    calls = [(rng.choice(FUNCTIONS).name, random_arguments(rng)) for _ in range(rng.randrange(1, 4))]
    said = [written(*call, syntax, rng) for call in calls]
    blank, gap = rng.choice(["", " ", "\n"]), rng.choice(["", "\n\n"])
    if syntax.separate:
        told = blank.join(f"<tool_call>{blank}{each}{blank}</tool_call>" for each in said)
    elif syntax is MISTRAL:
        told = rng.choice(["[TOOL_CALLS]", "[TOOL_CALLS] ", ""]) + f"[{blank}" + f",{blank}".join(said) + f"{blank}]"
    elif syntax in (LLAMA, PYTHONIC):
        told = f"[{', '.join(said)}]" if syntax is PYTHONIC else rng.choice(["; ", "\n"]).join(said)
        told = ("<|python_tag|>" if text else rng.choice(["<|python_tag|>", ""])) + told
    elif syntax.closes:
        told = f"{rng.choice(['', syntax.opens])}{blank.join(said)}{syntax.closes}"
    else:
        told = blank.join(said)
    after = rng.choice(["", "", "That is all.", "Done }"])
    return f"{text}{gap}{told}{blank}{after}", text + after, calls


@pytest.mark.parametrize("name", SYNTAXES)
def test_calls_and_content_are_parsed_from_any_pieces(name: str) -> None:
    rng = random.Random(name)
    for _ in range(25):
        text, content, calls = random_answer(name, rng)
        said, found = parsed(SYNTAXES[name], text, rng)
        assert said == content, text
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls, text


@pytest.mark.parametrize("name", SYNTAXES)
def test_broken_answers_are_parsed_the_same_from_any_pieces(name: str) -> None:
    rng = random.Random(name)
    kept = 0
    for _ in range(40):
        text = random_answer(name, rng)[0]
        for _ in range(rng.randrange(1, 4)):
            at, end = sorted(rng.sample(range(len(text) + 1), 2))
            text = (
                text[:at]
                + rng.choice(["", '"', "}", "{", "[", "]", "<", ",", "(", "'", text[at:end] * 2])
                + text[min(end, at + 3) :]
            )
        content, calls = parsed(SYNTAXES[name], text, rng)
        kept += not calls
        assert calls or content == text, "an answer without a call is content as a whole"
    assert kept > 1


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
        (MISTRAL_V13, "[TOOL_CALLS]get {}"),
        (MISTRAL_V13, "get[ARGS]{}"),
        (DEEPSEEK_V3, f"{DEEPSEEK_V3.opens}get"),
        (DEEPSEEK_V3, DEEPSEEK_V3.opens + DEEPSEEK_V3.each[0] + "get" + DEEPSEEK_V3.each[1] + "{}"),
        (QWEN_CODER, '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'),
        (QWEN_CODER, "<function=unknown>\n</function>"),
        (PYTHONIC, "[unknown(a=1)]"),
        (PYTHONIC, "[get, add]"),
        (PYTHONIC, "[get(a=b)]"),
        (PYTHONIC, "[get(1)]"),
        (PYTHONIC, "[get(a=get(b=1))]"),
        (PYTHONIC, "[get(a=f'{add}')]"),
        (PYTHONIC, "[get(a=1e999)]"),
        (PYTHONIC, "[get(a={1: 2})]"),
        (PYTHONIC, f"[get(a={'(' * 500}1{')' * 500})]"),
        (PYTHONIC, "[get(a=1) and so on"),
        (PYTHONIC, '[get(a="cut off'),
        (PYTHONIC, "Say [get(a=1)]"),
    ],
)
def test_text_without_a_call_is_content(syntax: Syntax, text: str) -> None:
    assert parsed(syntax, text, random.Random(0)) == (text, [])


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"),
    [
        # A call with its mark may name any function.
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
        (MISTRAL, '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]', "", [("unknown", "{}")]),
        (LLAMA, '<|python_tag|>{"name": "unknown", "parameters": {}}', "", [("unknown", "{}")]),
        # Mistral's call without its mark may follow text.
        (MISTRAL, 'I look. [{"name": "get", "arguments": {"a": [1]}}]', "I look.", [("get", '{"a": [1]}')]),
        # A bracket is forgotten.
        (
            HERMES,
            '<tool_call>\n{"name": "get", "arguments": {"a": 1}\n</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": {}}',
            "",
            [("get", '{"a": 1}'), ("add", "{}")],
        ),
        (MISTRAL_V13, '[TOOL_CALLS]unknown[ARGS]{"a": 1} b', "b", [("unknown", '{"a": 1}')]),
        # The outer mark is forgotten, or a fence.
        (QWEN_CODER, "Now <function=get>\n<parameter=a>x</parameter></function>", "Now", [("get", '{"a": "x"}')]),
        (
            QWEN_CODER,
            "<tool_call>\n<function=get>\n<parameter=a>\nx\n</parameter>\n</tool_call>!",
            "!",
            [("get", '{"a": "x"}')],
        ),
        (DEEPSEEK_V31, f"{DEEPSEEK_V31.each[0]}get{DEEPSEEK_V31.each[1]}{{}} so", "so", [("get", "{}")]),
        # Values of other types, in Python and in tags.
        (
            PYTHONIC,
            "[get(a=(1, -2.5), b={'x': [True, null]}, c=\"\\d\\u00e9\", d='two\\nlines', e=r'\\d',), add()]",
            "",
            [
                ("get", '{"a": [1, -2.5], "b": {"x": [true, null]}, "c": "\\\\dé", "d": "two\\nlines", "e": "\\\\d"}'),
                ("add", "{}"),
            ],
        ),
        (PYTHONIC, '[get(a="half \\ud83d")]', "", [("get", '{"a": "half \\ud83d"}')]),
        (PYTHONIC, "[get(a=1)] [add()]", "[add()]", [("get", '{"a": 1}')]),
        (PYTHONIC, "[get(a=1), get(b)]", ", get(b)]", [("get", '{"a": 1}')]),
        (
            QWEN_CODER,
            "<tool_call><function=get><parameter=a>\n5\n</parameter><parameter=b>\n5\n</parameter>"
            "<parameter=c>\nNone\n</parameter><parameter=d>\nSay </parameter>.\n</parameter></function></tool_call>",
            "",
            [("get", '{"a": "5", "b": 5, "c": null, "d": "Say </parameter>."}')],
        ),
        # Without the mark, each call of a list must name a known function.
        (
            MISTRAL,
            '[{"name": "get", "arguments": {}}, {"name": "unknown", "arguments": {}}]',
            ', {"name": "unknown", "arguments": {}}]',
            [("get", "{}")],
        ),
        # The answer is cut off within a call.
        (QWEN_CODER, "<tool_call>\n<function=get>\n<parameter=a>\nq\n</parameter>\n", "", [("get", '{"a": "q"')]),
        (QWEN_CODER, "<tool_call>\n<function=get>\n<parameter=a>\nPar\n</para", "", [("get", '{"a": "Par')]),
        (QWEN_CODER, "<tool_call>\n<function=get>\n<parameter=b>\n[1, 2", "", [("get", '{"b": ')]),
        (PYTHONIC, "[get(a=1), ad", "", [("get", '{"a": 1}')]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "get", "arguments": {"a": "tw', "", [("get", '{"a": "tw')]),
    ],
)
def test_unusual_calls(syntax: Syntax, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(syntax, text, random.Random(0)) == (content, calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = HERMES.parser(FUNCTIONS)
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


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, 'Yes.<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'),
        (MISTRAL, 'Yes.[TOOL_CALLS] [{"name": "get", "arguments": {}}, {"name": "add", "arguments": '),
        (LLAMA, 'Yes.<|python_tag|>{"name": "get", "parameters": {}}; {"name": "add", "parameters": '),
        (
            DEEPSEEK_V3,
            f"Yes.{DEEPSEEK_V3.each[0]}function{DEEPSEEK_V3.each[1]}get\n```json\n{{}}\n```{DEEPSEEK_V3.each[2]}{DEEPSEEK_V3.closes}",
        ),
    ],
)
def test_a_call_that_is_cut_off_after_its_arguments_leaves_no_text(syntax: Syntax, text: str) -> None:
    for end in range(text.index("{}") + 2, len(text) + 1):
        assert parsed(syntax, text[:end], random.Random(0)) == ("Yes.", [("get", "{}")])


@pytest.mark.parametrize("name", SYNTAXES)
def test_only_text_that_may_become_a_call_is_held(name: str) -> None:
    """The work for a piece of text must not grow with the answer."""
    syntax = SYNTAXES[name]
    parser, held = syntax.parser(FUNCTIONS), 0
    for _ in range(20_000):
        held += len(" [word] <b> {x}") - sum(len(delta["content"]) for delta in parser.push(" [word] <b> {x}"))
        assert held < 5
    parser = syntax.parser(FUNCTIONS)
    text = written("get", {"a": "@"}, syntax, random.Random(0))
    begin, end = text.split("@")
    marks = {QWEN_CODER: "<tool_call>", PYTHONIC: "[", HERMES: "<tool_call>", MISTRAL: "["}
    parser.push(marks.get(syntax, "") + begin)
    for _ in range(20_000):
        deltas = parser.push("word ")
        assert [delta["tool_calls"][0]["function"] for delta in deltas] == (
            [{"arguments": "word "}] * (syntax is not PYTHONIC)
        )
    if syntax is PYTHONIC:
        (call,) = joined_message(parser.push(end + "]"))["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": "word " * 20_000}


def test_a_function_in_python_tells_the_types_of_its_arguments(talker: Path) -> None:
    def get(a: str, b: int) -> None:
        """Get it.

        Args:
            a: A text.
            b: A number.
        """

    tokenizer = Tokenizer(talker, tool_call_parser="qwen3_coder")
    text = "<function=get>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\n5\n</parameter>\n</function>"
    (call,) = parse_message(text, tokenizer, [get])["tool_calls"]
    assert call["function"] == {"name": "get", "arguments": {"a": "5", "b": 5}}
    with pytest.raises(ValueError, match="the function parse has no schema"):
        parse_message(text, tokenizer, [parse])


def test_text_that_is_no_call_for_long_is_not_held() -> None:
    text = '<tool_call>{"id": "' + "x" * HELD
    assert "".join(delta["content"] for delta in HERMES.parser(FUNCTIONS).push(text)) == text


def test_ids_are_what_mistral_takes() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in ids)


def test_a_whole_answer_is_a_message(talker: Path) -> None:
    hermes = Tokenizer(talker)
    with pytest.raises(ValueError, match="no known format for tools"):
        parse_message("Hi", hermes, [])
    hermes.hf.chat_template = '<tool_call>{"name": ...}'
    text = 'Let me see.\n<tool_call>\n{"name": "get", "arguments": {"a": [1]}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "get"}}, {"name": "add"}, parse_message]
    message = parse_message(text, hermes, tools)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get", "arguments": {"a": [1]}}
    assert message == {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    assert parse_message("Hi", hermes, []) == {"role": "assistant", "content": "Hi"}
    (call,) = parse_message(text[:-16], hermes, [])["tool_calls"]
    assert call["function"] == {"name": "get", "arguments": '{"a": [1'}, "cut off, so text"
