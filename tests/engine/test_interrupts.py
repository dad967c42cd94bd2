"""Ctrl-C and exceptions at any point: calls end in order, and no output changes."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from conftest import Turns, check_idle, random_ids
from invariants import check_scheduler
from safetensors.torch import load_file
from torch import Tensor

import fastgen
from fastgen import Event, Generator, Request, RequestOutput, SamplingParams
from fastgen.engine import interrupts
from fastgen.engine.interrupts import DeferredInterrupt
from fastgen.request import Completion

pytestmark = pytest.mark.timeout(120)
T = TypeVar("T")

SIGINT = signal.SIGINT
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(SIGINT)


@pytest.fixture(autouse=True)
def _the_handler_is_pythons_again() -> Iterator[None]:
    before = signal.signal(SIGINT, signal.default_int_handler)  # a chat that was not closed may have left its own
    yield
    assert signal.signal(SIGINT, before) is signal.default_int_handler


# ------------------------------------------------------------------------------------------- DeferredInterrupt


def test_ctrl_c_waits_for_the_end_of_the_outermost_block() -> None:
    outer, inner, done = DeferredInterrupt(), DeferredInterrupt(), []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with outer:
            with outer, inner:
                press()
                done.append(1)
            done.append(2)
        done.append(3)
    assert done == [1, 2]


def test_check_raises_once_and_what_comes_behind_it_is_not_raised_again() -> None:
    deferred, done = DeferredInterrupt(), []
    with pytest.raises(KeyboardInterrupt), deferred:  # noqa: PT012
        deferred.check()
        press()
        try:
            deferred.check()
        finally:
            deferred.check()
            press()
            done.append(1)
    assert done == [1]
    with deferred:
        pass


def test_an_error_within_is_the_context_of_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, DeferredInterrupt():  # noqa: PT012
        press()
        raise LookupError
    assert isinstance(raised.value.__context__, LookupError)


def test_presses_without_end_wait_too() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():  # noqa: PT012
        for _ in range(9):
            press()
            done.append(1)
    assert len(done) == 9


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda number, frame: None], ids=["ignored", "own"])
def test_a_handler_of_the_programs_own_stays(own: Any) -> None:
    signal.signal(SIGINT, own)
    try:
        with DeferredInterrupt():
            assert signal.getsignal(SIGINT) is own
            press()
        assert signal.getsignal(SIGINT) is own
    finally:
        signal.signal(SIGINT, signal.default_int_handler)


def test_a_handler_that_is_installed_within_stays() -> None:
    def own(number: int, frame: FrameType | None) -> None: ...

    def items() -> Iterator[int]:
        signal.signal(SIGINT, own)
        yield 1

    try:
        deferred = DeferredInterrupt()
        with deferred:
            assert list(deferred.reading(items())) == [1]
            assert signal.getsignal(SIGINT) is own
        assert signal.getsignal(SIGINT) is own
    finally:
        signal.signal(SIGINT, signal.default_int_handler)


def test_ctrl_c_is_not_deferred_while_an_iterable_makes_its_next_item() -> None:
    made = []

    def items() -> Iterator[int]:
        yield 1
        press()
        made.append(2)
        yield 2

    deferred, read = DeferredInterrupt(), []
    with pytest.raises(KeyboardInterrupt), deferred:  # noqa: PT012
        for item in deferred.reading(items()):
            read.append(item)
            assert signal.getsignal(SIGINT) is not signal.default_int_handler
    assert (read, made) == ([1], [])
    with pytest.raises(KeyboardInterrupt), deferred:  # noqa: PT012
        for item in deferred.reading([1, 2]):
            read.append(item)
            press()
    assert read == [1, 1]


def test_other_threads_leave_the_handler_alone() -> None:
    found = []

    def work() -> None:
        deferred = DeferredInterrupt()
        with deferred:
            found.append(signal.getsignal(SIGINT) is signal.default_int_handler)
            found.append(list(deferred.reading([1, 2])))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True, [1, 2]]


# ------------------------------------------------------------------------------------------- calls


def pressing(function: Callable[..., T], at: int = 1) -> Callable[..., T]:
    """Return a function that presses Ctrl-C before its call number `at`, and otherwise does the same."""
    calls = itertools.count(1)

    def pressed(*given: Any, **named: Any) -> T:
        if next(calls) == at:
            press()
        return function(*given, **named)

    return pressed


def test_an_interrupted_step_ends_and_the_next_one_tells_its_events(
    gen: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gen.generate([[5, 6, 7]], SHORT)[0].completions[0]
    gen.add([5, 6, 7], SHORT)
    monkeypatch.setattr(gen._runner, "collect", pressing(gen._runner.collect))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        gen.step()
        gen.step()
    prefilled = gen.stats.prefilled_tokens
    events = [event for _ in range(9) for event in gen.step()]
    assert [token for event in events for token in event.token_ids] == expected.token_ids
    assert gen.stats.prefilled_tokens == prefilled, "what was in flight was thrown away"


def test_an_interrupted_add_has_added_nothing(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gen._inputs, "process", pressing(gen._inputs.process))
        with pytest.raises(KeyboardInterrupt):
            gen.add([5, 6, 7], SHORT, id="a")
    assert gen.unfinished == 0
    assert gen.add([5, 6, 7], SHORT, id="a") == "a"
    gen.abort("a")


@pytest.mark.parametrize("target", ["_scheduler.add", "_runner.launch", "_runner.collect"])
def test_an_interrupted_generate_aborts_its_requests_and_no_others(
    target: str, gen: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gen.generate([[5, 6, 7]], SHORT)[0].completions[0]
    gen.add([5, 6, 7], SHORT)
    part, name = target.split(".")
    with monkeypatch.context() as patch:
        owner = getattr(gen, part)
        patch.setattr(owner, name, pressing(getattr(owner, name), at=2))
        with pytest.raises(KeyboardInterrupt):
            gen.generate([random_ids(20), random_ids(9)], SHORT)
    assert gen.unfinished == 1
    events = [event for _ in range(9) for event in gen.step()]
    assert [token for event in events for token in event.token_ids] == expected.token_ids


def test_an_iterable_that_waits_is_left_at_once(gen: Generator) -> None:
    def requests() -> Iterator[Request]:
        yield Request([5, 6], SHORT)
        press()
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        list(gen.stream(requests()))
    assert gen.unfinished == 0


# ------------------------------------------------------------------------------------------- anything, anywhere


class Fails:
    """A mask that allows all tokens, and raises after a number of tokens."""

    def __init__(self, at: int) -> None:
        self.left = at

    def fill(self, row: Any) -> None: ...

    def accept(self, token: int) -> None:
        if not self.left:
            raise ValueError("not that one")
        self.left -= 1


LONG = SamplingParams(max_tokens=14, seed=4, ignore_eos=True)
SHARED = random_ids(40, seed=5)
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (random_ids(30), replace(LONG, n=2, repetition_penalty=1.2)),
    (SHARED, replace(LONG, logprobs=2)),
    ([*SHARED[:35], 9], replace(LONG, n=3, temperature=0.8)),
    (random_ids(80), replace(LONG, temperature=0, prompt_logprobs=1, max_tokens=40)),
    (random_ids(11), replace(LONG, mask=Turns(), stop="zz")),
    (random_ids(9), replace(LONG, mask=Fails(5), n=2)),
    (random_ids(5), replace(LONG, top_k=4, return_sampling_mask=True, max_tokens=50)),
    (random_ids(20), SamplingParams(temperature=0.7, seed=9, max_tokens=60, stop=("e", "th"))),
]
SCORED = [random_ids(25, seed=2), random_ids(50, seed=3)]


@cache
def alone(folder: Path) -> tuple[list[RequestOutput], list[list[float]]]:
    """Return the outputs of each request when it runs alone, and the scores."""
    with Generator(folder, page_size=16) as gen:
        return [gen.generate([prompt], params)[0] for prompt, params in REQUESTS], gen.score(SCORED, 1)


class TroubleError(Exception):
    """An error of a kernel, or of too little memory."""


class Fuzz:
    """Random calls of a Generator with few pages. In some of them Ctrl-C is pressed, or a part of a step raises.

    All outputs must equal those of the same requests alone. Ctrl-C comes at a call or return of random number within
    fastgen, so that a seed replays exactly: those are most places where Python handles signals.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.expected, self.scores = alone(folder)
        self.gen = Generator(
            folder,
            seed=0,
            page_size=16,
            num_pages=12,
            max_seqs=self.rng.choice((1, 2, 2, 4)),
            max_step_tokens=self.rng.choice((16, 40, 200)),
            host_cache_gb=self.rng.choice((0, 2e-4)),
        )
        self.open: dict[str | int, tuple[int, list[list[Event]]]] = {}  # id -> request number, events by sample
        self.kept: dict[str | int, list[Completion]] = {}  # completions that were resumed
        self.stream: Iterator[RequestOutput] | None = None
        self.ids = itertools.count()
        self.seen: Counter[str] = Counter()
        self.trouble = 0  # the number of the call that raises
        for owner, names in (
            (self.gen._runner, ("launch", "collect", "sample")),
            (self.gen._scheduler, ("schedule", "update")),
        ):
            for name in names:
                setattr(owner, name, self._failing(getattr(owner, name)))

    # Calls.

    def run(self, calls: int) -> Counter[str]:
        actions = (self.add, self.add, self.resume, *[self.steps] * 6, self.abort, self.generate, self.pull, self.pull)
        actions += (self.leave, self.score, self.update, self.sleep)
        with self.gen:
            for _ in range(calls):
                self.rng.choice(actions)()
                self.check()
            self.leave()
            self.drain()
            check_idle(self.gen)
            assert self.gen.stats.requests == self.gen.stats.finished + self.gen.stats.aborted
        return self.seen

    def check(self) -> None:
        assert signal.getsignal(SIGINT) is signal.default_int_handler
        check_scheduler(self.gen._scheduler)
        active, untold = self.gen._active.keys(), {event.id for event in self.gen._events if event.finish_reason}
        assert active | untold >= self.open.keys(), "a request is lost"
        if self.stream is None:
            assert self.open.keys() >= active | untold, "a request was not asked for, or is none any more"

    def hit(self, call: Callable[[], T]) -> T | None:
        """What the call returns; None where Ctrl-C or trouble has ended it."""
        kind = self.rng.random()
        self.trouble = self.rng.randint(1, 8) if kind < 0.25 else 0
        presses = {
            self.rng.randrange(self.rng.choice((40, 400, 3000))) for _ in range(self.rng.choice((1, 1, 1, 2, 6)))
        }
        result: T | None = None
        try:
            with DeferredInterrupt() if kind > 0.9 else nullcontext():  # as fgchat has one
                result = self._pressed(call, presses) if kind > 0.6 else call()
        except (TroubleError, KeyboardInterrupt) as error:
            self.seen[type(error).__name__] += 1
        finally:
            self.trouble = 0
        return result

    def _pressed(self, call: Callable[[], T], presses: set[int]) -> T:
        home, calls = str(Path(fastgen.__file__).parent), itertools.count()

        def count(frame: FrameType, event: str, argument: object) -> None:
            file = frame.f_code.co_filename
            within = file.startswith(home) and file != interrupts.__file__  # the handler must see that file's frames
            early = event in ("call", "c_call") or self.gen._interrupt._depth  # what a call returns may be lost
            if within and early and next(calls) in presses:
                press()

        sys.setprofile(count)
        try:
            return call()
        finally:
            sys.setprofile(None)

    def _failing(self, method: Callable[..., T]) -> Callable[..., T]:
        def failing(*given: Any) -> T:
            self.trouble -= 1
            if self.trouble == 0 and self.rng.random() < 0.5:
                raise TroubleError
            result = method(*given)
            if self.trouble == 0:
                raise TroubleError
            return result

        return failing

    # What is called.

    def add(self) -> None:
        number, id = self.rng.randrange(len(REQUESTS)), next(self.ids)
        self.hit(partial(self.gen.add, *REQUESTS[number], id=id))
        if id in self.gen._active:  # perhaps after an interrupt, too
            self.open[id] = number, [[] for _ in range(REQUESTS[number][1].n)]

    def resume(self) -> None:
        """Abort one and go on with what it has."""
        plain = [id for id, (number, _) in self.open.items() if REQUESTS[number][1].n == 1 and id not in self.kept]
        if not plain:
            return
        id = self.rng.choice(plain)
        number = self.open[id][0]
        for output in self.abort(id):
            (part,) = output.completions
            if part.finish_reason == "abort":
                prompt, params = REQUESTS[number]
                self.gen.add(prompt, params, id=id, resume=part)
                self.open[id], self.kept[id] = (number, [[]]), [part]
                self.seen["resumed"] += 1

    def steps(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.tell(self.hit(self.gen.step) or [])

    def abort(self, id: str | int | None = None) -> list[RequestOutput]:
        if not self.open:
            return []
        id = self.rng.choice(list(self.open)) if id is None else id
        outputs = self.hit(partial(self.gen.abort, id))
        for output in outputs or []:
            number, events = self.open.pop(output.id)
            for part, told, whole in zip(output.completions, events, self.expected[number].completions, strict=True):
                self.compare(part, whole)
                said = [token for event in told for token in event.token_ids]
                told_before = self.kept[output.id][0].token_ids if output.id in self.kept else []
                assert [*told_before, *said] == part.token_ids[: len(told_before) + len(said)]
                self.seen["aborted"] += 1
        if outputs is None and id not in self.gen._active and all(event.id != id for event in self.gen._events):
            self.open.pop(id, None)  # it was done, and only what it returns is lost
        return outputs or []

    def generate(self) -> None:
        numbers = [self.rng.randrange(len(REQUESTS)) for _ in range(self.rng.randint(1, 3))]
        prompts, params = zip(*(REQUESTS[number] for number in numbers), strict=True)
        outputs = self.hit(partial(self.gen.generate, prompts, params))
        for number, output in zip(numbers, outputs or [], strict=False):
            self.compare_all(output, self.expected[number])
            self.seen["generated"] += 1

    def pull(self) -> None:
        if self.stream is None:
            numbers = [self.rng.randrange(len(REQUESTS)) for _ in range(6)]
            requests = [Request(*REQUESTS[number], id=f"{number} of {next(self.ids)}") for number in numbers]
            self.stream = self.gen.stream(iter([None, *requests, None]))
        output = self.hit(partial(next, self.stream, None))
        if output is None:
            self.stream = None
        else:
            self.compare_all(output, self.expected[int(str(output.id).split()[0])])
            self.seen["streamed"] += 1

    def leave(self) -> None:
        self.stream = None  # which closes it

    def score(self) -> None:
        scores = self.hit(partial(self.gen.score, SCORED, 1))
        assert scores is None or scores == self.scores

    def update(self) -> None:
        """Update with the same weights, which changes no output."""
        weights = old_weights(self.folder)
        given = weights if self.rng.random() < 0.5 else iter(weights.items())
        mode = self.rng.choice(("keep", "recompute"))
        self.hit(partial(self.gen.update_weights, given, in_flight=mode))
        if self.gen._weights.torn:
            with pytest.raises(RuntimeError, match="torn"):
                self.gen.generate([[5]], SHORT)
            self.gen.update_weights(weights, in_flight=mode)
            self.seen["torn"] += 1
        self.seen["updated"] += 1

    def sleep(self) -> None:
        self.leave()
        self.drain()
        self.hit(partial(self.gen.sleep, self.rng.choice(("weights", "kv_cache", ("weights", "kv_cache")))))
        self.hit(self.gen.wake)
        self.gen.wake()
        self.seen["slept"] += 1

    def drain(self) -> None:
        for _ in range(2000):
            if self.gen.unfinished:
                self.tell(self.gen.step())
        assert not self.open, "a request never ended"

    # What comes of it.

    def tell(self, events: list[Event]) -> None:
        for event in events:
            assert event.id in self.open, "an event of a request that is not open"
            number, samples = self.open[event.id]
            samples[event.index].append(event)
            if all(told and told[-1].finish_reason for told in samples):
                del self.open[event.id]
                before = self.kept.get(event.id, [None] * len(samples))
                for first, told, whole in zip(before, samples, self.expected[number].completions, strict=True):
                    self.compare(joined(first, told, whole.text), whole)
                    self.seen["told"] += 1

    def compare_all(self, found: RequestOutput, whole: RequestOutput) -> None:
        assert str(found.prompt_logprobs) == str(whole.prompt_logprobs)  # NaN is not equal to itself
        for one, other in zip(found.completions, whole.completions, strict=True):
            self.compare(one, other)

    @staticmethod
    def compare(found: Completion, whole: Completion) -> None:
        """A completion, which may have been cut short, with what it has to be."""
        if found.finish_reason != "abort":
            assert replace(found, weight_versions=[], seed=None) == replace(whole, weight_versions=[], seed=None)
            return
        count = len(found.token_ids)
        assert found.token_ids == whole.token_ids[:count]
        assert found.lists() == {name: values[:count] for name, values in whole.lists().items()}


def joined(first: Completion | None, events: list[Event], text: str) -> Completion:
    """Return the completion that a sample's events add up to, behind the one that it resumed. text: of a resumed
    sample, whose events repeat text that the abort had emitted before a stop string was complete."""
    last = events[-1]
    text = text if first else "".join(event.text for event in events)
    whole = Completion(last.index, [], text, str(last.finish_reason), last.stop_reason, last.error)
    whole.top_logprobs = None if last.top_logprobs is None else []
    whole.sampling_mask = None if last.sampling_mask is None else []
    for part in [*([] if first is None else [first]), *events]:
        whole.token_ids += part.token_ids
        whole.extend(part)
    return whole


@cache
def old_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def run_fuzz(folder: Path, seeds: range, calls: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += Fuzz(folder, seed).run(calls)
        except BaseException as error:
            raise AssertionError(f"Fuzz(talker, {seed}).run({calls}): {error!r}") from error
    return seen


def test_whatever_comes_between_no_answer_changes(talker: Path) -> None:
    seen = run_fuzz(talker, range(14), calls=30)
    wanted = {"KeyboardInterrupt", "TroubleError", "told", "aborted", "generated", "streamed", "resumed", "updated"}
    assert seen.keys() >= wanted, seen


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_whatever_comes_between_no_answer_changes_at_length(talker: Path) -> None:
    seen = run_fuzz(talker, range(100, 1600), calls=60)
    assert seen["torn"] > 20, seen
    assert seen["slept"] > 20, seen
