"""Speculation changes no bit: tokens, logprobs and texts are the same with any drafts as without."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Turns, check_idle, families_in_turn, random_ids
from drafting import adversary
from handmade import let_pages_run_out

from fastgen import Generator, RequestOutput, SamplingParams, Speculation
from fastgen.kernels.drafts import propose

EAGER = Speculation(max_draft=5, row_cost=0.0, history_tokens=0)
FREE = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
REQUESTS = [
    (random_ids(1), replace(FREE, temperature=0)),
    (random_ids(70), replace(FREE, temperature=0.7, logprobs=3, prompt_logprobs=1)),
    (random_ids(33), replace(FREE, top_p=0.9, n=3)),
    (random_ids(5), replace(FREE, top_k=20, min_p=0.02, return_sampling_mask=True, min_tokens=9, max_tokens=40)),
    (random_ids(64), replace(FREE, repetition_penalty=1.3, frequency_penalty=0.2)),
    (random_ids(40), replace(FREE, logit_bias={5: 3.0, 6: -100.0}, stop_token_ids=tuple(range(3, 40)))),
    (random_ids(9), replace(FREE, mask=Turns(), temperature=0.9)),
    (random_ids(21), replace(FREE, speculate=False)),
    (random_ids(64), replace(FREE, max_tokens=1)),
]


def completions(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.completions, (output.prompt_logprobs or [])[1:]) for output in outputs]


SCHEDULES: list[dict[str, Any]] = [
    {"page_size": 64, "max_seqs": 16},
    {"page_size": 16, "max_seqs": 2, "max_step_tokens": 16},
    {"page_size": 1, "max_seqs": 5, "max_step_tokens": 40},
    {"page_size": 16, "num_pages": 18, "max_seqs": 16, "max_step_tokens": 40, "host_cache_gb": 0.001},
]


@pytest.mark.parametrize(("family", "schedule"), families_in_turn(SCHEDULES), indirect=["family"])
def test_drafts_of_an_adversary_change_no_bit(
    schedule: dict[str, Any], family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = zip(*REQUESTS, strict=True)
    with Generator(family, speculate=False) as gen:
        expected = gen.generate(prompts, params)
        vocab = gen.model_config.vocab_size
    adversary(monkeypatch, expected, vocab)
    with Generator(family, speculate=EAGER, **schedule) as gen:
        if "num_pages" in schedule:
            let_pages_run_out(gen)
        for _ in range(2):
            assert completions(gen.generate(prompts, params)) == completions(expected)
            check_idle(gen)
        stats = gen.stats
        assert stats.drafted > stats.accepted > 0
        assert stats.saved_steps > 0
        assert "drafts right" in str(stats)


def test_texts_and_events_end_where_they_do_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop strings, stop ids and the last token come in the middle of drafts."""
    prompts, whole = ["hello", "what is fastgen?"], SamplingParams(max_tokens=50, n=3, seed=0, min_tokens=2)
    with Generator(speculate=False) as plain, Generator(speculate=EAGER, page_size=16) as gen:
        adversary(monkeypatch, plain.generate(prompts, whole), 1024)
        for stop, shown in zip(((), (" ",), ("e", "qu"), ("help you",), ("?",)), itertools.cycle((False, True))):
            params, accepted = replace(whole, stop=stop, include_stop_str_in_output=shown), gen.stats.accepted
            expected = plain.generate(prompts, params)
            assert completions(gen.generate(prompts, params)) == completions(expected)
            gen.add("hello", params)
            text, ids = ["", "", ""], [[], [], []]  # type: ignore[var-annotated]
            while gen.unfinished:
                for event in gen.step():
                    assert len(event.token_ids) == len(event.logprobs) == len(event.raw_logprobs)
                    text[event.index] += event.text
                    ids[event.index] += event.token_ids
            assert gen.stats.accepted > accepted
            check_idle(gen)
            assert text == [completion.text for completion in expected[0].completions]
            assert ids == [completion.token_ids for completion in expected[0].completions]


def test_history_drafts_the_answers_of_the_same_prompt() -> None:
    params = SamplingParams(max_tokens=60, temperature=0)
    questions = "what is 12 * 13?", "what is fastgen?", "hello"
    prompts: list[Any] = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    with Generator(speculate="auto") as gen:
        first = gen.generate(prompts, params)
        steps = gen.stats.steps
        assert gen.history.tokens > 0
        second = gen.generate(prompts, params)
        assert completions(second) == completions(first)
        assert gen.stats.steps - steps < 0.7 * steps
        gen.history.clear()
        assert gen.history.tokens == 0
    with Generator(speculate="ngram") as gen:
        assert completions(gen.generate(prompts, params)) == completions(first)
        assert gen.history.tokens == 0


def slow_proposal(text: list[int], near: int, most: int) -> tuple[list[int], int, int]:
    """Return what `propose` should return, by comparing the text before every place with its end."""
    best, behind = 0, 1
    for place in range(1, len(text)):
        length = 0
        while length < min(16, place) and text[place - 1 - length] == text[-1 - length] >= 0:
            length += 1
        if length and near < place <= near + 6:
            length += 2
        if length and length >= best:
            best, behind = length, place
    if best < 5 and not near < behind <= near + 6:
        most = min(most, best)
    draft = [text[behind + at % (len(text) - behind)] for at in range(most)] if best else []
    return draft[: draft.index(-1)] if -1 in draft else draft, behind, best


def test_a_draft_repeats_what_followed_the_longest_match() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = [rng.randrange(-1, rng.choice((2, 4))) for _ in range(rng.randint(1, 60))]
        most, near = rng.randint(1, 9), rng.randint(-16, 60)
        found, *rest = propose(np.array(text, dtype=np.int32), near, most)
        assert (found.tolist(), *rest) == slow_proposal(text, near, most), (text, near, most)
