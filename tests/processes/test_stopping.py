"""stopping.py: a block of code is stopped from another thread, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fastgen.processes import stopping as stopping_module
from fastgen.processes.stopping import Stoppable, StoppedError

pytestmark = pytest.mark.timeout(60)


@contextmanager
def stopping(*blocks: Stoppable) -> Iterator[None]:
    """Let another thread stop these blocks once the first runs."""

    def stop() -> None:
        while not blocks[0].runs:
            time.sleep(0.001)
        for block in blocks:
            block.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    yield
    thread.join()


def run_on() -> None:
    while True:
        try:
            sum(range(100))
        except Exception:  # as templates and libraries do
            continue


def is_stopped(block: Stoppable, work: Callable[[], object]) -> bool:
    try:
        with block:
            work()
    except StoppedError:
        return True
    return False


def test_a_loop_is_stopped() -> None:
    block = Stoppable()
    with stopping(block):
        assert is_stopped(block, run_on)
    assert not block.runs
    block.stop()
    assert sum(1 for _ in range(10**5)) == 10**5, "nothing comes after the block"


def test_a_block_that_was_stopped_does_not_begin() -> None:
    block, begun = Stoppable(), list[int]()
    block.stop()
    assert is_stopped(block, lambda: begun.append(1))
    assert not begun


@pytest.mark.parametrize("both", [False, True])
def test_the_block_around_is_stopped_and_says_so(both: bool) -> None:
    outer, inner = Stoppable(), Stoppable()
    seen: list[bool] = []

    def work() -> None:
        try:
            with inner:
                run_on()
        except StoppedError:
            seen.append(inner.interrupted)
            raise

    with stopping(outer, *([inner] if both else [])):
        assert is_stopped(outer, work)
    assert seen == [True]
    assert not outer.interrupted


def test_the_block_around_is_stopped_if_the_inner_one_catches_the_exception() -> None:
    outer, inner = Stoppable(), Stoppable()

    def work() -> None:
        with inner:
            is_stopped(Stoppable(), run_on)

    with stopping(outer):
        assert is_stopped(outer, work)


class StoppingLock:
    """A lock that lets another thread stop a block when it is left for the first time."""

    def __init__(self, block: Stoppable) -> None:
        self._left: list[Stoppable] = [block]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if self._left:
            thread = threading.Thread(target=self._left.pop().stop)
            thread.start()
            thread.join()


def test_the_block_around_is_stopped_at_the_end_of_the_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = Stoppable(), Stoppable()

    def work() -> None:
        with inner:
            monkeypatch.setattr(stopping_module, "_lock", StoppingLock(outer))

    assert is_stopped(outer, work)


def test_only_the_inner_block_is_stopped() -> None:
    outer, inner = Stoppable(), Stoppable()

    def work() -> None:
        assert is_stopped(inner, run_on)
        assert not inner.interrupted
        assert outer.runs

    with stopping(inner):
        assert not is_stopped(outer, work)


def test_stops_that_come_at_any_moment_reach_their_blocks_only() -> None:
    """Nested blocks of a few instructions, which another thread stops now and then."""
    outer, inner = Stoppable(), Stoppable()
    over = threading.Event()

    def stop() -> None:
        number = 0
        while not over.is_set():
            number += 1
            (outer, inner)[number % 3 == 0].stop()
            time.sleep(0)

    thread = threading.Thread(target=stop)
    thread.start()
    counts = [0, 0, 0]
    try:
        while min(counts) < 20:
            outer, inner = Stoppable(), Stoppable()
            ended = False

            def work(inner: Stoppable = inner) -> None:
                nonlocal ended
                stopped = is_stopped(inner, lambda: sum(range(500)))
                if inner.interrupted:
                    raise StoppedError
                counts[0] += stopped
                sum(range(500))
                ended = True

            stopped = is_stopped(outer, work)
            counts[1] += stopped
            counts[2] += ended
            assert stopped or ended
            assert sum(range(200)) == 19900
    finally:
        over.set()
        thread.join()


PROFILED = """
import sys
from fastgen.processes.stopping import Stoppable

with Stoppable():
    pass
calls = []
sys.setprofile(lambda frame, kind, argument: calls.append(kind))
str.upper("a")
sys.setprofile(None)
print("c_call" in calls)
"""


def test_a_profiler_goes_on_after_a_block() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=50)
    assert done.stdout == "True\n"
