"""The fields of Hugging Face's `config.json`, one at a time."""

from __future__ import annotations

from typing import Any

_LARGEST = 3e38  # float32 holds no larger number
_MOST = 2**24  # maximum of sizes in config.json


def integer(config: dict[str, Any], field: str, default: int | None = None, low: int = 1, high: int = _MOST) -> int:
    """Return an integer field, or the default if it is absent or null. Raises ValueError for other values."""
    value = default if config.get(field) is None else config[field]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{field}={value!r} is missing or not an integer from {low} to {high}")
    return value


def number_of(
    config: dict[str, Any], field: str, default: float | None = None, low: float = -_LARGEST, high: float = _LARGEST
) -> float:
    """Return a number field, an int or a float as in the file; see `integer`."""
    value = default if config.get(field) is None else config[field]
    if value is None or type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(f"{field}={value!r} is missing or not a number from {low:g} to {high:g}")
    return value


def unsupported(field: str, value: object, instead: str = "") -> ValueError:
    """Return the error for a field of a config.json. instead: what is supported."""
    shown = repr(value)
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    return ValueError(f"{field}={shown} is not supported" + (f"; {instead}" if instead else ""))
