"""A look at the first prompts of a job, for which nothing is generated and only the tokenizer is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from fastgen.cli.command import note
from fastgen.cli.gen.rows import Row
from fastgen.cli.gen.work import Ask
from fastgen.model.config import ModelConfig, read_config
from fastgen.text.tokenizer import Tokenizer, encode_prompt

if TYPE_CHECKING:
    from fastgen.cli.gen.server_backend import Calls

ROWS = 3  # shown without --limit

Show = Callable[[Row], tuple[str, int | None]]
"""A function that returns the prompt of a row as text, and its number of tokens, if known. Raises ValueError or
TypeError for a row with an error."""


def show_prompts(show: Show, rows: Iterable[Row], limit: int | None, total: int) -> int:
    """Print the prompts of the first rows, and return the exit status, 3 if all of them have errors."""
    shown = errors = tokens = 0
    for row in islice(rows, limit or ROWS):
        try:
            if row.error is not None:
                raise ValueError(row.error)
            text, count = show(row)
        except (ValueError, TypeError) as error:
            text, count, errors = f"error: {error}", None, errors + 1
        head = f"--- row {row.index}" + ("" if count is None else f": {count} tokens")
        sys.stdout.write(f"{head}\n{text}\n".encode(errors="backslashreplace").decode())
        shown, tokens = shown + 1, tokens + (count or 0)
    counted = f", {tokens} tokens" if tokens else ""
    note("fggen", f"dry run: {shown} of {total} rows, {errors} of them errors{counted}; nothing was generated")
    return 3 if shown and errors == shown else 0


@dataclass(frozen=True)
class TokenizerModel:
    """The facts about a model if only its tokenizer is loaded."""

    tokenizer: Tokenizer | None
    model_config: ModelConfig
    max_model_len: int


def load_tokenizer(name: str, revision: str | None, tokenizer: str | None, **options: Any) -> TokenizerModel:
    """Load the tokenizer of a model. tokenizer: name of another one. options: those of Tokenizer."""
    from fastgen.model.loader import find_tokenizer, resolve  # imports torch, which takes seconds

    folder = resolve(name, revision, weights=False)
    config = read_config(folder)
    return TokenizerModel(find_tokenizer(tokenizer, folder, **options), config, config.max_position)


def show_request(ask: Ask, tokenizer: Tokenizer | None, row: Row) -> tuple[str, int | None]:
    """Show a row's prompts as the model gets them."""
    asked = ask(row)
    if not asked.requests:
        raise ValueError(asked.finish([])[1])
    texts, count = [], 0
    for request in asked.requests:
        ids, text = encode_prompt(request.prompt, tokenizer)
        if text is None:
            text = str(ids) if tokenizer is None else tokenizer.decode(ids, special=True)
        texts.append(text)
        count += len(ids)
    return "\n".join(texts), count


def show_call(calls: Calls, row: Row) -> tuple[str, int | None]:
    """Show a row's request to a server."""
    call = calls.call(row)
    return f"POST {call.path}\n{json.dumps(call.body, ensure_ascii=False, indent=1)}", None
