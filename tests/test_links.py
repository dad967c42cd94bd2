"""Messages to ranks and from them: whole, in order and once, through any interrupt; and what a launch takes along."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from fastgen import links
from fastgen.exchange import DepartedError
from fastgen.links import Failed, Launch, Link, Links, Message, Settle
from fastgen.request import Batch, LaneStart, Prefill, SamplingParams, Score

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pair() -> Iterator[tuple[Links, Link]]:
    """The ends of one connection, to rank 0."""
    ours, its = socket.socketpair()
    leader = Links()
    leader.add(0, ours)
    rank = Link(its, lambda: None)
    yield leader, rank
    leader.close()
    rank.close()


def carried(batch: Batch) -> Batch:
    """As a rank has it."""
    found = links._loads(links._dumps(Launch(1, batch))[links.LENGTH.size :])
    assert isinstance(found, Launch)
    assert found.number == 1
    return found.batch


def test_messages_of_any_number_keep_their_order_and_go_where_they_belong() -> None:
    ours, ends = Links(), {}
    for rank in range(3):
        mine, its = socket.socketpair()
        ours.add(rank, mine)
        ends[rank] = Link(its, lambda: None)
    source = random.Random(1)
    wanted: dict[int, list[Message]] = {rank: [] for rank in ends}
    for number in range(0, 2000, 10):
        if source.random() < 0.5:
            each: dict[int, Message] = dict.fromkeys(ends, Settle(number))
            ours.send(each[0])
        else:
            each = {rank: Settle(number + rank) for rank in source.sample(range(3), source.randint(0, 3))}
            ours.send(each)
        for rank, message in each.items():
            wanted[rank].append(message)
    for rank, end in ends.items():
        assert [end.receive() for _ in wanted[rank]] == wanted[rank]
    ours.close()
    assert [end.receive() for end in ends.values()] == [None] * 3
    assert not [thread for thread in ours._threads if thread.is_alive()]


def test_what_the_user_gave_need_not_pickle() -> None:
    class Mask:
        def __init__(self) -> None:
            self.grammar = lambda: None

    params = SamplingParams(
        mask=Mask(), logit_bias=MappingProxyType({3: 1.5}), stop=iter("ab"), stop_token_ids=iter([1]), top_k=5, n=3
    )  # type: ignore[arg-type]
    alike = [SamplingParams(stop_token_ids=np.arange(3)) for _ in range(2)]  # type: ignore[arg-type]  # == is no bool
    each = (params, params, *alike)
    starts = tuple(LaneStart(lane, given, 1, 0, 4, frozenset([1]), ()) for lane, given in enumerate(each))
    got = carried(Batch((), (), starts, (), False)).starts
    assert got[0].params == SamplingParams(logit_bias={3: 1.5}, top_k=5, n=3)
    assert got[0].params is got[1].params, "samples share them"
    assert got[0].stop_ids == {1}
    assert got[2].params == got[3].params == SamplingParams()


def test_a_launch_takes_all_of_its_batch_along() -> None:
    one, other = SamplingParams(top_k=5, logit_bias={3: 1.5}), SamplingParams(seed=2**63)
    score = Score(2, np.arange(5, dtype=np.int32), 4, 0.5)
    chunks = (
        Prefill(3, 64, np.arange(7, dtype=np.int32), sample=False, score=score),
        Prefill(0, 0, np.array([2**31 - 1], dtype=np.int32), sample=True, forks=(4, 5)),
    )
    starts = (
        LaneStart(0, one, 2**64 - 1, 0, 1, frozenset((2,)), (1, 2)),
        LaneStart(4, one, -1, 1, 1, frozenset((2,)), ()),
        LaneStart(5, other, 5, 2, 1, frozenset(), ()),
    )
    sent = Batch((7, 6), chunks, starts, ((3, 1, (9, 8)), (0, 0, (4,))), True, (9,), ((1, 2),), ((3, 4),), ((5, 6),))
    found = carried(sent)
    for chunk, mine in zip(found.prefills, chunks, strict=True):
        assert chunk.tokens.dtype == np.int32
        assert chunk.tokens.tolist() == mine.tokens.tolist()
        chunk.tokens = mine.tokens
    got = found.prefills[0].score
    assert got is not None
    assert (got.row, got.targets.tolist(), got.top, got.temperature) == (2, [0, 1, 2, 3, 4], 4, 0.5)
    found.prefills[0].score = score
    assert found == sent
    assert found.starts[0].params is found.starts[1].params, "samples share them"
    assert carried(Batch((), (), (), (), False)) == Batch((), (), (), (), False)


def test_decodes_that_stay_the_same_are_sent_once(pair: tuple[Links, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    leader, rank = pair
    sizes: list[int] = []
    dumps = links._dumps

    def counted(message: Message, again: bool) -> bytes:
        sizes.append(len(dumps(message, again)))
        return dumps(message, again)

    monkeypatch.setattr(links, "_dumps", counted)
    wide, narrow = tuple(range(512)), (1, 2)
    for number, decodes in enumerate((wide, wide, narrow, wide, wide)):
        leader.send(Launch(number, Batch(decodes, (), (), ((5, 1, (number,)),), False, (number,))))
        leader.send(Settle(number))
        found = rank.receive()
        assert found == Launch(number, Batch(decodes, (), (), ((5, 1, (number,)),), False, (number,)))
        assert rank.receive() == Settle(number)
    assert [size > 1000 for size in sizes[::2]] == [True, False, False, True, False]
    assert max(sizes[2], sizes[8]) < 100


class Interrupted:
    """A connection that takes a few bytes at a time; an interrupt comes in the calls named, which take none."""

    def __init__(self, connection: socket.socket, calls: set[int]) -> None:
        self.connection = connection
        self.calls = calls
        self.count = 0

    def send(self, data: memoryview) -> int:
        self.count += 1
        if self.count in self.calls:
            raise KeyboardInterrupt
        return self.connection.send(data[:40])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("interrupted", [0, 1])
def test_what_an_interrupt_cuts_short_goes_on_with_the_next_message(call: int, interrupted: int) -> None:
    leader, ranks = Links(), []
    for rank in range(2):
        ours, its = socket.socketpair()
        leader.add(rank, Interrupted(ours, {call} if rank == interrupted else set()))  # type: ignore[arg-type]
        ranks.append(Link(its, lambda: None))
    decodes = tuple(range(20))
    messages: list[Message] = [Launch(number, Batch(decodes, (), (), (), False)) for number in range(3)]
    messages.append(Settle(3))
    cut = 0
    for message in messages:
        try:
            leader.send(message)
            assert not leader._unsent
        except KeyboardInterrupt:
            assert leader._unsent
            cut += 1
    assert cut == 1
    for end in ranks:
        assert [end.receive() for _ in messages] == messages
        end.close()
    leader.close()


def test_who_does_not_read_is_cut_off_where_another_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STUCK", 0.05)
    called, leader = threading.Event(), Links()
    pairs = [socket.socketpair() for _ in range(2)]
    for rank, (ours, _) in enumerate(pairs):
        leader.add(rank, ours)
    stuck = Link(pairs[0][1], called.set)
    threading.Timer(0.2, pairs[1][1].close).start()
    start = time.monotonic()
    leader.send(links.Settle("x" * 10**7))  # type: ignore[arg-type]  # more than a connection holds
    assert 0.15 < time.monotonic() - start < 5, "it waits as long as all are well"
    assert called.wait(5)
    assert {failed.rank for failed in leader.failures} >= {1}
    leader.close()
    stuck.close()


def test_closing_does_not_wait_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STUCK", 0.05)
    leader, (ours, its) = Links(), socket.socketpair()
    leader.add(0, ours)
    leader._unsent.append(links._Part(ours, memoryview(bytes(10**7))))  # which an interrupt has left
    start = time.monotonic()
    leader.close()
    assert time.monotonic() - start < 5
    its.close()


def test_a_rank_is_told_at_once_that_nothing_more_will_come_and_can_read_what_came_before() -> None:
    for failing in (False, True):
        called, leader, (ours, its) = threading.Event(), Links(), socket.socketpair()
        leader.add(0, ours)
        rank = Link(its, called.set)
        leader.send(Settle(1))
        assert not called.wait(0.05)
        if failing:
            leader.send(Failed(0, ValueError("bad")))
            leader.send(Settle(2))  # is lost
        else:
            leader.close()
        assert called.wait(5), "while it reads nothing"
        assert rank.receive() == Settle(1)
        if failing:
            found = rank.receive()
            assert isinstance(found, Failed)
            rank.send(Settle(3))
            assert leader.receive(5) == (0, Settle(3)), "it may still say something"
        assert rank.receive() is None
        rank.close()
        leader.close()


@pytest.mark.parametrize("eager", [0.0, 10.0])
def test_a_rank_waits_for_a_message_as_long_as_it_says(pair: tuple[Links, Link], eager: float) -> None:
    leader, rank = pair
    rank.eager = eager
    threading.Timer(0.05, leader.send, [Settle(1)]).start()
    start = time.monotonic()
    assert rank.receive(5) == Settle(1)
    assert time.monotonic() - start < 4
    rank.eager = 0.01
    with pytest.raises(TimeoutError):
        rank.receive(0.05)
    leader.close()
    assert rank.receive(5) is None


def test_of_several_failures_the_first_that_comes_of_no_other_is_told() -> None:
    """A death too counts only where nothing was raised before it: a watchdog may end a rank that others have left."""
    ours = Links()
    failures = [
        Failed(0, DepartedError("gone")),
        Failed(1, ValueError("a")),
        Failed(2, None),
        Failed(3, DepartedError("gone")),
        Failed(4, KeyError("b")),
    ]
    assert ours.first_failure() is None
    for count in range(1, 6):
        for some in itertools.permutations(failures, count):
            ours.failures = list(some)
            causes = [failed for failed in some if not isinstance(failed.error, DepartedError)]
            assert ours.first_failure() is (causes or some)[0]
    ours.failures = failures[:1]
    timer = threading.Timer(0.05, ours.failures.append, failures[2:3])
    timer.start()
    assert ours.first_failure(patience=10.0) is failures[2]
    ours.close()
