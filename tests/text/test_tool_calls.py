"""tool_calls.py: calls parsed from pieces of text; for forced calls and templates see test_serve_tools.py."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
from grammars import add
from tokenizers import AddedToken

from fastgen.request import Completion
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tool_calls import joined_message, parse_message
from fastgen.text.tools.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_V11,
    MISTRAL_V13,
    OLMO_3,
    PYTHONIC,
    QWEN_CODER,
    SEED_OSS,
)
from fastgen.text.tools.parser import HELD, Function, Syntax, new_call_id
from fastgen.text.tools.python_calls import Pythonic
from fastgen.text.tools.xml_calls import QwenCoder

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
    "seed_oss": SEED_OSS,
    "olmo3": OLMO_3,
    "granite": GRANITE,
}
TEXT = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {}, "c": {"anyOf": [{"type": "null"}, {"type": "array"}]}},
}
BOTH = [("get", "{}"), ("add", "{}")]
FUNCTIONS = [Function(name, TEXT) for name in ("mcp.get-weather", "get", "add")]


def parse(syntax: Syntax, pieces: list[str], cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of an answer, and the names and arguments of its calls. cut: it was cut off."""
    parser = syntax.parser(FUNCTIONS)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.push("", last=True, cut=cut)
    assert all(delta.get("content") or delta.get("tool_calls") for delta in deltas)
    content, calls = add(deltas)
    assert parser.calls == len(calls) == len({call[0] for call in calls})
    assert cut or all(type(json.loads(call[2])) is dict for call in calls)
    return content, [call[1:] for call in calls]


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.choice([1, 2, 5, 40]))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def splits(text: str, rng: random.Random, most: int) -> list[list[str]]:
    """Return ways to cut a text: into characters, in two (of a long text at `most` indices), and at random."""
    places = range(len(text) + 1) if len(text) < 2 * most else rng.sample(range(len(text) + 1), most)
    return [
        list(text) if len(text) < HELD else [text],
        *([text[:at], text[at:]] for at in places),
        *(cut(text, rng) for _ in range(2 * most // 3)),
    ]


def parsed(
    syntax: Syntax, text: str, rng: random.Random, cut: bool = False, most: int = 30
) -> tuple[str, list[tuple[str, str]]]:
    """Parse a text; check that the result does not depend on its pieces."""
    whole = parse(syntax, [text], cut)
    for pieces in splits(text, rng, most):
        assert parse(syntax, pieces, cut) == whole, pieces
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
    if isinstance(syntax, QwenCoder):
        line = "\n" * syntax.lines
        tags = "".join(
            f"<parameter={key}>{line}{value if isinstance(value, str) else json_of(value, rng)}{line}</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<function={name}>\n{tags}</function>"
    if isinstance(syntax, Pythonic):
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
    if syntax is SEED_OSS:  # a line break at the end of a text is lost
        calls = [(each, {**given, "a": given["a"].rstrip("\n")} if given else given) for each, given in calls]
    said = [written(*call, syntax, rng) for call in calls]
    blank, gap = rng.choice(["", " ", "\n"]), rng.choice(["", "\n\n"])
    if syntax.separate:
        told = blank.join(f"{syntax.opens}{blank}{each}{blank}{syntax.closes}" for each in said)
    elif syntax is GRANITE:
        told = f"{syntax.opens}[{blank}" + f",{blank}".join(said) + f"{blank}]"
    elif syntax is MISTRAL:
        told = rng.choice(["[TOOL_CALLS]", "[TOOL_CALLS] ", ""]) + f"[{blank}" + f",{blank}".join(said) + f"{blank}]"
    elif syntax in (LLAMA, PYTHONIC):
        told = f"[{', '.join(said)}]" if syntax is PYTHONIC else rng.choice(["; ", "\n"]).join(said)
        told = ("<|python_tag|>" if text else rng.choice(["<|python_tag|>", ""])) + told
    elif syntax is OLMO_3:
        told = syntax.opens + blank + (blank or "\n").join(said) + blank + syntax.closes
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
        (HERMES, '<tool_call>{"name": "get", "arguments": "x"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "get", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "get" and so on}</tool_call>'),
        (HERMES, '<tool_call>{"name": "get", "input": {"a": 1}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "get", "a": 1}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {"a": "cut'),
        (HERMES, '{"name": "get", "arguments": {}}'),
        (HERMES, '<tool_call>{"name": "get", "argum'),
        (HERMES, '<tool_call>{"id": "' + "x" * HELD + '", "name": "get", "arguments": {}}</tool_call>'),
        (MISTRAL, "[1, 2]"),
        (MISTRAL, '[{"name": "unknown", "arguments": {}}]'),
        (MISTRAL, '{"name": "get", "arguments": {}}'),
        (MISTRAL, "[TOOL_CALLS] no"),
        (LLAMA, '{"name": "unknown", "parameters": {}}'),
        (LLAMA, 'Say {"name": "get", "parameters": {}}'),
        (LLAMA, '<|python_tag|>get.call(query="x")'),
        (LLAMA, '{"answer": 5}'),
        (LLAMA, '{"name": "get"}'),
        (LLAMA, '{"parameters": {"a": 1}, "name": "unknown"}'),
        (LLAMA, '{"name": "get", "answer": 5, "parameters": {}}'),
        (MISTRAL, '[{"name": "get"}]'),
        (MISTRAL_V13, "[TOOL_CALLS]get"),
        (MISTRAL_V13, "[TOOL_CALLS]get {or} not"),
        (MISTRAL_V13, "get[ARGS]{}"),
        (DEEPSEEK_V3, f"{DEEPSEEK_V3.opens}get"),
        (DEEPSEEK_V3, DEEPSEEK_V3.opens + DEEPSEEK_V3.each[0] + "get it"),
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
        (PYTHONIC, f"[get(a='b{' ' * 20_000}c' d)]"),
        (HERMES, "a" + "\n" * 20_000 + "b"),
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
        # After the closing mark, an object is content.
        (
            HERMES,
            '<tool_call>{"name": "get", "arguments": {}}</tool_call> {"name": "add", "arguments": {}}',
            '{"name": "add", "arguments": {}}',
            [("get", "{}")],
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
            "[get(a=(+1, -2.5), b={'x': [True, null]}, c=\"\\d\\u00e9\", d='two\\nlines', e=r'\\d',), add()]",
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
        (HERMES, '<tool_call>{"name": "get", "arguments": {}\n{"name": "add", "arguments": {}}</tool_call>', "", BOTH),
        (HERMES, '<tool_call>{"name": "get", "id": 5\n</tool_call>', "", [("get", "{}")]),
        # A list, a head, and the other version's head.
        (
            HERMES,
            '<tool_call>[{"name": "get", "arguments": {}}, {"name": "add"}]</tool_call>',
            "",
            BOTH,
        ),
        (
            LLAMA,
            '[{"name": "get", "parameters": {}}, {"name": "add", "parameters": null}]',
            "",
            BOTH,
        ),
        (MISTRAL, "[TOOL_CALLS]get{}[TOOL_CALLS]add[ARGS]{}", "", BOTH),
        (
            MISTRAL_V13,
            '[TOOL_CALLS] [{"name": "get", "arguments": {}}, {"name": "add", "arguments": {}}]',
            "",
            BOTH,
        ),
        (MISTRAL_V11, '[TOOL_CALLS]get[CALL_ID]abcABC123[ARGS]"{\\"a\\": 1}"', "", [("get", '{"a": 1}')]),
        (MISTRAL_V13, "[TOOL_CALLS]get[ARGS][TOOL_CALLS]add[ARGS]null", "", BOTH),
        (DEEPSEEK_V3, f"{DEEPSEEK_V3.each[0]}get{DEEPSEEK_V3.each[1]}{{}}{DEEPSEEK_V3.each[2]}", "", [("get", "{}")]),
        (
            DEEPSEEK_V3,
            f"{DEEPSEEK_V3.each[0]}function{DEEPSEEK_V3.each[1]}get\n```json\n\n```{DEEPSEEK_V3.each[2]}",
            "",
            [("get", "{}")],
        ),
        (LLAMA, '{"name": "get", "parameters": {}}\n```python\nx', "```python\nx", [("get", "{}")]),
    ],
)
def test_unusual_calls(syntax: Syntax, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(syntax, text, random.Random(0)) == (content, calls)


@pytest.mark.parametrize(
    ("syntax", "text", "open", "closed"),
    [
        (QWEN_CODER, "<tool_call>\n<function=get>\n<parameter=a>\nq\n</parameter>\n", '{"a": "q"', '{"a": "q"}'),
        (QWEN_CODER, "<tool_call>\n<function=get>\n<parameter=a>\nPar\n</para", '{"a": "Par', '{"a": "Par"}'),
        (QWEN_CODER, "<tool_call>\n<function=get>\n<parameter=b>\n[1, 2]", '{"b": ', '{"b": [1, 2]}'),
        (QWEN_CODER, "<tool_call>\n<function=get>", "{", "{}"),
        (PYTHONIC, "[get(a=1), ad", '{"a": 1}', '{"a": 1}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "get", "arguments": {"a": "tw', '{"a": "tw', '{"a": "tw"}'),
        (HERMES, '<tool_call>{"name": "get", "arguments": {"a": [1, 2', '{"a": [1', '{"a": [1, 2]}'),
        (
            HERMES,
            '<tool_call>{"name": "get", "arguments": {"a": [{"b": "x"}, {',
            '{"a": [{"b": "x"}, {',
            '{"a": [{"b": "x"}, {}]}',
        ),
        (HERMES, '<tool_call>{"name": "get", "arguments": {"a"', '{"a', '{"a": null}'),
        (LLAMA, '{"name": "get", "parameters": "{\\"a\\": \\"tw', "", '{"a": "tw"}'),
        (MISTRAL_V13, '[TOOL_CALLS]get[ARGS]{"a": "x\\', '{"a": "x', '{"a": "x"}'),
    ],
)
def test_an_incomplete_call_is_completed_unless_it_was_cut_off(
    syntax: Syntax, text: str, open: str, closed: str
) -> None:
    assert parsed(syntax, text, random.Random(0), cut=True) == ("", [("get", open)])
    assert parsed(syntax, text, random.Random(0)) == ("", [("get", closed)])


# Objects that models write instead of {"name": "get", "arguments": {"a": "x\ny", "b": 1}}, and with no arguments.
MEANT = {"a": "x\ny", "b": 1}
DEVIANT = [
    '{"name": "get", "arguments": "{\\n  \\"a\\": \\"x\\\\ny\\", \\"b\\": 1\\n}"}',
    '{"name": "get", "arguments": "{"a": "x\\ny", "b": 1}"}',
    '{"arguments": {"a": "x\\ny", "b": 1}, "name": "get"}',
    '{"type": "function", "parameters": {"a": "x\\ny", "b": 1}, "id": "a}", "name": "get"}',
    '{"arguments": "{\\"a\\": \\"x\\\\ny\\", \\"b\\": 1}", "name": "get"}',
    '{"name": "get", "arguments": {"a": "x\ny", "b": 1}}',
    '{"name": "get", "arguments": null, "parameters": {"a": "x\\ny", "b": 1}}',
    "{'name': 'get', 'arguments': {'a': 'x\\ny', 'b': 1,}}",
    '{"function": {"name": "get", "arguments": {"a": "x\\ny", "b": 1}}, "type": "function"}',
    '{"type": "function", "function": {"arguments": {"a": "x\\ny", "b": 1}, "name": "get"}}',
    '{{"name": "get", "arguments": {"a": "x\\ny", "b": 1}}}',
    '{"function": "get" "parameters": {"a": "x\\ny" "b": 1}}',
    '{"name": "get", "arguments": {"a": "x\\ny", "b": 1}}}',
    '{name: "get", arguments: {a: "x\\ny", b: 1}}',
    '{"name": "get", "arguments": {"a": "x\\ny", "b": 1}, "index": 0,}',
]
WITHOUT = ["null", '"{}"', '""', "{}", "None", '"null"', "[]"]


@pytest.mark.parametrize(
    ("syntax", "around"),
    [
        (HERMES, "<tool_call>\n%s\n</tool_call>"),
        (HERMES, "<tool_call>%s\n%s</tool_call>"),
        (HERMES, "<tool_call>\n```json\n%s\n```\n</tool_call>"),
        (HERMES, "<tool_call>[%s, %s]"),
        (MISTRAL, "[TOOL_CALLS] [%s, %s]"),
        (MISTRAL, "[%s,\n%s]"),
        (MISTRAL, "[TOOL_CALLS]%s"),
        (MISTRAL, "[TOOL_CALLS]```json\n[%s]\n```"),
        (MISTRAL_V13, "[TOOL_CALLS][%s]"),
        (LLAMA, "%s; %s"),
        (LLAMA, "<|python_tag|>%s\n%s"),
        (LLAMA, "<|python_tag|>```\n%s\n```\n"),
        (LLAMA, "[%s, %s]"),
    ],
)
def test_objects_that_models_write_instead(syntax: Syntax, around: str) -> None:
    rng, number = random.Random(around), around.count("%s")
    for written in DEVIANT:
        content, calls = parsed(syntax, around % ((written,) * number), rng, most=3)
        assert (content, [(name, json.loads(body)) for name, body in calls]) == ("", [("get", MEANT)] * number), written
    for empty in WITHOUT:
        for written in (f'{{"name": "get", "arguments": {empty}}}', f'{{"arguments": {empty}, "name": "get"}}'):
            assert parsed(syntax, around % ((written,) * number), rng, most=3) == ("", [("get", "{}")] * number), (
                written
            )
    if around.startswith("<"):
        assert parsed(syntax, around % (('{"name": "get"}',) * number), rng, most=3) == ("", [("get", "{}")] * number)


OPENED, CLOSED = "<tool_call>\n<function=get>\n<parameter=a>\n", "\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "middle",
    [
        "x</parameter>\n<parameter=b>\n5",  # the last is not closed
        "x\n<parameter=b>\n5\n</parameter>",
        "x<parameter=b>5</parameter>",
        "x\n</parameter/>\n<parameter=b>\n5\n</parameter1>",
        "x\n</parameters>\n<parameter=b>\n5\n</param>",
        "x\n</Parameter>\n<parameter=b>\n5\n< /parameter>",
        "x\n</a>\n<parameter=b>\n5\n</b>",
        "x\n<parameter>\n<parameter=b>\n5\n<parameter>",
        "x\n</parameter\n<parameter=b>\n5\n</parameter",
        "x\n</parameter_function>\n<parameter=b>\n5</parameterfunction>",
        'x\n</parameter>\n<parameter="b">\n5\n</parameter>',
        'x\n</parameter>\n<parameter name="b">\n5\n</parameter>',
        "x\n</parameter>\n<parameter=b: 5\n</parameter>",
        "x\n</parameter>\n<parameter=b\n5\n</parameter>",
        "x\n</parameter>\n<parameter=\nlost\n</parameter>\n<parameter=b>\n5\n</parameter>",
        "x\r\n</parameter>\r\n<parameter=b>\r\n5\r\n</parameter>",
        'x\n</parmeter>\n<parameter = "b">\n5\n</para>',
        "x\n</param>\n<param=b>\n5\n</param>",
    ],
)
def test_tags_that_models_forget_or_misspell(middle: str) -> None:
    rng = random.Random(middle)
    meant = ("get", '{"a": "x", "b": 5}')
    odd = ("\n</get>\n</tool_call>", CLOSED + "\n</function_invocation>")
    for after in (CLOSED, "\n</function>", "\n</tool_call>", "", *(odd if middle.endswith(">") else ())):
        assert parsed(QWEN_CODER, OPENED + middle + after, rng) == ("", [meant]), after
    for between in (CLOSED + "\n", "\n</function>\n", "\n</tool_call>\n", "\n"):
        for opened in (OPENED, OPENED.removeprefix("<tool_call>\n").replace("=get", ' name="get"')):
            twice = OPENED + middle + between + opened + middle + CLOSED
            assert parsed(QWEN_CODER, twice, rng, most=9) == ("", [meant, meant]), (between, opened)


@pytest.mark.parametrize("name", SYNTAXES)
def test_patterns_do_not_grow_with_the_names_of_functions_and_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compile a pattern of thousands of names takes seconds, in which a server does nothing else."""
    sizes: list[int] = []
    compiled = regex.compile
    monkeypatch.setattr(
        regex, "compile", lambda pattern, flags=0: (sizes.append(len(pattern)), compiled(pattern, flags))[1]
    )
    names = {f"property_{number}": {"type": "string"} for number in range(300)}
    functions = [Function(function, {"type": "object", "properties": {}}) for function in names]
    functions.append(Function("get", {"type": "object", "properties": names}))
    text = written("get", {"property_7": "x"}, SYNTAXES[name], random.Random(0))
    opens = SYNTAXES[name].opens if SYNTAXES[name].separate else ""
    parser = SYNTAXES[name].parser(functions)
    parser.push(f"{opens}{text}", last=True)
    assert parser.calls == (name not in ("mistral", "granite", "olmo3", "pythonic"))
    assert max(sizes, default=0) < 2000


def test_arguments_may_be_json_in_a_function_tag() -> None:
    rng = random.Random(0)
    text = '<tool_call>\n<function=get>\n{"a": "x",\n "b": [5, {}]}'
    for after in ("\n</function>\n</tool_call>", "</function>", "\n</tool_call>", ""):
        assert parsed(QWEN_CODER, text + after, rng) == ("", [("get", '{"a": "x",\n "b": [5, {}]}')])
    assert parsed(QWEN_CODER, text[:-3], rng, cut=True) == ("", [("get", '{"a": "x",\n "b": [5, {')])
    assert parsed(QWEN_CODER, text[:-3], rng) == ("", [("get", '{"a": "x",\n "b": [5, {}]}')])


@pytest.mark.parametrize(
    "value", ["</parameter> b", "</tool_call>\nb", "a\n</function>\nb", "<i>a</i>\n<parameter=z>", "</param", "<"]
)
def test_a_value_may_hold_what_resembles_a_tag(value: str) -> None:
    text = f"{OPENED}{value}\n</parameter>{CLOSED} So."
    assert parsed(QWEN_CODER, text, random.Random(0)) == ("So.", [("get", json.dumps({"a": value}))])


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
        {"index": 0, "function": {"arguments": part}} for part in ('{"a', '":', " 1}")
    ], "a quotation mark or a number is complete when something follows"
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
        assert parsed(syntax, text[:end], random.Random(0), cut=True) == ("Yes.", [("get", "{}")])


@pytest.mark.parametrize("name", SYNTAXES)
def test_only_text_that_may_become_a_call_is_held(name: str) -> None:
    """The work for a piece of text must not grow with the answer."""
    syntax = SYNTAXES[name]
    parser, held = syntax.parser(FUNCTIONS), 0
    for _ in range(5_000):
        held += len(" [word] <b> {x}") - sum(len(delta["content"]) for delta in parser.push(" [word] <b> {x}"))
        assert held < 5
    parser = syntax.parser(FUNCTIONS)
    text = written("get", {"a": "@"}, syntax, random.Random(0))
    begin, end = text.split("@")
    marks = {PYTHONIC: "[", HERMES: "<tool_call>", MISTRAL: "[", GRANITE: "<|tool_call|>", OLMO_3: "<function_calls>"}
    parser.push(marks.get(syntax, "") + begin + "word ")
    for _ in range(5_000):
        deltas = parser.push("word ")
        assert [delta["tool_calls"][0]["function"] for delta in deltas] == (
            [{"arguments": "word "}] * (not isinstance(syntax, Pythonic))
        )
    if isinstance(syntax, Pythonic):
        (call,) = joined_message(parser.push(end + (syntax.closes or "]")))["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": "word " * 5_001}


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


def test_a_mark_may_be_a_special_token(talker: Path) -> None:
    """As those of Granite 4 are."""
    tokenizer = Tokenizer(talker, tool_call_parser="granite4")
    tokenizer.hf.add_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in ("<tool_call>", "</tool_call>")]
    )
    ids = tokenizer.encode('<tool_call>\n{"name": "get", "arguments": "{}"}\n</tool_call>', special=False)
    assert {tokenizer.added_ids["<tool_call>"], tokenizer.added_ids["</tool_call>"]} < set(ids)
    (call,) = parse_message(tokenizer.decode(ids), tokenizer, [])["tool_calls"]
    assert call["function"] == {"name": "get", "arguments": {}}


@pytest.mark.parametrize("text", ['<tool_call>{"id": "' + "x" * HELD, "<tool_call>" + "\n" * (HELD + 1)])
def test_text_that_is_no_call_for_long_is_not_held(text: str) -> None:
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
    assert call["function"] == {"name": "get", "arguments": '{"a": ['}, "perhaps cut off, so text"
    for reason, stop, arguments in (
        ("length", None, '{"a": ['),
        ("stop", "1", '{"a": ['),
        ("stop", 5, {"a": [1]}),
        ("stop", None, {"a": [1]}),
    ):
        (call,) = parse_message(Completion(0, [], text[:-16], reason, stop), hermes, [])["tool_calls"]
        assert call["function"] == {"name": "get", "arguments": arguments}
