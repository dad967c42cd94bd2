"""loose_json.py: JSON as models write it, made valid; test_tool_calls.py has calls with it."""

from __future__ import annotations

import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.text.tools import loose_json
from fastgen.text.tools.loose_json import LooseJson

STOP = "</x:call>"


def read(pieces: list[str]) -> tuple[str, str]:
    """Return what is made of a text in pieces, and the text after the value."""
    value, text, at, made = LooseJson(STOP), "", 0, ""
    for piece in pieces:
        text += piece
        at = value.read(text, at, last=False)
        made += value.take()
    at = value.read(text, at, last=True)
    value.close()
    return made + value.take(), text[at:]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    def text() -> str:
        return "".join(rng.choices(['"', "'", "\\", "\n", *"aé😀{}[],: ", STOP], k=rng.randrange(8)))

    kind = rng.randrange(5 if depth < 4 else 3)
    if kind == 3:
        return {text(): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 4:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return text() if kind else rng.choice([None, True, False, 0, -1.5, 1e300, 10**20])


def test_valid_json_stays_as_it_is() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        written = [random_value(rng)] if rng.random() < 0.5 else {"a": random_value(rng)}
        text = json.dumps(written, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
        after = rng.choice(["", ",", "}", " ]", "\n" + STOP])
        assert read([text + after]) == (text, after)


def test_any_text_becomes_json_that_does_not_depend_on_the_pieces() -> None:
    rng = random.Random(1)
    signs = ['"', "'", *"{}[],:\\\nx= ", STOP, "<"]
    for _ in range(1000):
        text = json.dumps({"a": random_value(rng), "b": random_value(rng)}, ensure_ascii=False)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(signs) + text[at + rng.randrange(3) :]
        whole = read([text])
        json.loads(whole[0])
        assert read(list(text)) == whole, text
        places = [0, *sorted(rng.choices(range(len(text)), k=3)), len(text)]
        assert read([text[a:b] for a, b in itertools.pairwise(places)]) == whole, text


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('{"a": "x\ny\tz\x01"}', {"a": "x\ny\tz\x01"}),
        (r'{"a": "C:\dir and \d+ and \'"}', {"a": r"C:\dir and \d+ and '"}),
        ("{'a': 'it\\'s', 'b': 'say \"x\"', 'c': \"it's\"}", {"a": "it's", "b": 'say "x"', "c": "it's"}),
        ("{a: True, b: None, c: x y, d: http://x.y:80/z}", {"a": True, "b": None, "c": "x y", "d": "http://x.y:80/z"}),
        ('{"a": NaN, "b": -01, "c": .5}', {"a": "NaN", "b": "-01", "c": 0.5}),
        ('{"a": [1, 2,],}', {"a": [1, 2]}),
        ('{,"a": [,1,,2], , "b": 3}', {"a": [1, 2], "b": 3}),
        ('{"a": 1 "b": [1 "x"] "c": "d"\n"e": {"f": 1}{', {"a": 1, "b": [1, "x"], "c": "d", "e": {"f": 1}, "{": None}),
        ('{"a": "say "hi", he said", "b": "print("x")"}', {"a": 'say "hi", he said', "b": 'print("x")'}),
        ('{"a": , "b": [], "c"}', {"a": None, "b": [], "c": None}),
        ('{"a": [{"b": 1}', {"a": [{"b": 1}]}),
        ('{"a": [1, {"b": [2}', {"a": [1, {"b": [2]}]}),
        ('{"a": {"b": "x"</x:call>', {"a": {"b": "x"}}),
        ('{"a": {"b": tru</x:call>', {"a": {"b": "tru"}}),
        ('{"a": {"b": "</x:call>', {"a": {"b": "</x:call>"}}),
        ('{"a": {"b"', {"a": {"b": None}}),
        ('{"a": 1]', {"a": 1}),
        ("", None),
        (" true ", True),
    ],
)
def test_mistakes_are_mended(text: str, meant: Any) -> None:
    assert json.loads(read([text])[0]) == json.loads(read(list(text))[0]) == meant


def test_the_value_is_all_that_is_read() -> None:
    assert read([' {"a": 1} , ']) == ('{"a": 1}', " , ")
    assert read(['{"a": [1}] ']) == ('{"a": [1]}', "] ")
    assert read(['{"a": 1] ']) == ('{"a": 1}', "] ")


def test_text_comes_as_it_is_written() -> None:
    value, text = LooseJson(STOP), '{"a": "'
    at = value.read(text, 0, last=False)
    assert value.take() == text
    for _ in range(3):
        text += "word "
        at = value.read(text, at, last=False)
        assert (value.take(), at) == ("word ", len(text))


def test_each_part_of_a_long_word_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, searched = loose_json._Ends("</x>"), 0

    class Counted:
        def __init__(self, pattern: Any) -> None:
            self.pattern, self.match = pattern, pattern.match

        def search(self, text: str, at: int, partial: bool) -> Any:
            nonlocal searched
            searched += len(text) - at
            return self.pattern.search(text, at, partial=partial)

    counted = SimpleNamespace(**{name: Counted(getattr(ends, name)) for name in ("value", "word", "key")})
    monkeypatch.setattr(loose_json, "_Ends", lambda stops: counted)
    for begin in ("", "{"):
        value, text = LooseJson("</x>"), begin
        at = value.read(text, 0, last=False)
        for _ in range(1000):
            text += "a<"
            at = value.read(text, at, last=False)
    assert searched < 20_000
