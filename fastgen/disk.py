"""Errors that say which disk is full, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path


@contextmanager
def naming_full_disk(path: Path | str, remedy: str) -> Iterator[None]:
    """Add a path and a remedy to an OSError that says that a disk, a quota or a file is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT, EFBIG):
            raise
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(error.filename or path)) from error
