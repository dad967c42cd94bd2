"""Ctrl-C and exceptions at any point: calls end in order, and no output changes."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from conftest import Turns, check_idle, random_ids
from invariants import check_scheduler
from safetensors.torch import load_file

import fastgen
from fastgen import Event, Generator, Request, RequestOutput, SamplingParams
from fastgen.engine import interrupts
from fastgen.engine.interrupts import DeferredInterrupt

pytestmark = pytest.mark.timeout(120)
T = TypeVar("T")

SIGINT = signal.SIGINT
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
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


# ------------------------------------------------------------------------------------------- DeferredInterrupt


def test_ctrl_c_waits_for_the_end_of_the_outermost_block_and_is_raised_once(error: type[BaseException]) -> None:
    outer, inner, done = DeferredInterrupt(), DeferredInterrupt(), []
    with pytest.raises(error) as raised:  # noqa: PT012
        with outer:
            with outer, inner:
                press()
                press()
                done.append(1)
            done.append(2)
            raise LookupError
        done.append(3)
    assert done == [1, 2]
    assert isinstance(raised.value.__context__, LookupError)
    with outer:
        outer.check()


def test_check_raises_what_has_come_and_the_end_what_comes_after_it(error: type[BaseException]) -> None:
    deferred, done = DeferredInterrupt(), []
    with pytest.raises(error), deferred:  # noqa: PT012
        deferred.check()
        press()
        with pytest.raises(error), deferred:
            deferred.check()
        deferred.check()
        press()
        done.append(1)
    assert done == [1]


def test_a_handler_that_returns_is_called_once_and_an_ignored_signal_stays_so() -> None:
    calls: list[tuple[Any, ...]] = []
    for handler, count in ((lambda *given: calls.append(given), 1), (signal.SIG_IGN, 1)):
        before = signal.signal(SIGINT, handler)
        with DeferredInterrupt() as deferred:
            press()
            press()
        assert (deferred, len(calls)) == (None, count)
        assert signal.signal(SIGINT, before) is handler


def test_ctrl_c_is_not_deferred_while_an_iterable_makes_its_next_item(error: type[BaseException]) -> None:
    deferred, made, read = DeferredInterrupt(), [], []

    def items() -> Iterator[int]:
        with deferred:  # a call from within the iterable
            pass
        yield 1
        press()
        made.append(2)

    with pytest.raises(error), deferred:  # noqa: PT012
        for item in deferred.reading(items()):
            press()
            with pytest.raises(error):
                deferred.check()
            read.append(item)
    with pytest.raises(error), deferred:  # noqa: PT012
        for item in deferred.reading([2, 3]):
            read.append(item)
            press()
    assert (read, made) == ([1, 2], [])


def test_a_handler_that_the_iterable_installs_stays_and_is_called() -> None:
    calls: list[int] = []

    def items() -> Iterator[int]:
        before.append(signal.signal(SIGINT, lambda number, frame: calls.append(number)))
        with deferred:  # a call from within the iterable
            press()
            deferred.check()
        yield 1

    before: list[Any] = []
    deferred = DeferredInterrupt()
    with deferred:
        for _ in deferred.reading(items()):
            press()
    assert calls == [SIGINT] * 2
    signal.signal(SIGINT, before[0])


def test_other_threads_leave_the_handler_alone(gen: Generator) -> None:
    before, found, refused = signal.getsignal(SIGINT), [], threading.Event()

    class Looks(Turns):
        def fill(self, row: Any) -> None:
            found.append(signal.getsignal(SIGINT))

        def accept(self, token: int) -> None:
            refused.wait(20)

    thread = threading.Thread(target=gen.generate, args=([[5, 6]], replace(SHORT, mask=Looks(), max_tokens=2)))
    thread.start()
    while not found:
        pass
    with pytest.raises(RuntimeError, match="another thread is using this Generator"):
        gen.step()
    assert signal.getsignal(SIGINT) is before, "it is given back where the call is refused"
    refused.set()
    thread.join()
    assert found == [before] * 2


# ------------------------------------------------------------------------------------------- calls


def at(event: int, action: Callable[[], object], call: Callable[[], T], within: Callable[[str], object] = bool) -> T:
    """Return what the call returns. `action` runs at one of the points in fastgen where Python may handle a signal.
    within: the points for whose file it is true are counted."""
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


def test_an_interrupted_call_ends_its_step_and_loses_nothing_of_others(
    gen: Generator, error: type[BaseException]
) -> None:
    """Ctrl-C at any point of `generate`, `add` and `step`, beside a request that goes on as if nothing had been."""
    prompts, params = [random_ids(20), random_ids(9)], replace(SHORT, speculate=False)
    expected = gen.generate([[5, 6, 7]], params)[0].completions[0]
    for event in range(0, 3000, 97):
        id = gen.add([5, 6, 7], params)
        prefilled, preempted = gen.stats.prefilled_tokens, gen.stats.preemptions
        with suppress(error):
            at(event, press, partial(gen.generate, prompts, params))
        assert gen.unfinished == 1
        with suppress(error):
            at(event, press, partial(gen.add, [8, 9], params, id="other"))
        gen.abort("other")
        events = gen.step()
        with suppress(error):
            events += at(event % 300, press, gen.step)
        while gen.unfinished:
            events += gen.step()
        assert [token for event in events for token in event.token_ids] == expected.token_ids
        assert gen.stats.preemptions == preempted, "what was in flight was thrown away"
        assert {event.id for event in events} == {id}
        assert gen.stats.prefilled_tokens <= prefilled + 34


def test_an_interrupted_generate_ends_after_its_step(gen: Generator, error: type[BaseException]) -> None:
    class Presses(Turns):
        def fill(self, row: Any) -> None:
            press()

        def accept(self, token: int) -> None: ...

    before = gen.stats.steps
    with pytest.raises(error):
        gen.generate([5, 6], replace(SHORT, mask=Presses(), max_tokens=50))
    assert gen.stats.steps - before < 3


def test_an_interrupted_add_has_added_nothing(
    gen: Generator, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    process = gen._inputs.process
    with monkeypatch.context() as patch:
        patch.setattr(gen._inputs, "process", lambda *given: (press(), process(*given))[1])
        with pytest.raises(error):
            gen.add([5, 6, 7], SHORT, id="a")
    assert gen.unfinished == 0
    assert gen.add([5, 6, 7], SHORT, id="a") == "a"
    gen.abort("a")


@pytest.mark.parametrize("method", ["generate", "stream", "score"])
def test_an_iterable_that_waits_is_left_at_once(gen: Generator, error: type[BaseException], method: str) -> None:
    def items() -> Iterator[Any]:
        yield Request([5, 6], SHORT) if method == "stream" else [5, 6]
        press()
        raise AssertionError("it went on")

    with pytest.raises(error):
        list(getattr(gen, method)(items()))
    assert gen.unfinished == 0


@pytest.mark.parametrize("aborts", [False, True])
def test_after_an_exception_in_a_step_requests_go_on_or_can_be_aborted(
    gen: Generator, monkeypatch: pytest.MonkeyPatch, aborts: bool
) -> None:
    """At each point of the loop; those of the modules below come in Fuzz."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, speculate=False)
    expected = gen.generate(["hello"], params)[0].completions[0]
    modules = ("generator.py", "loop.py", "contextlib.py")
    running: list[int] = []  # when the device was waited for
    monkeypatch.setattr(gen._runner, "synchronize", lambda: running.append(gen.stats.running))
    for event in range(60):
        gen.add("hello", params, id="a")
        told, before = gen.step(), len(running)
        try:
            told += at(event, raise_own, gen.step, lambda file: file.endswith(modules))
        except OwnError:
            check_scheduler(gen._loop.scheduler)
            assert running[before:] in ([], [1]), "pages may be given out again only when the device has done its work"
            if aborts:
                (output,) = gen.abort("a")
                assert output.completions[0].token_ids == expected.token_ids[: len(output.completions[0].token_ids)]
                assert not gen.unfinished
                continue
        while gen.unfinished:
            told += gen.step()
        assert "".join(part.text for part in told) == expected.text
        assert [token for part in told for token in part.token_ids] == expected.token_ids
    assert len(running) > 10


OPEN_STREAM = """
import json
from fastgen import Generator, Request, SamplingParams
json.stream = Generator().stream(Request("hello", SamplingParams(max_tokens=5 + 50 * n)) for n in range(3))
print(next(json.stream).id)
"""


def test_an_open_stream_at_the_exit_of_the_interpreter_is_no_error() -> None:
    """It ends after the globals of this package are gone."""
    done = subprocess.run([sys.executable, "-c", OPEN_STREAM], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("r0\n", "")


# ------------------------------------------------------------------------------------------- anything, anywhere


LONG = SamplingParams(max_tokens=14, seed=4, ignore_eos=True)
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (random_ids(30), replace(LONG, n=2, repetition_penalty=1.2)),
    (random_ids(40, seed=5), replace(LONG, logprobs=2)),
    ([*random_ids(40, seed=5)[:35], 9], replace(LONG, n=3, temperature=0.8)),
    (random_ids(80), replace(LONG, temperature=0, prompt_logprobs=1, max_tokens=40)),
    (random_ids(11), replace(LONG, mask=Turns(), stop="zz")),
    (random_ids(20), SamplingParams(temperature=0.7, seed=9, max_tokens=60, stop=("e", "th"))),
]
SCORED = [random_ids(25, seed=2), random_ids(50, seed=3)]


@cache
def undisturbed(folder: Path) -> tuple[list[RequestOutput], list[list[float]]]:
    with Generator(folder, page_size=16) as gen:
        return [gen.generate([prompt], params)[0] for prompt, params in REQUESTS], gen.score(SCORED, 1)


class Fuzz:
    """Random calls of a Generator with few pages. In some, Ctrl-C is pressed or a step raises at a random point.

    All outputs must equal those of the same requests by themselves. A seed replays exactly.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.weights = load_file(folder / "model.safetensors")
        self.expected, self.scores = undisturbed(folder)
        sizes = {"max_seqs": rng.choice((1, 2, 4)), "max_step_tokens": rng.choice((16, 40, 200))}
        self.gen = Generator(folder, seed=0, page_size=16, num_pages=12, host_cache_gb=rng.choice((0, 2e-4)), **sizes)
        self.open: dict[str | int, list[list[Event]]] = {}  # events by sample
        self.stream: Iterator[RequestOutput] | None = None
        self.ids = itertools.count()
        self.seen: Counter[str] = Counter()

    def run(self, calls: int) -> Counter[str]:
        actions = (self.add, self.add, *[self.step] * 6, self.abort, self.generate, *[self.pull] * 3, self.leave)
        with self.gen:
            for _ in range(calls):
                self.rng.choice((*actions, self.score, self.update))()
                check_scheduler(self.gen._loop.scheduler)
            self.leave()
            while self.gen.unfinished:
                self.tell(self.gen.step())
            check_idle(self.gen)
        assert not self.open, "a request is lost"
        assert self.gen.stats.requests == self.gen.stats.finished + self.gen.stats.aborted
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

    def pick(self) -> tuple[int, Request]:
        number = self.rng.randrange(len(REQUESTS))
        return number, Request(*REQUESTS[number], id=f"{number} of {next(self.ids)}")

    def compare(self, output: RequestOutput, kind: str) -> None:
        whole = self.expected[int(str(output.id).split()[0])]
        assert str(output.prompt_logprobs) == str(whole.prompt_logprobs)  # NaN is not equal to itself
        for found, right in zip(output.completions, whole.completions, strict=True):
            assert replace(found, weight_versions=[], seed=None) == replace(right, weight_versions=[], seed=None)
        self.seen[kind] += 1

    def add(self) -> None:
        _, request = self.pick()
        before = self.gen.unfinished
        self.hit(partial(self.gen.add, request.prompt, request.params, request.id))
        if self.gen.unfinished > before:  # perhaps after an interrupt, too
            self.open[str(request.id)] = [[] for _ in range(request.params.n)]  # type: ignore[union-attr]

    def step(self) -> None:
        self.tell(self.hit(self.gen.step) or [])

    def tell(self, events: list[Event]) -> None:
        for event in events:
            samples = self.open[event.id]
            samples[event.index].append(event)
            if all(told and told[-1].finish_reason for told in samples):
                for told, whole in zip(samples, self.expected[int(str(event.id)[0])].completions, strict=True):
                    assert [token for each in told for token in each.token_ids] == whole.token_ids
                    assert [value for each in told for value in each.logprobs] == whole.logprobs
                    assert "".join(each.text for each in told) == whole.text
                    assert told[-1].finish_reason == whole.finish_reason
                del self.open[event.id]
                self.seen["told"] += 1

    def abort(self) -> None:
        if not self.open:
            return
        id = self.rng.choice(list(self.open))
        outputs = self.hit(partial(self.gen.abort, id)) or []
        outputs += self.gen.abort(id)  # in case that the first was interrupted
        self.tell(self.gen.take_events())  # it may have ended in the step that `abort` waited for
        self.open.pop(id, None)
        for output in outputs:
            for part, whole in zip(output.completions, self.expected[int(str(id)[0])].completions, strict=True):
                assert part.token_ids == whole.token_ids[: len(part.token_ids)]
            self.seen["aborted"] += 1

    def generate(self) -> None:
        requests = [self.pick() for _ in range(self.rng.randint(1, 3))]
        outputs = self.hit(lambda: self.gen.generate(*zip(*(REQUESTS[number] for number, _ in requests), strict=True)))
        for (_, request), output in zip(requests, outputs or [], strict=False):
            self.compare(replace(output, id=request.id), "generated")

    def pull(self) -> None:
        if self.stream is None:
            self.stream = self.gen.stream(iter([None, *(self.pick()[1] for _ in range(6)), None]))
        output = self.hit(partial(next, self.stream, None))
        if output is None:
            self.stream = None
        else:
            self.compare(output, "streamed")

    def leave(self) -> None:
        self.stream = None  # which closes it

    def score(self) -> None:
        assert self.hit(partial(self.gen.score, SCORED, 1)) in (None, self.scores)

    def update(self) -> None:
        """Update with the same weights, which changes no output."""
        given = self.weights if self.rng.random() < 0.5 else iter(self.weights.items())
        mode = self.rng.choice(("keep", "recompute"))
        self.hit(partial(self.gen.update_weights, given, in_flight=mode))
        if self.gen.torn:
            with pytest.raises(RuntimeError, match="torn"):
                self.gen.generate([[5]], SHORT)
            self.gen.update_weights(self.weights, in_flight=mode)
            self.seen["torn"] += 1


@pytest.mark.parametrize(
    ("seeds", "calls"),
    [
        (range(14), 30),
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
    assert seen.keys() >= {"KeyboardInterrupt", "OwnError", "told", "generated", "streamed", "torn"}, seen
