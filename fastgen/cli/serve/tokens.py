"""Tokens as clients see them: the bytes and names of ids, the prompts of requests, and the answers about tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from fastgen.cli.serve.protocol import ApiError, ChatRequest, TokenizeRequest, refused
from fastgen.cli.serve.shapes import DetokenizeReply, TokenizeReply, TokenizerInfo
from fastgen.cli.serve.tools import Calling
from fastgen.request import Message
from fastgen.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as the engine takes it; text: what `echo` repeats."""

    ids: list[int]
    text: str = ""


class Vocabulary:
    """What each id of a tokenizer stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        hf = tokenizer.hf
        self._entries: dict[int, str] = {id: entry for entry, id in hf.get_vocab().items()}
        self._added: dict[int, str] = {id: token.content for id, token in hf.added_tokens_decoder.items()}
        self.special = frozenset(id for id, token in hf.added_tokens_decoder.items() if token.special)
        self._known: dict[int, bytes] = {}
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = self._byte_fallback = False
        decoder = getattr(getattr(hf, "backend_tokenizer", None), "decoder", None)
        for step in _steps(json.loads(decoder.__getstate__())) if decoder is not None else ():
            if step["type"] == "ByteLevel":
                self._byte_level = True
            elif step["type"] == "ByteFallback":
                self._byte_fallback = True
            elif step["type"] == "Metaspace":
                self._replacements.append((step["replacement"], " "))
            elif step["type"] == "Replace" and "String" in step["pattern"]:
                self._replacements.append((step["pattern"]["String"], step["content"]))

    def raw(self, id: int) -> bytes:
        """UTF-8, or a part of a character; b"" for an id that the tokenizer does not have."""
        if id not in self._known:
            self._known[id] = self._find(id)
        return self._known[id]

    def _find(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        entry = self._entries.get(id, "")
        if self._byte_level:
            return b"".join(_BYTES[char] if char in _BYTES else char.encode() for char in entry)
        if self._byte_fallback and len(entry) == 6 and entry.startswith("<0x"):
            return bytes([int(entry[3:5], 16)])
        for old, new in self._replacements:
            entry = entry.replace(old, new)
        return entry.encode()

    def text(self, id: int) -> str:
        """The token alone, parts of characters shown as U+FFFD."""
        return self.raw(id).decode(errors="replace")

    def name(self, id: int) -> str:
        """The text, or the bytes where they are no whole characters, as OpenAI's /completions names tokens."""
        raw = self.raw(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _byte_letters() -> dict[str, bytes]:
    """The letters that stand for bytes in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    return letters | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTES = _byte_letters()


# ------------------------------------------------------------------------------------------------- prompts


def encode_text(
    prompt: str | SequenceOf[int], tokenizer: Tokenizer | None, echo: bool = False, most: int | None = None
) -> PromptTokens:
    """A prompt of /completions. echo: its text is wanted; that of ids leaves special tokens out. most: as of
    Tokenizer.encode."""
    if isinstance(prompt, str):
        return PromptTokens(needed(tokenizer).encode(prompt, most=most), prompt)
    ids = list(prompt)
    return PromptTokens(ids, tokenizer.decode(ids) if echo and tokenizer is not None else "")


def encode_chat(
    request: ChatRequest | TokenizeRequest,
    tokenizer: Tokenizer | None,
    messages: SequenceOf[Message],
    variables: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> PromptTokens:
    """A request's messages, as `Calling` has prepared them, written by the chat template. Raises ApiError.

    variables: of the template, beside the request's own (such as tools).
    """
    named = {**(variables or {}), **(request.chat_template_kwargs or {})}
    prompting = request.add_generation_prompt is not False
    try:
        return PromptTokens(needed(tokenizer).encode_chat(messages, prompting, named, most))
    except ValueError as error:
        raise refused(error, "messages") from None


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, which a request can not do without. Raises ApiError where there is none."""
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer files; give the prompt as token ids", code="invalid_value")
    return tokenizer


# ------------------------------------------------------------------------------------------------- answers


def tokenize(request: TokenizeRequest, tokenizer: Tokenizer, vocabulary: Vocabulary, context: int) -> TokenizeReply:
    if request.prompt is None:
        try:
            messages = Calling(tokenizer, []).template_messages(request.messages or ())
        except ValueError as error:
            raise refused(error, "messages") from None
        ids = encode_chat(request, tokenizer, messages).ids
    else:
        ids = tokenizer.encode(request.prompt, special=request.add_special_tokens is not False)
    names = [vocabulary.name(id) for id in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": names}


def detokenize(tokens: SequenceOf[int], tokenizer: Tokenizer, vocab_size: int) -> DetokenizeReply:
    """The text of ids, with special tokens by their names."""
    for place, id in enumerate(tokens):
        if not 0 <= id < vocab_size:
            message = f"tokens[{place}] is {id}, outside the vocabulary of {vocab_size} tokens"
            raise ApiError(400, message, f"tokens[{place}]", "invalid_value")
    return {"prompt": tokenizer.decode(tokens, special=True)}


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    """What clients need that write chats or count tokens themselves; null for a special token that there is not."""
    hf = tokenizer.hf
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    bos, eos, pad, unk = (None if (token := getattr(hf, name, None)) is None else str(token) for name in names)
    return {
        "tokenizer_class": type(hf).__name__,
        "vocab_size": len(hf),
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unk,
        "chat_template": hf.chat_template,
    }
