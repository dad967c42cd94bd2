"""Structured output: turns JSON schemas, regular expressions and choices into grammars, and grammars into token masks.

A grammar is a string in llguidance's variant of Lark, so processes can exchange it. A Compiler turns it into a
TokenMask for one tokenizer. llguidance compiles a grammar in a millisecond to a second, while other threads run.
Functions whose names end in `_rule` return the right side of a rule: "start: " + rule is a grammar, and other rules can
contain it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fastgen.request import STRUCTURES, SamplingParams, TokenMask
from fastgen.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # fgserve's HTTP process, which writes grammars, does not load NumPy
    import numpy as np

CACHED_GRAMMARS = 64
MAX_GRAMMAR = 2_000_000  # characters of a grammar for fgserve; llguidance compiles few that are longer
MAX_GBNF = 20_000  # maximum number of characters of a grammar that is translated, which may take their square
# One space, or a newline with indentation. JSON allows any amount, in which small models get lost.
WHITESPACE = r" |\n[ \t]{0,20}"
FREE_FORMATS = ("binary", "directory-path", "file-path", "password", "path")  # formats that every string has
_VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords with values, not schemas
_ADDING = frozenset({"patternProperties", "anyOf", "oneOf", "$ref"})  # keywords that may add properties to an object
_NAMING = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


def json_rule(schema: Mapping[str, Any], *, strict: bool, closed: bool = False) -> str:
    """Return the rule of a JSON value that fits a schema, with properties in the order of the schema.

    strict: schema keywords that cannot be enforced are an error, except uniqueItems. Otherwise they are ignored.
    closed: objects have only the listed properties, unless the schema contains additionalProperties or allOf. A strict
    schema is always closed; another one stays open if it requires a property that it does not list.
    Raises ValueError.
    """
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict}
    try:
        text = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
        kept = _enforceable(schema, closed='"allOf"' not in text) if strict or closed else schema
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from error
    if closed and not strict and _unlisted(kept) is not None:
        kept = schema
    if (name := _unlisted(kept)) is not None:
        remedy = "list it there, or set additionalProperties to true"
        raise ValueError(f"required has {name!r}, which is not in properties; {remedy}")
    return f"%json {json.dumps({**kept, 'x-guidance': options})}"


def _enforceable(schema: Any, closed: bool, named: bool = False) -> Any:
    """Return a schema without FREE_FORMATS and uniqueItems, which llguidance refuses. closed: objects have only the
    listed properties. named: the keys are names of schemas, not keywords."""
    if isinstance(schema, list):
        return [_enforceable(part, closed) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        if named or key not in _VALUES | {"uniqueItems", "format"}:
            kept[key] = _enforceable(value, closed, not named and key in _NAMING)
        elif key in _VALUES or (key == "format" and value not in FREE_FORMATS):
            kept[key] = value
    if closed and not named and "properties" in kept and kept.keys().isdisjoint(_ADDING):
        kept.setdefault("additionalProperties", False)
    return kept


def _unlisted(schema: Any) -> str | None:
    """Return the name of a property that an object of a schema needs and cannot have; None if there is none."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        if not isinstance(part, Mapping):
            continue
        left += [value for key, value in part.items() if key not in _VALUES]
        properties, required = part.get("properties"), part.get("required")
        if part.get("additionalProperties") is not False or not _ADDING.isdisjoint(part) or "allOf" in part:
            continue
        if isinstance(properties, Mapping) and isinstance(required, list):
            unlisted = (name for name in required if isinstance(name, str) and name not in properties)
            if (name := next(unlisted, None)) is not None:
                return name
    return None


def regex_rule(pattern: str) -> str:
    """Return the rule of a text that a regular expression matches completely, in the syntax of Rust's regex crate."""
    written = {"/": r"\x2F", "\n": r"\x0A"}  # these cannot stand between the slashes of a literal

    def write(match: re.Match[str]) -> str:
        if match[0] == "\\":
            raise ValueError("regex ends with a backslash, which escapes nothing")
        return written.get(match[0][-1], match[0])

    return "/" + re.sub(r"(?s)\\.?|[/\n]", write, pattern) + "/"


def choice_rule(choices: Iterable[str]) -> str:
    """Return the rule of a text that equals one of the choices.

    A regular expression of 10,000 choices compiles in milliseconds; the same number of literals takes seconds.
    """
    escaped = (re.sub(r"[][\\.+*?()|{}^$]", r"\\\g<0>", text) for text in choices)
    return regex_rule(f"(?:{'|'.join(escaped)})")


def quoted(text: str) -> str:
    """Return a text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def lark_grammar(grammar: str) -> str:
    """Return a grammar in Lark. One in GBNF, the EBNF of llama.cpp and xgrammar, is translated. Raises ValueError."""
    if "::=" not in grammar or re.search(r"(?m)^[ \t]*+(start[ \t]*+:(?!:)|%)", grammar):
        return grammar
    if len(grammar) > MAX_GBNF:
        raise ValueError(f"grammar: it has {len(grammar)} characters of EBNF, above the maximum of {MAX_GBNF}")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # llguidance raises this class itself
        raise ValueError(f"grammar: it is not EBNF: {error}") from None


def params_rule(params: SamplingParams) -> str | None:
    """Return the rule of the structured output that validated parameters ask for, or None for any text."""
    if params.json_schema is not None:
        return json_rule(_read_schema(params.json_schema), strict=True)
    if params.regex is not None:
        return regex_rule(params.regex)
    if params.choice is not None:
        return choice_rule(params.choice)
    return None if params.grammar is None else f"%lark {{\n{params.grammar}\n}}"  # with a rule `start` of its own


def params_grammar(params: SamplingParams) -> str | None:
    """Return the grammar that validated parameters ask for, or None for any text."""
    if params.grammar is not None:
        return params.grammar
    try:
        rule = params_rule(params)
    except ValueError as error:
        raise named_error(structure_name(params), error) from None
    return None if rule is None else f"start: {rule}"


def structure_name(params: SamplingParams) -> str:
    """Return the name of the parameter that asks for the structure of the answers, for errors."""
    return next((name for name in STRUCTURES if getattr(params, name) is not None), "")


def named_error(name: str, error: ValueError) -> ValueError:
    """Return an error that begins with the name of the parameter whose grammar is wrong."""
    return error if str(error).startswith(name) else ValueError(f"{name}: {error}")


def _read_schema(schema: Any) -> Mapping[str, Any]:
    """Return the JSON schema given as a mapping, as JSON, or as a pydantic class."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise TypeError(f"json_schema must be a JSON schema (a dict) or a class of pydantic, not {schema!r}")
    return schema


@dataclass(frozen=True)
class MarkVocabulary:
    """A small stand-in for the vocabulary of a tokenizer, which can be sent to another process to check grammars.

    It consists of the tokenizer's special tokens, which a grammar may contain by name or id, and one token per byte.

    size: number of ids. eos_ids: ids that end an answer. special: names of the special tokens by id.
    """

    size: int
    eos_ids: Sequence[int]
    special: Mapping[int, str]

    def tokens(self) -> Any:
        """Return the LLTokenizer of this vocabulary."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_MarkTokenizer(self)), eos_token=list(self.eos_ids))


class _MarkTokenizer:
    """A MarkVocabulary with llguidance's interface of a tokenizer: the text of each id, and a function from text to
    ids."""

    bos_token_id = None

    def __init__(self, marks: MarkVocabulary) -> None:
        taken = {*marks.special, *marks.eos_ids}
        self.tokens = [b""] * max(marks.size, 256 + len(taken))
        self._ids = [id for id in range(len(self.tokens)) if id not in taken][:256]  # one id per byte
        for byte, id in enumerate(self._ids):
            self.tokens[id] = bytes((byte,))
        for id, name in marks.special.items():
            self.tokens[id] = name.encode()
        self.special_token_ids, self.eos_token_id = list(marks.special), marks.eos_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def compile_grammar(tokens: Any, grammar: str) -> Any:
    """Return the LLMatcher of a grammar. tokens: the LLTokenizer. Raises ValueError with the reason if the grammar or a
    schema in it is wrong."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
    if not matcher.is_error():
        matcher.compute_logit_bias()  # some errors appear here, after up to a second
    if matcher.is_error():
        raise ValueError(_reason(matcher.get_error()))
    return matcher


class Compiler:
    """A compiler of grammars to masks for one tokenizer, with a cache. For a large vocabulary, creating it takes a
    second and may block other threads. Any thread may call `compile`.

    vocab_size: V of the model. eos_ids: ids that end an answer; masks allow them when the grammar is complete. marks:
    a small vocabulary with which grammars have the same errors.

    Raises ValueError if llguidance is not installed, or if the model has no tokenizer or no eos_ids.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        if tokenizer is None:
            raise ValueError("this model has no tokenizer files, so its answers cannot follow a grammar")
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError:
            raise ValueError("structured output needs the package llguidance; run: pip install llguidance") from None
        if not eos_ids:
            raise ValueError("this model has no end-of-sequence token, so an answer could not end where a grammar does")
        # A tokenizer may have more tokens than its model; `fill` drops the additional ones.
        self._size = max(vocab_size, len(tokenizer.hf))
        eos = sorted(eos_ids)
        self._tokens = from_tokenizer(tokenizer.hf, n_vocab=self._size, eos_token=eos)
        added = {id: token.content for id, token in tokenizer.hf.added_tokens_decoder.items()}
        special = {id: name for id, name in added.items() if self._tokens.is_special_token(id)}
        self.marks = MarkVocabulary(self._size, eos, special)
        self._compiled = lru_cache(CACHED_GRAMMARS)(self._compile)

    def compile(self, grammar: str) -> GrammarMask:
        """Return a new mask. Raises ValueError with the reason if the grammar or a schema in it is wrong."""
        return deepcopy(self._compiled(grammar))

    def _compile(self, grammar: str) -> GrammarMask:
        return GrammarMask(compile_grammar(self._tokens, grammar), -(-self._size // 32))


class GrammarMask:
    """A TokenMask that follows a grammar. words: number of int32 words that the matcher writes, of 32 tokens each."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self.words = matcher, words

    def fill(self, row: np.ndarray) -> None:
        import numpy as np

        bits = row if len(row) == self.words else np.empty(self.words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        if bits is not row:
            row[:] = bits[: len(row)]

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarMask:
        return GrammarMask(self._matcher.deep_copy(), self.words)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(_reason(self._matcher.get_error()))


class TokenRules:
    """A TokenMask that allows a fixed set of tokens, except tokens that would complete one of several words.

    inner: another mask that must also allow the tokens. row: int32 [ceil(V / 32)], the set of tokens as
    `TokenMask.fill` writes it. words: ids of each word, at least two.
    """

    def __init__(self, inner: TokenMask | None, row: np.ndarray, words: Sequence[Sequence[int]]) -> None:
        self._inner, self._row, self._words = inner, row, words
        self._longest = max(map(len, words), default=1)
        self._last: list[int] = []  # the last tokens, as many as the longest word has

    def fill(self, row: np.ndarray) -> None:
        if self._inner is not None:
            self._inner.fill(row)
        row &= self._row
        bits = row.view("u1")  # one bit per token
        for *begin, end in self._words:
            if self._last[-len(begin) :] == begin:
                bits[end // 8] &= 255 - (1 << end % 8)

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
        self._last = [*self._last, token][-self._longest :]

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenRules:
        copy = TokenRules(deepcopy(self._inner, memo), self._row, self._words)
        copy._last = self._last
        return copy


class LaterEnd:
    """A TokenMask without the tokens that end an output among its first tokens, unless it then allows none: a complete
    structure ends.

    inner: the mask. ends: the tokens. count: number of first tokens.
    """

    def __init__(self, inner: TokenMask, vocab_size: int, ends: Collection[int], count: int) -> None:
        self._inner, self._left = inner, count
        self._others = token_row(vocab_size, set(range(vocab_size)).difference(ends), ())

    def fill(self, row: np.ndarray) -> None:
        self._inner.fill(row)
        if self._left > 0 and (row & self._others).any():
            row &= self._others

    def accept(self, token: int) -> None:
        self._inner.accept(token)
        self._left -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> LaterEnd:
        copied = copy(self)
        copied._inner = deepcopy(self._inner, memo)
        return copied


def token_row(vocab_size: int, allowed: Collection[int] | None, forbidden: Collection[int]) -> np.ndarray:
    """Return the row of a TokenMask that allows the `allowed` tokens (None: all) without the forbidden ones."""
    import numpy as np

    bits = np.full(-(-vocab_size // 32) * 32, allowed is None)
    bits[list(allowed or ())] = True
    bits[list(forbidden)] = False
    return np.packbits(bits, bitorder="little").view(np.int32)


def _reason(error: str) -> str:
    """Return the reason in an error of llguidance, without positions in a grammar that the user has not written."""
    first = error.partition("<state>")[0].strip()
    lines = [line for line in first.splitlines() if not line.lstrip(" 0123456789").startswith(("|", "^"))]
    reason = " ".join(" ".join(lines).split())
    place, colon, rest = reason.partition("): ")
    reason = rest if colon and place.startswith("at ") else reason
    if reason == "NoExtensionBias":
        return "no text can follow the schema or grammar; a part of it may lead only to itself, as {'$ref': '#'} does"
    return reason.removeprefix("failed to compile JSON schema: ")[:500]
