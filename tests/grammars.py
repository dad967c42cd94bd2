"""Helpers for tests of grammars and tools: a byte-level tokenizer, and walks through a mask."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from fastgen.cli.serve.engine_input import answer_rule
from fastgen.cli.serve.openai_input import ResponseFormat
from fastgen.request import TokenMask
from fastgen.text.tokenizer import Tokenizer

FORMAT: TypeAdapter[Any] = TypeAdapter(ResponseFormat)
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")


def byte_level(folder: Path, marks: Sequence[str], template: str | None = None) -> Tokenizer:
    """Save a byte-level BPE and return its Tokenizer.

    It has two ends of sequence (ids 0 and 1), the marks as tokens (all special except Qwen's and DeepSeek's), the 256
    bytes, and merges of some JSON with tokens that span its structure.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    added = [mark for mark in marks if "tool_call>" in mark or "\u2581" in mark]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=["<|end|>", "<|eom|>", *(mark for mark in marks if mark not in added)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    json = ['{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 22]}}', '{"a": {"b": null}}, "x é日"]']
    trained.train_from_iterator(json * 3, trainer)
    trained.add_tokens([AddedToken(mark, normalized=False) for mark in added])
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>", chat_template=template).save_pretrained(
        folder
    )
    return Tokenizer(folder)


def allowed(mask: TokenMask, vocab_size: int) -> list[int]:
    """Return the tokens that a mask allows."""
    row = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    mask.fill(row)
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def accepts(mask: TokenMask, ids: Sequence[int], vocab_size: int) -> bool:
    """Return whether a mask allows these tokens one after another. The mask is changed."""
    for token in ids:
        if token not in allowed(mask, vocab_size):
            return False
        mask.accept(token)
    return True


def walk(mask: TokenMask, vocab_size: int, ends: Sequence[int], rng: random.Random, steps: int = 3000) -> list[int]:
    """Draw tokens that a mask allows, up to an end token. Return them without it."""
    ids: list[int] = []
    for _ in range(steps):
        token = rng.choice(allowed(mask, vocab_size))
        mask.accept(token)
        if token in ends:
            return ids
        ids.append(token)
    raise AssertionError(f"no end after {steps} tokens: {ids[:50]}")


def add(deltas: Sequence[Any]) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the content of deltas, and (id, name, arguments) of each call."""
    content, calls = "", dict[int, tuple[str, str, str]]()
    for delta in deltas:
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            id, name, arguments = calls.get(piece["index"], ("", "", ""))
            assert ("id" in piece) == (piece["index"] not in calls) == (piece.get("type") == "function")
            function = piece["function"]
            name += function.get("name", "")
            calls[piece["index"]] = (id + piece.get("id", ""), name, arguments + function.get("arguments", ""))
    assert list(calls) == list(range(len(calls)))
    return content, list(calls.values())


def rule_of(wanted: dict[str, Any]) -> str | None:
    """Return the rule of a response_format in the form that clients send."""
    return answer_rule(FORMAT.validate_python(wanted))
