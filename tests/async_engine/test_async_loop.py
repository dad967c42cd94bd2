"""loop.py: events between processes, and the loop of an engine in the process of the test."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

from fastgen.async_engine.loop import INTAKE_SECONDS, Abort, Answer, Call, EngineLoop, StepEnded, Submit
from fastgen.engine.stats import Stats
from fastgen.request import Event, SamplingParams


class FakeGenerator:
    """Runs every request for three steps; `add` takes 4 ms."""

    needs_weights = False
    tokenizer = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.left: dict[int, int] = {}

    def add(self, prompt: Sequence[int], params: SamplingParams, number: int, *rest: Any) -> None:
        time.sleep(0.004)
        self.calls.append(("add", number))
        self.left[number] = 3

    def abort(self, numbers: range) -> None:
        self.calls.append(("abort", numbers))
        for number in numbers:
            self.left.pop(number, None)

    def step(self) -> list[Event]:
        self.calls.append(("step", len(self.left)))
        self.left = {number: steps - 1 for number, steps in self.left.items() if steps > 1}
        return []

    @property
    def unfinished(self) -> int:
        return len(self.left)

    @property
    def stats(self) -> Stats:
        return Stats()


def test_arrivals_delay_a_step_for_a_limited_time_and_aborts_do_not() -> None:
    gen = FakeGenerator()
    incoming: SimpleQueue[Any] = SimpleQueue()
    loop = EngineLoop(gen, incoming, lambda message: None)  # type: ignore[arg-type]
    for number in range(40):
        incoming.put(Submit(number, [1], SamplingParams(), priority=number >= 20))
    incoming.put(Submit(40, [1], SamplingParams()))
    incoming.put(Submit(41, [1], SamplingParams(grammar='start: "x"')))
    incoming.put(Abort(range(39, 40)))
    incoming.put(Abort(range(41, 42)))
    while not loop.idle or not gen.calls:
        loop.turn()
    added = [number for name, number in gen.calls if name == "add"]
    assert added == [*range(20), 40, *range(20, 39)], "by priority and in order, without aborted ones"
    assert gen.calls[:2] == [("abort", range(39, 40)), ("abort", range(41, 42))]
    steps = [at for at, (name, _) in enumerate(gen.calls) if name == "step"]
    most = int(INTAKE_SECONDS / 0.004) + 1
    assert all(then - at - 1 <= most for at, then in pairwise(steps))
    assert steps[0] <= most + 1


def test_pause_reports_all_steps_before_its_answer() -> None:
    """Whatever comes after the answer, such as an update of the weights, may take longer than anyone waits."""
    gen, sent = FakeGenerator(), list[Any]()
    gen.left[0] = 3
    loop = EngineLoop(gen, incoming := SimpleQueue(), sent.append)  # type: ignore[arg-type]
    loop.turn()
    assert isinstance(sent.pop(), StepEnded)
    incoming.put(Call(7, "pause", (), {}))
    incoming.put(Call(8, "resume", (), {}))
    loop.turn()
    report, answer, *_ = sent
    assert isinstance(report, StepEnded)
    assert report.stats is not None
    assert answer == Answer(7)
