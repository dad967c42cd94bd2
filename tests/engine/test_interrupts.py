"""Ctrl-C and exceptions at any point: calls end in order, and no output changes."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from conftest import Turns, check_idle, random_ids
from invariants import check_scheduler

import fastgen
from fastgen import Event, Generator, Request, RequestOutput, SamplingParams
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
json.stream = Generator().stream(Request("hello", SamplingParams(max_tokens=5 + 50 * n)) for n in range(3))
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


def test_after_an_exception_in_a_step_requests_go_on_or_can_be_aborted(gen: Generator) -> None:
    """The exception is raised at each point of the loop; Fuzz raises it in other modules too."""
    expected = gen.generate(["hello"], SHORT)[0].completions[0]
    modules, raised = ("generator.py", "loop.py", "contextlib.py"), 0
    for event, aborts in itertools.product(range(60), (False, True)):
        gen.add("hello", SHORT, id="a")
        told = gen.step()
        try:
            told += at(event, raise_own, gen.step, lambda file: file.endswith(modules))
        except OwnError:
            raised += 1
            if aborts:
                (output,) = gen.abort("a")
                assert output.completions[0].token_ids == expected.token_ids[: len(output.completions[0].token_ids)]
                continue
        while gen.unfinished:
            told += gen.step()
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


LONG = SamplingParams(max_tokens=14, seed=4, ignore_eos=True)
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (random_ids(30), replace(LONG, n=2, repetition_penalty=1.2)),
    (random_ids(40, seed=5), replace(LONG, logprobs=2)),
    ([*random_ids(40, seed=5)[:35], 9], replace(LONG, n=3, temperature=0.8)),
    (random_ids(80), replace(LONG, temperature=0, prompt_logprobs=1, max_tokens=40)),
    (random_ids(11), replace(LONG, mask=Turns(), stop="zz")),
    (random_ids(20), SamplingParams(temperature=0.7, seed=9, max_tokens=60, stop=("e", "th"))),
]


@cache
def undisturbed(folder: Path) -> list[RequestOutput]:
    with Generator(folder, page_size=16) as gen:
        return [gen.generate([prompt], params)[0] for prompt, params in REQUESTS]


class Fuzz:
    """Random calls of a Generator with few pages. In some, Ctrl-C is pressed or a step raises at a random point.

    All outputs must equal those of the same requests by themselves. A seed replays exactly.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.expected = undisturbed(folder)
        sizes = {"max_seqs": rng.choice((1, 2, 4)), "max_step_tokens": rng.choice((16, 40, 200))}
        self.gen = Generator(folder, seed=0, page_size=16, num_pages=12, host_cache_gb=rng.choice((0, 2e-4)), **sizes)
        self.open: dict[str | int, list[Event]] = {}  # the events of requests of `add`
        self.stream: Iterator[RequestOutput] | None = None
        self.ids = itertools.count()
        self.seen: Counter[str] = Counter()

    def run(self, calls: int) -> Counter[str]:
        with self.gen as gen:
            for _ in range(calls):
                self.rng.choice((self.add, self.add, *[self.step] * 6, self.abort, *[self.pull] * 4, self.leave))()
                check_scheduler(gen._loop.scheduler)
            self.leave()
            while gen.unfinished:
                self.tell(gen.step())
            check_idle(gen)
        assert not self.open, "a request is lost"
        assert gen.stats.requests == gen.stats.finished + gen.stats.aborted
        return self.seen

    def hit(self, call: Callable[[], T]) -> T | None:
        """Return what the call returns; None where Ctrl-C or an error ended it."""
        event, kind = self.rng.randrange(self.rng.choice((40, 400, 3000))), self.rng.random()
        try:
            if kind < 0.25:
                return at(event, raise_own, call, lambda _: self.gen._loop.stepping)
            return at(event, press, call) if kind < 0.6 else call()
        except (OwnError, KeyboardInterrupt) as error:
            self.seen[type(error).__name__] += 1
            return None

    def pick(self) -> Request:
        number = self.rng.randrange(len(REQUESTS))
        return Request(*REQUESTS[number], id=f"{number} of {next(self.ids)}")

    def right(self, id: str | int) -> RequestOutput:
        return self.expected[int(str(id).split()[0])]

    def add(self) -> None:
        request, before = self.pick(), self.gen.unfinished
        self.hit(partial(self.gen.add, request.prompt, request.params, request.id))
        if self.gen.unfinished > before:  # which may be true after an interrupt too
            self.open[str(request.id)] = []

    def step(self) -> None:
        self.tell(self.hit(self.gen.step) or [])

    def tell(self, events: list[Event]) -> None:
        for event in events:
            told, samples = self.open[event.id], self.right(event.id).completions
            told.append(event)
            if sum(each.finish_reason is not None for each in told) == len(samples):
                for whole in samples:
                    own = [each for each in told if each.index == whole.index]
                    assert [token for each in own for token in each.token_ids] == whole.token_ids
                    assert [value for each in own for value in each.logprobs] == whole.logprobs
                    assert ("".join(each.text for each in own), own[-1].finish_reason) == (
                        whole.text,
                        whole.finish_reason,
                    )
                del self.open[event.id]
                self.seen["told"] += 1

    def abort(self) -> None:
        id = self.rng.choice([*self.open, "nobody"])
        outputs = self.hit(partial(self.gen.abort, id)) or []
        outputs += self.gen.abort(id)  # in case the first call was interrupted
        self.tell(self.gen.take_events())  # it may have ended in the step that `abort` waited for
        self.open.pop(id, None)
        for output in outputs:
            for part, whole in zip(output.completions, self.right(id).completions, strict=True):
                assert part.token_ids == whole.token_ids[: len(part.token_ids)]

    def pull(self) -> None:
        self.stream = self.stream or self.gen.stream(iter([None, *(self.pick() for _ in range(6)), None]))
        output = self.hit(partial(next, self.stream, None))
        if output is None:
            return self.leave()
        whole = self.right(output.id)
        assert str(output.prompt_logprobs) == str(whole.prompt_logprobs)  # NaN is not equal to itself
        for found, expected in zip(output.completions, whole.completions, strict=True):
            assert replace(found, seed=None) == replace(expected, seed=None)
        self.seen["streamed"] += 1

    def leave(self) -> None:
        self.stream = None  # which closes it


@pytest.mark.parametrize(
    ("seeds", "calls"),
    [
        (range(10), 30),
        pytest.param(range(100, 1600), 60, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_whatever_comes_between_no_answer_changes(talker: Path, seeds: range, calls: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += Fuzz(talker, seed).run(calls)
        except BaseException as error:
            raise AssertionError(f"Fuzz(talker, {seed}).run({calls}): {error!r}") from error
    assert seen.keys() >= {"KeyboardInterrupt", "OwnError", "told", "streamed"}, seen
