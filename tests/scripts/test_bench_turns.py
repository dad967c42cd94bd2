"""The conversations of `bench.py gpu --turns`: what is asked when, what is timed; a tier not used is noticed."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import bench_gpu
import bench_limits
import bench_turns
from bench_turns import SMALL, Turns

from fastgen import SamplingParams
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.model.config import parse_config
from fastgen.request import Event


class FakeEngine:
    """Answers with tokens that nobody else has; a prompt waits `prompt[0] % 3` steps for the first, of 1 second each.

    It knows the full pages of all that it has said, and takes them to have come from the host where `on_host`.
    """

    def __init__(self, on_host: bool = True, page_size: int = SMALL.page_size, short_by: int = 0) -> None:
        self.now = 0.0
        self.asked: list[list[int]] = []
        self.said: list[list[int]] = []
        self.counts: list[tuple[int, int]] = []  # (running, finished) at each step
        self.stats = SimpleNamespace(pages_loaded=0)
        self.model_config = SimpleNamespace(vocab_size=1000)
        self._on_host, self._page_size, self._short_by = on_host, page_size, short_by
        self._tokens = itertools.count(10**6)
        self._known: set[tuple[int, ...]] = set()
        self._running: dict[int, tuple[list[int], int, int]] = {}  # id -> (tokens, those left, steps to wait)
        self._cached: dict[int, int] = {}

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        id, most = len(self.asked), (len(prompt) - 1) // self._page_size * self._page_size
        ends = range(0, most + 1, self._page_size)
        self._cached[id] = max(end for end in ends if end == 0 or tuple(prompt[:end]) in self._known)
        if self._on_host:
            self.stats.pages_loaded += self._cached[id] // self._page_size
        assert params.max_tokens is not None
        assert params.ignore_eos
        self.asked.append(list(prompt))
        self._running[id] = list(prompt), params.max_tokens - self._short_by, prompt[0] % 3
        return id

    def step(self) -> list[Event]:
        self.counts.append((len(self._running), len(self.said)))
        self.now += 1
        return [event for id in list(self._running) if (event := self._advance(id)) is not None]

    def _advance(self, id: int) -> Event | None:
        tokens, left, wait = self._running[id]
        if wait:
            self._running[id] = tokens, left, wait - 1
            return None
        new = [next(self._tokens)] if left else []
        tokens += new
        self._running[id] = tokens, left - 1, 0
        if left <= 1:
            del self._running[id]
            self.said.append(tokens)
            self._known |= {tuple(tokens[:end]) for end in range(0, len(tokens), self._page_size)}
        reason = "length" if left <= 1 else None
        return Event(id, 0, new, "", reason, cached_tokens=self._cached[id])


def test_the_sizes_are_those_of_the_plan() -> None:
    turns = Turns()
    assert (turns.context, turns.known) == (1500, 1250)
    assert (turns.pages, turns.pool_pages) == (256 * 24, 256 * 8)
    assert turns.active * 24 <= turns.pool_pages, "those that are active fit, or there would be preemptions"
    assert [turns.cached(tokens) for tokens in (1, 64, 65, 1250)] == [0, 0, 64, 19 * 64]


@pytest.mark.parametrize("turns", [Turns(), SMALL, Turns(page_size=16)])
def test_the_host_tier_holds_all_conversations(turns: Turns) -> None:
    for name, dtype in (("mistral7", "bfloat16"), ("qwen14", "bfloat16"), ("mistral7", "float32")):
        model = parse_config(bench_limits.MODELS[name])
        options = GeneratorOptions(device="cpu", dtype=dtype, page_size=turns.page_size)
        page_bytes = EngineConfig.make(model, options).page_bytes(model)
        assert int(turns.host_gb(model, dtype) * 1e9 / page_bytes) == turns.pages


def test_answers_come_in_order_and_the_next_is_added_as_one_ends() -> None:
    engine = FakeEngine()
    prompts = [[first, 7, 8] for first in (5, 3, 4, 9, 10, 11, 2)]
    answers = bench_turns.ask(engine, prompts, generated=4, active=3, clock=lambda: engine.now)
    assert [answer.ttft for answer in answers] == [prompt[0] % 3 + 1 for prompt in prompts]
    said = {tuple(tokens[:3]): tokens[3:] for tokens in engine.said}
    assert [answer.token_ids for answer in answers] == [said[tuple(prompt)] for prompt in prompts]
    assert engine.asked == prompts
    assert all(running == min(3, len(prompts) - finished) for running, finished in engine.counts)


def test_an_answer_that_ends_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="3 tokens instead of 4"):
        bench_turns.ask(FakeEngine(short_by=1), [[1, 2]], generated=4, active=1)
    with pytest.raises(RuntimeError, match="0 tokens instead of 4"):
        bench_turns.ask(FakeEngine(short_by=4), [[1, 2]], generated=4, active=1)


def test_a_turn_asks_the_whole_conversation_and_new_tokens() -> None:
    engine, count = FakeEngine(), SMALL.conversations
    rounds = bench_turns.play(engine, SMALL, 1000, clock=lambda: engine.now)
    assert [len(answers) for answers in rounds] == [count] * SMALL.turns
    assert max(running for running, _ in engine.counts) == SMALL.active
    orders = []
    for turn in range(SMALL.turns):
        asked = engine.asked[turn * count : (turn + 1) * count]
        before = turn * (SMALL.new + SMALL.generated)
        assert {len(prompt) for prompt in asked} == {before + SMALL.new}
        said = engine.said[(turn - 1) * count : turn * count] if turn else [[]] * count
        assert sorted(prompt[:before] for prompt in asked) == sorted(said)
        orders.append([tuple(prompt[: SMALL.new]) for prompt in asked])
    assert {len(set(order)) for order in orders} == {count}
    assert len({tuple(order) for order in orders}) == SMALL.turns, "each round has an order of its own"
    assert max(map(len, engine.said)) == SMALL.context
    lengths = [turn * (SMALL.new + SMALL.generated) for turn in range(1, SMALL.turns)]
    cached = [{answer.cached_tokens for answer in answers} for answers in rounds]
    assert cached == [{0}, *({SMALL.cached(length)} for length in lengths)]


def test_a_conversation_alone_is_known_but_for_what_is_new() -> None:
    engine: Any = FakeEngine()
    assert len(bench_turns.alone_from_host(engine, SMALL)) == SMALL.repeats
    first, others, last = (
        [prompt for prompt in engine.asked if len(prompt) == length]
        for length in (SMALL.known - SMALL.generated, SMALL.context, SMALL.known + SMALL.new)
    )
    assert len(first) + len(others) + len(last) == len(engine.asked)
    assert [prompt[: len(start)] for prompt, start in zip(last, first, strict=True)] == first
    assert sum(SMALL.cached(len(prompt)) for prompt in others) > SMALL.pool_pages * SMALL.page_size
    assert engine.counts[-1][0] == 1, "alone"
    computed: Any = FakeEngine()
    assert len(bench_turns.alone_computed(computed, SMALL)) == SMALL.repeats
    assert {len(prompt) for prompt in computed.asked} == {SMALL.known + SMALL.new}


def test_a_conversation_that_was_not_on_the_host_is_noticed() -> None:
    still_in_the_pool: Any = FakeEngine(on_host=False)
    with pytest.raises(RuntimeError, match="48 were found and 0 pages loaded from the host, not 48 in 3"):
        bench_turns.alone_from_host(still_in_the_pool, SMALL)
    forgetful: Any = FakeEngine(page_size=1000)
    with pytest.raises(RuntimeError, match="0 were found and 0 pages loaded"):
        bench_turns.alone_from_host(forgetful, SMALL)


@pytest.mark.parametrize(
    ("name", "saved", "loaded", "share", "right"),
    [
        ("host", 9, 9, 0.99, True),
        ("host", 9, 0, 0.99, False),
        ("host", 0, 9, 0.99, False),
        ("host", 9, 9, 0.5, False),
        ("cache", 0, 0, 0.3, True),
        ("cache", 9, 0, 0.3, False),
        ("recompute", 0, 0, 0.0, True),
        ("recompute", 0, 0, 0.1, False),
    ],
)
def test_an_engine_that_did_something_else_is_noticed(
    name: str, saved: int, loaded: int, share: float, right: bool
) -> None:
    found = {"pages_saved": saved, "pages_loaded": loaded, "cached_share": share}
    if right:
        bench_turns.confirm(name, found)
    else:
        with pytest.raises(RuntimeError, match=rf"{name}: {saved} pages were saved and {loaded} loaded"):
            bench_turns.confirm(name, found)


def test_the_figures_are_milliseconds() -> None:
    assert bench_turns.spread([0.001 * each for each in range(1, 12)]) == pytest.approx(
        {"median": 6.0, "mean": 6.0, "p90": 10.0}
    )
    found = bench_turns.alone(from_host=[0.02, 0.01, 0.03], computed=[0.05, 0.08, 0.06])
    assert found["times_faster"] == pytest.approx(3)


def test_the_three_engines_run_small(tmp_path: Path) -> None:
    bench_gpu.main(["--smoke", "--turns", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "mistral7-cpu-turns.json").read_text())
    assert list(report["engines"]) == ["host", "cache", "recompute"]
    for found in report["engines"].values():
        assert found["engine"]["num_pages"] == SMALL.pool_pages
        assert list(found["ttft_ms"]) == ["turn 1", "turn 2", "turn 3"]
        assert found["tokens_per_second"] > 0
    shares = [found["cached_share"] for found in report["engines"].values()]
    assert shares[0] > max(0.9, shares[1])
    assert shares[2] == 0
    assert report["alone"]["times_faster"] > 0


@pytest.mark.parametrize("options", ["--turns --no-prefix-cache"])
def test_what_makes_no_sense_is_refused(options: str) -> None:
    with pytest.raises(SystemExit):
        bench_gpu.parse(options.split())
