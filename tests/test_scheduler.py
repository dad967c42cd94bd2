"""The scheduler and its allocator, without torch: thousands of random schedules, and each promise by itself."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hash_model import (
    VOCAB,
    HashMask,
    HashRunner,
    InterruptError,
    Simulation,
    WrongAnswerError,
    expected,
    hopeful,
    make_config,
    make_sequence,
)

from fastgen.cache.pages import PageAllocator
from fastgen.config import EngineConfig
from fastgen.request import SamplingParams, Sequence, Status
from fastgen.scheduler import Expectation, Scheduler

SEEDS_A_TEST = 100
SEEDS = 2000


def request(config: EngineConfig, prompt_len: int, max_tokens: int | None, seed: int = 0, **other: Any) -> Sequence:
    """A sequence whose prompt differs from that of other seeds; `other` goes to SamplingParams."""
    prompt = [(7 * seed + 3 * at) % VOCAB for at in range(prompt_len)]
    score = (0, 1.0) if other.get("prompt_logprobs") is not None else None
    return make_sequence(prompt, SamplingParams(max_tokens=max_tokens, **other), config, seed=seed, score=score)


def run(config: EngineConfig, *sequences: Sequence, **other: Any) -> Simulation:
    """All of them from the first turn on; the answers are checked as they come."""
    return Simulation(config, [(0, sequence) for sequence in sequences], **other).run()


# ---------------------------------------------------------------------------------------- random schedules


def random_config(rng: random.Random) -> EngineConfig:
    page_size, lanes = rng.choice((1, 2, 3, 4, 5, 8, 16)), rng.randint(1, 8)
    context = rng.randint(4, 28)
    return make_config(
        max_model_len=context,
        max_seqs=lanes,
        max_step_tokens=lanes + rng.choice((0, 0, 1, 3, 8, 40)),
        page_size=page_size,
        num_pages=-(-context // page_size) + 1 + rng.choice((0, 0, 1, 2, 4, 30)),
    )


def random_mask(rng: random.Random) -> HashMask | None:
    if rng.random() < 0.75:
        return None
    end, kind = rng.randrange(8), rng.choice((None, "forbids", "fill_raises", "accept_raises"))
    mask = HashMask(rng.randrange(1000))
    if kind is not None:
        setattr(mask, kind, end)
    return mask


def random_request(rng: random.Random, config: EngineConfig) -> list[Sequence]:
    scored_only = rng.random() < 0.1
    room = config.max_model_len - (not scored_only)
    prompt = [rng.randrange(VOCAB) for _ in range(min(rng.randint(1, room), rng.randint(1, room)))]
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
    return [
        make_sequence(prompt, params, config, index=index, seed=seed, stop_ids=stop_ids, score=score)
        for index in range(params.n)
    ]


def random_expectation(rng: random.Random) -> Expectation:
    """One that is above all answers, or one that may be below some or all of them."""
    if rng.random() < 0.3:
        return Expectation()
    average, least, weight = rng.choice((0, 0, 2, 10)), rng.choice((0, 3)), rng.choice((0, 1 / 16, 1))
    return Expectation(average, least, weight, exact=rng.random() < 0.5)


MakeScheduler = Callable[[EngineConfig, Expectation], Scheduler]


def random_simulation(seed: int, make_scheduler: MakeScheduler = Scheduler, check: bool = True) -> Simulation:
    rng = random.Random(seed)
    config = random_config(rng)
    span = rng.choice((1, 10, 40))
    arrivals = []
    for _ in range(rng.randint(1, 7)):
        turn = rng.randrange(span)
        arrivals += [(turn, sequence) for sequence in random_request(rng, config)]
    return Simulation(
        config,
        arrivals,
        rng=rng,
        aborts=rng.choice((0.0, 0.0, 0.1)),
        trouble=rng.choice((0.0, 0.0, 0.02)),
        scheduler=make_scheduler(config, random_expectation(rng)),
        check=check,
    )


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_any_schedule_gives_the_answers_of_no_schedule(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        try:
            simulation = random_simulation(seed).run()
            scheduler = simulation.scheduler
            if scheduler.expectation.least == Expectation.least and not simulation.seen["interrupted"]:
                assert not scheduler.preemptions, "preempted where no answer got longer than expected"
        except Exception as error:
            raise AssertionError(f"random_simulation({seed}).run(): {error}") from error


def test_the_random_schedules_reach_every_corner() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS, SEEDS + 150):
        seen += random_simulation(seed).run().seen
    corners = ("mixed", "chunked", "masked", "preempted", "dropped", "stopped late", "interrupted")
    reasons = ("stop", "length", "abort", "error")
    errors = ("the mask allowed no token", "'no rows today')", "'not that token')")
    assert not [corner for corner in corners + reasons + errors if seen[corner] < 10], seen


class DoubledPages(PageAllocator):
    """Now and then takes a page for free that it has just handed out."""

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        grown = super().grow(pages, num_tokens)
        if grown and pages and pages[-1] % 5 == 0:
            self.release([pages[-1]])
        return grown


class HandsOutTwice(Scheduler):
    def __init__(self, config: EngineConfig, expectation: Expectation) -> None:
        super().__init__(config, expectation)
        self.pages = DoubledPages(config.num_pages, config.page_size)


class DropsPageUpdate(Scheduler):
    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        grown = super()._grow(sequence, num_tokens)
        if len(sequence.pages) == 3 and self._page_updates:
            self._page_updates.pop()
        return grown


class TrustsStalePages(Scheduler):
    def _preempt(self, sequence: Sequence) -> None:
        super()._preempt(sequence)
        sequence.computed = min(self.config.page_size, len(sequence.token_ids) - 1)


class ForgetsLaneStart(Scheduler):
    def _admit(self) -> bool:
        admitted = super()._admit()
        if admitted and self.running[-1].preemptions:
            self._starts.pop()
        return admitted


class KeepsTokenTooMany(Scheduler):
    def _end(self, sequence: Sequence, token: int) -> None:
        super()._end(sequence, token)
        if sequence.status is Status.FINISHED and sequence.pending:
            sequence.token_ids.append(token)


@pytest.mark.parametrize(
    "broken", [HandsOutTwice, DropsPageUpdate, TrustsStalePages, ForgetsLaneStart, KeepsTokenTooMany]
)
def test_the_simulation_notices_a_broken_scheduler_by_its_answers(broken: MakeScheduler) -> None:
    wrong = 0
    for seed in range(120):
        try:
            random_simulation(seed, broken, check=False).run()
        except WrongAnswerError:
            wrong += 1
        except (AssertionError, IndexError, ValueError):
            pass  # noticed as well, but not by the answer
    assert wrong


# -------------------------------------------------------------------------------------- what goes into a step


def test_decodes_are_never_starved_by_prefills() -> None:
    config = make_config(max_seqs=3, max_step_tokens=5)
    talker, *readers = (request(config, 2, 20), request(config, 30, 2, seed=1), request(config, 40, 2, seed=2))
    batches = run(config, talker, *readers).batches
    assert [0 in batch.decodes for batch in batches[:20]] == [False] + 19 * [True]
    assert all(batch.num_tokens == 5 for batch in batches[:15]), "prefills fill what decodes leave of the budget"


def test_prefills_of_one_step_go_in_order_of_arrival_and_share_the_budget() -> None:
    config = make_config(max_seqs=4, max_step_tokens=10)
    batches = run(config, *(request(config, length, 1, seed=length) for length in (4, 9, 3))).batches
    chunks = [[(chunk.lane, chunk.start, len(chunk.tokens)) for chunk in batch.prefills] for batch in batches]
    assert chunks == [[(0, 0, 4), (1, 0, 6)], [(1, 6, 3), (2, 0, 3)]]


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    config = make_config(num_pages=8, page_size=4)  # the second one fits only when the first has gone
    first, large, small = request(config, 12, 6), request(config, 20, 2, seed=1), request(config, 1, 1, seed=2)
    batches = run(config, first, large, small).batches
    starts = [start.seed for batch in batches for start in batch.starts]
    assert starts == [0, 1, 2]
    assert first.preemptions == 0


def test_the_youngest_gives_way_when_pages_run_out() -> None:
    config = make_config(num_pages=9, page_size=2, max_step_tokens=64)
    old, middle, young = (request(config, 3, 12, seed=seed) for seed in range(3))
    simulation = run(config, old, middle, young, scheduler=hopeful(config))
    assert simulation.scheduler.preemptions == old.preemptions + middle.preemptions + young.preemptions
    assert old.preemptions == 0
    assert young.preemptions >= middle.preemptions >= 1
    assert simulation.seen["preempted"] == simulation.scheduler.preemptions


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 2), (1, 9), (4, 2), (4, 5), (16, 3)])
def test_a_lone_sequence_fills_the_whole_context_of_the_pool(page_size: int, num_pages: int) -> None:
    config = make_config(page_size=page_size, num_pages=num_pages, max_model_len=1000, max_step_tokens=4)
    context = config.max_model_len
    assert context == (num_pages - 1) * page_size
    if context > 1:
        answered = request(config, 1, None)
        assert run(config, answered).scheduler.preemptions == 0
        assert len(answered.token_ids) == context
    scored = request(config, context, 0, prompt_logprobs=0)
    run(config, scored, request(config, max(1, context - 1), 1, seed=1))


def test_a_step_with_a_masked_lane_that_draws_is_flagged() -> None:
    config = make_config(max_step_tokens=4, max_seqs=2)
    masked = request(config, 10, 3, mask=HashMask(0))
    simulation = run(config, masked, request(config, 2, 9, seed=1))
    batches = simulation.batches
    # Its prompt takes three steps, and only the last of them draws; then it decodes twice.
    assert [batch.masked for batch in batches[:6]] == [False, False, True, True, True, False]
    assert simulation.scheduler.generated_tokens == 3 + 9


def test_the_decodes_of_two_steps_are_one_object_where_they_are_equal() -> None:
    """The runner looks at nothing else to know that it has nothing to send."""
    config = make_config(max_seqs=3)
    batches = run(config, *(request(config, 4, length, seed=length) for length in (6, 6, 9))).batches
    assert [batch.decodes for batch in batches] == [(), *[(0, 1, 2)] * 5, *[(2,)] * 3]
    assert len({id(batch.decodes) for batch in batches[1:6]}) == 1
    assert len({id(batch.decodes) for batch in batches[6:]}) == 1


def test_wants_more_while_lanes_are_free_for_those_who_wait() -> None:
    config = make_config(max_seqs=2)
    scheduler = Scheduler(config)
    wants = []
    for seed in range(4):
        wants.append(scheduler.wants_more)
        scheduler.add(request(config, 3, 4, seed=seed))
    assert wants == [True, True, True, False]
    assert scheduler.schedule() is not None  # two run, two wait
    assert not scheduler.wants_more


def test_wants_more_while_pages_are_free_for_those_who_wait() -> None:
    config = make_config(max_seqs=9, num_pages=8, page_size=4)
    scheduler = Scheduler(config)
    wants = []
    for seed in range(4):
        wants.append(scheduler.wants_more)
        scheduler.add(request(config, 6, 7, seed=seed))  # three pages
    assert wants == [True, True, True, False]
    first = scheduler.waiting[0]
    scheduler.schedule()  # two run, two wait
    assert not scheduler.wants_more
    scheduler.finish(scheduler.waiting[0], "abort")
    assert not scheduler.wants_more
    scheduler.finish(scheduler.waiting[0], "abort")
    assert scheduler.wants_more
    assert scheduler.running[0] is first
    scheduler.check()


# --------------------------------------------------------------------------------------------------- the end


def stopping(config: EngineConfig, at: int, **other: Any) -> Sequence:
    """A sequence that says its stop id as its token number `at`, and not before."""
    for seed in range(100):
        tokens = expected(request(config, 5, at + 1, seed=seed, **other)).token_ids[5:]
        if tokens[at] not in tokens[:at]:
            sequence = request(config, 5, other.pop("max_tokens", 20), seed=seed, **other)
            sequence.stop_ids = frozenset({tokens[at]})
            return sequence
    raise AssertionError


def draws(simulation: Simulation) -> int:
    return sum(len(batch.sampling) for batch in simulation.batches)


def test_a_stop_computes_one_token_too_many_and_drops_it() -> None:
    config = make_config()
    sequence = stopping(config, at=3)
    simulation = run(config, sequence)
    assert sequence.output_len == 4
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", sequence.token_ids[-1])
    assert draws(simulation) == 5
    assert simulation.seen["dropped"] == 1


def test_a_stop_at_the_last_token_drops_nothing() -> None:
    config = make_config(max_model_len=9)
    sequence = stopping(config, at=3)  # 5 + 4: the stop is where the context ends
    simulation = run(config, sequence)
    assert sequence.finish_reason == "stop"
    assert draws(simulation) == 4


def test_a_stop_id_before_min_tokens_does_not_end_the_answer() -> None:
    config = make_config()
    sequence = stopping(config, at=3, min_tokens=4)
    run(config, sequence)
    assert sequence.output_len > 4


@pytest.mark.parametrize(("max_tokens", "context", "tokens"), [(5, 64, 5), (1, 64, 1), (None, 12, 9), (30, 12, 9)])
def test_an_end_known_beforehand_is_never_overrun(max_tokens: int | None, context: int, tokens: int) -> None:
    config = make_config(max_model_len=context)
    sequence = request(config, 3, max_tokens)
    simulation = run(config, sequence)
    assert sequence.finish_reason == "length"
    assert sequence.output_len == draws(simulation) == len(simulation.batches) == tokens


def test_a_scored_prompt_draws_nothing() -> None:
    config = make_config(max_step_tokens=4)
    sequence = request(config, 11, 0, prompt_logprobs=0)
    simulation = run(config, sequence)
    assert draws(simulation) == 0
    assert [batch.num_tokens for batch in simulation.batches] == [4, 4, 3]
    assert not any(np.isnan(sequence.prompt_logprobs[1:]))


@pytest.mark.parametrize("turns", range(8))
def test_an_aborted_sequence_leaves_with_what_it_has(turns: int) -> None:
    config = make_config(max_seqs=1, max_step_tokens=4)
    aborted, neighbour = request(config, 9, 9), request(config, 3, 3, seed=1)
    simulation = Simulation(config, [(0, neighbour)])
    simulation.expected[aborted] = expected(aborted)
    simulation.add(aborted)
    simulation.add(neighbour)
    for _ in range(turns):
        simulation.advance()
    waiting = neighbour.status
    simulation.abort(aborted)
    assert aborted.finish_reason == "abort"
    assert aborted.output_len == max(0, turns - 2)  # three chunks of prompt; the step in flight counts
    assert waiting is Status.WAITING
    assert not simulation.scheduler.running
    simulation.scheduler.abort(aborted)  # once more is harmless
    simulation.arrivals.clear()
    simulation.run()
    assert neighbour.finish_reason == "length"


def test_a_waiting_sequence_is_aborted_without_a_trace() -> None:
    config = make_config(max_seqs=1)
    first, second = request(config, 3, 3), request(config, 3, 3, seed=1)
    simulation = Simulation(config, [(0, first), (0, second)])
    for _, sequence in list(simulation.arrivals):
        simulation.add(sequence)
    simulation.arrivals.clear()
    simulation.advance()
    simulation.abort(second)
    assert (second.finish_reason, second.output_len) == ("abort", 0)
    simulation.run()
    assert len(simulation.batches) == 3


# -------------------------------------------------------------------------------------------------- interrupts


class Torn(list[Any]):
    """Interrupts the first append."""

    whole = False

    def append(self, value: Any) -> None:
        if not self.whole:
            self.whole = True
            raise InterruptError
        super().append(value)


@pytest.mark.parametrize("torn", ["logprobs", "raw_logprobs", "token_ids"])
def test_an_interrupt_within_update_leaves_no_token_without_its_logprobs(torn: str) -> None:
    config = make_config()
    sequences = [request(config, 3, 4, seed=seed) for seed in range(2)]
    simulation = Simulation(config, [(0, sequence) for sequence in sequences])
    for _, sequence in list(simulation.arrivals):
        simulation.add(sequence)
    simulation.arrivals.clear()
    simulation.advance()
    simulation.advance()
    assert simulation.in_flight is not None
    setattr(sequences[1], torn, Torn(getattr(sequences[1], torn)))
    simulation.settle()
    assert simulation.seen["interrupted"] == 1
    for sequence, length in zip(sequences, (2, 1), strict=True):
        assert len(sequence.logprobs) == len(sequence.raw_logprobs) == sequence.output_len == length
    simulation.run()


def test_rewind_forgets_what_is_in_flight_and_keeps_the_order() -> None:
    config = make_config(max_seqs=2, max_step_tokens=2)
    sequences = [request(config, 3, 4, seed=seed) for seed in range(4)]
    simulation = Simulation(config, [])
    for sequence in sequences:
        simulation.expected[sequence] = expected(sequence)
        simulation.add(sequence)
    for _ in range(4):
        simulation.advance()
    simulation.in_flight = None
    simulation.scheduler._reserved_sum += 1  # an interrupt in the middle of a sum
    simulation.scheduler._wanted_sum += 1
    simulation.scheduler.rewind()
    simulation.scheduler.check()
    assert list(simulation.scheduler.waiting) == sequences
    assert simulation.scheduler.pages.num_free == config.num_pages
    assert simulation.scheduler.in_flight == 0
    simulation.run()


# ---------------------------------------------------------------------------------------------------- the rest


def test_check_notices_what_is_wrong() -> None:
    config = make_config()
    faults: list[Callable[[Scheduler, Sequence], object]] = [
        lambda scheduler, sequence: sequence.pages.pop(),
        lambda scheduler, sequence: scheduler.running.clear(),
        lambda scheduler, sequence: setattr(sequence, "lane", 3),
        lambda scheduler, sequence: scheduler.waiting.append(sequence),
        lambda scheduler, sequence: setattr(sequence, "computed", 99),
        lambda scheduler, sequence: sequence.token_ids.extend(range(99)),
    ]
    for fault in faults:
        scheduler, sequence = Scheduler(config), request(config, 3, 4)
        scheduler.add(sequence)
        scheduler.schedule()
        scheduler.check()
        fault(scheduler, sequence)
        with pytest.raises(AssertionError):
            scheduler.check()


def test_a_batch_replays_on_a_second_runner() -> None:
    """Batch is all that a rank needs: another runner that is given the same batches comes to the same tokens."""
    config = make_config(num_pages=12, page_size=2)
    simulation = run(config, *(request(config, 3 + seed, 8, seed=seed) for seed in range(4)), scheduler=hopeful(config))
    assert simulation.scheduler.preemptions
    ranks = [HashRunner(config), HashRunner(config)]
    for batch in simulation.batches:
        results = [rank.launch(batch).result for rank in ranks]
        assert results[0] == results[1]
    assert ranks[0].memory == simulation.runner.memory


def test_the_modules_under_the_scheduler_do_not_import_torch() -> None:
    modules = "fastgen.scheduler, fastgen.request, fastgen.cache.pages, fastgen.config, fastgen.arch"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
