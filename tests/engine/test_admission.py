"""Admission: page reservations for predicted outputs, and preemption when outputs get longer."""

from __future__ import annotations

import pytest
from hash_model import VOCAB, HashMask, InexactEstimate, hopeful, make_config
from simulation import Simulation, begin, request, run
from test_scheduler import stopping

from fastgen.engine.admission import LaneTable, LengthEstimate
from fastgen.engine.scheduler import MAX_PREFILLS, Scheduler
from fastgen.request import Sequence


def most_running(simulation: Simulation) -> int:
    return max(len({*batch.decodes, *(chunk.lane for chunk in batch.prefills)}) for batch in simulation.batches)


@pytest.mark.parametrize(("page_size", "num_pages"), [(4, 133), (4, 130), (1, 528), (16, 34)])
def test_sequences_that_run_to_their_length_are_never_preempted(page_size: int, num_pages: int) -> None:
    """A model of 512 sequences of 1024 -> 1024 tokens with pages for 425, scaled down by 16 in number and length."""
    config = make_config(max_model_len=128, max_seqs=32, max_step_tokens=40, page_size=page_size, num_pages=num_pages)
    sequences = [request(config, 16, 16, seed=seed) for seed in range(32)]
    simulation = run(config, *sequences)
    pages_each = -(-31 // page_size)  # the last token needs no KV
    assert simulation.scheduler.stats.preemptions == 0
    assert num_pages // pages_each <= most_running(simulation) <= num_pages // pages_each + 1 < 32
    assert simulation.scheduler.stats.prefilled_tokens == 32 * 16


def test_a_reservation_leaves_room_for_running_sequences_to_grow() -> None:
    config = make_config(num_pages=9, page_size=4, max_step_tokens=64)
    for answer, starts in ((6, 3), (7, 2)):  # the 13th token needs a fourth page
        olds = [request(config, 3, 7, seed=seed) for seed in range(2)]  # a page now, three at the end
        simulation = run(config, *olds, request(config, 7, answer, seed=2))
        assert len(simulation.batches[0].starts) == starts
        assert simulation.scheduler.stats.preemptions == 0


def test_a_sequence_longer_than_predicted_reserves_one_page_more_than_it_holds() -> None:
    config = make_config(num_pages=9, page_size=2, max_model_len=16)
    scheduler = hopeful(config)
    sequence = request(config, 3, None)
    simulation = begin(config, sequence, scheduler=scheduler)
    while scheduler.busy:
        simulation.advance()
        if scheduler.running:
            assert scheduler.reservations.reserved_pages == min(len(sequence.pages) + 1, 8)
    assert scheduler.reservations.reserved_pages == 0


def test_a_prompt_that_is_only_scored_reserves_only_its_own_pages() -> None:
    config = make_config(num_pages=8, page_size=4, max_step_tokens=64)
    scores = [request(config, 8, 0, seed=seed, prompt_logprobs=0) for seed in range(4)]
    assert len(run(config, *scores).batches) == 1


def test_outputs_that_end_early_let_more_sequences_run_at_a_time() -> None:
    """The outputs may fill the context, but end with a stop id long before."""
    config = make_config(max_model_len=4000, max_seqs=64, max_step_tokens=64, page_size=16, num_pages=600)
    sequences = [request(config, 4, None, seed=seed) for seed in range(150)]
    for sequence in sequences:
        sequence.stop_ids = frozenset(range(0, VOCAB, 4))
    simulation = run(config, *sequences)
    assert simulation.scheduler.stats.preemptions == 0
    assert max(len(batch.decodes) + len(batch.prefills) for batch in simulation.batches[:5]) == 600 // 65
    assert most_running(simulation) > 20
    assert simulation.scheduler.estimate.average < 20


def test_outputs_longer_than_predicted_are_preempted_and_complete() -> None:
    config = make_config(max_model_len=120, max_seqs=8, max_step_tokens=16, page_size=4, num_pages=60)
    scheduler = Scheduler(config, InexactEstimate(average=4))
    run(config, *(request(config, 5, 60, seed=seed) for seed in range(12)), scheduler=scheduler)
    assert 0 < scheduler.stats.preemptions < 40
    assert scheduler.estimate.average > 25  # the later ones were predicted to get long


def test_lower_priorities_go_first_and_each_in_order_of_arrival() -> None:
    config, begun = make_config(max_seqs=1), list[Sequence]()
    sequences = [request(config, 3 + seed, 2, seed=seed) for seed in range(6)]
    for sequence, priority in zip(sequences, (0, 5, 0, -1, 5, -1), strict=True):
        sequence.priority = priority
    simulation = begin(config, *sequences)
    while simulation.scheduler.busy:
        simulation.advance()
        begun += [s for s in simulation.scheduler.running if s not in begun]
    assert begun == [sequences[place] for place in (3, 5, 0, 2, 1, 4)]


def test_those_of_the_highest_number_are_preempted_first_and_of_these_the_youngest() -> None:
    config = make_config(max_model_len=64, max_seqs=8, max_step_tokens=64, page_size=4, num_pages=40)
    sequences = [request(config, 5, 50, seed=seed) for seed in range(5)]
    for sequence, priority in zip(sequences, (0, 9, 9, 9, -1), strict=True):
        sequence.priority = priority
    simulation, preempted = begin(config, *sequences[:4], scheduler=hopeful(config)), list[Sequence]()
    simulation.advance()
    simulation.add(sequences[4])  # the youngest one that runs
    while len(preempted) < 3:
        simulation.advance()
        preempted += [s for s in reversed(sequences) if s.preemptions and s not in preempted]
    assert preempted == [sequences[place] for place in (3, 2, 1)]
    simulation.run()
    assert not sequences[0].preemptions + sequences[4].preemptions


def test_an_urgent_prompt_is_computed_before_others_that_are_in_their_prefill() -> None:
    config = make_config(max_model_len=120, max_seqs=12, max_step_tokens=12, num_pages=200)
    simulation = begin(config, *(request(config, 30 + seed, 1, seed=seed) for seed in range(MAX_PREFILLS + 1)))
    simulation.advance()
    assert len(simulation.scheduler.prefilling) == MAX_PREFILLS
    urgent = request(config, 100, 1, seed=99)
    urgent.priority = -1
    simulation.add(urgent)
    for _ in range(2):
        simulation.advance()
    chunks = [[(chunk.start, len(chunk.tokens)) for chunk in batch.prefills] for batch in simulation.batches[1:]]
    assert chunks == [[(0, 12)], [(12, 12)]]
    simulation.run()


def test_an_urgent_request_does_not_wait_for_the_next_attempt_to_admit_another() -> None:
    config = make_config(max_model_len=40, max_seqs=4, max_step_tokens=64, page_size=4, num_pages=12)
    simulation = begin(config, request(config, 4, 30), request(config, 20, 20, seed=1))
    for _ in range(2):
        simulation.advance()
    assert (len(simulation.scheduler.running), len(simulation.scheduler.waiting)) == (1, 1)
    urgent = request(config, 4, 2, seed=2)
    urgent.priority = -1
    simulation.add(urgent)
    simulation.advance()
    assert urgent in simulation.scheduler.running
    simulation.run()


def test_the_estimate_learns_only_from_complete_outputs() -> None:
    config = make_config(max_seqs=1)
    stopped, scored = stopping(config, at=3), request(config, 9, 0, seed=1, prompt_logprobs=0)
    failed, aborted = request(config, 3, 9, seed=2, mask=HashMask(0, forbids=2)), request(config, 3, 9, seed=3)
    simulation = run(config, stopped, scored, failed)
    simulation.add(aborted)
    for _ in range(4):
        simulation.advance()
    simulation.abort(aborted)
    assert aborted.output_len
    assert simulation.scheduler.estimate.average == 1024 + (4 - 1024) / 16, "the average of the one that stopped"


def test_a_certain_length_is_predicted_whatever_other_outputs_were() -> None:
    """With a stop id, a stop string or a mask, max_tokens is only an upper bound."""
    config = make_config(max_model_len=400, max_seqs=8, page_size=4, num_pages=101)
    scheduler = Scheduler(config, LengthEstimate(average=8))
    certain = request(config, 4, 300)
    assert scheduler.reservations.expected(certain) == 76
    for params in ({"stop": ("ab",)}, {"mask": HashMask(0)}):
        assert scheduler.reservations.expected(request(config, 4, 300, **params)) == 3
    certain.stop_ids = frozenset({0})
    assert scheduler.reservations.expected(certain) == 3


@pytest.mark.parametrize(("count", "at_a_time"), [(5, 5), (6, 3), (10, 5), (11, 4), (13, 5)])
def test_what_does_not_fit_at_once_goes_in_equal_waves(count: int, at_a_time: int) -> None:
    """The pool has pages for five sequences, and no more requests will come if `closed`."""
    config = make_config(max_model_len=16, max_seqs=16, max_step_tokens=64, page_size=4, num_pages=20)
    for closed, most in ((True, at_a_time), (False, 5)):
        scheduler = Scheduler(config)
        scheduler.complete = closed
        simulation = run(config, *(request(config, 1, 15, seed=seed) for seed in range(count)), scheduler=scheduler)
        assert max(len(batch.decodes) for batch in simulation.batches[:8]) == min(most, count)
        assert simulation.scheduler.stats.preemptions == 0


def test_a_wave_begins_before_the_previous_one_has_ended() -> None:
    """Two waves of 8 sequences of 64 -> 64 tokens over pages for 14. The second wave begins 32 steps after the first,
    with room for all of it when the first one ends, and a little later, since the scheduler keeps a margin."""
    config = make_config(max_model_len=128, max_seqs=16, max_step_tokens=1024, page_size=4, num_pages=14 * 32)
    for closed, together, least, most in ((True, True, 64 + 32, 64 + 32 + 12), (False, False, 64 + 64, 999)):
        scheduler = Scheduler(config)
        scheduler.complete = closed  # else 14 run at once, and two wait until they have ended
        simulation = run(config, *(request(config, 64, 64, seed=seed) for seed in range(16)), scheduler=scheduler)
        assert scheduler.stats.preemptions == 0
        assert scheduler.stats.prefilled_tokens == 64 * 16
        assert (most_running(simulation) == 16) == together
        assert least <= len(simulation.batches) <= most


def test_the_lowest_free_lane_is_taken_and_changes_are_sent_once() -> None:
    config, lanes = make_config(), LaneTable(3)
    sequences = [request(config, 3, 4, seed=seed) for seed in range(3)]
    for sequence in sequences:
        lanes.take(sequence)
    for at in (2, 0, 1):
        lanes.leave(sequences[at])
    lanes.take(sequences[1])
    sequences[1].pages += [5, 6]
    lanes.send_pages(sequences[1], 0)
    starts, updates = lanes.take_changes()
    assert (starts[-1].lane, starts[-1].seed, updates) == (0, 1, ((0, 0, (5, 6)),))
    assert lanes.take_changes() == ((), ())
