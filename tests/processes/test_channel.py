"""Messages between processes arrive whole and in order, and failures are noticed at once."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from fastgen.processes.channel import Channel, Failed, Peers
from fastgen.processes.errors import DepartedError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel, SimpleQueue[Any]]]:
    """The two ends of a connection, and the messages that arrive at the second end."""
    ours, its = socket.socketpair()
    incoming: SimpleQueue[Any] = SimpleQueue()
    one, other = Channel(ours, lambda _: None), Channel(its, incoming.put)
    yield one, other, incoming
    one.close()
    other.close()


def test_messages_keep_their_order_until_the_end(pair: tuple[Channel, Channel, Any]) -> None:
    one, other, incoming = pair
    source = random.Random(1)
    sent = [bytes([number % 256]) * source.choice((0, 1, 100, 300_000)) for number in range(300)]
    for message in sent:
        one.send(message)
    one.close()
    assert [incoming.get(timeout=10) for _ in sent] == sent
    assert incoming.get(timeout=10) is None
    with pytest.raises(OSError, match="Broken pipe"):
        other.send(1)


def test_what_is_not_taken_at_once_follows() -> None:
    ours, its = socket.socketpair()
    one, large = Channel(ours, lambda _: None), "x" * 10**6
    for _ in range(3):
        one.send(large, wait=False)  # nobody reads
    incoming: SimpleQueue[Any] = SimpleQueue()
    other = Channel(its, incoming.put)
    one.send("last", wait=False)
    one.flush()
    assert [incoming.get(timeout=10) for _ in range(4)] == [large] * 3 + ["last"]
    one.close()
    other.close()


def test_a_part_of_a_message_ends_the_connection(pair: tuple[Channel, Channel, Any]) -> None:
    class Interrupted:
        """A connection whose second call is interrupted."""

        def __init__(self, connection: socket.socket) -> None:
            self.connection = connection

        def sendall(self, data: bytes) -> None:
            self.connection.sendall(data[:20])
            if len(data) > 20:
                raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

    one, _, incoming = pair
    one._connection = Interrupted(one._connection)  # type: ignore[assignment]
    one.send(1)
    with pytest.raises(KeyboardInterrupt):
        one.send("a message of more bytes")
    assert [incoming.get(timeout=10) for _ in range(2)] == [1, None]


def unreadable() -> Any:
    raise LookupError("not here")


class Unreadable:
    def __reduce__(self) -> Any:
        return unreadable, ()


def test_a_message_that_cannot_be_pickled_is_not_sent_and_one_that_cannot_be_unpickled_is_a_failure(
    pair: tuple[Channel, Channel, Any],
) -> None:
    one, _, incoming = pair
    with pytest.raises(Exception, match="lambda"):
        one.send(lambda: 0)
    one.send(Unreadable())
    one.send(1)
    failed = incoming.get(timeout=10)
    assert isinstance(failed.error, LookupError)
    assert "unreadable" in failed.trace
    assert incoming.empty()


@pytest.mark.parametrize("error", [None, ValueError("bad")])
def test_a_failure_is_noticed_at_once_and_comes_after_earlier_messages(error: Exception | None) -> None:
    """error: raised by the leader; None: its connection ends."""
    leader, followers = Peers(), {1: Peers(), 2: Peers()}
    for rank, follower in followers.items():
        ours, its = socket.socketpair()
        its.settimeout(0.01)  # as of a connection that had to be made soon
        leader.add(rank, ours)
        follower.add(0, its)
        follower.send(rank)
    assert sorted(leader.receive(10) for _ in followers) == [(1, 1), (2, 2)]
    with pytest.raises(Empty):
        leader.receive(0.01)
    called = threading.Event()
    followers[1].on_failure = called.set
    leader.send(1)
    assert not called.wait(0.05)
    if error is None:
        leader.close()
    else:
        leader.send(Failed.of(error))
    assert called.wait(50), "while it reads nothing"
    assert followers[1].receive() == (0, 1)
    assert repr(followers[1].receive()[1].error) == repr(error)
    leader.close()
    with pytest.raises(Empty):
        followers[1].receive(0.1)
    ((rank, failed),) = followers[1].failures
    assert (rank, repr(failed.error)) == (0, repr(error))
    for follower in followers.values():
        follower.close()
    assert not leader.failures, "it has closed"


def test_the_first_failure_that_is_no_consequence_of_another_is_found() -> None:
    """A death is the cause only if no error was raised before it: a watchdog may end a rank that others have left."""
    peers = Peers()
    errors = [DepartedError("gone"), ValueError("a"), None, KeyError("b")]
    failures = [(rank, Failed(error)) for rank, error in enumerate(errors)]
    assert peers.first_failure() is None
    for peers.failures in map(list, itertools.permutations(failures)):
        causes = [each for each in peers.failures if not isinstance(each[1].error, DepartedError)]
        assert peers.first_failure() is causes[0]
    peers.failures = failures[:1]
    assert peers.first_failure() is failures[0]
    threading.Timer(0.05, peers.failures.append, failures[2:3]).start()
    assert peers.first_failure(patience=10.0) is failures[2]
