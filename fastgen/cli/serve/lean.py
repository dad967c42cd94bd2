"""Starting quickly: transformers' tokenizers without all else that importing transformers brings."""

from __future__ import annotations

import logging
import sys


def import_tokenizers() -> None:
    """Import what a Tokenizer needs of transformers, which imports torch, and parts of it that are slow, where it finds
    it. Its tokenizers do without: 3 s and 300 MB less in a process without torch.

    For a program of ours, which imports no torch: whatever else transformers can do, it can not do in this process.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        return
    logger = logging.getLogger("transformers")
    logger.addFilter(_drop)  # it says that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # so that it is not found
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
