"""Word lists, the calendar, and the reader of the texts from which the bundled model's training dialogues are made.

Everything in `data` was written for this project, and the dialogues of `tiny_data.py` are made only from it.
"""

import re
from collections.abc import Sequence
from pathlib import Path

Pairs = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def read(name: str) -> dict[str, tuple[str, ...]]:
    """Read data/NAME.txt: the lines below each [title]. Empty lines are skipped, and ↵ is a line break in a text."""
    sections: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("data").joinpath(f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if title := re.fullmatch(r"\[(.+)\]", line):
            lines = sections[title[1]] = []
        elif line:
            lines.append(line.replace("↵", "\n"))
    return {title: tuple(lines) for title, lines in sections.items()}


def pairs(lines: tuple[str, ...]) -> Pairs:
    """Split lines such as "ways; to ask -> reply -> other reply" into (ways to ask, replies)."""
    parts = (line.split(" -> ") for line in lines)
    return tuple((tuple(ways.split("; ")), tuple(replies)) for ways, *replies in parts)


def joined(parts: Sequence[str]) -> str:
    """Return parts of a sentence as a list with "and" before the last one."""
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def filled(templates: tuple[str, ...], **fields: object) -> tuple[str, ...]:
    """Fill some fields of templates before they are typed; the others stay."""
    for name, value in fields.items():
        templates = tuple(template.replace(f"{{{name}}}", str(value)) for template in templates)
    return templates


_TEXTS = read("words")
_WORDS = {title: tuple(" ".join(lines).split()) for title, lines in _TEXTS.items()}
WORDS, NAMES, THINGS, COLORS = (_WORDS[title] for title in ("words", "names", "things", "colors"))
DAYS, MONTHS, ORDINALS = (_WORDS[title] for title in ("days", "months", "ordinals"))
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
CAPITALS = {country: capital for (country,), (capital,) in pairs(_TEXTS["capitals"])}
COUNTRY_ALIASES = {country: ways for ways, (country,) in pairs(_TEXTS["ways to write countries"])}
OPPOSITES = tuple((word, other) for (word,), (other,) in pairs(_TEXTS["opposites"]))
_ONES, _TENS = _WORDS["ones"], _WORDS["tens"]


def number_in_words(n: int) -> str:
    """Spell out 0 <= n <= 999 in English: 42 -> "forty-two"."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")
    rest = f" {number_in_words(n % 100)}" if n % 100 else ""
    return f"{_ONES[n // 100]} hundred{rest}"
