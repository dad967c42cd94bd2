"""Errors that are raised in another process than the one they occurred in. This module does not import torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress


class DepartedError(RuntimeError):
    """Another rank has left the group, or does not answer."""


def portable(error: BaseException) -> Exception:
    """Return a copy of an error that can be pickled and has no frames. An error that cannot be pickled, or that is not
    an Exception and would end the process that raises it, becomes a RuntimeError with its text."""
    with suppress(Exception):  # pickling runs code of the error's class, which may raise anything
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 (its own)
        if isinstance(copy, Exception) and type(copy) is type(error):
            return copy
    return RuntimeError(f"{type(error).__name__}: {error}")


def raise_first(errors: Mapping[int, Exception | None]) -> None:
    """Raise the error of the lowest rank that has one. errors: {rank: its error, or None}."""
    for rank in sorted(errors):
        error = errors[rank]
        if error is not None:
            error.add_note(f"raised on rank {rank}")
            raise error
