"""The Runner: scores and logprobs equal the ones of transformers, and forks draw what lanes with a prefill draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from called_graphs import Called, capturable
from conftest import FEW, VOCAB, allow, check_idle, families_in_turn, hf_logits, random_ids
from handmade import make_runner, siblings, start, table
from handmade import run as run_batch

from fastgen import Generator, SamplingParams
from fastgen.engine.prompt_scorer import SCORE_ROWS
from fastgen.engine.prompt_scores import ChunkTargets, Scored
from fastgen.engine.warm_up import capture
from fastgen.model.linear import ROW_TILE
from fastgen.request import Batch, Prefill

pytestmark = pytest.mark.timeout(60)  # the usual fault here is a loop that waits forever
PROMPTS = [random_ids(length) for length in (1, 2, 40, 90)]


def target_logprobs(folder: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return the logprobs of ids as transformers computes them, NaN at position 0."""
    logprobs = (hf_logits(folder, ids) / temperature).log_softmax(-1)
    return [math.nan, *logprobs[range(len(ids) - 1), ids[1:]].tolist()]


def close(found: list[float], expected: list[float]) -> bool:
    assert len(found) == len(expected)
    return np.allclose(found, expected, atol=1e-4, rtol=0, equal_nan=True)


# Scores.


@pytest.mark.parametrize(("family", "step"), families_in_turn([7, 2048]), indirect=["family"])
def test_scores_are_those_of_transformers(family: Path, step: int) -> None:
    with Generator(family, max_seqs=4, max_step_tokens=step, page_size=16) as gen:
        for temperature in (1.0, 0.5):
            expected = [target_logprobs(family, ids, temperature) for ids in PROMPTS]
            for found, wanted in zip(gen.score(PROMPTS, temperature=temperature), expected, strict=True):
                assert close(found, wanted)
            starts = [0, 2, 13, 90]
            for found, wanted, start in zip(gen.score(PROMPTS, starts, temperature), expected, starts, strict=True):
                assert close(found, wanted[start:])
        assert close(gen.score(PROMPTS[3:], start=7)[0], target_logprobs(family, PROMPTS[3])[7:])
        check_idle(gen)


def test_long_prompts_are_scored_piece_by_piece(llama: Path) -> None:
    ids = random_ids(500)
    with Generator(llama, max_step_tokens=2048) as gen:
        whole = gen.score([ids])[0]
        gen._runner.model.logits = limited(gen._runner.model.logits, 100)  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fastgen.engine.prompt_scorer.SCORE_ROWS", 100)
            assert gen.score([ids])[0][1:] == whole[1:]
    assert SCORE_ROWS >= 100
    assert close(whole, target_logprobs(llama, ids))


def limited(logits: Callable[[torch.Tensor], torch.Tensor], rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def checked(hidden: torch.Tensor, *out: object) -> torch.Tensor:
        assert len(hidden) <= rows
        return logits(hidden)

    return checked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[5, 6]], 3), "start is 3; it must be from 0 to the sequence's length, 2"),
        (([[5, 6]], -1), "start is -1"),
        (([[5, 6]], [0, 1]), "1 sequences and 2 starts"),
        (([[5, 6]], 1.0), "start must be an integer, or one for each sequence, not 1.0"),
        (([[5, 6]], 0, 0.0), "temperature is 0.0"),
        (([[5, 6]], 0, math.nan), "temperature is nan"),
        (([[5, 6], []],), "the prompt is empty"),
        (([[5, 6], [VOCAB]],), f"the id {VOCAB}, outside the vocabulary"),
        (([[5, 6], [5] * 513],), "has room for 512"),
        (([[5, 6], "hello"],), "no tokenizer files"),
    ],
)
def test_sequences_that_cannot_be_scored(llama: Path, arguments: tuple[Any, ...], message: str) -> None:
    with Generator(llama) as gen:
        with pytest.raises((ValueError, TypeError), match=message):
            gen.score(*arguments)
        assert gen.unfinished == 0
        check_idle(gen)
        assert len(gen.score([[5] * 512])[0]) == 512


# Logprobs.


@pytest.mark.parametrize("family", FEW, indirect=True)
def test_raw_logprobs_and_alternatives_are_those_of_transformers(family: Path) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.5, top_k=3, seed=3, logprobs=4, prompt_logprobs=20)
    params = replace(params, logit_bias={9: 2.0}, ignore_eos=True)
    with Generator(family, max_seqs=4, max_step_tokens=64, page_size=16) as gen:
        outputs = gen.generate(PROMPTS, params)
    for output in outputs:
        completion, prompt = output.completions[0], output.prompt_token_ids
        ids = prompt + completion.token_ids
        logprobs = hf_logits(family, ids).log_softmax(-1)
        every = target_logprobs(family, ids)
        assert close(completion.raw_logprobs, every[len(prompt) :])
        assert output.prompt_logprobs is not None
        assert close(output.prompt_logprobs, every[: len(prompt)])
        assert output.prompt_top_logprobs is not None
        assert completion.top_logprobs is not None
        tops = [*output.prompt_top_logprobs, *completion.top_logprobs]
        assert tops[0] == {}
        assert [len(top) for top in tops[1:]] == [20] * (len(prompt) - 1) + [4] * 10
        for top, row in zip(tops[1:], logprobs, strict=False):
            best = row.topk(len(top))
            assert close(list(top.values()), best.values.tolist())
            assert close(row[list(top)].tolist(), best.values.tolist())
        assert output.prompt_ranks is not None
        assert output.prompt_ranks[0] == 0
        for token, rank, top, row in zip(prompt[1:], output.prompt_ranks[1:], tops[1:], logprobs, strict=False):
            assert int((row > row[token] + 1e-4).sum()) < rank <= int((row > row[token] - 1e-4).sum())
            assert rank == list(top).index(token) + 1 if token in top else rank > len(top)


@pytest.mark.parametrize("family", FEW, indirect=True)
def test_chosen_ids_have_their_raw_logprobs_whatever_their_neighbours_choose(family: Path) -> None:
    """They follow the alternatives; ids that are among these are there once."""
    plain = SamplingParams(max_tokens=12, temperature=0.7, top_k=3, seed=3, ignore_eos=True)
    many = [7, 5, 7, *range(100, 150)]
    each = [
        replace(plain, logprob_token_ids=np.array([9, 5])), plain, replace(plain, logprobs=4),
        replace(plain, logprobs=2, logprob_token_ids=many), replace(plain, logprob_token_ids=(11,), speculate=False),
    ]  # fmt: skip
    prompts = [PROMPTS[0]] * len(each)
    with Generator(family, max_seqs=8, max_step_tokens=64, page_size=16) as gen:
        together = gen.generate(prompts, each)
        alone = [gen.generate(prompt, params)[0] for prompt, params in zip(prompts, each, strict=True)]
    tops = [output.completions[0].top_logprobs for output in together]
    assert tops == [output.completions[0].top_logprobs for output in alone]
    assert tops[1] is None
    completion, prompt = together[0].completions[0], together[0].prompt_token_ids
    logprobs = hf_logits(family, prompt + completion.token_ids).log_softmax(-1)[len(prompt) - 1 :]
    for position, row in enumerate(logprobs[:12]):
        for found in (tops[0], tops[3], tops[4]):
            assert found is not None
            assert close(list(found[position].values()), row[list(found[position])].tolist())
        first, fourth, last = (found[position] for found in (tops[0], tops[3], tops[4]) if found is not None)
        assert (list(first), list(last)) == ([9, 5], [11])
        best = row.topk(2).indices.tolist()
        assert list(fourth) == list(dict.fromkeys([*best, *many]))


def test_greedy_logprobs_are_0_and_lists_are_as_long_as_the_ids(gen: Generator) -> None:
    greedy = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
    ids = gen.generate([random_ids(8)], greedy)[0].completions[0].token_ids
    stop = ids[9]
    params = replace(greedy, stop_token_ids=[stop], logprobs=0, return_sampling_mask=True)
    alone, _ = gen.generate([random_ids(8)], params)[0], check_idle(gen)
    beside, _ = gen.generate([random_ids(8), random_ids(9)], [params, replace(greedy, logprobs=3)])
    assert alone.completions == beside.completions
    completion, length = alone.completions[0], ids.index(stop) + 1
    assert completion.token_ids == ids[:length]  # the stop token stays
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.logprobs == [0.0] * length
    assert len(completion.raw_logprobs) == length
    assert all(raw < 0 for raw in completion.raw_logprobs)
    assert not any(completion.top_logprobs or [])
    assert completion.sampling_mask == [[token] for token in completion.token_ids]


def test_a_request_may_only_score_its_prompt_and_lists_not_asked_for_are_none(gen: Generator) -> None:
    prompts = [random_ids(8)] * 2
    plain, output = gen.generate(
        prompts, [SamplingParams(max_tokens=2), SamplingParams(max_tokens=0, prompt_logprobs=1)]
    )
    assert plain.prompt_logprobs is plain.prompt_top_logprobs is plain.prompt_ranks is None
    assert plain.completions[0].top_logprobs is plain.completions[0].sampling_mask is None
    completion = output.completions[0]
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
    assert output.prompt_logprobs is not None
    assert output.prompt_top_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_top_logprobs) == 8
    assert close(output.prompt_logprobs, gen.score([random_ids(8)])[0])


# Forks.


@pytest.mark.parametrize(("family", "length"), families_in_turn([1, 15, 16, 17, 45]), indirect=["family"])
def test_a_fork_draws_what_a_lane_with_a_prefill_draws(family: Path, length: int) -> None:
    runner, prompt = make_runner(family), random_ids(length)
    expected, _ = siblings(runner, prompt, forked=False)
    runner.clear_lanes()
    found, _ = siblings(runner, prompt, forked=True)
    assert found == expected
    assert len({tuple(said[lane][0] for said in found) for lane in range(3)}) == 3, "each has its own seed"


def test_forks_go_on_in_graphs(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, prompt = make_runner(llama, max_seqs=ROW_TILE), random_ids(21)
    expected, _ = siblings(runner, prompt, forked=False)
    capturable(monkeypatch)
    capture(runner, [ROW_TILE])
    runner.clear_lanes()
    assert siblings(runner, prompt, forked=True)[0] == expected
    graphs = runner.graphs[False]
    assert isinstance(graphs, Called)
    assert len(graphs.ran) == 20


def test_forks_and_scores_of_a_prompt_go_together(llama: Path) -> None:
    runner, prompt = make_runner(llama), random_ids(37)
    score = ChunkTargets(0, 3, np.array(prompt[4:]), 2, 1.0)
    expected, alone = siblings(runner, prompt, forked=False, steps=3, score=score)
    found, together = siblings(runner, prompt, forked=True, steps=3, score=score)
    assert found == expected
    assert together.features == alone.features
    scored = alone.find(Scored)
    assert scored is not None
    assert len(scored.logprobs) == 33


def test_a_fork_has_a_mask_of_its_own(llama: Path) -> None:
    runner, prompt = make_runner(llama), random_ids(20)
    masks = {lane: np.zeros(-(-VOCAB // 32), dtype=np.int32) for lane in (0, 2, 3)}
    for lane, row in masks.items():
        allow(row, [50 + lane, 60 + lane])
    expected, _ = siblings(runner, prompt, forked=False, steps=3, masks=masks)
    found, _ = siblings(runner, prompt, forked=True, steps=3, masks=masks)
    assert found == expected
    assert all(found[0][lane][0] in (50 + lane, 60 + lane) for lane in masks)


def test_the_last_layer_computes_only_rows_that_are_drawn_from(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, drawn = make_runner(llama), []
    finish = runner.model.finish_rows
    monkeypatch.setattr(
        runner.model, "finish_rows", lambda x, q, rows, *rest: drawn.append(rows) or finish(x, q, rows, *rest)
    )
    siblings(runner, random_ids(20), forked=True, steps=0)
    assert drawn[-1].tolist() == [0, 24, 24, 24, 25], "lane 3, siblings, lane 5; of 26 rows"


def test_only_fresh_pages_are_wiped(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama)
    monkeypatch.setattr(type(runner.attention), "needs_clean_pages", True)
    runner.pool.values.fill_(math.nan)
    runner.pool.values[:, 9] = 7.0
    first = Prefill(0, 0, (5, 6, 7), sample=True)
    updates = *table(0, [4]), *table(1, [9])
    begun = (start(0, SamplingParams(), (), 3),)
    batch = Batch(prefills=(first,), starts=begun, page_updates=updates, fresh=(4,))
    said, _ = run_batch(runner, batch)
    assert said[0][0] >= 0
    assert runner.pool.values[:, 4].isfinite().all()
    assert (runner.pool.values[:, 9] == 7).all(), "it is another's, and shared"
    assert runner.pool.values[:, 5].isnan().all()
