"""grammar.py: masks of structured output over every kind of vocabulary. Grammars of tools are in
test_serve_tools.py."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from conftest import VOCAB
from families import EOS
from grammars import MARKS, accepts, allowed, byte_level, rule_of, walk

import fastgen
from fastgen import Generator, SamplingParams
from fastgen.text import grammar as grammars
from fastgen.text.grammar import Compiler, LaterEnd, choice_rule, json_rule, lark_grammar, params_grammar, regex_rule
from fastgen.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "日本"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "note": {"type": ["string", "null"], "maxLength": 5},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "note", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "maxItems": 2}},
}
RIGHT = {"city": "日本", "days": 22, "note": 'é "\n\\', "place": [0.5, -1]}

Vocabulary = tuple[Tokenizer, int, list[int]]  # tokenizer, number of ids, ids that end an answer


@pytest.fixture(scope="module", params=["byte fallback", "byte level", "bundled"])
def vocabulary(request: pytest.FixtureRequest, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    if request.param == "byte fallback":
        return Tokenizer(talker), VOCAB, [EOS]
    if request.param == "byte level":
        tokenizer = byte_level(tmp_path_factory.mktemp("level"), MARKS)
        return tokenizer, len(tokenizer.hf) + 40, [0, 1]
    tokenizer = Tokenizer(Path(fastgen.__file__).parent / "tiny")
    return tokenizer, len(tokenizer.hf), [tokenizer.hf.eos_token_id]


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> Compiler:
    return Compiler(*vocabulary)


def grammar(schema: dict[str, Any] | None, strict: bool | None = True) -> str:
    """Return the grammar of a schema; None: any object."""
    described = {"name": "x", "schema": schema, "strict": strict}
    wanted = {"type": "json_object"} if schema is None else {"type": "json_schema", "json_schema": described}
    return f"start: {rule_of(wanted)}"


def check(value: Any) -> None:
    """Check a value against SCHEMA."""
    assert list(value) == ["city", "days", "note", "place"]
    assert value["city"] in ("Paris", "日本")
    assert isinstance(value["days"], int)
    assert 1 <= value["days"] <= 30
    assert value["note"] is None or len(value["note"]) <= 5
    assert len(value["place"]) <= 2
    assert all(-1 <= number <= 1 for number in value["place"])


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that follows another, without special tokens and without a leading space."""
    before, ids = (list(tokenizer.hf(said, add_special_tokens=False)["input_ids"]) for said in (",", "," + text))
    assert ids[: len(before)] == before
    return ids[len(before) :]


# ------------------------------------------------------------------------------------------------- masks


def test_random_walks_fit_the_schema_and_copies_are_independent(vocabulary: Vocabulary, compiler: Compiler) -> None:
    tokenizer, size, ends = vocabulary
    rng = random.Random(0)
    first = compiler.compile(grammar(SCHEMA))
    fresh = allowed(first, size)
    assert accepts(first, encoded(tokenizer, '{"city": "'), size)
    second = deepcopy(first)
    assert accepts(first, encoded(tokenizer, "Paris"), size)
    assert accepts(second, encoded(tokenizer, "日本"), size)
    for _ in range(12):
        mask = compiler.compile(grammar(SCHEMA))
        assert allowed(mask, size) == fresh, "the compiled grammar that is kept has not moved"
        check(json.loads(tokenizer.decode(walk(mask, size, ends, rng))))


@pytest.mark.parametrize("indent", [None, 2])
def test_a_right_value_is_allowed_and_ends_when_it_is_complete(
    vocabulary: Vocabulary, compiler: Compiler, indent: int | None
) -> None:
    tokenizer, size, ends = vocabulary
    ids = encoded(tokenizer, json.dumps(RIGHT, ensure_ascii=False, indent=indent))
    for schema in (SCHEMA, None):
        mask = compiler.compile(grammar(schema))
        for token in ids:
            now = allowed(mask, size)
            assert token in now
            assert not set(now) & set(ends)
            mask.accept(token)
        assert allowed(mask, size) == sorted(ends)
        mask.accept(ends[-1])
        assert allowed(mask, size) == sorted(ends), "with ignore_eos the answer goes on"
    for wrong in ("[1]", '{"city": "Rome', '{"days"', '{"city": "Paris", "days": 31', "{  ", "{\n\n", "{\n" + " " * 21):
        assert not accepts(compiler.compile(grammar(SCHEMA)), encoded(tokenizer, wrong), size)


def test_a_token_that_was_not_allowed_is_an_error(vocabulary: Vocabulary, compiler: Compiler) -> None:
    mask = compiler.compile(grammar(SCHEMA))
    with pytest.raises(ValueError, match="grammar") as raised:
        mask.accept(encoded(vocabulary[0], "x")[0])
    assert "<state>" not in str(raised.value)
    with pytest.raises(ValueError, match="grammar"):
        allowed(mask, vocabulary[1])


@pytest.mark.parametrize("difference", [-3, 0, 1, 100])
def test_a_tokenizer_and_its_model_may_differ_in_size(vocabulary: Vocabulary, difference: int) -> None:
    tokenizer, _, ends = vocabulary
    size = len(tokenizer.hf) + difference
    mask = Compiler(tokenizer, size, ends).compile('start: %json {"type": "object"} "\\n"')
    assert "{" in {tokenizer.decode([token]) for token in allowed(mask, size)}
    assert max(allowed(mask, size)) < len(tokenizer.hf)


# ------------------------------------------------------------------------------------------------- compiling


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "'/nowhere' does not exist"),
        ({"$ref": "https://example.com/a.json"}, "example.com"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "object", "properties": 5}, "properties"),
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "string", "format": "secret"}, "Unknown format: secret"),
        ({"$ref": "#"}, "may lead only to itself"),  # an error that only the first mask shows
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "may lead only to itself"),
    ],
)
def test_a_bad_schema_is_an_error_with_its_reason(compiler: Compiler, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=r"^(?!at )") as raised:
        compiler.compile(grammar(schema))
    assert reason in str(raised.value)
    assert "%json" not in str(raised.value)
    with pytest.raises(ValueError, match="not JSON"):
        grammar({"maximum": float("nan")})


@pytest.mark.parametrize("extra", [{"not": {"type": "null"}}, {"unevaluatedProperties": 5}, {"format": "secret"}])
@pytest.mark.parametrize("strict", [False, None])
def test_unenforceable_keywords_are_ignored_unless_strict(
    vocabulary: Vocabulary, compiler: Compiler, extra: dict[str, Any], strict: bool | None
) -> None:
    ids = encoded(vocabulary[0], json.dumps(RIGHT, ensure_ascii=False))
    assert accepts(compiler.compile(grammar({**SCHEMA, **extra, "x-guidance": 5}, strict)), ids, vocabulary[1])


def test_a_strict_schema_may_have_keywords_that_pydantic_writes(vocabulary: Vocabulary, compiler: Compiler) -> None:
    class File(pydantic.BaseModel):
        path: Path
        key: pydantic.SecretStr
        tags: set[Literal["a", "b"]]

    schema = File.model_json_schema()
    assert schema["properties"]["tags"]["uniqueItems"]
    for value, fits in (
        ({"path": "/x", "key": "k", "tags": ["b"]}, True),
        ({"path": "/x", "key": 5, "tags": []}, False),
    ):
        ids = encoded(vocabulary[0], json.dumps(value))
        assert accepts(compiler.compile(grammar(schema)), ids, vocabulary[1]) == fits


def test_names_and_values_in_a_strict_schema_are_not_keywords() -> None:
    parts = {"uniqueItems": True, "format": {"format": "date"}, "enum": {"format": "password"}}
    schema = {
        "properties": parts,
        "const": {"format": "path", "uniqueItems": True},
        "anyOf": [{"format": "path"}, False],
    }
    told = json.loads(json_rule(schema, strict=True).removeprefix("%json "))
    told.pop("x-guidance")
    parts = {"uniqueItems": True, "format": {"format": "date"}, "enum": {}}
    assert told == {"properties": parts, "const": schema["const"], "anyOf": [{}, False]}


@pytest.mark.parametrize(
    ("more", "there"),
    [({}, False), ({"additionalProperties": True}, True), ({"allOf": [{"required": ["a"]}]}, True)],
)
def test_objects_have_only_the_properties_of_a_strict_or_closed_schema(
    vocabulary: Vocabulary, compiler: Compiler, more: dict[str, Any], there: bool
) -> None:
    tokenizer, size, ends = vocabulary
    schema = {"properties": {"properties": {"type": "object", "properties": {}}, "a": {"type": "null"}}, **more}
    for strict, closed in ((True, False), (False, True), (False, False)):
        rule = json_rule(schema, strict=strict, closed=closed)
        for text, fits in (('{"properties": {}, "a": null}', True), ('{"a": null, "b": 5}', there)):
            ids = [*encoded(tokenizer, text), ends[0]]
            assert accepts(compiler.compile(f"start: {rule}"), ids, size) == (fits or not (strict or closed))


@pytest.mark.parametrize(
    ("needs", "error"),
    [
        ({"required": ["b"]}, "required has 'b', which is not in properties; list it there, or set"),
        ({"minProperties": 2}, "minProperties is 2, and properties has 1; list more, or set"),
    ],
)
def test_a_closed_schema_that_is_not_strict_may_require_what_it_does_not_list(
    needs: dict[str, Any], error: str
) -> None:
    schema = {"properties": {"a": {}}, **needs}
    assert json_rule(schema, strict=False, closed=True) == json_rule(schema, strict=False)
    with pytest.raises(ValueError, match=error):
        json_rule({**schema, "additionalProperties": False}, strict=False, closed=True)


def test_a_closed_schema_may_say_that_it_is_open_by_unevaluated_properties() -> None:
    schema = {"properties": {"a": {}}, "unevaluatedProperties": True}
    assert "additionalProperties" not in json_rule(schema, strict=False, closed=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "required": ["a", "b"]},
        {"type": "object", "properties": {}, "required": ["b"], "additionalProperties": False},
        {"properties": {"a": {"type": "object", "properties": {"c": {}}, "required": ["b"]}}},
        {"anyOf": [{"type": "null"}, {"properties": {"a": {}}, "required": ["b"]}]},
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"properties": {"a": {}}, "required": ["b"]}}}},
    ],
)
def test_a_required_property_that_an_object_cannot_have_is_an_error_that_names_it(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="required has 'b', which is not in properties; list it there, or set"):
        json_rule(schema, strict=True)
    with pytest.raises(ValueError, match="json_schema: required has 'b'"):
        params_grammar(SamplingParams(json_schema=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "required": ["b"], "additionalProperties": True},
        {"properties": {"a": {}}, "required": ["b"], "patternProperties": {"^b": {}}, "additionalProperties": False},
        {"allOf": [{"properties": {"a": {}}, "required": ["b"]}], "properties": {"b": {}}},
        {"properties": {"b": {}}, "anyOf": [{"required": ["b"]}]},
        {"required": ["b"]},
        {"properties": {"required": {"enum": ["b"]}, "properties": {}}, "required": ["properties"]},
        {"const": {"properties": {"a": 1}, "required": ["b"], "additionalProperties": False}},
    ],
)
def test_a_required_property_may_be_described_elsewhere(compiler: Compiler, schema: dict[str, Any]) -> None:
    compiler.compile(f"start: {json_rule(schema, strict=True)}")


def test_min_tokens_holds_back_ends_unless_the_structure_is_complete() -> None:
    """Of a mask that allows tokens 0 to 3 and then only the ends, 5 and 40."""

    class Ended:
        def __init__(self) -> None:
            self.said: list[int] = []

        def fill(self, row: np.ndarray) -> None:
            bits = sum(1 << token for token in ((5, 40) if len(self.said) == 3 else (0, 1, 2, 3, 5, 40)))
            row.view(np.uint32)[:] = bits & 0xFFFFFFFF, bits >> 32

        def accept(self, token: int) -> None:
            self.said.append(token)

    for count, held in ((0, 0), (2, 2), (9, 3)):
        mask = LaterEnd(Ended(), 41, (5, 40), count)
        for place in range(4):
            copied = deepcopy(mask)
            assert allowed(copied, 41) == ([] if place == 3 else [0, 1, 2, 3]) + ([5, 40] if place >= held else [])
            copied.accept(1)
            mask = copied if place % 2 else (mask.accept(1), mask)[1]


HARD = "a/b\\[c]|(d)^$ {2}*+?#&-~<>"


@pytest.mark.timeout(20)
def test_choices_and_patterns_are_taken_literally(vocabulary: Vocabulary, compiler: Compiler) -> None:
    tokenizer, size, ends = vocabulary
    choices = [["yes", "yes or no", "y.s", HARD], ["", "\n\r\t\0é"], [""]]
    cases = [(choice_rule(these), text, text in these) for these in choices for text in [*these, "yxs"]]
    many = choice_rule(f"choice {i} " * 3 for i in range(60_000))  # compiles in milliseconds
    cases += [(many, "choice 59999 " * 3, True), (many, "choice 60000 " * 3, False)]
    patterns = ("a/b", "a/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), (r"\\/\n", "\\/\n"), ("", ""), ('"#', '"#')
    cases += [(regex_rule(pattern), text, True) for pattern, text in patterns]
    for rule, text, fits in cases:
        ids = [*(encoded(tokenizer, text) if text else []), ends[0]]
        assert accepts(compiler.compile(f"start: {rule}"), ids, size) == fits, (rule[:100], text)


def test_grammars_in_ebnf_are_translated(vocabulary: Vocabulary, compiler: Compiler) -> None:
    tokenizer, size, ends = vocabulary
    mask = compiler.compile(lark_grammar('root ::= number ("," number)*\nnumber ::= [0-9]+ | "::="'))
    for text, fits in (("12,::=,3", True), ("12,,3", False), ("12,", False)):
        assert accepts(deepcopy(mask), [*encoded(tokenizer, text), ends[0]], size) == fits
    lark = 'start: "::=" x\nx: "a"'
    assert lark_grammar(lark) == lark
    for wrong, reason in (
        ("root ::= other", "'other' not found"),
        ("a ::= (", r"Expected '\)'"),
        ("::=" * 9999, "maximum"),
        ("::=" + "\n" * 10**6, "maximum"),
    ):
        with pytest.raises(ValueError, match=reason):
            lark_grammar(wrong)


def test_the_same_grammar_is_compiled_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, compile_grammar = Counter[str](), grammars.compile_grammar

    def counted(tokens: Any, grammar: str) -> Any:
        counts[grammar] += 1
        return compile_grammar(tokens, grammar)

    monkeypatch.setattr(grammars, "compile_grammar", counted)
    compiler = Compiler(*vocabulary)
    first, second = (compiler.compile(grammar(SCHEMA)) for _ in range(2))
    assert first is not second
    assert counts == {grammar(SCHEMA): 1}


def test_what_a_compiler_needs(vocabulary: Vocabulary, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        Compiler(vocabulary[0], vocabulary[1], [])
    with Generator(llama, seed=0) as gen, pytest.raises(ValueError, match="no tokenizer"):
        gen.add([5], SamplingParams(choice=["a"]))
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ValueError, match="run: pip install llguidance"):
        Compiler(vocabulary[0], 5, [0])


# ------------------------------------------------------------------------------------------------- requests


class Answer(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    days: int


@pytest.mark.parametrize(
    ("structure", "shape"),
    [
        ({"json_schema": SCHEMA}, r"(?s)\{.*\}"),
        ({"json_schema": Answer}, r'\{\s*"city"\s*:\s*"(Paris|Rome)"\s*,\s*"days"\s*:\s*-?\d+\s*\}'),
        ({"json_schema": json.dumps({"type": "boolean"})}, "true|false"),
        ({"regex": r"^\d{3}/[a-f]\\$"}, r"\d{3}/[a-f]\\"),
        ({"choice": ["yes", 'no "way"\n', "日本"]}, 'yes|no "way"\n|日本'),
        ({"grammar": 'start: sign? digits\nsign: "+" | "-"\ndigits: /[0-9]{2}/'}, r"[+-]?\d\d"),
    ],
)
def test_answers_have_the_requested_structure(gen: Generator, structure: dict[str, Any], shape: str) -> None:
    params = SamplingParams(n=6, max_tokens=400, seed=2, **structure)
    ended = [c for c in gen.generate("hello", params)[0].completions if c.finish_reason == "stop"]
    assert len(ended) >= 4
    for completion in ended:
        assert re.fullmatch(shape, completion.text), completion.text
        if structure.get("json_schema") is SCHEMA:
            check(json.loads(completion.text))


@pytest.mark.parametrize(
    ("structure", "kind", "reason"),
    [
        ({"json_schema": 5}, TypeError, "json_schema must be a JSON schema"),
        ({"json_schema": "{"}, ValueError, "json_schema is not JSON"),
        ({"json_schema": "[" * 100_000}, ValueError, "json_schema is not JSON: maximum recursion depth"),
        ({"json_schema": {"type": "x"}}, ValueError, "json_schema: Invalid type: x"),
        ({"regex": 5}, TypeError, "regex must be a string"),
        ({"regex": "(a"}, ValueError, 'regex: invalid regex "(a"'),
        ({"regex": "a\\"}, ValueError, "regex ends with a backslash"),
        ({"choice": "ab"}, TypeError, "choice must be a list of strings"),
        ({"choice": []}, ValueError, "choice is empty"),
        ({"grammar": "start: x"}, ValueError, 'grammar: unknown name: "x"'),
        ({"grammar": 'root ::= "a"'}, ValueError, "grammar: 1(7): Expected token"),
        ({"regex": "a", "choice": ["a"]}, ValueError, "regex and choice are given together"),
    ],
)
def test_a_wrong_structure_is_an_error(
    gen: Generator, structure: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=re.escape(reason)):
        gen.add("hello", SamplingParams(**structure))
    assert gen.unfinished == 0
