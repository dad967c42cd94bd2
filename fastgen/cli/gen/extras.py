"""What fggen needs for some jobs alone, imported when it comes to them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def pyarrow(part: str = "") -> Any:
    """pyarrow, or a module of it. Raises ValueError where it is not installed."""
    return needed(f"pyarrow.{part}".rstrip("."), "parquet", "Parquet files")


def needed(module: str, extra: str, what: str) -> Any:
    """A module of what an extra installs, for `what`. Raises ValueError where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "fastgen":
            raise
        raise ValueError(f"{what} need {error.name}; install it with: pip install 'fastgen[{extra}]'") from None
