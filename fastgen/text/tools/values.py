"""Values of arguments that models do not write as JSON: literals of Python, and text whose type a schema tells."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

UNREADABLE = object()  # the result for a text that is no literal; None is a value
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MOST_NESTED = 100  # signs and brackets in a row, above which Python's own parser may run out of stack
MOST_REFS = 20  # references in a schema that lead to each other

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
    if value is not UNREADABLE or re.search(rf"(?:[-+~(\[{{]\s*){{{MOST_NESTED}}}", text):
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
        case ast.List() | ast.Tuple():
            return [_literal(each) for each in node.elts]
        case ast.Dict() if None not in node.keys:
            found = {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
            if all(isinstance(key, str) for key in found):
                return found
        case ast.Name() if node.id in _NAMES:
            return _NAMES[node.id]
    raise ValueError("not a literal")


# ------------------------------------------------------------------------------------------------- schemas


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the one that its reference names; {}, which allows everything, if there is none. root: the
    schema that contains it."""
    for _ in range(MOST_REFS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema if isinstance(schema, Mapping) else {}
        names = schema["$ref"].removeprefix("#").split("/")[1:]
        schema = root
        for name in names:
            schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def parts_of(schema: Mapping[str, Any], word: str, root: Mapping[str, Any], seen: set[int]) -> list[Mapping[str, Any]]:
    """Return the schemas under a keyword such as anyOf, without those that were `seen` before in a schema that contains
    itself, or twice."""
    parts = schema.get(word)
    found = [resolved(part, root) for part in parts] if isinstance(parts, list) else []
    new = [part for part in found if id(part) not in seen]
    seen.update(map(id, new))
    return new


def types_of(schema: Any, root: Mapping[str, Any], seen: set[int] | None = None) -> frozenset[str]:
    """Return the types of JSON that a schema allows; all if it does not say. root: the schema that contains it. seen:
    see `parts_of`."""
    schema, seen = resolved(schema, root), set() if seen is None else seen
    found = TYPES
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found = frozenset(map(str, named)) & TYPES or TYPES
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        found &= frozenset().union(*map(kinds_of, values)) or TYPES
    for word in ("anyOf", "oneOf", "allOf"):
        if allowed := [types_of(part, root, seen) for part in parts_of(schema, word, root, seen)]:
            found &= frozenset.intersection(*allowed) if word == "allOf" else frozenset.union(*allowed)
    return found or TYPES


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
