"""The scheduler and its allocator over the hash model, in random schedules. scripts/check/mutate.py breaks them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hash_model import (
    POISON,
    VOCAB,
    HashMask,
    InexactEstimate,
    drawn_first,
    expected,
    make_config,
    make_sequence,
)
from simulation import Simulation

from fastgen.engine.admission import LengthEstimate
from fastgen.engine.options import EngineConfig
from fastgen.engine.scheduler import Scheduler
from fastgen.request import SamplingParams, Sequence
from fastgen.speculation.options import Speculation

SEEDS_A_TEST = 100
SEEDS = 2000
LONG_SEEDS = 1_000_000


def random_config(rng: random.Random, crowd: bool) -> EngineConfig:
    page_size, lanes = rng.choice((1, 2, 3, 4) if crowd else (1, 2, 3, 4, 5, 8, 16)), rng.randint(1, 8)
    context, budget = rng.randint(4, 28), lanes + rng.choice((0, 0, 1, 3, 8, 40))
    return make_config(
        max_model_len=context,
        max_seqs=lanes,
        max_step_tokens=budget,
        page_size=page_size,
        num_pages=-(-context // page_size) + 1 + rng.choice((0, 0, 1, 2, 4) if crowd else (0, 1, 4, 30)),
        prefix_cache=crowd or rng.random() < 0.9,
        host_pages=rng.choice((1, 2, 3, 5, 10, 40) if crowd else (0, 0, 1, 40)),
        max_prefill_tokens=rng.choice((budget, rng.randint(1, budget))),
        speculate=random_speculation(rng, budget),
    )


def random_speculation(rng: random.Random, budget: int) -> Speculation | None:
    if rng.random() < 0.4:
        return None
    draft, rows = rng.choice((1, 2, 7)), rng.choice((4, 8, 64))
    kept = rng.choice((0, 99))
    return Speculation(max_draft=draft, max_rows=min(rows, budget), row_cost=0.0, history_tokens=kept)


def random_mask(rng: random.Random) -> HashMask | None:
    if rng.random() < 0.75:
        return None
    end, kind = rng.randrange(8), rng.choice((None, "forbids", "fill_raises", "accept_raises"))
    mask = HashMask(rng.randrange(1000))
    if kind is not None:
        setattr(mask, kind, end)
    return mask


def random_prompt(rng: random.Random, room: int, before: list[Sequence]) -> list[int]:
    """Return random tokens, which may follow all or a part of an earlier prompt, with or without its output."""
    prompt = [rng.randrange(VOCAB) for _ in range(min(rng.randint(1, room), rng.randint(1, room)))]
    if rng.random() < 0.02:
        prompt[rng.randrange(len(prompt))] = POISON
    if not before or rng.random() < 0.4:
        return prompt
    known = rng.choice(before)
    tokens = known.token_ids if rng.random() < 0.6 else expected(known).token_ids
    kept = rng.choice((len(tokens), rng.randint(1, len(tokens))))
    return (tokens[:kept] + rng.choice(([], prompt)))[:room]


def random_request(rng: random.Random, config: EngineConfig, before: list[Sequence]) -> list[Sequence]:
    scored_only = rng.random() < 0.1
    prompt = random_prompt(rng, config.max_model_len - (not scored_only), before)
    max_tokens = 0 if scored_only else rng.choice((None, 1, 2, rng.randint(1, 12)))
    params = SamplingParams(
        n=1 if scored_only else rng.choice((1, 1, 2, 3)),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, rng.randint(0, 4))),
        presence_penalty=rng.choice((0.0, 0.0, 1.0)),
        stop=rng.choice(((), (), "ab", ("dad", "c"))),
        mask=random_mask(rng),
    )
    stop_ids = frozenset(rng.choice(((), (2,), (2, 7, 11))))
    scored = scored_only or rng.random() < 0.15
    score = (rng.choice((0, rng.randint(0, len(prompt)))), rng.choice((1.0, 0.7))) if scored else None
    seed = rng.getrandbits(63)
    sequences = [
        make_sequence(prompt, params, config, index=index, seed=seed, stop_ids=stop_ids, score=score)
        for index in range(params.n)
    ]
    for sequence in sequences:
        if rng.random() < 0.1:
            resume(sequence, rng)
    return sequences


def resume(sequence: Sequence, rng: random.Random) -> None:
    """Let a sequence begin with a part of its output, as after an abort."""
    right = expected(sequence)
    count = rng.randrange(max(len(right.drawn.logprobs), 1))
    sequence.token_ids = right.token_ids[: sequence.prompt_len + count]
    sequence.drawn = drawn_first(right.drawn, count)
    if sequence.mask is not None:
        for token in sequence.output_ids:
            sequence.mask.accept(token)


def random_estimate(rng: random.Random, crowd: bool) -> LengthEstimate:
    """Return an estimate that is above all output lengths, or one that may be below some or all of them."""
    if crowd and rng.random() < 0.5:
        return InexactEstimate(0, 0)
    if rng.random() < 0.3:
        return LengthEstimate()
    kind = rng.choice((LengthEstimate, InexactEstimate))
    return kind(rng.choice((0, 0, 2, 3, 10)), rng.choice((0, 1 / 16, 1)))


def random_simulation(seed: int) -> Simulation:
    """Return a simulation; some are crowds: many requests that share prefixes, few pages, and a small host tier."""
    rng = random.Random(seed)
    crowd = rng.random() < 0.4
    config = random_config(rng, crowd)
    span = rng.choice((1, 10, 40))
    urgency = random.Random(~seed)
    priorities = urgency.choice(((0,), (0, 1), (-1, 0, 7)))
    arrivals: list[tuple[int, Sequence]] = []
    for _ in range(rng.randint(6, 14) if crowd else rng.randint(1, 7)):
        turn = rng.randrange(span)
        before = [sequence for _, sequence in arrivals]
        sequences, priority = random_request(rng, config, before), urgency.choice(priorities)
        for sequence in sequences:
            sequence.priority = priority
        arrivals += [(turn, sequence) for sequence in sequences]
    return Simulation(
        config,
        arrivals,
        rng=rng,
        aborts=rng.choice((0.0, 0.0, 0.1)),
        trouble=rng.choice((0.0, 0.0, 0.02)),
        updates=rng.choice((0.0, 0.0, 0.0, 0.05)),
        sleeps=rng.choice((0.0, 0.1)),
        waves=rng.random() < 0.5,
        scheduler=Scheduler(config, random_estimate(rng, crowd)),
    )


def run_seeds(seeds: range) -> Counter[str]:
    """Run the simulations of some seeds, and count what they saw. Raises AssertionError with the seed that fails."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            simulation = random_simulation(seed).run()
            scheduler = simulation.scheduler
            longer = scheduler.estimate.average > 28  # than all outputs
            if longer and not simulation.config.speculate and not simulation.seen["reset"]:
                asked = simulation.seen["computed again"]
                assert scheduler.stats.preemptions == asked, "preempted although no output got longer than predicted"
        except Exception as error:
            raise AssertionError(f"random_simulation({seed}).run(): {error}") from error
        seen += simulation.seen
    return seen


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_any_schedule_gives_the_outputs_of_the_oracle(first: int) -> None:
    run_seeds(range(first, first + SEEDS_A_TEST))


@pytest.mark.long
@pytest.mark.parametrize("first", range(SEEDS, LONG_SEEDS, LONG_SEEDS // 200))
def test_any_of_many_schedules_gives_the_outputs_of_the_oracle(first: int) -> None:
    run_seeds(range(first, first + LONG_SEEDS // 200))


def test_the_random_schedules_reach_every_corner() -> None:
    seen = run_seeds(range(SEEDS, SEEDS + 150))
    corners = ("mixed", "chunked", "masked", "preempted", "dropped", "stopped late", "reset", "updates", "sleeps")
    corners += ("computed again", "resumed", "speculative")
    corners += ("cached", "forks", "copies", "saves", "loads")
    reasons = ("stop", "length", "abort", "error")
    errors = ("the logits are not finite", "the mask allowed no token", "'no rows today')", "'not that token')")
    assert not [corner for corner in corners + reasons + errors if seen[corner] < 10], seen
    assert seen["cut"], "no stop string came before other tokens of its step"
