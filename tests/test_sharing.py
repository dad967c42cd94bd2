"""Cached prefixes, forks, trees of prompts and a host tier change no bit on the CPU in float32.

The expected answers come from a Generator that caches nothing and runs one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import FEW, FIRST_HALF, SECOND_HALF, Turns, check_idle, families_in_turn, random_ids
from handmade import let_pages_run_out
from test_schedules import Answer, answers

from fastgen import Generator, SamplingParams
from fastgen.engine.options import token_bytes
from fastgen.model.config import read_config

SHORT = SamplingParams(max_tokens=14, seed=7, ignore_eos=True)
SYSTEM = random_ids(37, seed=1)
SHOTS = [SYSTEM + random_ids(length, seed=2) for length in (11, 27)]  # to the end of a page, and beyond
REQUESTS = [
    (SYSTEM, replace(SHORT, n=3)),
    (SHOTS[0] + random_ids(5, seed=3), replace(SHORT, temperature=0, logprobs=2)),
    (SHOTS[0] + random_ids(5, seed=3), replace(SHORT, temperature=0.7, top_p=0.9, n=2)),
    (SHOTS[0] + random_ids(30, seed=4), replace(SHORT, repetition_penalty=1.2, frequency_penalty=0.3, n=2)),
    (SHOTS[0], replace(SHORT, prompt_logprobs=1)),
    (SHOTS[1], replace(SHORT, n=4, seed=8)),
    (SHOTS[1], replace(SHORT, n=2, seed=8)),
    (SHOTS[1] + random_ids(40, seed=5), replace(SHORT, mask=Turns(), n=2)),
    (SHOTS[1] + random_ids(3, seed=6), replace(SHORT, top_k=9, return_sampling_mask=True)),
]


@pytest.fixture
def apart(family: Path) -> list[Answer]:
    """Return the answer to each request by itself, with its samples one after another."""
    return each_apart(family)


@cache
def each_apart(family: Path) -> list[Answer]:
    with Generator(family, prefix_cache=False, max_seqs=1) as gen:
        found = [answers(gen, [request])[0] for request in REQUESTS]
        assert gen.stats.cached_tokens == 0
    return found


def host_gb(folder: Path, pages: float, page_size: int) -> float:
    return pages * page_size * token_bytes(read_config(folder), "float32") / 1e9


OPTIONS: dict[str, dict[str, Any]] = {
    "all at once": {"page_size": 16, "max_seqs": 32},
    "forks without a cache": {"page_size": 16, "max_seqs": 32, "prefix_cache": False},
    "chunks of 7": {"page_size": 4, "max_seqs": 7, "max_step_tokens": 7},
    "pages of 1": {"page_size": 1, "max_seqs": 5, "max_step_tokens": 64},
}


@pytest.mark.parametrize(("family", "name"), families_in_turn([*OPTIONS]), indirect=["family"])
def test_a_cold_and_a_warm_cache_change_no_bit(name: str, family: Path, apart: list[Answer]) -> None:
    with Generator(family, **OPTIONS[name]) as gen:
        for _ in range(2):
            assert answers(gen, REQUESTS) == apart
        assert gen.stats.cached_tokens > 500


@pytest.mark.parametrize(("family", "page_size"), families_in_turn([3, 16]), indirect=["family"])
def test_a_host_tier_that_thrashes_changes_no_bit(page_size: int, family: Path, apart: list[Answer]) -> None:
    options = {"page_size": page_size, "num_pages": 176 // page_size, "max_seqs": 3, "max_step_tokens": 40}
    with Generator(family, **options, host_cache_gb=host_gb(family, 200 / page_size, page_size)) as gen:
        for _ in range(2):
            assert answers(gen, REQUESTS) == apart
        assert gen.stats.pages_saved > 20
        assert gen.stats.pages_loaded > 0


@pytest.mark.parametrize("family", FIRST_HALF, indirect=True)
def test_preempted_sequences_that_find_their_pages_change_no_bit(family: Path, apart: list[Answer]) -> None:
    with Generator(family, page_size=8, num_pages=24, max_seqs=16, max_step_tokens=50) as gen:
        let_pages_run_out(gen)
        assert answers(gen, REQUESTS) == apart
        assert gen.stats.preemptions > 0


@pytest.mark.parametrize("family", SECOND_HALF, indirect=True)
def test_aborted_neighbours_change_no_bit(family: Path, apart: list[Answer]) -> None:
    """They share pages with the remaining requests, and leave their pages in the cache."""
    with Generator(family, page_size=8, num_pages=60, max_seqs=8, max_step_tokens=30) as gen:
        for round in range(2):
            doomed = [gen.add(*request) for request in REQUESTS]
            for _ in range(3 + 5 * round):
                gen.step()
            gen.abort(doomed)
            check_idle(gen)
            assert answers(gen, REQUESTS) == apart


@pytest.mark.parametrize("family", FEW, indirect=True)
def test_scores_do_not_depend_on_what_is_cached(family: Path) -> None:
    sequences = [prompt + random_ids(9, seed=9) for prompt, _ in REQUESTS]
    starts = [0, 5, 17, 33, 40, len(sequences[5]) - 1, 1, 20, 64]
    with Generator(family, prefix_cache=False) as gen:
        expected = gen.score(sequences, start=starts, temperature=0.8)
    with Generator(family, page_size=16) as gen:
        assert gen.score(sequences, start=starts, temperature=0.8)[1:] == expected[1:]
        cold = gen.stats.cached_tokens
        assert gen.score(sequences, start=starts, temperature=0.8)[1:] == expected[1:]
        assert gen.stats.cached_tokens > cold
