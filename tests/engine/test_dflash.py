"""DFlash heads: their drafts are those of a reference in torch, under any schedule, and they change no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import check_idle, random_ids
from drafting import adversary
from handmade import let_pages_run_out
from heads import DIALECTS, Reference, record, save_head

from fastgen import Generator, SamplingParams, Speculation

LENGTHS = (1, 70, 33, 5, 64, 96)
PROMPTS = [random_ids(length) for length in LENGTHS[:-1]]
PROMPTS.append(PROMPTS[1][:64] + random_ids(32, 5))
PARAMS = [
    SamplingParams(max_tokens=40, seed=number, ignore_eos=True, temperature=(0.0, 0.8)[number % 2], n=1 + number % 2)
    for number in range(len(PROMPTS))
]
SCHEDULES: list[dict[str, Any]] = [
    {"page_size": 64, "max_seqs": 8},
    {"page_size": 16, "max_seqs": 2, "max_step_tokens": 16},
    {"page_size": 1, "max_seqs": 5, "max_step_tokens": 40},
    {"page_size": 16, "num_pages": 12, "max_seqs": 6, "max_step_tokens": 40, "host_cache_gb": 0.001},
]


def eager(head: Path) -> Speculation:
    return Speculation(row_cost=0.0, history_tokens=0, head=head)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads draft even if nothing they draft is right, as with random weights."""
    monkeypatch.setattr("fastgen.engine.speculation.planning.BARREN", 10**9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_drafts_are_those_of_the_reference(
    dialect: str, schedule: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    """The text drafter is an adversary whose drafts are right, wrong, or right up to some token, so that any number of
    rows is rejected before the next draft. The second time, prompts are in the prefix cache or in the host tier."""
    first = int(dialect != "DeepSpec")
    head = save_head(tmp_path / "head", llama, dialect, reduced=200 if dialect == "speculators" else 0)
    with Generator(llama, speculate=False) as gen:
        expected = gen.generate(PROMPTS, PARAMS)
    adversary(monkeypatch, expected, gen.model_config.vocab_size)
    reference = Reference(llama, head, first)
    with Generator(llama, speculate=eager(head), **schedule) as gen:
        if "num_pages" in schedule:
            let_pages_run_out(gen)
        for _ in range(2):
            recorded = record(gen, monkeypatch)
            found = gen.generate(PROMPTS, PARAMS)
            assert [output.completions for output in found] == [output.completions for output in expected]
            assert recorded.check(reference, first, 6, expected) > 100
            check_idle(gen)
        stats = gen.stats
        assert stats.cached_tokens > 0
        assert stats.drafted > stats.accepted > 0
        assert stats.head_drafted > 0
        if "num_pages" in schedule:
            assert stats.preemptions > 0, stats
            assert stats.pages_loaded > 0


def test_a_head_changes_no_bit(family: Path, tmp_path: Path, always: None) -> None:
    params = [replace(each, logprobs=2) for each in PARAMS]
    with Generator(family, speculate=False) as gen:
        expected = gen.generate(PROMPTS, params)
    head = save_head(tmp_path, family)
    with Generator(family, speculate=eager(head), page_size=16, max_seqs=8, max_step_tokens=40) as gen:
        found = gen.generate(PROMPTS, params)
        assert [output.completions for output in found] == [output.completions for output in expected]
        assert gen.stats.head_drafted > 0
        check_idle(gen)
