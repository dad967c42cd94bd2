"""Traces, the line in the log, and the cost of the loop."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Checkpoint, Turns, random_ids
from invariants import check_scheduler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import bench_host

from fastgen import Generator, SamplingParams
from fastgen.device.profiling import span

pytestmark = pytest.mark.timeout(120)
PARTS = ("schedule", "launch", "collect", "update")
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, speculate=False)


def spans(path: Path) -> Counter[str]:
    """Count the named ranges in a trace."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


# Blocks.


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_the_parts_of_so_many_steps(gen: Generator, tmp_path: Path, name: str) -> None:
    alone = gen.generate([random_ids(9)], PARAMS)[0].completions
    with gen.profile(tmp_path / name, steps=5):
        assert gen.generate([random_ids(9)], PARAMS)[0].completions == alone
    found = spans(tmp_path / name)
    assert [found[part] for part in PARTS] == [5, 5, 4, 4]  # nothing was in flight before the first


def test_a_trace_of_a_masked_step_shows_its_sampler_and_torchs_operations(gen: Generator, tmp_path: Path) -> None:
    with gen.profile(str(tmp_path / "trace.json"), steps=3):
        gen.generate([random_ids(9)], replace(PARAMS, mask=Turns()))
    assert spans(tmp_path / "trace.json")["sample"] == 3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"aten::empty", "aten::embedding"} <= {event["name"] for event in events if event.get("cat") == "cpu_op"}


def test_a_block_that_ends_early_writes_its_steps(gen: Generator, tmp_path: Path) -> None:
    def two_steps() -> None:
        with gen.profile(tmp_path / "trace.json"):
            gen.step()
            gen.step()
            raise KeyboardInterrupt

    gen.add(random_ids(9), PARAMS, id="a")
    with pytest.raises(KeyboardInterrupt):
        two_steps()
    gen.step()
    assert spans(tmp_path / "trace.json")["schedule"] == 2
    gen.abort("a")


@pytest.mark.parametrize(
    ("path", "steps", "error", "message"),
    [
        ("trace.json", 0, ValueError, "steps"),
        ("trace.json", 1.5, TypeError, "steps"),
        (".", 1, ValueError, "in a folder that exists"),
        ("nowhere/trace.json", 1, ValueError, "in a folder that exists"),
    ],
)
def test_bad_arguments(
    path: str, steps: Any, error: type[Exception], message: str, gen: Generator, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message), gen.profile(tmp_path / path, steps=steps):
        pass


def test_one_trace_at_a_time(gen: Generator, tmp_path: Path) -> None:
    with (
        gen.profile(tmp_path / "outer.json"),
        pytest.raises(ValueError, match="a trace is being recorded"),
        gen.profile(tmp_path / "inner.json"),
    ):
        pass
    with (
        torch.profiler.profile(),
        pytest.raises(ValueError, match="a trace is being recorded"),
        gen.profile(tmp_path / "inner.json"),
    ):
        pass
    for name, steps in (("first.json", 1), ("second.json", 2)):
        with gen.profile(tmp_path / name, steps=steps):
            gen.generate([[5]], PARAMS)
    assert [spans(tmp_path / name)["launch"] for name in ("first.json", "second.json")] == [1, 2]


def test_spans_show_in_a_users_own_trace_and_cost_nothing_without(gen: Generator) -> None:
    with torch.profiler.profile() as profiler:
        gen.generate([[5]], PARAMS)
    assert {event.key for event in profiler.key_averages()} >= set(PARTS)
    assert span("one") is span("other")


# The line in the log.


def test_a_line_in_the_log_tells_how_it_goes(
    gen: Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastgen.generator")
    gen.generate([random_ids(9)] * 3, PARAMS)
    assert not caplog.records, "it has not taken long"
    monkeypatch.setattr("fastgen.engine.loop.LOG_SECONDS", 0.0)
    gen.add(random_ids(9), PARAMS, "a")
    gen.step()
    gen.step()
    first, second = (record.getMessage() for record in caplog.records)
    assert "running 1, waiting 0, finished 0; 0 tokens in, 1 out, 0.0 tok/s in" in second
    assert "pages 1/" in second
    assert "preemptions 0" in second
    assert "\n" not in first + second
    gen.abort("a")


def test_rates_are_of_the_interval(gen: Generator) -> None:
    gen.generate([random_ids(30)], PARAMS)
    before = gen.stats
    gen.generate([random_ids(11)], replace(PARAMS, max_tokens=3))
    part = gen.stats.since(before)
    assert (part.prefilled_tokens, part.generated_tokens, part.steps, part.finished) == (11, 3, 3, 1)
    assert part.prefilled_per_second == pytest.approx(11 / part.step_seconds)
    assert part.tokens_per_second == pytest.approx(3 / part.step_seconds)
    assert part.pages == before.pages
    assert f"{part.prefilled_per_second:.1f} tok/s in, {part.tokens_per_second:.1f} tok/s out" in str(part)


# The cost of the loop. The bounds are wide, because the machine may be busy. scripts/bench/bench_host.py measures it.


def test_the_loop_costs_little_and_no_more_at_long_contexts(checkpoint: Checkpoint) -> None:
    model = checkpoint("Llama", max_position_embeddings=32768)
    steps, windows = 64, 3
    with (
        bench_host.decoding(256, 100, steps * windows * 5, model=model) as short,
        bench_host.decoding(256, 30_000, steps * windows * 5, model=model) as long,
    ):
        for _ in range(steps):  # the lists of tokens have grown once
            long._loop.advance()
            short._loop.advance()
        found = []
        for _ in range(3):  # side by side
            found.append((bench_host.seconds(short, steps, windows), bench_host.seconds(long, steps, windows)))
            if found[-1][1] < 1.5 * found[-1][0]:
                break
        assert min(costs[0] for costs in found) < 3e-3
        assert found[-1][1] < 1.5 * found[-1][0], found


def test_nothing_of_a_sequence_is_kept_when_it_has_ended() -> None:
    with bench_host.decoding(8, 100, 300) as gen:
        while gen.unfinished:
            gen._loop.advance()
        check_scheduler(gen._loop.scheduler)
        assert not gen._loop.owners
        assert gen.stats.pages_used == 0
