"""values.py: literals of Python, and text whose type a schema tells."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastgen.text.tools import values
from fastgen.text.tools.values import TYPES, UNREADABLE, Schemas, python_text, read_literal, typed_json

SELF = {"$ref": "#/$defs/self"}
ROOT = {
    "$defs": {
        "a/b": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
        "self": {"anyOf": [{"anyOf": [SELF] * 50}, SELF, {"type": "null"}, {"type": "object"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "number", "null"}),
        ({"const": True}, {"boolean"}),
        ({"type": "string", "enum": ["a"]}, {"string"}),
        ({"anyOf": [{"type": "array"}, {"const": "x"}]}, {"array", "string"}),
        ({"allOf": [{"type": ["array", "string"]}, {"type": ["string", "null"]}]}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, TYPES),
        ({"anyOf": [SELF, {"type": "integer"}]}, TYPES),
        ({"anyOf": 5}, TYPES),
        ({"$ref": "#/nowhere"}, TYPES),
        ({"type": "objekt"}, TYPES),
        ({}, TYPES),
        (True, TYPES),
    ],
)
def test_types_of_schemas(schema: Any, types: set[str]) -> None:
    assert Schemas(ROOT).types(schema) == types


def test_references_of_which_each_leads_to_the_next_in_two_ways() -> None:
    links = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]} for i in range(40)}
    root = {"$defs": {**links, "a40": {"$ref": "#/$defs/a0"}}}
    assert Schemas(root).types({"$ref": "#/$defs/a0"}) == TYPES
    assert len(list(Schemas(root).alternatives({"$ref": "#/$defs/a0"}))) == 40


def test_alternatives_are_read_as_far_as_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_ALTERNATIVES", 100)
    leaves = [{"const": number} for number in range(90)]
    schemas = Schemas({"$defs": {"u": {"anyOf": [*leaves[:40], {"oneOf": leaves[40:]}, SELF]}}})
    for _ in range(20):
        assert next(iter(schemas.alternatives({"$ref": "#/$defs/u"})))["anyOf"][0] == leaves[0]
    with pytest.raises(ValueError, match="leads to more than 100 others; simplify it"):
        list(schemas.alternatives({"anyOf": [{"$ref": "#/$defs/u"}]}))
    assert [each for each in Schemas({}).alternatives({"anyOf": leaves[:3]}) if "const" in each] == leaves[:3]


def test_references_are_followed_once() -> None:
    looked_up = 0

    class Root(dict[str, Any]):
        def get(self, *key: Any) -> Any:
            nonlocal looked_up
            looked_up += key[0] == "$defs"
            return super().get(*key)

    schemas = Schemas(Root({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}}))
    for _ in range(10):
        assert schemas.types({"anyOf": [{"$ref": "#/$defs/a"}]}) == {"null"}
    assert looked_up == 2


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        (" 5.0 ", {"integer"}, 5.0),
        ("5.5", {"integer"}, "5.5"),
        ("5", {"string"}, "5"),
        ("5", {"string", "null"}, "5"),
        ('"a"', {"string", "null"}, '"a"'),
        ("null", {"string", "null"}, None),
        ("None", {"integer", "null"}, None),
        ("True", {"boolean"}, True),
        ("{'a': [1, True]}", {"object"}, {"a": [1, True]}),
        ('{"a": "two\nlines"}', {"object"}, {"a": "two\nlines"}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, "1e999"),
        ("9" * 5000, {"number"}, "9" * 5000),  # more digits than Python converts
        ('a "b"', TYPES, 'a "b"'),
        ("-1.5", TYPES, -1.5),
    ],
)
def test_text_becomes_a_value_of_its_type(text: str, types: set[str], value: Any) -> None:
    assert json.loads(typed_json(text, frozenset(types))) == value


def test_literals_are_read_again() -> None:
    value = {"a": ["x'\"\\\n", None, True, -1.5, 10**20], "é": {}}
    assert read_literal(python_text(value)) == value
    assert read_literal(repr(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "f()", "1 + 1", "b'x'", "1j", "...", "{**{}}", "f'{1}'", "[x for x in y]", "'\0\n'x"),
        *(part * 100_000 + "1" for part in ("-", "(", "[", "not ", "{1:", "1+", "lambda:", "a if b else ", "a**")),
    ],
    ids=range(20),
)
def test_other_texts_are_unreadable(text: str) -> None:
    assert read_literal(text) is UNREADABLE
