"""members.py and fleet.py: what needs no servers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fastgen.rl.engine import RemoteEngine
from fastgen.rl.fleet import Fleet
from fastgen.rl.http import Connections, Json, ServerClient
from fastgen.rl.members import Member, Members, of_each
from fastgen.rl.options import RemoteGeneratorOptions
from fastgen.rl.weights import ADAPTER, WEIGHTS, Update

URL = "http://localhost:1"


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let an engine answer without a server. Return the version of its weights, which a test may change."""
    found = [0]

    def get(client: ServerClient, path: str) -> Json:
        if path != "/weight_version":
            raise ValueError("there is no such path")
        return {"weight_version": found[0], "torn": False}

    monkeypatch.setattr(ServerClient, "get", get)
    return found


def test_all_members_are_called_at_the_same_time() -> None:
    """Senders of an update wait for each other, however many engines there are."""
    engine = RemoteEngine(URL, RemoteGeneratorOptions(URL))
    members = [Member(number, f"http://localhost:{number}", engine) for number in range(70)]
    together = threading.Barrier(len(members) + 1)

    def call(member: Member) -> int:
        together.wait(10)
        if member.number == 3:
            raise ValueError("no")
        return member.number

    def meanwhile() -> None:
        together.wait(10)

    found = of_each(members, call, meanwhile)
    assert isinstance(found.pop(members[3]), ValueError)
    assert list(found.values()) == [number for number in range(70) if number != 3]


def update_of(route: str, version: int, name: str, **options: Any) -> Update:
    """Make an update of one tensor, for which a number stands."""
    return Update(route, [(name, 0)], {"version": version, "in_flight": "error", **options})


def test_an_engine_returns_with_each_kind_of_update_and_the_others_do_not_wait_for_it(
    version: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, updating, go_on, done = list[tuple[str, list[str]]](), *(threading.Event() for _ in range(3))

    def update(engine: RemoteEngine, update: Update) -> int:
        assert isinstance(update.source, list)
        made.append((update.route, [name for name, _ in update.source]))
        updating.set()
        assert go_on.wait(10)
        version[0] = update.options["version"]
        if version[0] == members.version:
            done.set()
        return version[0]

    monkeypatch.setattr(RemoteEngine, "update", update)
    members = Members([URL], RemoteGeneratorOptions(URL))
    members.begin()
    (member,) = members
    for each in (
        update_of(WEIGHTS, 1, "a", partial=False),
        update_of(WEIGHTS, 2, "b", partial=True),
        update_of(ADAPTER, 3, "lora"),
        update_of(WEIGHTS, 4, "c", partial=True),
    ):
        members.settle({member: each.options["version"]}, each, each)
    try:
        with pytest.raises(ConnectionError, match="it has ended"):
            members.call_all(ended)
        assert updating.wait(10)
        other = threading.Thread(target=members.begin, daemon=True)
        other.start()
        other.join(5)
        assert not other.is_alive(), "it waits for the update"
        go_on.set()
        assert done.wait(10)
    finally:
        go_on.set()
        members.close()
    assert made == [(WEIGHTS, ["a", "b"]), (ADAPTER, ["lora"]), (WEIGHTS, ["c"])]


def ended(engine: RemoteEngine) -> None:
    raise ConnectionError("it has ended")


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("moment", ["update", "end of the engine"])
def test_a_request_that_is_aborted_while_it_waits_is_not_sent(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`moment` is what it waits for; when its engine ends, it has been sent to that one."""
    posted, aborted = list[str](), threading.Event()

    def post(client: ServerClient, path: str, body: Json, connections: Connections) -> Json:
        posted.append(path)
        aborted.set()
        raise ConnectionError("it has ended")

    monkeypatch.setattr(ServerClient, "post", post)
    fleet, found = Fleet([URL], RemoteGeneratorOptions([URL])), list[Json | None]()
    connections = Connections()
    fleet.begin()
    body = {"prompt": [1, 2], "params": None}
    asking = threading.Thread(target=lambda: found.append(fleet.generate(body, connections, aborted.is_set)))
    try:
        if moment == "update":
            with fleet.members.held("keep"):
                asking.start()
                asking.join(0.1)
                aborted.set()
        else:
            asking.start()
        asking.join(5)
    finally:
        connections.ended = True  # ends a request that goes on
        fleet.close()
    assert found == [None]
    assert posted == ([] if moment == "update" else ["/generate"])
