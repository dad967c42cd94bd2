"""Grammars of tool calls, in each format. The right sides of rules are in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from fastgen.text.grammar import FREE_FORMATS, MAX_GRAMMAR, choice_rule, json_rule, quoted
from fastgen.text.tools.json_calls import DeepSeek, MistralHeads, ObjectList, ObjectSyntax
from fastgen.text.tools.parser import Function, Syntax
from fastgen.text.tools.python_calls import Pythonic
from fastgen.text.tools.values import Schemas, listed, python_text
from fastgen.text.tools.xml_calls import QwenCoder

Mark = Callable[[str], str]  # returns the rule of a mark

_ANY = ("additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "if")  # may add other arguments
_FREE = {"type", "title", "description", "default", "examples", "deprecated", "format", "anyOf", "oneOf"}
_ANY_NAME = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def calls_rule(syntax: Syntax, first: str, mark: Mark, parallel: bool) -> str:
    """Return the right side of a rule for all calls of an answer, which uses the rule `call`.

    first: rule of the mark of the first call. parallel: there may be several.
    """

    def repeated(separator: str, each: str) -> str:
        return f"({separator} {each})*" if parallel else ""

    match syntax:
        case ObjectList():
            return f'{first} " "? "[" call {repeated(quoted(", "), "call")} "]"'
        case MistralHeads():
            return f"{first} call {repeated(mark(syntax.opens), 'call')}"
        case DeepSeek():
            begins, _, ends = syntax.each
            each = f"{mark(begins)} call {mark(ends)}"
            return f"{first} {each} {repeated(quoted(chr(10)) if syntax.fenced else '', each)} {mark(syntax.closes)}"
        case Pythonic(closes=""):
            return f'{first} "[" call {repeated(quoted(", "), "call")} "]"'
        case Pythonic():
            return f'{first} "\\n" call {repeated(quoted(chr(10)), "call")} "\\n" {mark(syntax.closes)}'
        case _ if syntax.closes:  # Hermes and Qwen3-Coder
            rest = f'"\\n" call "\\n" {mark(syntax.closes)}'
            return f"{first} {rest} {repeated(quoted(chr(10)), f'{mark(syntax.opens)} {rest}')}"
    return f"{first} call"


def call_rules(syntax: Syntax, functions: Sequence[Function], mark: Mark) -> list[str]:
    """Return the rule `call`: the name and arguments of one function, as the templates write them; and rules for it.
    Raises ValueError for a function whose calls cannot be enforced in the format, and if the rules are too long."""
    rules, size = list[str](), 0
    for rule in _call_rules(syntax, functions, mark):
        rules.append(rule)
        size += len(rule)
        if size > MAX_GRAMMAR:
            raise ValueError(f"the schemas of the tools make a grammar of more than {MAX_GRAMMAR} characters")
    return rules


def _call_rules(syntax: Syntax, functions: Sequence[Function], mark: Mark) -> Iterator[str]:
    yield "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))
    for i, function in enumerate(functions):
        if isinstance(syntax, QwenCoder):
            yield from _tag_rules(f"call_{i}", function, "\n" * syntax.lines)
        elif isinstance(syntax, Pythonic):
            yield from _python_rules(f"call_{i}", function)
        else:
            yield f"call_{i}: {_json_call(syntax, function, mark)}"
    if isinstance(syntax, QwenCoder):  # a lazy rule ends at the first occurrence of its end
        ends = quoted("\n" * syntax.lines + "</parameter>\n")
        yield f"tag_ends: {ends}"
        yield f"tag_text[lazy]: TAG_TEXT {ends}"
        yield r"TAG_TEXT: /(.|\n)*/"


def _json_call(syntax: Syntax, function: Function, mark: Mark) -> str:
    name, arguments = function.name, json_rule(function.parameters, strict=function.strict)
    match syntax:
        case ObjectSyntax():
            return f'{quoted(f"""{{"name": {json.dumps(name)}, "{syntax.arguments}": """)} {arguments} "}}"'
        case MistralHeads():
            id = f"{mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/" if syntax.ids else ""
            return f"{quoted(name)} {id} {mark('[ARGS]')} {arguments}"
        case DeepSeek(fenced=True):
            head = f"{quoted('function')} {mark(syntax.each[1])} {quoted(f'{name}{chr(10)}```json{chr(10)}')}"
            return f"{head} {arguments} {quoted(f'{chr(10)}```')}"
        case DeepSeek():
            return f"{quoted(name)} {mark(syntax.each[1])} {arguments}"
    raise AssertionError(f"{syntax} has no grammar")


# ------------------------------------------------------------------------------------------------- arguments one by one


class _Arguments:
    """The arguments of a function. Each schema has one rule, which all its arguments share."""

    def __init__(self, function: Function) -> None:
        self.function, self.schemas = function, Schemas(function.parameters)
        self._root = self.schemas.resolved(function.parameters)
        self._rules: dict[int, str] = {}  # the names of the rules of schemas, by the `id` of the schema

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
        """Yield the name and schema of each argument, and whether it is required."""
        required = {name for name in listed(self._root, "required") if isinstance(name, str)}
        for name, schema in self.schemas.arguments().items():
            yield name, schema, name in required

    def rule(self, schema: Mapping[str, Any], name: str) -> tuple[str, bool]:
        """Return the name of the rule of a schema, and whether it is new. name: the one that a new rule gets."""
        rule = self._rules.setdefault(id(schema), name)
        return rule, rule == name

    @property
    def takes_others(self) -> bool:
        """True if there may be arguments that the schema does not list. Raises ValueError if the function is strict and
        its schema is more than a list."""
        schema, function = self._root, self.function
        adding = [word for word in _ANY if schema.get(word) not in (None, False)]
        if adding and function.strict:
            raise ValueError(
                f"in this model's format of tools, the arguments of a strict function are listed in properties; those "
                f"of {function.name} also come from {adding[0]}: remove it, or leave strict out"
            )
        listed = function.strict or schema.get("properties") or schema.get("additionalProperties") is False
        return bool(adding) or not listed

    def literal(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of an argument in JSON, or with the words of Python that templates write."""
        parameters, strict = self.function.parameters, self.function.strict
        types = self.schemas.types(schema) if schema.keys().isdisjoint({"enum", "const"}) else frozenset()
        words = [*(("True", "False") if "boolean" in types else ()), *(("None",) if "null" in types else ())]
        if "$ref" in str(schema):
            schema = {**{word: parameters[word] for word in ("$defs", "definitions") if word in parameters}, **schema}
        return f"({' | '.join([json_rule(schema, strict=strict), *map(quoted, words)])})"

    def values(self, schema: Any) -> list[Any] | None:
        """Return all values that a schema allows, as for Literal["a", "b"] | None; None if it does not list them."""
        constants: list[Any] = []
        for each in self.schemas.alternatives(schema):
            if "const" in each or listed(each, "enum"):
                constants += listed(each, "enum") or [each["const"]]
            elif each.get("type") == "null":
                constants.append(None)
            elif not (listed(each, "anyOf") or listed(each, "oneOf")):
                return None
        return constants

    def is_free(self, schema: Any) -> bool:
        """Return whether a schema that allows strings allows all of them."""
        return all(
            each.keys() <= _FREE and each.get("format") in (None, *FREE_FORMATS)
            for each in self.schemas.alternatives(schema)
        )


def _tag_rules(rule: str, function: Function, line: str) -> Iterator[str]:
    """Yield the rules of a call in tags. line: the line break before values, or ""."""
    items, arguments = [], _Arguments(function)
    for place, (name, schema, required) in enumerate(arguments):
        if not re.fullmatch(r"[^<>\r\n]+", name):
            raise ValueError(f"the argument {name!r} of {function.name} cannot be in a tag; rename it")
        value, new = arguments.rule(schema, f"{rule}_value{place}")
        if new:
            yield f"{value}: {_tag_value(name, schema, arguments)}"
        yield f"{rule}_{place}: {quoted(f'<parameter={name}>{line}')} {value}"
        items.append(f"{rule}_{place}" + "?" * (not required))
    if arguments.takes_others:
        yield f'{rule}_other: "<parameter=" {_ANY_NAME} {quoted(">" + line)} tag_text'
        items.append(f"{rule}_other*")
    begins, ends = quoted(f"<function={function.name}>\n"), quoted("</function>")
    yield f"{rule}: {begins} {' '.join(items)} {ends}"


def _tag_value(name: str, schema: Mapping[str, Any], arguments: _Arguments) -> str:
    """Return the rule of an argument in a tag, and of the end of the tag: text, or the JSON of another type."""
    if values := arguments.values(schema):
        texts = ([value] if isinstance(value, str) else [json.dumps(value), python_text(value)] for value in values)
        return f"{choice_rule(dict.fromkeys(chain(*texts)))} tag_ends"
    if "string" not in arguments.schemas.types(schema):
        return f"{arguments.literal(schema)} tag_ends"
    if arguments.function.strict and not arguments.is_free(schema):
        raise ValueError(
            f"the text {name!r} of the strict function {arguments.function.name} has limits that cannot be enforced in "
            "this model's format of tools: keep only its type and description, or leave strict out"
        )
    return "tag_text"


def _python_rules(rule: str, function: Function) -> Iterator[str]:
    """Yield the rules of a call in Python, with values in JSON, or True, False and None."""
    items, arguments = [], _Arguments(function)
    for place, (name, schema, required) in enumerate(arguments):
        if not re.fullmatch(r"[^\W\d][\w-]*", name):
            raise ValueError(f"the argument {name!r} of {function.name} is not a Python name; rename it")
        value, new = arguments.rule(schema, f"{rule}_value{place}")
        if new:
            yield f"{value}: {arguments.literal(schema)}"
        yield f"{rule}_{place}: {quoted(name + '=')} {value}"
        items.append((f"{rule}_{place}", required))
    first = later = ""  # the rest of the arguments, if none comes before it and if some do
    if arguments.takes_others:
        yield f'{rule}_other: {_ANY_NAME} "=" {json_rule({}, strict=False)}'
        later = f'(", " {rule}_other)*'
        first = f"({rule}_other {later})?"
    for place, (item, required) in reversed(list(enumerate(items))):
        others = "" if required else f" | {first}" if first else ""
        yield f"{rule}_first{place}: ({item} {later}{others}){'?' * (not required and not others)}"
        yield f'{rule}_later{place}: (", " {item}){"?" * (not required)} {later}'
        first, later = f"{rule}_first{place}", f"{rule}_later{place}"
    yield f'{rule}: {quoted(function.name + "(")} {first} ")"'
