"""The scheduler over the hash model, without torch: each promise by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hash_model import HashMask, HashRunner, TroubleError, expected, hopeful, make_config, num_tokens
from invariants import check_scheduler
from simulation import Simulation, request, run

from fastgen.engine.options import EngineConfig
from fastgen.engine.scheduler import MAX_PREFILLS, Scheduler
from fastgen.request import Sequence, Status

# -------------------------------------------------------------------------------------- what goes into a step


def test_decodes_are_never_starved_by_prefills() -> None:
    config = make_config(max_seqs=3, max_step_tokens=5)
    talker, *readers = (request(config, 2, 20), request(config, 30, 2, seed=1), request(config, 40, 2, seed=2))
    batches = run(config, talker, *readers).batches
    assert [0 in batch.decodes for batch in batches[:20]] == [False] + 19 * [True]
    assert all(num_tokens(batch) == 5 for batch in batches[:15]), "prefills fill what decodes leave of the budget"


def chunks_of(simulation: Simulation) -> list[list[tuple[int, int, int]]]:
    """Return the lane, start and number of tokens of each chunk, for each step."""
    return [[(chunk.lane, chunk.start, len(chunk.tokens)) for chunk in batch.prefills] for batch in simulation.batches]


def test_prefills_of_one_step_go_in_order_of_arrival_and_share_the_budget() -> None:
    config = make_config(max_seqs=4, max_step_tokens=10)
    done = run(config, *(request(config, length, 1, seed=length) for length in (4, 9, 5)))
    assert chunks_of(done) == [[(0, 0, 4), (1, 0, 6)], [(1, 6, 3), (2, 0, 5)]]


def test_a_short_prompt_does_not_wait_for_long_ones_and_these_get_half_of_each_step() -> None:
    config = make_config(max_seqs=4, max_step_tokens=10)
    lengths = (30, 40, 5, 12)
    done = run(config, *(request(config, length, 1, seed=seed) for seed, length in enumerate(lengths)))
    assert chunks_of(done)[:5] == [
        [(2, 0, 5), (0, 0, 5)], [(3, 0, 5), (0, 5, 5)], [(3, 5, 5), (0, 10, 5)], [(3, 10, 2), (0, 15, 8)],
        [(0, 23, 7), (1, 0, 3)],
    ]  # fmt: skip


def test_a_long_prompt_does_not_starve_behind_many_short_ones() -> None:
    """Two short prompts arrive at each turn, more than there is room for beside the long one."""
    config = make_config(max_seqs=12, max_step_tokens=12, num_pages=200, max_model_len=140)
    long = request(config, 120, 1)
    shorts = [request(config, 5, 1, seed=seed) for seed in range(1, 81)]
    simulation = Simulation(config, [(0, long), *((number // 2, short) for number, short in enumerate(shorts))]).run()
    chunks = chunks_of(simulation)
    steps = next(at for at, step in enumerate(chunks) if any(start + n == 120 for _, start, n in step)) + 1
    assert 120 / 12 < steps <= 2 * 120 / 12
    assert sum(len(batch.sampling) for batch in simulation.batches[:steps]) > steps, "short ones have the other half"


def test_prompts_that_begin_alike_are_computed_once_though_several_may_be_in_their_prefill() -> None:
    config = make_config(max_seqs=8, max_step_tokens=10, page_size=4, prefix_cache=True)
    long = request(config, 30, 3)
    twin, longer = request(config, 30, 3), request(config, 30, 3)
    longer.token_ids += [9, 9]
    longer.prompt_len, longer.max_len = 32, 35
    done = run(config, long, twin, longer, request(config, 4, 1, seed=1))
    assert done.scheduler.stats.prefilled_tokens == 30 + 0 + 32 - 28 + 4
    assert done.seen["forks"] == 1


def test_no_more_than_eight_prompts_are_in_the_middle_of_their_prefill() -> None:
    config = make_config(max_seqs=12, max_step_tokens=12, num_pages=200)
    simulation = run(config, *(request(config, 20 + seed, 1, seed=seed) for seed in range(12)))
    assert [len(batch.starts) for batch in simulation.batches[:4]] == [MAX_PREFILLS, 1, 0, 1]


def test_new_weights_begin_incomplete_prefills_again_and_keep_the_order_of_arrival() -> None:
    config = make_config(max_seqs=4, max_step_tokens=10)
    sequences = old, long, short = [request(config, length, 20, seed=length) for length in (3, 40, 4)]
    simulation = Simulation(config, [])
    for sequence in sequences:
        simulation.expected[sequence] = expected(sequence)
        simulation.add(sequence)
    simulation.advance()
    simulation.advance()
    simulation.drain()
    assert [sequence.prefill_left > 0 for sequence in sequences] == [False, True, False]
    simulation.scheduler.drop_prefixes()
    check_scheduler(simulation.scheduler)
    assert simulation.scheduler.running == [old]
    assert [*simulation.scheduler.waiting] == [long, short]


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
    assert simulation.scheduler.stats.preemptions == old.preemptions + middle.preemptions + young.preemptions
    assert old.preemptions == 0
    assert young.preemptions >= middle.preemptions >= 1
    assert simulation.seen["preempted"] == simulation.scheduler.stats.preemptions


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 2), (1, 9), (4, 2), (4, 5), (16, 3)])
def test_a_lone_sequence_fills_the_whole_context_of_the_pool(page_size: int, num_pages: int) -> None:
    config = make_config(page_size=page_size, num_pages=num_pages, max_model_len=1000, max_step_tokens=4)
    context = config.max_model_len
    assert context == (num_pages - 1) * page_size
    if context > 1:
        answered = request(config, 1, None)
        assert run(config, answered).scheduler.stats.preemptions == 0
        assert len(answered.token_ids) == context
    scored = request(config, context, 0, prompt_logprobs=0)
    run(config, scored, request(config, max(1, context - 1), 1, seed=1))


def test_a_step_with_a_masked_lane_that_draws_is_flagged() -> None:
    config = make_config(max_step_tokens=4, max_seqs=2)
    masked = request(config, 10, 3, mask=HashMask(0))
    simulation = run(config, masked, request(config, 5, 9, seed=1))
    batches = simulation.batches
    # Its prompt takes three steps, and only the last of them draws; then it decodes twice.
    assert [batch.masked for batch in batches[:6]] == [False, False, True, True, True, False]
    assert simulation.scheduler.stats.generated_tokens == 3 + 9


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
    first = next(iter(scheduler.waiting))
    scheduler.schedule()  # two run, two wait
    assert not scheduler.wants_more
    scheduler.finish(next(iter(scheduler.waiting)), "abort")
    assert not scheduler.wants_more
    scheduler.finish(next(iter(scheduler.waiting)), "abort")
    assert scheduler.wants_more
    assert scheduler.running[0] is first
    check_scheduler(scheduler)


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
    assert [num_tokens(batch) for batch in simulation.batches] == [4, 4, 3]
    assert sequence.score is not None
    assert not any(np.isnan(sequence.score.logprobs[1:]))


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
    simulation.scheduler.finish(aborted, "abort")  # once more is harmless
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


# -------------------------------------------------------------------------------------------------- exceptions


class Torn(list[Any]):
    """Raises at the first append."""

    whole = False

    def append(self, value: Any) -> None:
        if not self.whole:
            self.whole = True
            raise TroubleError
        super().append(value)


@pytest.mark.parametrize("torn", ["logprobs", "untruncated_logprobs", "raw_logprobs", "token_ids"])
def test_an_exception_within_update_leaves_no_token_without_its_logprobs(torn: str) -> None:
    config = make_config()
    sequences = [request(config, 3, 4, seed=seed) for seed in range(2)]
    simulation = Simulation(config, [(0, sequence) for sequence in sequences])
    for _, sequence in list(simulation.arrivals):
        simulation.add(sequence)
    simulation.arrivals.clear()
    simulation.advance()
    simulation.advance()
    assert simulation.in_flight is not None
    owner = sequences[1] if torn == "token_ids" else sequences[1].drawn
    setattr(owner, torn, Torn(getattr(owner, torn)))
    simulation.drain()
    assert simulation.seen["reset"] == 1
    for sequence, length in zip(sequences, (2, 1), strict=True):
        assert {sequence.output_len, *map(len, sequence.drawn.lists().values())} == {length}
    simulation.run()


def test_reset_forgets_what_is_in_flight_and_keeps_the_order() -> None:
    config = make_config(max_seqs=2, max_step_tokens=2)
    sequences = [request(config, 3, 4, seed=seed) for seed in range(4)]
    simulation = Simulation(config, [])
    for sequence in sequences:
        simulation.expected[sequence] = expected(sequence)
        simulation.add(sequence)
    for _ in range(4):
        simulation.advance()
    simulation.in_flight = None
    simulation.scheduler.reservations.reserved_pages += 1  # an exception in the middle of a sum
    simulation.scheduler.reservations.waiting_pages += 1
    simulation.scheduler.reset(sequences)
    check_scheduler(simulation.scheduler)
    assert list(simulation.scheduler.waiting) == sequences
    assert len(simulation.scheduler.pages._free) == config.num_pages, "a prefix is cached that no step has computed"
    assert simulation.scheduler.in_flight == 0
    simulation.run()


def test_an_exception_between_the_last_token_and_the_end_ends_the_sequence() -> None:
    config = make_config()
    first = request(config, 3, 2)
    scheduler = Scheduler(config)
    scheduler.add(first)
    scheduler.schedule()
    first.token_ids += [1, 2]  # as if read
    for kept in first.drawn.lists().values():
        kept += [0.0, 0.0]
    scheduler.reset([first])
    check_scheduler(scheduler)
    assert (first.status, first.finish_reason) == (Status.FINISHED, "length")
    assert not scheduler.busy


# ---------------------------------------------------------------------------------------------------- the rest


def test_check_notices_what_is_wrong() -> None:
    config = make_config()
    faults: list[Callable[[Scheduler, Sequence], object]] = [
        lambda scheduler, sequence: sequence.pages.pop(),
        lambda scheduler, sequence: scheduler.running.clear(),
        lambda scheduler, sequence: setattr(sequence, "lane", 3),
        lambda scheduler, sequence: scheduler.waiting.update({sequence: None}),
        lambda scheduler, sequence: setattr(sequence, "computed", 99),
        lambda scheduler, sequence: sequence.token_ids.extend(range(99)),
    ]
    for fault in faults:
        scheduler, sequence = Scheduler(config), request(config, 3, 4)
        scheduler.add(sequence)
        scheduler.schedule()
        check_scheduler(scheduler)
        fault(scheduler, sequence)
        with pytest.raises(AssertionError):
            check_scheduler(scheduler)


def test_a_batch_replays_on_a_second_runner() -> None:
    """Batch is all that a rank needs: another runner that is given the same batches comes to the same tokens."""
    config = make_config(num_pages=12, page_size=2)
    simulation = run(config, *(request(config, 3 + seed, 8, seed=seed) for seed in range(4)), scheduler=hopeful(config))
    assert simulation.scheduler.stats.preemptions
    ranks = [HashRunner(config), HashRunner(config)]
    for batch in simulation.batches:
        results = [rank.launch(batch).result for rank in ranks]
        assert results[0] == results[1]
    assert ranks[0].memory == simulation.runner.memory


def test_the_modules_under_the_scheduler_do_not_import_torch() -> None:
    modules = (
        "fastgen.engine.scheduler, fastgen.request, fastgen.engine.pages, fastgen.engine.options, fastgen.model.config"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
