"""The schedule never shows: on the CPU, tokens and logprobs are the same to the bit, however the work is
divided into steps, pages and batches, and whatever other requests there are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FEW, Turns, check_idle, families_in_turn, random_ids
from handmade import let_pages_run_out

from fastgen import Generator, Request, RequestOutput, SamplingParams
from fastgen.device.threads import FreeCores
from fastgen.model.packed import packing
from fastgen.request import Completion

SHORT = SamplingParams(max_tokens=16, seed=7, ignore_eos=True)
REQUESTS = [
    (random_ids(1), replace(SHORT, temperature=0)),
    (random_ids(70), replace(SHORT, temperature=0, logprobs=3, prompt_logprobs=2)),
    (random_ids(33), replace(SHORT, temperature=0.8, top_p=0.9)),
    (random_ids(5), replace(SHORT, top_k=20, min_p=0.05, seed=-1, return_sampling_mask=True)),
    (random_ids(64), replace(SHORT, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)),
    (random_ids(100), replace(SHORT, temperature=1.3, logit_bias={5: 3.0, 6: -100.0, 7: 2.5}, prompt_logprobs=0)),
    (random_ids(17), replace(SHORT, temperature=0, frequency_penalty=0.3, repetition_penalty=1.1)),
    (random_ids(45), replace(SHORT, n=3)),
    (random_ids(20), replace(SHORT, temperature=2.0, min_tokens=4, stop_token_ids=tuple(range(3, 60)))),
    (random_ids(9), replace(SHORT, mask=Turns(), temperature=0.9)),
    (random_ids(40), replace(SHORT, mask=Turns(), temperature=0, n=2)),
]

Answer = tuple[list[Completion], list[float], list[dict[int, float]] | None, list[int] | None]


def answer(output: RequestOutput) -> Answer:
    """Return the parts of an output that must not change."""
    return output.completions, (output.prompt_logprobs or [])[1:], output.prompt_top_logprobs, output.prompt_ranks


def answers(gen: Generator, requests: list[tuple[list[int], SamplingParams]] = REQUESTS) -> list[Answer]:
    prompts, params = zip(*requests, strict=True)
    found = [answer(output) for output in gen.generate(prompts, params)]
    check_idle(gen)
    return found


@pytest.fixture
def alone(family: Path) -> list[Answer]:
    """Return the answer to each request by itself."""
    return each_alone(family)


@cache
def each_alone(family: Path) -> list[Answer]:
    with Generator(family) as gen:
        found = [answers(gen, [request])[0] for request in REQUESTS]
    said = [completion.token_ids for completions, *_ in found for completion in completions]
    assert len({tuple(ids) for ids in said}) > len(REQUESTS)
    return found


SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {"page_size": 64, "max_seqs": 32, "max_step_tokens": 4096},
    "two at a time": {"page_size": 16, "max_seqs": 2, "max_step_tokens": 512},
    "chunks of 7": {"page_size": 16, "max_seqs": 7, "max_step_tokens": 7},
    "chunks of a page": {"page_size": 16, "max_seqs": 16, "max_step_tokens": 16},
    "chunks of a large page": {"page_size": 64, "max_seqs": 32, "max_step_tokens": 64},
    "short chunks next to decodes": {"page_size": 16, "max_seqs": 3, "max_prefill_tokens": 5},
    "pages of 1": {"page_size": 1, "max_seqs": 32, "max_step_tokens": 100},
}


@pytest.mark.parametrize(("family", "schedule"), families_in_turn([*SCHEDULES]), indirect=["family"])
def test_batches_and_chunks_change_no_bit(schedule: str, family: Path, alone: list[Answer]) -> None:
    with Generator(family, **SCHEDULES[schedule]) as gen:
        assert answers(gen) == alone


@pytest.mark.skipif(
    packing(torch.bfloat16, deterministic=True) is None,
    reason="deterministic products in bfloat16 need a CPU with AVX-512, and with AMX a compiler",
)
def test_batches_and_threads_change_no_bit_in_bfloat16(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreeCores, "update", lambda self: 64)  # steps take all threads that torch is set to
    before, found = torch.get_num_threads(), []
    schedules = [{"max_seqs": 1}, SCHEDULES["all at once"], SCHEDULES["chunks of 7"], SCHEDULES["chunks of a page"]]
    try:
        for threads, schedule in zip((1, 2, 4, 16), schedules, strict=True):
            torch.set_num_threads(threads)
            with Generator(llama, dtype="bfloat16", deterministic=True, **schedule) as gen:
                found.append(answers(gen))
    finally:
        torch.set_num_threads(before)
    assert found == found[:1] * len(found)
    assert found[0] != each_alone(llama), "in float32 the logprobs are others"


@pytest.mark.parametrize("family", FEW[1:2], indirect=True)
def test_one_token_per_step_changes_no_bit(family: Path, alone: list[Answer]) -> None:
    chosen = [2, 4, 9]
    with Generator(family, max_seqs=1, max_step_tokens=1, page_size=16) as gen:
        assert answers(gen, [REQUESTS[i] for i in chosen]) == [alone[i] for i in chosen]
        assert gen.stats.steps > sum(len(REQUESTS[i][0]) for i in chosen)


LONG = replace(SHORT, max_tokens=36)
GROWING = [  # the last ones are preempted first
    (random_ids(45), LONG),
    (random_ids(30), replace(LONG, mask=Turns(), n=2)),
    (random_ids(41), replace(LONG, temperature=0, prompt_logprobs=1)),
    (random_ids(33), replace(LONG, repetition_penalty=1.2, frequency_penalty=0.2, logprobs=1)),
]


@cache
def growing_alone(family: Path) -> list[Answer]:
    with Generator(family) as gen:
        return [answers(gen, [request])[0] for request in GROWING]


@pytest.mark.parametrize(("family", "pages"), families_in_turn([(1, 240), (16, 18), (32, 5)]), indirect=["family"])
def test_preemptions_change_no_bit(pages: tuple[int, int], family: Path) -> None:
    page_size, num_pages = pages
    with Generator(family, page_size=page_size, num_pages=num_pages, max_seqs=16, max_step_tokens=40) as gen:
        let_pages_run_out(gen)
        assert answers(gen, GROWING) == growing_alone(family)
        assert gen.stats.preemptions > 0


@pytest.mark.parametrize("family", FEW[1:2], indirect=True)
def test_priorities_change_no_bit(family: Path) -> None:
    with Generator(family, page_size=16, num_pages=18, max_seqs=16, max_step_tokens=40) as gen:
        let_pages_run_out(gen)
        requests = [Request(*pair, id=place, priority=-place) for place, pair in enumerate(GROWING)]
        outputs = {output.id: answer(output) for output in gen.stream(requests)}
        assert [outputs[place] for place in range(len(GROWING))] == growing_alone(family)
        assert gen.stats.preemptions > 0
        for wrong in ("high", 0.5, None):
            with pytest.raises(TypeError, match="priority must be an integer"):
                gen.add([5], priority=wrong)  # type: ignore[arg-type]
        check_idle(gen)


@pytest.mark.parametrize("family", FEW[2:3], indirect=True)
def test_neighbours_aborted_midway_change_no_bit(family: Path, alone: list[Answer]) -> None:
    with Generator(family, page_size=16, num_pages=24, max_seqs=8, max_step_tokens=24) as gen:
        doomed = [gen.add(random_ids(50, seed=i), replace(SHORT, max_tokens=100)) for i in range(len(REQUESTS))]
        found: list[Answer | None] = [None] * len(REQUESTS)
        for output in gen.stream(Request(*request, id=i) for i, request in enumerate(REQUESTS)):
            found[int(output.id)] = answer(output)
            gen.abort([doomed.pop()])
        gen.take_events()
        check_idle(gen)
    assert found == alone


@pytest.mark.parametrize("family", FEW, indirect=True)
def test_samples_do_not_depend_on_their_number(family: Path) -> None:
    params = replace(SHORT, temperature=0.9, logprobs=2)
    with Generator(family, page_size=16, max_seqs=5, max_step_tokens=32) as gen:
        one, two, four = (gen.generate(random_ids(35), replace(params, n=n))[0].completions for n in (1, 2, 4))
    assert one == four[:1]
    assert two == four[:2]
    assert len({tuple(completion.token_ids) for completion in four}) == 4
