"""Modules of the package's extras, imported where a command needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def pyarrow(part: str = "") -> Any:
    """Return pyarrow, or a module of it. Raises ValueError where it is not installed."""
    return needed(f"pyarrow.{part}".rstrip("."), "parquet", "Parquet files")


def needed(module: str, extra: str, what: str) -> Any:
    """Return a module that imports packages of an extra. Raises ValueError where one of them is not installed.

    what: the feature, for the message.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "fastgen":
            raise
        raise ValueError(
            f"{what} can not be used: the package {error.name} is not installed; run: pip install 'fastgen[{extra}]'"
        ) from None
