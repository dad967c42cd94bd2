"""Word wrap of a growing text."""

from __future__ import annotations

import random

import pytest

from fastgen.cli.wrapping import Wrapper

WIDTH = 20


def wrapped(text: str, rng: random.Random | None = None) -> str:
    """Wrap a text, which arrives in random pieces, or as a whole."""
    wrapper, out, at = Wrapper(lambda: WIDTH), "", 0
    while at < len(text):
        size = len(text) if rng is None else rng.randint(1, 7)
        out += wrapper.push(text[at : at + size])
        at += size
    return out + wrapper.flush()


CASES = [
    ("the quick brown fox jumps over", "the quick brown fox\njumps over"),
    ("exactly twenty chars", "exactly twenty chars"),
    ("exactly twenty chars!", "exactly twenty\nchars!"),
    ("line one is short\n\n  and indented as it was", "line one is short\n\n  and indented as it\nwas"),
    ("a\tb\tcolumns after tabs", "a\tb\ncolumns after tabs"),
    ("a\tb words", "a\tb words"),
    ("see " + "x" * 45 + " end", "see\n" + "x" * 20 + "\n" + "x" * 20 + "\nxxxxx end"),
    ("short 你好世界你好世界你好", "short 你好世界你好世\n界你好"),
    ("```python\nx = 'a long line of code'\n```\nwords", "```python\nx = 'a long line of code'\n```\nwords"),
    ("e\u0301" * 20 + " x", "e\u0301" * 20 + "\nx"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_lines_break_between_words(text: str, expected: str) -> None:
    assert wrapped(text) == expected


def test_the_result_does_not_depend_on_the_pieces() -> None:
    rng = random.Random(0)
    text = "\n".join(text for text, _ in CASES) + "\n~~~ sh\n" + "word " * 20 + "\n```\n~~~\n" + "word " * 20
    whole = wrapped(text)
    assert all(wrapped(text, rng) == whole for _ in range(50))
    assert "word " * 20 + "\n```\n~~~\nword word word word\nword" in whole


def test_a_terminal_may_change_its_width() -> None:
    width = 10
    wrapper = Wrapper(lambda: width)
    assert wrapper.push("one two three four ") == "one two\nthree four"
    width = 30
    assert wrapper.push("five six seven ") + wrapper.flush() == " five six seven"
