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
from fastgen.text.tool_calls import HELD, HERMES, LLAMA, MISTRAL, Syntax, ToolParser, new_call_id, parse_message

SYNTAXES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}
NAMES = ("get_weather", "get", "add")


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
    """Return ways to cut a text: into characters, in two at every index (at 30 of a long text), and at random."""
    places = range(len(text) + 1) if len(text) < 60 else rng.sample(range(len(text) + 1), 30)
    return [list(text), *([text[:at], text[at:]] for at in places), *(cut(text, rng) for _ in range(20))]


def parsed(syntax: Syntax, text: str, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Parse a text; check that the result does not depend on how it is cut."""
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
        said, found = parsed(SYNTAXES[name], text, rng)
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
        content, calls = parsed(SYNTAXES[name], text, rng)
        kept += not calls
        assert calls or content == text, "an answer without a call is content as a whole"
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
        # The answer is cut off within a call.
        (MISTRAL, '[TOOL_CALLS] [{"name": "get", "arguments": {"a": "tw', "", [("get", '{"a": "tw')]),
    ],
)
def test_unusual_calls(syntax: Syntax, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(syntax, text, random.Random(0)) == (content, calls)


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


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, 'Yes.<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'),
        (MISTRAL, 'Yes.[TOOL_CALLS] [{"name": "get", "arguments": {}}, {"name": "add", "arguments": '),
        (LLAMA, 'Yes.<|python_tag|>{"name": "get", "parameters": {}}; {"name": "add", "parameters": '),
    ],
)
def test_a_call_that_is_cut_off_after_its_arguments_leaves_no_text(syntax: Syntax, text: str) -> None:
    for end in range(text.index("{}") + 2, len(text) + 1):
        assert parsed(syntax, text[:end], random.Random(0)) == ("Yes.", [("get", "{}")])


def test_only_text_that_may_become_a_call_is_held() -> None:
    """The work for a piece of text must not grow with the answer."""
    parser = ToolParser(LLAMA, NAMES)
    parser.push('{"name": "get", "parameters": {"a": "')
    for _ in range(20_000):
        (delta,) = parser.push("word ")
        assert delta["tool_calls"][0]["function"] == {"arguments": "word "}
    for syntax in SYNTAXES.values():
        parser, held = ToolParser(syntax, NAMES), 0
        for _ in range(20_000):
            held += len(" [word] <b> {x}") - sum(len(delta["content"]) for delta in parser.push(" [word] <b> {x}"))
            assert held < 5


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
