"""members.py and fleet.py: what needs no servers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fastgen.model.deltas import DELTA, Delta
from fastgen.rl.engine import RemoteEngine
from fastgen.rl.fleet import Fleet
from fastgen.rl.http import Connections, Json, ServerClient
from fastgen.rl.members import Member, Members, StaleError, of_each
from fastgen.rl.options import RemoteGeneratorOptions
from fastgen.rl.weights import ADAPTER, WEIGHTS, RemoteUpdate

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


def update_of(route: str, version: int, name: str, **options: Any) -> RemoteUpdate:
    """Make an update of one tensor, for which a number stands."""
    return RemoteUpdate(route, [(name, 0)], {"version": version, "in_flight": "error", **options})


def test_an_engine_returns_with_each_kind_of_update_and_the_others_do_not_wait_for_it(
    version: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, updating, go_on, done = list[tuple[str, list[str]]](), *(threading.Event() for _ in range(3))

    def update(engine: RemoteEngine, update: RemoteUpdate) -> int:
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
        other.join(50)
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
        asking.join(50)
    finally:
        connections.ended = True  # ends a request that goes on
        fleet.close()
    assert found == [None]
    assert posted == ([] if moment == "update" else ["/generate"])


# ------------------------------------------------------------------------------------ engines that were started again


class Engines:
    """Two engines without servers. versions: {url: version of its weights}, which a test may change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: int = 0) -> None:
        self.versions = {f"http://localhost:{port}": version for port in (1, 2)}
        self.posted: list[tuple[str, str]] = []  # url and path
        self.refuses: type[Exception] | None = None
        self.reason = "stop"
        monkeypatch.setattr(ServerClient, "get", lambda *given: self._get(*given))
        monkeypatch.setattr(ServerClient, "post", lambda *given: self._post(*given))

    def _get(self, client: ServerClient, path: str) -> Json:
        if path != "/weight_version":
            raise ValueError("there is no such path")
        return {"weight_version": self.versions[client.url], "torn": False}

    def _post(self, client: ServerClient, path: str, body: Json, connections: Any = None) -> Json:
        self.posted.append((client.url, path))
        if self.refuses is not None:
            raise self.refuses("no")
        version = self.versions[client.url]
        if path == "/update_weights":
            self.versions[client.url] = version = body["version"]
        old = [] if body.get("resume") is None else [(0, 0, 2)]
        spans = [*old, (version, 2 * len(old), 2 * len(old) + len(body.get("prompt", ())))]
        drawn = [span for span in spans if span[1] < span[2]]
        completion = {"weight_versions": drawn, "finish_reason": self.reason}
        return {"completions": [completion], "logprobs": [[version]], "weight_version": version}

    @property
    def fleet(self) -> Fleet:
        return Fleet(list(self.versions), RemoteGeneratorOptions(list(self.versions), timeout=0.5))

    def restart(self, url: str) -> None:
        """Let an engine have the weights of the checkpoint, as after a start."""
        self.versions[url], self.posted = 0, []


def folder(partial: bool) -> RemoteUpdate:
    return RemoteUpdate(WEIGHTS, "/new", {"version": None, "in_flight": "keep", "partial": partial})


def generate(fleet: Fleet, prompt: list[int], **fields: Any) -> set[int]:
    found = fleet.generate({"prompt": prompt, "params": None, **fields}, Connections(), lambda: False)
    assert found is not None
    return {version for each in found["completions"] for version, _, _ in each["weight_versions"]}


@pytest.mark.parametrize("way", ["generate", "score", "lines"])
def test_an_engine_that_was_started_again_unnoticed_answers_nothing_with_old_weights(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch)
    monkeypatch.setattr(ServerClient, "lines", lambda client, path, body: iter([{"version": engines.versions}]))
    fleet, (first, second) = engines.fleet, engines.versions
    try:
        for _ in range(3):
            fleet.update(folder(partial=False))
        fleet.members.resting = {"steps"}  # nothing else brings it back here
        assert [generate(fleet, [1, 2]) for _ in range(4)] == [{3}] * 4
        engines.restart(first)
        if way == "generate":
            assert [generate(fleet, [number]) for number in range(8)] == [{3}] * 8
        elif way == "score":
            assert [answer["logprobs"] for answer in fleet.score([{"sequences": [[1]]}] * 8)] == [[[3]]] * 8
        else:
            with pytest.raises(ConnectionError, match="have version 0 instead of 3"):
                list(fleet.lines({"prompt": [9], "params": None}))
        assert [member.serves for member in fleet.members] == [False, True]
        engines.restart(second)
        with pytest.raises(
            ConnectionError, match="no engine is left: http://localhost:1: its weights have version 0 in"
        ):
            generate(fleet, [5])
        fleet.update(folder(partial=False))
        assert engines.versions == {first: 4, second: 4}
        assert generate(fleet, [5]) == {4}
    finally:
        fleet.close()


def test_a_request_waits_until_the_only_engine_has_its_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    url = next(iter(engines.versions))
    fleet = Fleet([url], RemoteGeneratorOptions([url], timeout=10))
    try:
        fleet.update(folder(partial=False))
        engines.restart(url)
        assert generate(fleet, [1]) == {1}
    finally:
        fleet.close()


def test_an_engine_that_was_started_again_unnoticed_takes_no_partial_update(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    fleet, (first, second) = engines.fleet, engines.versions
    try:
        fleet.update(folder(partial=False))
        fleet.members.resting = {"steps"}
        engines.restart(first)
        fleet.update(folder(partial=True))
        assert engines.versions == {first: 0, second: 2}
        assert engines.posted == [(second, "/update_weights")]
        assert generate(fleet, [1]) == {2}
    finally:
        fleet.close()


def test_answers_of_a_request_before_the_first_update_and_of_other_updates_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(monkeypatch)
    fleet = engines.fleet
    fleet.begin()
    try:
        with fleet.members.turn([], 1, Connections()) as turn:
            fleet.update(folder(partial=False))
            fleet.update(folder(partial=False))
            turn.check(0)
        assert all(member.serves for member in fleet.members)
        resume = {"token_ids": [1, 2]}
        assert generate(fleet, [3], resume=resume) == {0, 2}
        assert generate(fleet, [], resume=resume) == {0}, "it ended before another token"
        engines.refuses = ValueError
        with pytest.raises(ValueError, match="no"):
            fleet.update(folder(partial=False))
        engines.refuses = None
        assert generate(fleet, [3]) == {2}
        engines.versions = dict.fromkeys(engines.versions, 7)  # by another program
        assert generate(fleet, [3]) == {7}
        assert all(member.serves for member in fleet.members)
    finally:
        fleet.close()


@pytest.mark.parametrize("error", [ConnectionError, StaleError])
@pytest.mark.parametrize("by_caller", [False, True])
def test_a_request_that_a_lost_engine_ends_is_sent_again(
    by_caller: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost by another request, and gets its weights before it ends this one."""
    engines = Engines(monkeypatch)
    fleet, post = engines.fleet, engines._post
    fleet.update(folder(partial=False))
    fleet.members.resting, engines.posted = {"steps"}, []
    (member, _) = fleet.members

    def lose(client: ServerClient, path: str, body: Json, connections: Any = None) -> Json:
        engines.reason = "stop" if engines.posted else "abort"
        if not engines.posted:
            engines.versions[member.url] = 0
            fleet.members._lose(member, error("it sends nothing"))
            engines.versions[member.url] = 1
        return post(client, path, body)

    monkeypatch.setattr(engines, "_post", lose)
    try:
        found = fleet.generate(
            {"prompt": [1], "params": None}, Connections(), lambda: by_caller and bool(engines.posted)
        )
        assert found is not None
        assert found["completions"][0]["finish_reason"] == ("abort" if by_caller else "stop")
        fleet.members._judge(member, member.engine.state())
        engines.reason = "abort"
        monkeypatch.setattr(engines, "_post", post)
        assert generate(fleet, [1, 2, 3]) == {1}, "an abort by another program"
    finally:
        fleet.close()


@pytest.mark.parametrize("before", [0, 5])
def test_a_partial_update_leads_to_the_weights_only_from_those_of_the_checkpoint(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that comes back has the checkpoint, and not what another program gave it before this fleet began."""
    engines = Engines(monkeypatch, before)
    fleet, (first, _) = engines.fleet, engines.versions
    try:
        fleet.update(folder(partial=True))
        engines.restart(first)
        (member, _) = fleet.members
        fleet.members._judge(member, member.engine.state())
        fleet.members._restore(member)
        assert member.serves == (before == 0)
        assert engines.versions[first] == (1 if before == 0 else 0)
    finally:
        fleet.close()


@pytest.mark.parametrize(("path", "body"), [("/sleep", {"tags": ["kv_cache"]}), ("/pause", {})])
def test_engines_are_looked_for_after_a_sleep_that_was_refused(
    path: str, body: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch)
    fleet = engines.fleet
    try:
        engines.refuses = RuntimeError
        with pytest.raises(RuntimeError, match="no"):
            fleet.post(path, body)
        assert not fleet.members.resting
        engines.refuses = None
        fleet.post(path, body)
        assert fleet.members.resting
    finally:
        fleet.close()


def test_deltas_join_the_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy does not grow with the number of updates, and engines that come back get the latest values."""
    members = Members([URL], RemoteGeneratorOptions(URL))
    whole = torch.arange(6, dtype=torch.bfloat16).view(2, 3)

    def note(partial: bool, **tensors: Any) -> list[dict[str, Any]]:
        named = [(name.replace("_delta", DELTA), tensor) for name, tensor in tensors.items()]
        members._note(RemoteUpdate(WEIGHTS, named, {"partial": partial}))
        assert members._made_updates is not None
        return [dict(update.source) for update in members._made_updates if isinstance(update.source, list)]

    def delta(indices: list[int], *values: float) -> torch.Tensor:
        return Delta.of("a", (torch.tensor(indices), torch.tensor(values))).packed

    note(False, a=whole, b=torch.zeros(2))
    for step in range(5):
        (found,) = note(True, a_delta=delta([1, 4], step, step + 0.5))
    assert found["a"].tolist() == [[0, 4, 2], [3, 4.5, 5]]
    (found,) = note(True, a_delta=delta([0], 1 / 3), b=torch.ones(2))
    assert found["a"].view(-1)[0] == torch.tensor(1 / 3)
    assert found["b"].tolist() == [1, 1]
    members._made_updates = [RemoteUpdate(WEIGHTS, "/folder", {"partial": False})]
    note(True, a_delta=delta([1, 4], 1.0, 2.0))
    (found,) = note(True, a_delta=delta([0, 4], 7.0, 8.0))
    assert found["a" + DELTA].tolist() == [[0, 1, 4], [7, 1, 8]]
    (found,) = note(True, a=whole)
    assert list(found) == ["a"]
