"""The error of a full disk, with the place that is full and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path


@contextmanager
def naming_full_disk(path: Path | str, remedy: str) -> Iterator[None]:
    """Put a path and a remedy into the OSError of a disk, quota or file that is full, which has neither."""
    try:
        yield
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT, EFBIG):
            raise
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(error.filename or path)) from error
