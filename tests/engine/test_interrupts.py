"""Ctrl-C and exceptions at any point: calls end in order, and no output changes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from conftest import Turns, check_idle

import fastgen
from fastgen import Generator, Request, SamplingParams
from fastgen.engine import interrupts

pytestmark = pytest.mark.timeout(120)
T = TypeVar("T")

SIGINT = signal.SIGINT
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, speculate=False)
press = partial(signal.raise_signal, SIGINT)


class OwnError(Exception):
    """The error of a user's handler, or of anything in a step."""


def own(number: int, frame: FrameType | None) -> None:
    raise OwnError


@pytest.fixture(autouse=True)
def _the_handler_is_pythons_again() -> Iterator[None]:
    before = signal.signal(SIGINT, signal.default_int_handler)  # a chat that was not closed may have left its own
    yield
    assert signal.signal(SIGINT, before) is signal.default_int_handler


@pytest.fixture(params=[(signal.default_int_handler, KeyboardInterrupt), (own, OwnError)], ids=["python's", "own"])
def error(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """The error that the installed handler raises. Python's handler and a user's are treated alike."""
    signal.signal(SIGINT, request.param[0])
    yield request.param[1]
    assert signal.signal(SIGINT, signal.default_int_handler) is request.param[0]


class Calls(Turns):
    """A mask that calls a function in each step. It is copied for each sample when its request is added."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.function = function

    def __deepcopy__(self, memo: object) -> Calls:
        return Calls(self.function)

    def fill(self, row: Any) -> None:
        self.function()
        super().fill(row)


class PressesInCopy(Turns):
    """A mask that presses Ctrl-C when its request is added."""

    def __deepcopy__(self, memo: object) -> Turns:
        press()
        return Turns()


# ------------------------------------------------------------------------------------------- Ctrl-C at one place


def test_a_ctrl_c_as_a_call_begins_leaves_the_next_one_as_it_is(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        press()  # the last moment: signal.signal raises for what is pending before it changes the handler

    interrupt = interrupts.OneCaller()
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", interrupted)
        with pytest.raises(error), interrupt:
            raise AssertionError("the block has begun")
    deferred = False
    with pytest.raises(error), interrupt:  # noqa: PT012
        press()
        deferred = True
    assert deferred


@pytest.mark.parametrize("place", ["a step", "the iterable", "between two outputs"])
def test_ctrl_c_from_outside_ends_a_stream_and_loses_nothing_of_others(
    gen: Generator, error: type[BaseException], place: str
) -> None:
    expected = gen.generate([[5, 6, 7]], SHORT)[0].completions[0].token_ids
    added = gen.add([5, 6, 7], SHORT)
    events, stats = gen.step(), gen.stats

    def wait(seconds: float) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), SIGINT)).start()
        time.sleep(seconds)

    def requests() -> Iterator[Request]:
        mask = Calls(partial(wait, 0.2)) if place == "a step" else None
        yield Request([5, 6], SHORT)
        yield Request([5, 6], replace(SHORT, max_tokens=50, mask=mask))
        if place == "the iterable":
            wait(60)

    start = time.monotonic()
    with pytest.raises(error):  # noqa: PT012
        for _ in gen.stream(requests()):
            wait(60)
    assert time.monotonic() - start < 30
    assert gen.unfinished == 1
    while gen.unfinished:
        events += gen.step()
    assert {event.id for event in events} == {added}
    assert [token for event in events for token in event.token_ids] == expected
    assert gen.stats.preemptions == stats.preemptions, "what was in flight was thrown away"


def test_a_second_ctrl_c_in_a_step_is_the_same_one_and_a_call_ends_after_its_step(
    gen: Generator, error: type[BaseException]
) -> None:
    mask = Calls(lambda: (press(), press()))
    gen.add([5, 6], replace(SHORT, mask=mask), id="a")
    for _ in range(2):
        with pytest.raises(error):
            gen.step()
        assert gen.stats.running == 1
    gen.abort("a")
    before = gen.stats.steps
    with pytest.raises(error):
        gen.generate([5, 6], replace(SHORT, mask=mask, max_tokens=50))
    assert gen.stats.steps - before < 3


def test_an_interrupted_add_has_added_nothing(gen: Generator, error: type[BaseException]) -> None:
    with pytest.raises(error):
        gen.add([5, 6, 7], replace(SHORT, mask=PressesInCopy()), id="a")
    assert gen.unfinished == 0
    assert gen.add([5, 6, 7], SHORT, id="a") == "a"
    gen.abort("a")


@pytest.mark.parametrize("method", ["generate", "stream", "score"])
def test_an_iterable_that_waits_is_left_at_once(gen: Generator, error: type[BaseException], method: str) -> None:
    def items() -> Iterator[Any]:
        assert gen.add([8], SHORT, id="added") == "added"  # a call from within the iterable
        yield Request([5, 6], SHORT) if method == "stream" else [5, 6]
        press()
        raise AssertionError("it went on")

    with pytest.raises(error):
        list(getattr(gen, method)(items()))
    gen.abort("added")
    assert gen.unfinished == 0


def test_handlers_that_return_are_called_once_and_one_that_the_iterable_installs_stays(gen: Generator) -> None:
    calls: list[str] = []
    pressing = replace(SHORT, mask=Calls(lambda: (press(), press())), max_tokens=1)

    def items() -> Iterator[list[int]]:
        signal.signal(SIGINT, lambda *_: calls.append("the iterable's"))
        gen.add([8], pressing)
        gen.step()
        yield [5, 6]

    for handler in (signal.SIG_IGN, lambda *_: calls.append("own")):
        before = signal.signal(SIGINT, handler)
        gen.generate([5, 6], pressing)
        assert signal.getsignal(SIGINT) is handler
        gen.generate(items() if calls else [[5, 6]], SHORT)
        signal.signal(SIGINT, before)
    assert calls == ["own", "the iterable's"]
    assert gen.take_events()


OPEN_STREAM = """
import json
from fastgen import Generator, Request, SamplingParams
params = [SamplingParams(max_tokens=5 + 50 * n, ignore_eos=True) for n in range(3)]  # r0 is the first to end
json.stream = Generator().stream(Request("hello", each) for each in params)
print(next(json.stream).id)
"""


def test_an_open_stream_at_the_exit_of_the_interpreter_is_no_error() -> None:
    """The stream is closed after the globals of this package are gone."""
    done = subprocess.run([sys.executable, "-c", OPEN_STREAM], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("r0\n", "")


# ------------------------------------------------------------------------------------------- anything, anywhere


def at(event: int, action: Callable[[], object], call: Callable[[], T], within: Callable[[str], object] = bool) -> T:
    """Return what the call returns, and run `action` at one of the points in fastgen where Python may handle a signal.

    event: the number of this point. within: only points in files for which it is true are counted.
    """
    home, count = str(Path(fastgen.__file__).parent), itertools.count()

    def profile(frame: FrameType, kind: str, argument: object) -> None:
        file = frame.f_code.co_filename
        handles = kind in ("call", "c_return") and file.startswith(home) and file != interrupts.__file__
        if (handles or "contextlib" in file) and within(file) and next(count) == event:
            sys.setprofile(None)
            action()

    sys.setprofile(profile)
    try:
        return call()
    finally:
        sys.setprofile(None)


def raise_own() -> None:
    raise OwnError


@pytest.mark.parametrize(("action", "aborts"), [(raise_own, False), (raise_own, True), (press, False)])
def test_after_an_exception_or_ctrl_c_at_any_point_requests_go_on_or_can_be_aborted(
    gen: Generator, action: Callable[[], object], aborts: bool
) -> None:
    """It comes at every fourth point of a step in these modules and at each of its last ones, which are after the check
    for Ctrl-C. No token is lost or told twice."""
    expected = gen.generate(["hello"], SHORT)[0].completions[0]
    modules, points, raised = ("generator.py", "loop.py", "contextlib.py"), list[str](), 0
    gen.add("hello", SHORT, id="a")
    gen.step()
    at(-1, action, gen.step, lambda file: file.endswith(modules) and points.append(file) is None)
    gen.abort("a")
    for event in (*range(0, len(points), 4), *range(len(points) - 8, len(points))):
        gen.add("hello", SHORT, id="a")
        told = gen.step()
        try:
            told += at(event, action, gen.step, lambda file: file.endswith(modules))
        except (OwnError, KeyboardInterrupt):
            raised += 1
            if aborts:
                (output,) = gen.abort("a")
                assert output.completions[0].token_ids == expected.token_ids[: len(output.completions[0].token_ids)]
                assert not gen.take_events(), "of a request that is gone"
                continue
        while gen.unfinished:
            told += gen.step()
        check_idle(gen)
        assert "".join(part.text for part in told) == expected.text
        assert [token for part in told for token in part.token_ids] == expected.token_ids
    assert raised > 20


def test_after_an_exception_between_a_mask_and_its_token_the_mask_has_not_advanced(gen: Generator) -> None:
    """The exception is raised at each point of a step in these modules, until the step has no more of them."""
    params, modules, raised = replace(SHORT, mask=Turns()), ("request.py", "scheduler.py", "masks.py"), True
    expected = gen.generate(["hello"], params)[0].completions[0].token_ids
    for event in itertools.count():
        gen.add("hello", params)
        told = gen.step() + gen.step()
        try:
            told += at(event, raise_own, gen.step, lambda file: file.endswith(modules))
            raised = False
        except OwnError:
            raised = True
        while gen.unfinished:
            told += gen.step()
        assert [token for part in told for token in part.token_ids] == expected
        if not raised:
            break
    assert event > 20
