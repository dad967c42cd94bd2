"""The scheduler and its allocator over the hash model, in random schedules. scripts/check/mutate.py breaks them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hash_model import (
    make_config,
)
from random_requests import random_estimate, random_request
from simulation import Simulation

from fastgen.engine.options import EngineConfig
from fastgen.engine.scheduler import Scheduler
from fastgen.request import Sequence
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
