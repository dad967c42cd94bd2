"""What fggen needs for some jobs alone, imported when it comes to them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def pyarrow(part: str = "") -> Any:
    """pyarrow, or a module of it. Raises ValueError where it is not installed."""
    return _needed(f"pyarrow.{part}".rstrip("."), "parquet", "Parquet files")


def batches() -> Any:
    """The module for OpenAI's batch files. Raises ValueError where what fgserve needs is not installed."""
    return _needed("fastgen.cli.gen.batch", "serve", "OpenAI's batch files")


def rays() -> Any:
    """The module for work on Ray. Raises ValueError where it is not installed."""
    return _needed("fastgen.cli.gen.rays", "ray", "actors of Ray")


def _needed(module: str, extra: str, what: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "fastgen":
            raise
        raise ValueError(f"{what} need {error.name}; install it with: pip install 'fastgen[{extra}]'") from None
