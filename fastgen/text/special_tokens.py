"""Keeps text in messages that spells a special token, such as "<|im_end|>", from becoming that token.

A chat template writes special tokens around the texts of messages, and a tokenizer finds them in the rendered text. So
a message that contains the text of a special token could forge turns. To prevent that:

1. `mark` inserts a random number into each special token in messages and tools, after its first character, and into
   each beginning of one at the end of a text. The template can still trim, split or join these texts, or write them as
   JSON.
2. In the rendered text, special tokens without a number come from the template. `encode` replaces them by random
   aliases, and removes the numbers.
3. `encode` then uses a second tokenizer, which has the same model but knows special tokens only by their aliases. So
   texts are encoded as a whole, with the same merges as anywhere else.

Messages without special tokens skip all of this. A tokenizer may normalize texts before it looks for special tokens, so
messages are also searched in that form; the second tokenizer finds none in it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

# Tokens between ASCII or fullwidth bars. Some tokenizers do not declare them as special although they begin turns, such
# as DeepSeek's "User" and "Assistant".
_BARS = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
CUT = r"|\Z"


class TextGuard:
    """An encoder of rendered conversations in which messages spell special tokens.

    hf: the tokenizer of transformers. ids: ids of the special tokens, by their text.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._added: dict[int, Any] = dict(hf.added_tokens_decoder)
        named = set(hf.all_special_tokens)
        self.ids = {
            token.content: id
            for id, token in self._added.items()
            if len(token.content) > 1 and (token.special or token.content in named or _BARS.fullmatch(token.content))
        }
        self._tokens = re.compile(_either(self.ids))
        normalizer = getattr(getattr(hf, "backend_tokenizer", None), "normalizer", None)
        normalized = [token.content for token in self._added.values() if token.normalized and token.content in self.ids]
        self._normalize: Callable[[str], str] | None = normalizer.normalize_str if normalizer and normalized else None
        spelled = [*self.ids, *(filter(None, map(self._normalize, normalized)) if self._normalize else ())]
        # Many texts end with the first letter of a token such as "pad"; the template does not join these to a token.
        words = [text for text in spelled if text[:1].isalnum() or text[:1].isspace()]
        parts = f"(?:{_either(words)}|{_either(set(spelled).difference(words), CUT)})"
        self._parts = re.compile(parts)
        # The places after the first characters of special tokens and of their beginnings, which may overlap.
        self._begun = re.compile(f"(?<=(?={parts}).)", re.DOTALL)

    def mark(
        self, messages: Sequence[Any], variables: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any], str] | None:
        """Return messages and variables with a mark in each special token, and the mark; None if no text can become a
        special token. Roles, and variables other than tools and documents, come from the program and are not marked.
        Raises ValueError."""
        others = {name: variables[name] for name in ("tools", "documents") if name in variables}
        number = f"{secrets.randbelow(10**12):012}"  # digits survive JSON, repr() and a change of case
        try:
            if not any(map(self._spells, _texts([messages, others]))):
                return None
            marked, others = _changed([messages, others], lambda text: self._begun.sub(number, text))
        except RecursionError:
            raise ValueError("the messages or tools are nested too deep; make them flatter") from None
        for message, changed in zip(messages, marked, strict=True):
            if isinstance(message, Mapping) and "role" in message:
                changed["role"] = message["role"]
        return marked, {**variables, **others}, number

    def _spells(self, text: str) -> bool:
        """Return whether a text has a special token, or ends with the beginning of one."""
        match = self._parts.search(text) or (self._normalize and self._parts.search(self._normalize(text)))
        return match is not None

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the ids of a rendered conversation with marks. Raises ValueError if the tokenizer cannot encode a
        special token's text as other tokens."""
        tokenizer, aliases, real = self._second
        text = self._tokens.sub(lambda found: aliases[found[0]], text).replace(mark, "")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        special = set(self.ids.values()) - {self._hf.unk_token_id}
        if wrong := special & set(ids).difference(real):
            name = self._hf.convert_ids_to_tokens(min(wrong))
            raise ValueError(
                f"a message has the text {name!r}, which this tokenizer only has as a special token; remove it, or set "
                "allow_special_tokens"
            )
        return [real.get(id, id) for id in ids]

    @cached_property
    def _second(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """The second tokenizer, {special token: alias}, and {id in the second tokenizer: real id} for added tokens."""
        from tokenizers import AddedToken, Tokenizer

        first = getattr(self._hf, "backend_tokenizer", None)
        if first is None:
            raise ValueError(
                "a message has the text of a special token, which this tokenizer cannot encode as text, because "
                "it is not a fast one; remove it, or set allow_special_tokens"
            )
        second: Any = Tokenizer(first.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(first, part) is not None:  # some versions refuse None, although it is the default
                setattr(second, part, getattr(first, part))
        aliases = {text: secrets.token_hex(16) for text in self.ids}
        added = {aliases.get(token.content, token.content): (id, token) for id, token in self._added.items()}
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        second.add_tokens(
            [AddedToken(alias, **{name: getattr(token, name) for name in flags}) for alias, (_, token) in added.items()]
        )
        return second, aliases, {second.token_to_id(alias): id for alias, (id, _) in added.items()}


def _either(texts: Iterable[str], cut: str = "") -> str:
    """Return a pattern that matches any of the texts, and the longest if several match. It is a tree of characters,
    because a search for an alternation of hundreds of texts takes a minute in a hostile text of megabytes. cut: CUT, to
    match also the beginning of a text at the end."""
    return _tree(texts, "", cut) or "(?!)"


def _tree(texts: Iterable[str], other: str, cut: str) -> str:
    """Return the part of the pattern for the rests of texts that begin in the same way. other: its last alternative."""
    heads: dict[str, list[str]] = {}
    for text in texts:
        heads.setdefault(text[:1], []).append(text[1:])
    ends = heads.pop("", None) is not None
    branches = "|".join(re.escape(head) + _tree(rest, cut, cut) for head, rest in heads.items())
    return f"(?:{branches}{other}){'?' * ends}" if branches else ""


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in JSON-like data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON-like data with its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(name, change): _changed(inner, change) for name, inner in value.items()}
    return [_changed(inner, change) for inner in value] if isinstance(value, list | tuple) else value
