"""Answers that have to follow a grammar: what response_format asks for, compiled to masks of tokens.

A Grammar is text, which one process can send to another; a Compiler makes a TokenMask of it, for one tokenizer. The
work is llguidance's: its compiling takes milliseconds to a second and lets other threads run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fastgen.tokenizer import Tokenizer

if TYPE_CHECKING:  # pydantic, which the process of an engine does without, and torch
    from fastgen.cli.serve.fields import ResponseFormat
    from fastgen.generator import Generator

CACHED_GRAMMARS = 64
# A space, or a line and its indentation. JSON has no bound, and small models lose their way in blanks.
WHITESPACE = r" |\n[ \t]{0,20}"


@dataclass(frozen=True)
class Grammar:
    """What an answer must be, in llguidance's variant of Lark. Equal grammars are compiled once."""

    source: str

    def compile(self, gen: Generator, kept: dict[Any, Any]) -> GrammarMask:
        """A mask for a Generator's model. kept: where its Compiler is kept from one call to the next."""
        if Compiler not in kept:
            if gen.tokenizer is None:
                raise ValueError("this model has no tokenizer files, so its answers can not follow a grammar")
            kept[Compiler] = Compiler(gen.tokenizer, gen.model_config.vocab_size, gen.model_config.eos_ids)
        compiler: Compiler = kept[Compiler]
        return compiler.compile(self)


def json_rule(schema: Mapping[str, Any], *, strict: bool) -> str:
    """The piece of a grammar that stands for a JSON value of a schema, in the schema's order of properties.

    strict: keywords that can not be enforced make the grammar an error, else they are left out of it.
    """
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict}
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': options}, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from error


def answer_rule(wanted: ResponseFormat | None) -> str | None:
    """The rule of a request's response_format; None where any text will do. Raises ValueError."""
    if wanted is not None and wanted.type == "json_schema":
        return json_rule(wanted.json_schema.schema_, strict=bool(wanted.json_schema.strict))
    return None if wanted is None or wanted.type == "text" else json_rule({"type": "object"}, strict=True)


class Compiler:
    """Makes masks for one tokenizer. Building it takes a second for a large vocabulary, in which other threads may
    stand still; `compile` may be called by any thread.

    vocab_size: V of the model. eos_ids: the ids that end an answer; a mask allows them where the grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        from llguidance.hf import from_tokenizer

        if not eos_ids:
            raise ValueError("this model has no end-of-sequence token, so an answer could not end where a grammar does")
        # A tokenizer may know more tokens than its model: `fill` leaves them out.
        self._size = max(vocab_size, len(tokenizer.hf))
        self._tokens = from_tokenizer(tokenizer.hf, n_vocab=self._size, eos_token=sorted(eos_ids))
        self._compiled = lru_cache(CACHED_GRAMMARS)(self._compile)

    def compile(self, grammar: Grammar) -> GrammarMask:
        """A mask at its beginning. Raises ValueError with the reason where the grammar or a schema in it is wrong."""
        return self._compiled(grammar).copy()

    def _compile(self, grammar: Grammar) -> GrammarMask:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar.source), log_level=0)
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))
        mask = GrammarMask(matcher, -(-self._size // 32))
        mask.fill(np.empty(mask.words, dtype=np.int32))  # some errors show here, after a second that no step may wait
        return mask


class GrammarMask:
    """A TokenMask that follows a grammar. words: of 32 tokens each, that the matcher writes."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self.words = matcher, words

    def fill(self, row: np.ndarray) -> None:
        bits = row if len(row) == self.words else np.empty(self.words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        if bits is not row:
            row[:] = bits[: len(row)]

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> GrammarMask:
        return GrammarMask(self._matcher.deep_copy(), self.words)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarMask:
        return self.copy()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(_reason(self._matcher.get_error()))


def _reason(error: str) -> str:
    """llguidance's own words, without the place in a grammar that the user has not written, and its inner state."""
    first = error.partition("<state>")[0].strip()
    lines = [line for line in first.splitlines() if not line.lstrip(" 0123456789").startswith(("|", "^"))]
    reason = " ".join(" ".join(lines).split())
    place, colon, rest = reason.partition("): ")
    reason = rest if colon and place.startswith("at ") else reason
    return reason.removeprefix("failed to compile JSON schema: ")[:500]
