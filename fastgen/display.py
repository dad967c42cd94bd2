"""The forms in which objects are shown: a line for `repr`, and HTML for outputs in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from html import escape
from reprlib import Repr
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 40
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 3
_SHORT.maxdict, _SHORT.maxlevel = 2, 2

_CELL = "text-align: left; vertical-align: top; white-space: pre-wrap"


def shown(*names: str, html: Callable[[Any], str] | None = None) -> Callable[[Class], Class]:
    """Decorate a dataclass so that its `repr` fits a line: long values are shortened, and fields with their default
    values are left out. names: the attributes to show; none: all fields. html: its form in a notebook."""

    def decorate(cls: Class) -> Class:
        defaults = {each.name: _default(each) for each in fields(cls)}

        def line(self: object) -> str:
            values = ((name, getattr(self, name)) for name in names or defaults)
            given = [(name, value) for name, value in values if not _same(value, defaults.get(name))]
            return f"{cls.__name__}({', '.join(f'{name}={_short(value)}' for name, value in given)})"

        setattr(cls, "__repr__", line)  # noqa: B010
        if html is not None:
            setattr(cls, "_repr_html_", html)  # noqa: B010
        return cls

    return decorate


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _same(value: Any, default: Any) -> bool:
    """Return whether a value is the default. Values of other types, such as arrays, are not compared."""
    return value is default or (type(value) is type(default) and bool(value == default))


def _short(value: Any) -> str:
    if isinstance(value, list) and value and hasattr(value[0], "finish_reason"):  # completions
        return f"[{_short(value[0].text)}{f', {len(value) - 1} more' if len(value) > 1 else ''}]"
    return f"{value:.6g}" if isinstance(value, float) else _SHORT.repr(value)


def engine_line(engine: Any) -> str:
    """Return the `repr` of a Generator: the name of its model, and what was chosen for it."""
    config, folder = getattr(engine, "config", None), getattr(engine, "folder", None)
    name = "" if folder is None else folder.name
    if folder is not None and folder.parent.name == "snapshots":  # of the hub's cache
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    names = ("dtype", "device", "max_model_len", "max_seqs", "num_pages") if config is not None else ()
    return f"{type(engine).__name__}({', '.join([repr(name), *(f'{n}={getattr(config, n)!r}' for n in names)])})"


def output_html(output: Any) -> str:
    """Return a RequestOutput for a notebook: its prompt and a row for each completion, with all text escaped."""
    prompt = f"{len(output.prompt_token_ids)} ids" if output.prompt is None else output.prompt
    rows = [_row("prompt", prompt), *(_row(*_parts(each)) for each in output.completions)]
    return f"<table>{''.join(rows)}</table>"


def completion_html(completion: Any) -> str:
    """Return a Completion for a notebook, with all text escaped."""
    return f"<table>{_row(*_parts(completion))}</table>"


def _parts(completion: Any) -> tuple[str, str]:
    """Return the label and the text of a completion's row."""
    label = f"{completion.index}: {completion.finish_reason}, {len(completion.token_ids)} tokens"
    return label, completion.text if completion.error is None else f"{completion.text} [{completion.error}]"


def _row(label: str, text: str) -> str:
    return f'<tr><th style="{_CELL}">{escape(label)}</th><td style="{_CELL}">{escape(text)}</td></tr>'
