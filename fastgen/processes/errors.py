"""Errors of one rank that are raised on others. This module does not import torch, nor does fgserve's process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress


class DepartedError(RuntimeError):
    """Another rank has left the group, or does not answer."""


def portable(error: BaseException) -> Exception:
    """Return a copy of an error that can be pickled, without its frames. An error that does not pickle, or that would
    end the process which raises it, becomes a RuntimeError with its text."""
    with suppress(Exception):  # pickling runs the error's own code, which may raise anything
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 (its own)
        if isinstance(copy, Exception) and type(copy) is type(error):
            return copy
    return RuntimeError(f"{type(error).__name__}: {error}")


def raise_first(errors: Mapping[int, Exception | None]) -> None:
    """Raise the error of the lowest rank that has one. errors: by rank."""
    for rank in sorted(errors):
        error = errors[rank]
        if error is not None:
            error.add_note(f"raised on rank {rank}")
            raise error
