"""Names that users of vLLM and transformers try, with what to use here instead: names.toml has them all."""

from __future__ import annotations

import difflib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import cache, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar

Class = TypeVar("Class", bound=type)

MAX_FAULTS = 20  # maximum number of names or faults that an error lists


@cache
def foreign_names() -> dict[str, Any]:
    """Return the content of names.toml. It is read when a name is wrong, and by fgserve."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def advice(kind: Literal["argument", "attribute"]) -> dict[str, str]:
    """Return what to do instead of each foreign name of a kind. Where there is a counterpart, it is "use" and its
    name."""
    texts: dict[str, str] = {}
    for table in foreign_names()["tables"].values():
        for row in table["rows"]:
            text = row.get(kind, {})
            names = re.findall(r"`(?:--)?([\w-]+)`", row["theirs"]) if isinstance(text, str) else text
            texts |= {name.replace("-", "_"): text if isinstance(text, str) else text[name] for name in names}
    return texts


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the name that is most similar to an unknown one, or "" if none is similar."""
    return next(iter(difflib.get_close_matches(name[:100], list(names), n=1)), "")


def explains_names(*methods: str) -> Callable[[Class], Class]:
    """Decorate a class so that a foreign attribute is an AttributeError that says what to use instead, and an unknown
    argument of one of these methods a TypeError that does. Type checkers see the class unchanged."""

    def decorate(cls: Class) -> Class:
        for name in methods:
            setattr(cls, name, _explaining(getattr(cls, name), f"{cls.__name__}.{name}"))
        setattr(cls, "__getattr__", _explain)  # noqa: B010  # a method would let type checkers accept any attribute
        return cls

    return decorate


def _explain(self: object, name: str) -> Any:
    """Raise AttributeError for an attribute that is not there, as `__getattr__` must."""
    text = advice("attribute").get(name) or advice("argument").get(name, "")
    ours = re.match(r"use (\w+)", text)
    if text and (ours is None or hasattr(self, ours[1])):
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; {text}")
    return object.__getattribute__(self, name)  # raises the usual error, also one from within a property


def _explaining(method: Callable[..., Any], shown: str) -> Callable[..., Any]:
    """Return a method whose TypeErrors for wrong arguments say what to use. shown: its name in errors."""
    signature = inspect.signature(method)
    arguments = list(signature.parameters)[1:]

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := kwargs.keys() - set(arguments):
            name = min(unknown)
            near = nearest(name, arguments)
            usual = f"the nearest one is {near!r}" if near else f"the arguments are {', '.join(arguments)}"
            text, inner = advice("attribute").get(name) or advice("argument").get(name, usual), ""
            if name not in advice("attribute") and not near and "params" in arguments:
                inner = "; parameters of sampling go into params, as SamplingParams or as a dict"
            raise TypeError(f"{shown} has no argument {name!r}; {text}{inner}")
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{shown}: {error}") from None
        return method(*args, **kwargs)

    return call
