"""grammars.py: a limit on the time of grammars, over the vocabulary of the bundled model."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import alive, children, until

import fastgen
from fastgen.async_engine.grammars import WORKERS, GrammarPool
from fastgen.text.grammar import Compiler, json_rule
from fastgen.text.tokenizer import Tokenizer

SECONDS = 0.5
# llguidance intersects the automata of the multiples, whose states multiply.
NEVER = "start: " + json_rule(
    {"allOf": [{"type": "integer", "multipleOf": m} for m in (7, 11, 13, 17, 19, 23)]}, strict=True
)
EASY = 'start: "yes" | "no"'

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(Path(fastgen.__file__).parent / "tiny")
    return Compiler(tokenizer, len(tokenizer.hf), [tokenizer.hf.eos_token_id])


@pytest.fixture
def pool(compiler: Compiler) -> Iterator[GrammarPool]:
    """A pool, whose processes end with it."""
    before = children(os.getpid())
    pool = GrammarPool(lambda: compiler)
    yield pool
    pool.close()
    assert not [child for child in children(os.getpid()) if child not in before and alive(child)]
    until(lambda: not any(thread.name.startswith("fastgen-compile") for thread in threading.enumerate()), 5)


def test_a_grammar_that_takes_too_long_is_an_error_and_others_go_on(pool: GrammarPool) -> None:
    slow = [pool.compile(NEVER, SECONDS) for _ in range(WORKERS - 1)]
    assert pool.compile(EASY, SECONDS).result().words
    assert not any(each.done() for each in slow)
    for each in slow:
        with pytest.raises(ValueError, match=r"takes more than 0\.5 seconds to compile; simplify it"):
            each.result()
    assert pool.compile(EASY, SECONDS).result() is not pool.compile(EASY, SECONDS).result()


@pytest.mark.parametrize("marks", ['<[3]> <[1000-1010]> "a"', '<|end|> "a"'])
def test_tokens_do_not_hide_a_slow_grammar(pool: GrammarPool, marks: str) -> None:
    rule = NEVER.removeprefix("start: ")
    with pytest.raises(ValueError, match="takes more than"):
        pool.compile(f"start: {marks} b\nb: {rule}", SECONDS).result()


def test_errors_are_those_of_the_compiler(pool: GrammarPool) -> None:
    with pytest.raises(ValueError, match="unknown name"):
        pool.compile("start: nothing", SECONDS).result()


def test_a_process_that_dies_fails_its_grammar_alone(pool: GrammarPool) -> None:
    before = children(os.getpid())
    slow = pool.compile(NEVER, SECONDS)
    until(lambda: len(children(os.getpid())) > len(before))
    (child,) = set(children(os.getpid())) - set(before)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(ValueError, match="was killed by SIGKILL"):
        slow.result()
    assert pool.compile(EASY, SECONDS).result().words
