"""The scheduler over the hash model, without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hash_model import TroubleError, expected, make_config
from invariants import check_scheduler
from simulation import begin, request, run

from fastgen.engine.options import EngineConfig
from fastgen.engine.scheduler import MAX_PREFILLS, Scheduler
from fastgen.request import Sequence, Status

# -------------------------------------------------------------------------------------- what goes into a step


@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [
        ((4, 9, 5), [[(0, 0, 4), (1, 0, 6)], [(1, 6, 3), (2, 0, 5)]]),  # in order of arrival
        ((30, 40, 5, 12), [
            [(2, 0, 5), (0, 0, 5)], [(3, 0, 5), (0, 5, 5)], [(3, 5, 5), (0, 10, 5)], [(3, 10, 2), (0, 15, 8)],
            [(0, 23, 7), (1, 0, 3)],
        ]),
    ],
)  # fmt: skip
def test_short_prompts_do_not_wait_for_long_ones_and_these_get_half_of_each_step(
    lengths: tuple[int, ...], chunks: list[list[tuple[int, int, int]]]
) -> None:
    """chunks: the lane, start and number of tokens of each chunk, for each of the first steps."""
    config = make_config(max_seqs=4, max_step_tokens=10)
    done = run(config, *(request(config, length, 1, seed=seed) for seed, length in enumerate(lengths)))
    found = [[(chunk.lane, chunk.start, len(chunk.tokens)) for chunk in batch.prefills] for batch in done.batches]
    assert found[: len(chunks)] == chunks


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
    simulation = begin(config, *sequences)
    simulation.advance()
    simulation.advance()
    simulation.drain()
    assert [sequence.prefill_left > 0 for sequence in sequences] == [False, True, False]
    simulation.scheduler.drop_prefixes()
    check_scheduler(simulation.scheduler)
    assert (simulation.scheduler.running, [*simulation.scheduler.waiting]) == ([old], [long, short])


@pytest.mark.parametrize("limit", [{"max_seqs": 2}, {"num_pages": 8}])
def test_wants_more_while_lanes_and_pages_are_free_for_those_who_wait(limit: dict[str, int]) -> None:
    config = make_config(**{"max_seqs": 9, "page_size": 4} | limit)
    scheduler, wants = Scheduler(config), []
    sequences = [request(config, 6, 7, seed=seed) for seed in range(4)]  # three pages each
    for sequence in sequences:
        wants.append(scheduler.wants_more)
        scheduler.add(sequence)
    assert wants == [True, True, True, False]
    scheduler.schedule()  # two run, two wait
    assert scheduler.running == sequences[:2]
    for waiting in sequences[2:]:
        assert not scheduler.wants_more
        scheduler.finish(waiting, "abort")
    assert scheduler.wants_more
    check_scheduler(scheduler)


# --------------------------------------------------------------------------------------------------- the end


def stopping(config: EngineConfig, at: int) -> Sequence:
    """Return a sequence whose output has its stop id at position `at`, and not before."""
    for seed in range(100):
        tokens = expected(request(config, 5, at + 1, seed=seed)).token_ids[5:]
        if tokens[at] not in tokens[:at]:
            sequence = request(config, 5, 20, seed=seed)
            sequence.stop_ids = frozenset({tokens[at]})
            return sequence
    raise AssertionError


@pytest.mark.parametrize(("context", "dropped"), [(64, 1), (9, 0)])
def test_a_stop_computes_one_token_too_many_unless_it_is_at_the_end(context: int, dropped: int) -> None:
    config = make_config(max_model_len=context)
    sequence = stopping(config, at=3)  # 5 + 4 tokens
    simulation = run(config, sequence)
    assert sequence.output_len == 4
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", sequence.token_ids[-1])
    assert sum(len(batch.sampling) for batch in simulation.batches) == 4 + dropped
    assert (simulation.seen["dropped"], simulation.scheduler.stats.generated_tokens) == (dropped, 4)


def test_a_waiting_sequence_is_aborted_without_a_trace() -> None:
    config = make_config(max_seqs=1)
    first, second = request(config, 3, 3), request(config, 3, 3, seed=1)
    simulation = begin(config, first, second)
    simulation.advance()
    simulation.abort(second)
    simulation.scheduler.finish(second, "abort")  # once more is harmless
    assert (second.finish_reason, second.output_len) == ("abort", 0)
    simulation.run()
    assert len(simulation.batches) == 3


# -------------------------------------------------------------------------------------------------- exceptions


class Torn(list[Any]):
    """A list that raises at the first append."""

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
    simulation = begin(config, *sequences)
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
    config = make_config(max_seqs=2, max_step_tokens=2, page_size=1)
    sequences = [request(config, 3, 4, seed=seed) for seed in range(4)]
    simulation = begin(config, *sequences)
    for _ in range(4):
        simulation.advance()
    simulation.in_flight = None
    simulation.scheduler.reservations.reserved_pages += 1  # an exception in the middle of a sum
    simulation.scheduler.reservations.waiting_pages += 1
    simulation.scheduler.reset(sequences)
    check_scheduler(simulation.scheduler)
    assert list(simulation.scheduler.waiting) == sequences
    assert not any(simulation.scheduler.pages.match(s.token_ids, 9) for s in sequences), "no step has computed them"
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


def test_the_modules_under_the_scheduler_do_not_import_torch() -> None:
    code = "import sys, fastgen.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
