"""grammars.py: a limit on the time of grammars, over the vocabulary of the bundled model."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import alive, children, until

import fastgen
from fastgen.async_engine.grammars import WORKERS, GrammarPool
from fastgen.text.grammar import Compiler, json_rule
from fastgen.text.tokenizer import Tokenizer

SECONDS = 0.5
AMPLE = 30
# llguidance intersects the automata of the multiples, whose states multiply.
SLOW = {"allOf": [{"type": "integer", "multipleOf": m} for m in (7, 11, 13, 17, 19, 23)]}
NEVER = "start: " + json_rule(SLOW, strict=True)
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
    until(lambda: not any(thread.name.startswith("fastgen-compile") for thread in threading.enumerate()))


def test_a_grammar_that_takes_too_long_is_an_error_and_others_go_on(pool: GrammarPool) -> None:
    slow = [pool.compile(NEVER, 1) for _ in range(WORKERS - 1)]
    assert pool.compile(EASY, AMPLE).result().words
    assert not any(each.done() for each in slow)
    for each in slow:
        with pytest.raises(ValueError, match="takes more than 1 seconds of CPU time to compile; simplify it"):
            each.result()
    assert pool.compile(EASY, AMPLE).result() is not pool.compile(EASY, AMPLE).result()


def slow_schema(opening: str, closing: str) -> str:
    """Return a slow grammar, which has names that look like the marks of a token."""
    schema = {"type": "object", "required": [opening], "properties": {opening: SLOW, closing: {"type": "integer"}}}
    return f"start: {json_rule(schema, strict=True)}"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: <[3]> <[1000-1010]> "a" b\nb: ' + NEVER.removeprefix("start: "),
        'start: <|end|> "a" b\nb: ' + NEVER.removeprefix("start: "),
        slow_schema("<|", "|>"),
        slow_schema("<[", "]>"),
    ],
)
def test_tokens_and_names_that_look_like_tokens_do_not_hide_a_slow_grammar(pool: GrammarPool, grammar: str) -> None:
    with pytest.raises(ValueError, match="takes more than"):
        pool.compile(grammar, SECONDS).result()


def test_the_process_knows_every_token_that_a_grammar_may_name(pool: GrammarPool, compiler: Compiler) -> None:
    names = [*compiler.marks.special.values(), "<[300-4095]>"]
    assert "<|end|>" in names
    assert pool.compile(f"start: {' '.join(names)}", AMPLE).result().words


@pytest.mark.parametrize("grammar", ["start: no", "start: <|no|>", "start: <[4096]>", 'start: %json {"$ref": "#"}'])
def test_errors_are_those_of_the_compiler_which_gets_no_wrong_grammar(
    pool: GrammarPool, compiler: Compiler, grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"\w") as expected:
        compiler.compile(grammar)
    monkeypatch.setattr(compiler, "compile", lambda grammar: pytest.fail("reached the engine"))
    with pytest.raises(ValueError, match=r"\w") as raised:
        pool.compile(grammar, AMPLE).result()
    assert str(raised.value).partition(";")[0] == str(expected.value).partition(";")[0]


def test_a_process_that_dies_fails_its_grammar_alone(pool: GrammarPool) -> None:
    before = children(os.getpid())
    slow = pool.compile(NEVER, AMPLE)
    until(lambda: len(children(os.getpid())) > len(before))
    (child,) = set(children(os.getpid())) - set(before)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(ValueError, match="was killed by SIGKILL"):
        slow.result()
    assert pool.compile(EASY, AMPLE).result().words


def test_time_in_which_the_process_cannot_run_does_not_count(pool: GrammarPool) -> None:
    before = children(os.getpid())
    assert pool.compile(EASY, AMPLE).result().words
    (child,) = set(children(os.getpid())) - set(before)
    os.kill(child, signal.SIGSTOP)
    waiting = pool.compile('start: "maybe"', SECONDS)
    time.sleep(3 * SECONDS)
    os.kill(child, signal.SIGCONT)
    assert waiting.result().words
