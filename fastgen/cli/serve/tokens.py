"""Tokens for clients: prompts of requests, bytes and names of ids, and the routes about tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.cli.serve.protocol import ApiError, ChatRequest, DetokenizeRequest, TokenizeRequest, refused
from fastgen.cli.serve.shapes import DetokenizeReply, TokenizeReply, TokenizerInfo
from fastgen.cli.serve.tools import Calling
from fastgen.request import Message, SamplingParams
from fastgen.tokenizer import Tokenizer


class Vocabulary:
    """The bytes of each id of a tokenizer."""

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
        """Return the UTF-8 bytes of a token, which may be a part of a character; b"" for an unknown id."""
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
        """Return the text of a token alone, with U+FFFD for parts of characters."""
        return self.raw(id).decode(errors="replace")

    def name(self, id: int) -> str:
        """Return the text of a token, or "bytes:\\x.." for parts of characters, as OpenAI's /completions does."""
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
    """Return the letters that stand for bytes in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    return letters | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTES = _byte_letters()


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that requests need. defaults: of sampling. max_model_len: maximum tokens of prompt and answer
    together."""

    name: str
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary | None
    defaults: SamplingParams
    vocab_size: int
    max_model_len: int


# ------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The ids of a prompt. text: the text that `echo` repeats."""

    ids: list[int]
    text: str = ""


def encode_text(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, echo: bool = False, most: int | None = None
) -> PromptTokens:
    """Tokenize a prompt of /completions. echo: ids are also decoded, without special tokens. most: see
    Tokenizer.encode."""
    if isinstance(prompt, str):
        return PromptTokens(needed(tokenizer).encode(prompt, most=most), prompt)
    ids = list(prompt)
    return PromptTokens(ids, tokenizer.decode(ids) if echo and tokenizer is not None else "")


def encode_chat(
    request: ChatRequest | TokenizeRequest,
    tokenizer: Tokenizer | None,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> PromptTokens:
    """Tokenize messages, as `Calling.template_messages` returns them, by the chat template. Raises ApiError.

    variables: for the template, such as tools; the request's chat_template_kwargs are added.
    """
    variables = {**(variables or {}), **(request.chat_template_kwargs or {})}
    prompting = request.add_generation_prompt is not False
    try:
        return PromptTokens(needed(tokenizer).encode_chat(messages, prompting, variables, most))
    except ValueError as error:
        raise refused(error, "messages") from None


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer. Raises ApiError where the model has none."""
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer files; give the prompt as token ids", code="invalid_value")
    return tokenizer


# ------------------------------------------------------------------------------------------------- routes


def tokenize(request: TokenizeRequest, model: ModelFacts) -> TokenizeReply:
    """Answer /tokenize. Raises ApiError."""
    tokenizer, vocabulary = needed(model.tokenizer), model.vocabulary
    assert vocabulary is not None
    if request.prompt is None:
        try:
            messages = Calling(tokenizer, []).template_messages(request.messages or ())
        except ValueError as error:
            raise refused(error, "messages") from None
        ids = encode_chat(request, tokenizer, messages).ids
    else:
        ids = tokenizer.encode(request.prompt, special=request.add_special_tokens is not False)
    names = [vocabulary.name(id) for id in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": names}


def detokenize(request: DetokenizeRequest, model: ModelFacts) -> DetokenizeReply:
    """Answer /detokenize; the text shows special tokens. Raises ApiError."""
    tokenizer = needed(model.tokenizer)
    for position, id in enumerate(request.tokens):
        if not 0 <= id < model.vocab_size:
            param = f"tokens[{position}]"
            message = f"{param} is {id}, outside the vocabulary of {model.vocab_size} tokens"
            raise ApiError(400, message, param, "invalid_value")
    return {"prompt": tokenizer.decode(request.tokens, special=True)}


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    """Answer /tokenizer_info, for clients that count tokens or write chats themselves; None for a missing token."""
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
