"""Shared pages: cached prefixes, forks of one prefill, and how sharing changes admission."""

from __future__ import annotations

from typing import Any

import pytest
from hash_model import HashMask, expected, hopeful, make_config, make_sequence, page_moves
from invariants import check_scheduler
from simulation import Simulation, begin, run

from fastgen.engine.options import EngineConfig
from fastgen.engine.scheduler import Scheduler
from fastgen.request import SamplingParams, Sequence, StepResult


def ask(config: EngineConfig, prompt: list[int], max_tokens: int | None, index: int = 0, **other: Any) -> Sequence:
    score = other.pop("score", None)
    params = SamplingParams(max_tokens=max_tokens, **other)
    return make_sequence(prompt, params, config, index=index, seed=3, score=score)


def samples(config: EngineConfig, prompt: list[int], n: int, max_tokens: int) -> list[Sequence]:
    return [ask(config, prompt, max_tokens, index) for index in range(n)]


def then(simulation: Simulation, *sequences: Sequence) -> None:
    """Run all sequences to their end, and then these."""
    while simulation.scheduler.busy:
        simulation.advance()
    for sequence in sequences:
        simulation.add(sequence)
    while simulation.scheduler.busy:
        simulation.advance()


PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


# ------------------------------------------------------------------------------------------ cached prefixes


def test_a_prefix_is_shared_in_the_very_step_that_computes_it() -> None:
    config = make_config(max_step_tokens=64)
    first, second = ask(config, [*PROMPT, 1], 4), ask(config, [*PROMPT, 2, 3], 4)
    simulation = begin(config, first, second)
    simulation.advance()
    [batch] = simulation.batches
    assert [(chunk.lane, chunk.start, len(chunk.tokens)) for chunk in batch.prefills] == [(0, 0, 11), (1, 8, 4)]
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert (first.cached_tokens, second.cached_tokens, simulation.scheduler.stats.cached_tokens) == (0, 8, 8)
    simulation.run()


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_the_last_known_token_is_always_computed(length: int, cached: int) -> None:
    config = make_config()
    simulation = begin(config, ask(config, PROMPT, 1))
    again = ask(config, PROMPT[:length], 1)
    then(simulation, again)
    assert again.cached_tokens == cached
    assert simulation.batches[-1].prefills[0].start == cached
    simulation.run()


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_the_row_before_a_scored_position_is_computed(start: int, cached: int) -> None:
    """The logprob at position `start` comes from the row before it."""
    config = make_config()
    simulation = begin(config, ask(config, PROMPT, 1))
    scored = ask(config, PROMPT, 0, prompt_logprobs=0, score=(start, 1.0))
    then(simulation, scored)
    assert scored.cached_tokens == cached
    simulation.run()


def test_an_answer_is_found_again_with_its_prompt() -> None:
    config = make_config(page_size=2)
    first = ask(config, PROMPT[:5], 8)
    simulation = begin(config, first)
    then(simulation)
    assert len(first.token_ids) == 13
    follow_up = ask(config, [*first.token_ids, 1, 2], 3)
    then(simulation, follow_up)
    assert follow_up.cached_tokens == 12  # its last token's KV was never computed
    simulation.run()


def test_the_token_too_many_after_a_stop_is_not_in_the_cache() -> None:
    config = make_config(page_size=1)
    first = ask(config, PROMPT[:5], 8)
    first.stop_ids = frozenset({expected(ask(config, PROMPT[:5], 8)).token_ids[8]})
    simulation = begin(config, first)
    then(simulation)
    assert simulation.seen["dropped"] == 1
    known = len(first.token_ids)
    assert len(simulation.scheduler.pages.match([*first.token_ids, *range(40)], 100)) == known
    follow_up = ask(config, [*first.token_ids, 1], 2)
    then(simulation, follow_up)
    assert follow_up.cached_tokens == known
    simulation.run()


def test_a_preempted_sequence_finds_its_pages_again_with_a_prefix_cache() -> None:
    prefilled = []
    for prefix_cache in (False, True):
        config = make_config(num_pages=9, page_size=2, max_step_tokens=64, prefix_cache=prefix_cache)
        sequences = [ask(config, [seed, *PROMPT[:3]], 12) for seed in range(3)]
        simulation = begin(config, *sequences, scheduler=hopeful(config))
        then(simulation)
        stats = simulation.scheduler.stats
        prefilled.append(stats.prefilled_tokens)
        assert stats.preemptions > 0
        assert (stats.cached_tokens > 0) == prefix_cache
        assert all(sequence.cached_tokens == 0 for sequence in sequences), "only what is found at first counts"
        assert any(simulation.scheduler.pages.match(each.token_ids, 16) for each in sequences) == prefix_cache
    assert prefilled[0] > prefilled[1]


def test_evicted_pages_come_back_from_the_host_tier() -> None:
    config = make_config(num_pages=6, host_pages=8, max_model_len=20, max_step_tokens=32)
    first = ask(config, [*PROMPT, *PROMPT[:3]], 2)
    simulation = begin(config, first)
    other = ask(config, [1] * 18, 2)
    then(simulation, other)
    scheduler = simulation.scheduler
    assert scheduler.stats.pages_saved > 0
    again = ask(config, [*PROMPT, *PROMPT[:4]], 2)
    then(simulation, again)
    assert again.cached_tokens == 12
    moved = list(map(page_moves, simulation.batches))
    assert scheduler.stats.pages_loaded == sum(len(moves.loads) for moves in moved) > 0
    assert scheduler.stats.pages_saved == sum(len(moves.saves) for moves in moved)
    simulation.run()


# ---------------------------------------------------------------------------------------------------- forks


def test_samples_of_a_prompt_prefill_it_once() -> None:
    config = make_config(max_seqs=8, max_step_tokens=64)
    sequences = samples(config, PROMPT, 5, 6)
    simulation = run(config, *sequences)
    first, second, *_ = simulation.batches
    assert [chunk.forks for chunk in first.prefills] == [(1, 2, 3, 4)]
    assert first.sampling == (0, 1, 2, 3, 4)
    assert sorted(start.index for start in first.starts) == [0, 1, 2, 3, 4]
    assert len(first.copies) == 4
    assert {source for source, _ in first.copies} == {2}
    assert second.copies == ()
    assert second.decodes == (0, 1, 2, 3, 4)
    assert simulation.scheduler.stats.prefilled_tokens == 10
    assert [sequence.cached_tokens for sequence in sequences] == [0, 9, 9, 9, 9]


def test_equal_prompts_sent_separately_prefill_once() -> None:
    config = make_config(max_seqs=8, max_step_tokens=16)
    equal = [ask(config, PROMPT, 5, temperature=index / 2, presence_penalty=1.0) for index in range(3)]
    masked = ask(config, PROMPT, 5, mask=HashMask(1))
    simulation = run(config, *equal, masked)
    assert [chunk.forks for chunk in simulation.batches[0].prefills] == [(1, 2, 3)]
    assert simulation.batches[0].masked


@pytest.mark.parametrize(("length", "max_tokens", "copies"), [(8, 4, 0), (9, 4, 2), (9, 1, 0), (9, 2, 2)])
def test_only_a_last_page_that_will_be_written_is_copied(length: int, max_tokens: int, copies: int) -> None:
    config = make_config()
    simulation = run(config, *samples(config, PROMPT[:length], 3, max_tokens))
    assert simulation.seen["forks"] == 2
    assert simulation.seen["copies"] == copies


def test_only_those_next_in_line_with_the_same_tokens_and_no_scores_are_forks() -> None:
    config = make_config(max_seqs=8, max_step_tokens=64)
    scored = ask(config, PROMPT, 2, prompt_logprobs=0, score=(6, 1.0))
    between = ask(config, PROMPT[:9], 2)
    simulation = run(config, *samples(config, PROMPT, 2, 2), scored, ask(config, PROMPT, 2), between)
    assert [(chunk.lane, chunk.forks) for chunk in simulation.batches[0].prefills] == [(0, (1,)), (2, (3,)), (4, ())]


def test_a_sample_that_finds_no_lane_shares_the_full_pages_later() -> None:
    config = make_config(max_seqs=2)
    sequences = samples(config, PROMPT, 3, 4)
    simulation = run(config, *sequences)
    assert [sequence.cached_tokens for sequence in sequences] == [0, 9, 8]
    assert simulation.scheduler.stats.prefilled_tokens == 12


def test_a_chunked_prompt_is_forked_when_its_last_chunk_is_scheduled() -> None:
    config = make_config(max_step_tokens=4)
    simulation = run(config, *samples(config, PROMPT, 3, 4))
    assert [[chunk.forks for chunk in batch.prefills] for batch in simulation.batches[:3]] == [[()], [()], [(1, 2)]]
    assert simulation.scheduler.stats.prefilled_tokens == 10


# -------------------------------------------------------------------------------------------- new weights


def test_no_kv_of_old_weights_is_given_to_sequences_after_an_update() -> None:
    config = make_config(max_step_tokens=4, max_seqs=2)
    old = ask(config, PROMPT, 12)
    simulation = begin(config, old)
    simulation.advance()
    simulation.update_weights()  # its first page is computed, and the rest is not
    sibling, later = ask(config, PROMPT, 4, index=1), ask(config, PROMPT, 4, index=2)
    for sequence in (sibling, later):
        simulation.add(sequence)
    simulation.run()  # their answers come from the new weights only
    assert old.preemptions == 1, "its prefill began again"
    assert (sibling.cached_tokens, later.cached_tokens) == (9, 8), "of the new weights"


# ---------------------------------------------------------------------------------- admission with sharing


def drive(scheduler: Scheduler, sequences: list[Sequence], steps: int) -> int:
    """Run `steps` steps whose tokens are all 1, and return the maximum number of sequences that ran at a time."""
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.complete = True
    before, most = None, 0
    for _ in range(steps):
        batch = scheduler.schedule()
        if before is not None:
            values = [0.0] * len(before.sampling)
            drawn = {"logprobs": values, "untruncated_logprobs": values, "raw_logprobs": values}
            scheduler.update(before, StepResult(tokens=[1] * len(values), lanes=before.sampling, **drawn))
        before, most = batch, max(most, len(scheduler.running))
    check_scheduler(scheduler)
    return most


@pytest.mark.parametrize(
    ("num_pages", "prompts", "n", "prefilled"),
    [
        (13000, [[group, *range(1, 1024)] for group in range(64)], 16, 64 * 1024),  # 24576 pages without sharing
        (6000, [[*range(2048), at, *range(99)] for at in range(512)], 1, 2048 + 512 * 100),
    ],
    ids=["samples", "a common prefix"],
)
def test_what_shares_its_prompt_runs_in_one_wave(
    num_pages: int, prompts: list[list[int]], n: int, prefilled: int
) -> None:
    config = make_config(max_model_len=4096, max_seqs=1024, max_step_tokens=8192, page_size=64, num_pages=num_pages)
    scheduler = Scheduler(config)
    sequences = [sequence for prompt in prompts for sequence in samples(config, prompt, n, 512)]
    assert drive(scheduler, sequences, 12) == len(sequences)
    assert (scheduler.stats.preemptions, scheduler.stats.prefilled_tokens) == (0, prefilled)


def test_shared_pages_are_reserved_once_and_running_sequences_can_still_grow() -> None:
    """The prompt has four pages, and each of n outputs has two more: 4 + 2 n."""
    for num_pages, at_once in ((11, 3), (12, 4), (13, 4), (14, 5)):
        config = make_config(max_seqs=8, max_step_tokens=64, num_pages=num_pages)
        simulation = run(config, *samples(config, [*PROMPT, *PROMPT[:6]], 5, 9))
        assert max(len(batch.decodes) for batch in simulation.batches) == at_once
        assert simulation.scheduler.stats.preemptions == 0


def test_cached_pages_without_references_count_as_free() -> None:
    config = make_config(num_pages=6, max_model_len=20, max_step_tokens=32)
    simulation = begin(config, ask(config, [*PROMPT, *PROMPT], 1))
    then(simulation)
    assert simulation.scheduler.pages.available == 6
    assert simulation.scheduler.wants_more
    two = [ask(config, [seed] * 9, 4) for seed in range(2)]  # three pages each
    then(simulation, *two)
    assert [len(batch.starts) for batch in simulation.batches[1:]] == [2, 0, 0, 0]
    simulation.run()


def test_matching_pages_without_references_count_as_needed() -> None:
    config = make_config(num_pages=6, max_model_len=20, max_step_tokens=32)
    simulation = begin(config, ask(config, [*PROMPT, *PROMPT[:7]], 1))
    then(simulation)
    runs, waits = ask(config, [1] * 9, 4), ask(config, [*PROMPT, *PROMPT[:7]], 1)  # three pages; four of them cached
    then(simulation, runs, waits)
    assert waits.cached_tokens == 12, "one of the four was evicted"
    assert simulation.scheduler.stats.preemptions == 0
    assert [len(batch.starts) for batch in simulation.batches[1:3]] == [1, 0]
    simulation.run()


def test_a_prompt_that_has_to_wait_is_not_looked_up_again_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(num_pages=6, max_model_len=20, max_step_tokens=32)
    simulation = begin(config, ask(config, [1] * 9, 11), ask(config, [*PROMPT, *PROMPT[:7]], 1))
    match, lookups = simulation.scheduler.pages.match, []
    monkeypatch.setattr(simulation.scheduler.pages, "match", lambda *given: lookups.append(given) or match(*given))
    then(simulation)
    assert len(lookups) <= 5, "once a page that the other takes, not once a token"
