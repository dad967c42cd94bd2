"""Options: values that a user may set, each with its type, bounds and description.

A dataclass derived from `Options` has one field for each option. `takes_fields_of` makes the fields the arguments of
another class's `__init__`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import MISSING, dataclass, field, fields
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from fastgen.names import advice, nearest

Owner = TypeVar("Owner")
Given = TypeVar("Given", bound="Options")
Fields = ParamSpec("Fields")

_TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
}


@dataclass(frozen=True)
class Option:
    """An option that a user may set: one field of an `Options` class.

    kind: type of the value: str, int, float, bool, or another type, which is not checked.
    default: value that holds if the user gives none; MISSING for an option that must be given; None if the
        choice is left to fastgen, and `unset` then describes the choice in words.
    low, high: bounds of a number, both included; with `above`, low itself is excluded.
    choices: all values that a string may have.
    """

    name: str
    kind: Any
    default: Any = None
    help: str = ""
    unset: str = ""
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    choices: tuple[str, ...] = ()

    @property
    def default_text(self) -> str:
        """Return the default in words."""
        return self.unset or (f"{self.default:g}" if isinstance(self.default, float) else str(self.default))

    @property
    def line(self) -> str:
        """Return the description for a docstring."""
        choices = f" Choices: {', '.join(self.choices)}." if self.choices else ""
        default = "" if self.default is MISSING else f" Default: {self.default_text}."
        return f"{self.name}: {self.help}.{choices}{default}"

    def check(self, value: Any) -> None:
        """Raise TypeError or ValueError for a value that the option cannot have."""
        if value is None and self.default is None:
            return
        if type(value) is not self.kind and self.kind in _TYPES:  # isinstance of Integral takes many times longer
            kind, words = _TYPES[self.kind]
            if not isinstance(value, kind) or (isinstance(value, bool) and self.kind is not bool):
                raise TypeError(f"{self.name} must be {words}, not {value!r}")
        if wrong := self.wrong(value):
            raise ValueError(f"{self.name} {wrong}")

    def wrong(self, value: Any) -> str:
        """Return why a value of the right type cannot be used, as the end of a sentence that begins with the option's
        name; "" if it can be used."""
        if self.choices and value not in self.choices:
            return f"is {value!r}; it must be one of {', '.join(map(repr, self.choices))}"
        if self.kind not in (int, float):
            return ""
        try:
            finite = self.kind is int or math.isfinite(value)
        except OverflowError:  # an integer beyond all floats
            finite = False
        if finite and self.low <= value <= self.high and not (self.above and value == self.low):
            return ""
        low, high = (bound if self.kind is int else f"{bound:g}" for bound in (self.low, self.high))
        least = f"above {low}" if self.above else f"at least {low}"
        most = f" and at most {high}" if self.high < math.inf else ""
        return f"is {value}; it must be {'finite' if self.low == -math.inf else least + most}"


def option(default: Any, help: str = "", **limits: Any) -> Any:
    """Return a field of an `Options` class. limits: other arguments of `Option`."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class Options:
    """Base class of the options of a Generator, of a request, and so on. An unknown name is a TypeError that says which
    name is meant; its message begins with the name of the class, without "Options" at the end."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        names = cls.__dataclass_fields__
        if unknown := kwargs.keys() - names.keys():
            name = min(unknown)
            near = nearest(name, names)
            other = f"the nearest one is {near!r}" if near else f"the options are {', '.join(sorted(names))}"
            owner = cls.__name__.removesuffix("Options")
            raise TypeError(f"{owner} has no option {name!r}; {advice('argument').get(name, other)}")
        return super().__new__(cls)

    def check(self) -> None:
        """Raise TypeError or ValueError for the first option whose value cannot work."""
        for name, each in options_of(type(self)).items():
            each.check(getattr(self, name))


def takes_fields_of(
    options: Callable[Fields, Given],
) -> Callable[[Callable[[Owner, Given], None]], Callable[Concatenate[Owner, Fields], None]]:
    """Decorate an `__init__` that takes one object of the class `options`: it takes the fields as its arguments
    instead. Type checkers, its signature and its docstring show the fields."""

    def decorate(init: Callable[[Owner, Given], None]) -> Callable[Concatenate[Owner, Fields], None]:
        @wraps(init)
        def take(self: Owner, /, *args: Fields.args, **kwargs: Fields.kwargs) -> None:
            init(self, options(*args, **kwargs))

        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        take.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [first, *inspect.signature(options).parameters.values()]
        )
        take.__doc__ = "\n".join(each.line for each in options_of(options).values())
        return take

    return decorate


def options_of(cls: Any) -> dict[str, Option]:
    """Return the options of a dataclass whose fields were made by `option`, by name. If a field's type is a Literal,
    its values are the choices."""
    options, hints = {}, get_type_hints(cls)
    for each in fields(cls):
        hint, limits = hints[each.name], dict(each.metadata)
        kind = get_args(hint)[0] if get_origin(hint) in (UnionType, Union) else hint
        if get_origin(kind) is Literal:
            kind, limits["choices"] = str, get_args(kind)
        options[each.name] = Option(each.name, kind, each.default, **limits)
    return options


MAX_CHOSEN = 128
"""Maximum number of ids whose logprobs a request chooses."""
_OF_IDS = ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")
ITEMS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_OF_IDS, (Integral, "token ids (integers)")),
    **dict.fromkeys(("stop", "choice", "bad_words"), (str, "strings")),
    "repetition_detection": (Integral, "sizes"),
}
"""Sampling parameters that hold several items: the type of the items, and their name in errors."""

_BIAS = Option("a number in logit_bias", float, 0.0)


def check_items(name: str, values: Any, vocab_size: int) -> None:
    """Raise TypeError or ValueError unless `values` are a list (or set, or the like) of the ITEMS of a parameter."""
    if name == "repetition_detection":
        return _check_repetition(values)
    kind, words = ITEMS[name]
    if name == "stop" and isinstance(values, str):
        values = (values,)
    # An iterator could be read only once, and an array of texts has no truth value.
    types: Any = Mapping if name == "logit_bias" else Collection if kind is Integral else SequenceOf | Set
    if isinstance(values, str | bytes) or not isinstance(values, types):
        form = f"a dict from {words} to numbers" if name == "logit_bias" else f"a list of {words}"
        raise TypeError(f"{name} must be {form}, not {values!r}")
    if not len(values) and name in ("choice", "allowed_token_ids"):
        raise ValueError(f"{name} is empty, which allows no answer; give at least one of its {words}")
    if name == "logprob_token_ids" and len(values) > MAX_CHOSEN:
        raise ValueError(f"{name} has {len(values)} ids; it may have {MAX_CHOSEN}")
    for item in values:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise TypeError(f"{name} must hold {words}, not {item!r}")
        if kind is Integral and not 0 <= int(item) < vocab_size:
            raise ValueError(f"{name} holds the id {item}, outside the vocabulary of {vocab_size} tokens")
    for bias in values.values() if name == "logit_bias" else ():
        _BIAS.check(bias)
    if name == "stop" and "" in values:
        raise ValueError("a stop string is empty and would end every output at once; remove it")
    if name == "bad_words" and not all(map(str.strip, values)):
        raise ValueError("a text in bad_words is blank; remove it")


def _check_repetition(values: Any) -> None:
    """Raise TypeError or ValueError unless these are valid values of repetition_detection."""
    sizes = dict.fromkeys(("max_pattern_size", "min_pattern_size", "min_count"), 0)
    if not isinstance(values, Mapping) or not values.keys() <= sizes.keys():
        raise TypeError(f"repetition_detection must be a dict of {', '.join(sizes)}, not {values!r}")
    for name, value in values.items():
        Option(f"repetition_detection's {name}", int, 0, low=0).check(value)
    least, most, count = (values.get(name, 0) for name in ("min_pattern_size", "max_pattern_size", "min_count"))
    if least > most:
        raise ValueError(f"repetition_detection's min_pattern_size is {least}, above its max_pattern_size, {most}")
    if most and count < 2:
        raise ValueError(f"repetition_detection's min_count is {count}; it must be at least 2")
