"""Values of arguments that models do not write as JSON: literals of Python, and text whose type a schema tells."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

UNREADABLE = object()  # the result for a text that is no literal; None is a value
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_NESTED = 100  # signs and brackets in a row, above which Python's own parser may run out of stack
MAX_REFS = 20  # references in a schema that lead to each other
MAX_ALTERNATIVES = 100_000  # in the schema of a function's arguments

_ANYTHING: Mapping[str, Any] = {}  # the schema that allows everything
_NAMES = {"true": True, "false": False, "null": None}  # of JSON, which models write in Python as well
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = "\n\\'\"abfnrtvxuUN01234567"  # of other characters Python keeps the backslash, with a warning
_RAW = re.compile(r"\b[rR][\"']")


def read_json(text: str) -> Any:
    """Return the value of JSON, or UNREADABLE. Strings may contain line breaks."""
    try:
        return json.loads(text, strict=False, parse_constant=lambda name: math.nan)
    except (ValueError, RecursionError):
        return UNREADABLE


def json_text(value: Any) -> str | None:
    """Return a value as JSON, or None if JSON cannot express it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return text


def python_text(value: Any) -> str:
    """Return a value of JSON as a literal of Python, with strings as in JSON."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{python_text(name)}: {python_text(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(python_text, value)) + "]"
    return repr(value)


def read_literal(text: str) -> Any:
    """Return the value of a literal of JSON or Python, or UNREADABLE."""
    value = read_json(text)
    if value is not UNREADABLE or re.search(rf"(?:[-+~(\[{{]\s*){{{MAX_NESTED}}}", text):
        return value
    if not _RAW.search(text):
        text = _ESCAPE.sub(lambda found: found[0] if found[1] in _ESCAPED else "\\" + found[0], text)
    try:
        return _literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return UNREADABLE


def _literal(node: ast.AST) -> Any:
    """Return the value of a literal. Raises ValueError for other expressions."""
    match node:
        case ast.Constant(value=(str() | int() | float() | None) as value):  # bool is a kind of int
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=(int() | float()) as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=(int() | float()) as value)):
            return +value
        case ast.List() | ast.Tuple():
            return [_literal(each) for each in node.elts]
        case ast.Dict() if None not in node.keys:
            items = {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
            if all(isinstance(key, str) for key in items):
                return items
        case ast.Name() if node.id in _NAMES:
            return _NAMES[node.id]
    raise ValueError("not a literal")


# ------------------------------------------------------------------------------------------------- schemas


class Schemas:
    """The JSON schemas inside one schema, which may refer to each other. References may lead to a schema in very many
    ways, so what was found out about it is kept.

    root: the schema that contains the others, whose lifetime this object extends.
    """

    def __init__(self, root: Any) -> None:
        self.root: Mapping[str, Any] = root if isinstance(root, Mapping) else _ANYTHING
        self._named: dict[str, Any] = {}  # by reference
        self._types: dict[int, frozenset[str]] = {}  # by the `id` of the schema
        self._steps = 0  # number of alternatives so far

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema, or the one that its reference names; {}, which allows everything, if there is none."""
        for _ in range(MAX_REFS):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                return schema if isinstance(schema, Mapping) else _ANYTHING
            if reference not in self._named:
                self._named[reference] = self._find(reference)
            schema = self._named[reference]
        return _ANYTHING

    def _find(self, reference: str) -> Any:
        """Return what is in the root at the path of a reference; None if there is nothing."""
        value: Any = self.root
        for name in reference.removeprefix("#").split("/")[1:]:
            value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
        return value

    def arguments(self) -> dict[str, Mapping[str, Any]]:
        """Return the schema of each property of the root, by its name."""
        properties = self.resolved(self.root).get("properties")
        named = properties.items() if isinstance(properties, Mapping) else ()
        return {name: self.resolved(inner) for name, inner in named}

    def alternatives(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield a schema and, if it has anyOf or oneOf, the schemas there, those in them, and so on, each once. Raises
        ValueError after MAX_ALTERNATIVES of all calls together."""
        seen, left = set[int](), list[Iterator[Any]]([iter([schema])])
        while left:
            for part in left[-1]:
                self._steps += 1
                if self._steps > MAX_ALTERNATIVES:
                    raise ValueError(f"a schema leads to more than {MAX_ALTERNATIVES} others; simplify it")
                each = self.resolved(part)
                if id(each) not in seen:
                    seen.add(id(each))
                    yield each
                    left.append(chain(listed(each, "anyOf"), listed(each, "oneOf")))
                    break
            else:
                left.pop()

    def types(self, schema: Any, deep: int = 0) -> frozenset[str]:
        """Return the types of JSON that a schema allows; all if it does not say. deep: number of schemas that contain
        this one."""
        schema = self.resolved(schema) if deep < MAX_REFS else _ANYTHING
        if id(schema) in self._types:
            return self._types[id(schema)]
        types = self._types[id(schema)] = TYPES
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            types = frozenset(map(str, named)) & TYPES or TYPES
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            types &= frozenset().union(*map(kinds_of, values)) or TYPES
        for word in ("anyOf", "oneOf", "allOf"):
            if parts := listed(schema, word):
                allowed = [self.types(part, deep + 1) for part in parts]
                types &= frozenset.intersection(*allowed) if word == "allOf" else frozenset.union(*allowed)
        self._types[id(schema)] = types or TYPES
        return self._types[id(schema)]


def listed(schema: Mapping[str, Any], word: str) -> list[Any]:
    """Return the list that a schema has under a word; an empty one if it has none."""
    value = schema.get(word)
    return value if isinstance(value, list) else []


def kinds_of(value: Any) -> frozenset[str]:
    """Return the types of JSON that a value has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = {str: "string", float: "number", list: "array", dict: "object"}
    return frozenset({names.get(type(value), "null")})


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return as JSON a value that was written as text, without quotes if it is a string. types: those it may have."""
    words = {**_NAMES, "none": None}
    value = words[text.strip().lower()] if text.strip().lower() in words else read_literal(text.strip())
    written = None if value is UNREADABLE else json_text(value)
    if written is not None and kinds_of(value) & (types - {"string"}):
        return written
    return json.dumps(text, ensure_ascii=False)
