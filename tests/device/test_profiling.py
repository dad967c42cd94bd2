"""Traces, the line in the log, and the cost of the loop."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Checkpoint, Turns, random_ids
from stub_runner import decoding, seconds

from fastgen import Generator, SamplingParams

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
    with gen.profile(tmp_path / name, steps=3):
        gen.generate([random_ids(9)], replace(PARAMS, mask=Turns()))
    assert spans(tmp_path / name)["sample"] == 3


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


def test_what_cannot_be_traced(gen: Generator, tmp_path: Path) -> None:
    kinds: list[tuple[str, Any, type[Exception], str]] = [
        ("trace.json", 0, ValueError, "steps"),
        ("trace.json", 1.5, TypeError, "steps"),
        ("nowhere/trace.json", 1, ValueError, "in a folder that exists"),
    ]
    for path, steps, error, message in kinds:
        with pytest.raises(error, match=message), gen.profile(tmp_path / path, steps=steps):
            pass
    for outer in (gen.profile(tmp_path / "outer.json"), torch.profiler.profile()):
        with outer, pytest.raises(ValueError, match="a trace is being recorded"), gen.profile(tmp_path / "inner.json"):
            pass
    with torch.profiler.profile() as profiler:
        gen.generate([[5]], PARAMS)
    assert {event.key for event in profiler.key_averages()} >= set(PARTS), "spans show in a user's own trace"


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
    _, second = (record.getMessage() for record in caplog.records)
    assert "running 1, waiting 0, finished 0; 0 tokens in, 1 out, 0.0 tok/s in" in second, "of this interval"
    gen.abort("a")


# The cost of the loop. The bounds are wide, because the machine may be busy.


def test_the_loop_costs_little_and_no_more_at_long_contexts(checkpoint: Checkpoint) -> None:
    model = checkpoint("Llama", max_position_embeddings=32768)
    steps, windows = 64, 3
    with (
        decoding(256, 100, steps * windows * 5, model=model) as short,
        decoding(256, 30_000, steps * windows * 5, model=model) as long,
    ):
        for _ in range(steps):  # the lists of tokens have grown once
            long._loop.advance()
            short._loop.advance()
        found = []
        for _ in range(3):  # side by side
            found.append((seconds(short, steps, windows), seconds(long, steps, windows)))
            if found[-1][1] < 1.5 * found[-1][0]:
                break
        assert min(costs[0] for costs in found) < 3e-3
        assert found[-1][1] < 1.5 * found[-1][0], found
