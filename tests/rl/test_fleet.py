"""fleet.py: two servers behave like one Generator, also when one of them is killed."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sending import KEY, Sharded, refusal
from serving import FGSERVE, Server, until
from torch import Tensor

from fastgen import Generator, Request, RequestOutput, SamplingParams
from fastgen.rl.fleet import Fleet
from fastgen.rl.members import Member
from fastgen.rl.remote import RemoteGenerator

pytestmark = pytest.mark.timeout(240)

COUNT = 2  # of the servers
ROWS = [f"what is {number} + {number + 7}?" for number in range(16)]
PARAMS = SamplingParams(n=2, max_tokens=40, seed=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, seed=7, ignore_eos=True, speculate=False)

Weights = dict[str, Tensor]


class Servers:
    """Servers of one model. A killed one can be started again at its address."""

    def __init__(self, model: Path) -> None:
        self._stack, self._model = ExitStack(), str(model)
        self.servers = [self._start("0") for _ in range(COUNT)]
        for server in self.servers:
            server.await_ready()

    def _start(self, port: str) -> Server:
        arguments = ("--rollout", "--api-key", KEY, "--seed", "0", "--port", port)
        return self._stack.enter_context(Server(FGSERVE, self._model, *arguments))

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def kill(self, number: int) -> None:
        """Kill a server and its engine."""
        server = self.servers[number]
        engines = server.engines()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        until(lambda: all(not Path(f"/proc/{engine}").exists() for engine in engines))

    def restart(self, number: int) -> None:
        self.servers[number] = self._start(self.servers[number].url.rpartition(":")[2])

    def repair(self) -> None:
        for number, server in enumerate(self.servers):
            if server.process.poll() is not None:
                self.restart(number)
        for server in self.servers:
            server.await_ready()

    def answered(self) -> list[float]:
        """Return the number of requests that each server has finished."""
        return [server.stats()["finished_total"] for server in self.servers]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def servers(talker: Path) -> Iterator[Servers]:
    servers = Servers(talker)
    yield servers
    servers.close()


@pytest.fixture
def weights(talker: Path) -> Weights:
    return load_file(talker / "model.safetensors")


@pytest.fixture
def gen(servers: Servers, weights: Weights) -> Iterator[RemoteGenerator]:
    """A fleet of servers that have the same weights."""
    servers.repair()
    with made(servers, timeout=20) as gen:
        gen.update_weights(weights, in_flight="abort")
        yield gen


def made(servers: Servers, **options: Any) -> RemoteGenerator:
    return RemoteGenerator(servers.urls, api_key=KEY, replace_group=True, **options)


def changed(weights: Weights, seed: int = 1) -> Weights:
    """Return weights that draw other tokens."""
    torch.manual_seed(seed)
    return {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in weights.items()}


def members(gen: RemoteGenerator) -> list[Member]:
    assert isinstance(gen._engines, Fleet)
    return list(gen._engines.members)


def rows(outputs: list[RequestOutput]) -> list[Any]:
    """Return what depends only on weights and params."""
    return [
        (output.prompt_token_ids, each.index, each.token_ids, each.logprobs, each.text, output.error)
        for output in outputs
        for each in output.completions
    ]


@pytest.fixture(scope="module")
def here(talker: Path) -> Iterator[Generator]:
    """The Generator whose answers those of the servers are compared with; a test leaves it with its weights."""
    with Generator(talker, page_size=16, num_pages=300) as here:
        yield here


@pytest.fixture(scope="module")
def expected(here: Generator) -> list[Any]:
    return rows(here.generate(ROWS, PARAMS))


# ------------------------------------------------------------------------------------------------ requests


def test_rows_are_those_of_one_engine_and_all_engines_work(
    gen: RemoteGenerator, servers: Servers, expected: list[Any]
) -> None:
    before = servers.answered()
    assert rows(gen.generate(ROWS, PARAMS)) == expected
    until(lambda: sum(servers.answered()) - sum(before) == len(ROWS))
    shares = [after - old for after, old in zip(servers.answered(), before, strict=True)]
    assert min(shares) >= len(ROWS) / COUNT - 3


def test_engines_with_one_seed_draw_different_samples(gen: RemoteGenerator, servers: Servers) -> None:
    """The samples are those of their seeds, on any engine, and another client of the engines gets others."""
    before, params = servers.answered(), SamplingParams(max_tokens=8, ignore_eos=True)
    with made(servers) as other:
        seeds = [
            each.seed
            for client in (gen, gen, other)
            for output in client.generate(["tell me of the sea"] * 24, params)
            for each in output.completions
        ]
    until(lambda: sum(servers.answered()) - sum(before) == len(seeds))
    assert sum(after > old for after, old in zip(servers.answered(), before, strict=True)) > 1
    assert len(set(seeds)) == len(seeds)
    (first, second), own = gen.generate([[5], [5]], replace(params, n=2))[0].completions, replace(params, n=2, seed=9)
    assert first.seed == second.seed, "samples differ by their index"
    (again,) = gen.generate([[5]], replace(params, n=2, seed=first.seed))
    assert [each.token_ids for each in again.completions] == [first.token_ids, second.token_ids]
    assert gen.generate([[5]], own)[0].completions[0].seed == 9
    (cut,) = gen.generate([[5]], replace(params, max_tokens=2))
    events = list(gen.events(Request([5], params, resume=cut.completions[0])))
    assert events[-1].seed == cut.completions[0].seed, "a completion goes on with its own seed"


def test_requests_with_the_same_prompt_go_to_one_engine(gen: RemoteGenerator, servers: Servers) -> None:
    before = servers.answered()
    prompt = "tell me of the sea. " * 20
    requests = [Request(prompt, SamplingParams(max_tokens=4, seed=seed)) for seed in range(8)]
    assert len(list(gen.stream(requests))) == 8
    until(lambda: sum(servers.answered()) - sum(before) == 8)
    assert sorted(after - old for after, old in zip(servers.answered(), before, strict=True)) == [0, 8]


def test_abort_events_and_scores_are_those_of_a_generator(
    gen: RemoteGenerator, servers: Servers, here: Generator
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gen.generate, ROWS[:6], LONG)
        until(lambda: sum(server.stats()["running"] for server in servers.servers) == 6)
        partial = gen.abort()
        outputs = running.result()
    assert sorted(output.id for output in partial) == list(range(6))
    assert {each.finish_reason for output in outputs for each in output.completions} == {"abort"}
    longer = replace(LONG, max_tokens=len(outputs[0].completions[0].token_ids) + 8)
    (resumed,) = gen.stream([Request(ROWS[0], longer, resume=outputs[0].completions[0])])
    assert rows([resumed]) == rows(gen.generate(ROWS[0], longer))
    events = list(gen.events(ROWS[1], PARAMS))
    (whole,) = gen.generate(ROWS[1], PARAMS)
    assert [id for event in events if event.index == 1 for id in event.token_ids] == whole.completions[1].token_ids
    given = [[5, 6, 7], *ROWS[:3]] * 30
    assert [row[1:] for row in gen.score(given)] == [row[1:] for row in here.score(given)]
    assert gen.weight_checksums() == here.weight_checksums() * len(servers.servers)


def test_closing_a_stream_ends_its_requests_and_loses_no_engine(gen: RemoteGenerator, servers: Servers) -> None:
    stream = gen.stream(Request([5, number], PARAMS if number == 9 else LONG) for number in range(9, 15))
    next(stream)
    stream.close()
    until(lambda: all(server.idle() for server in servers.servers))
    assert serving(gen) == servers.urls


def test_errors_of_requests_are_those_of_the_request(gen: RemoteGenerator) -> None:
    first, second = gen.generate([[5, 6], [10**6]], PARAMS)
    assert first.error is None
    assert "outside the vocabulary" in (second.error or "")


def serving(gen: RemoteGenerator) -> list[str]:
    """Return the addresses of the engines that get requests."""
    return [member.url for member in members(gen) if member.serves]


# ------------------------------------------------------------------------------------------------ weights


def test_one_update_for_all_gathers_once(
    gen: RemoteGenerator, servers: Servers, here: Generator, weights: Weights
) -> None:
    old, new = rows(gen.generate(ROWS, PARAMS)), changed(weights)
    Sharded.gathered = 0
    version = gen.update_weights({name: Sharded(tensor) for name, tensor in new.items()})
    assert Sharded.gathered == len(new)
    assert [server.get("/weight_version", headers=auth()).json()["weight_version"] for server in servers.servers] == [
        version
    ] * COUNT
    here.update_weights(new)
    assert rows(gen.generate(ROWS, PARAMS)) == rows(here.generate(ROWS, PARAMS)) != old
    here.update_weights(weights)
    assert gen.update_weights(iter(weights.items()), version=4711) == 4711
    assert {each.weight_versions[0][0] for output in gen.generate(ROWS[:6], PARAMS) for each in output.completions} == {
        4711
    }


def auth() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


def test_an_update_that_does_not_fit_changes_nothing(
    gen: RemoteGenerator, servers: Servers, weights: Weights, expected: list[Any]
) -> None:
    version = gen.weight_version
    wrong = {**weights, "x": torch.ones(3)}
    assert "unexpected tensor 'x'" in refusal(lambda: gen.update_weights(wrong), ValueError)
    assert "no folder /nope" in refusal(lambda: gen.update_weights("/nope"), ValueError)
    assert "no tensors" in refusal(lambda: gen.update_weights([]), ValueError)
    assert (gen.weight_version, serving(gen)) == (version, servers.urls)
    assert rows(gen.generate(ROWS, PARAMS)) == expected


def test_an_error_of_the_trainer_leaves_no_engine_until_the_next_update(gen: RemoteGenerator, weights: Weights) -> None:
    some: dict[str, Any] = {name: Sharded(tensor, KeyError(name)) for name, tensor in weights.items()}
    with pytest.raises(KeyError):
        gen.update_weights({**some, "model.norm.weight": weights["model.norm.weight"]})
    assert "no engine is left" in refusal(lambda: gen.generate("a", PARAMS), ConnectionError)
    until(lambda: all(member.answers for member in members(gen)))
    gen.update_weights(weights)
    assert gen.generate("a", PARAMS)[0].error is None


@pytest.mark.long
def test_requests_in_flight(gen: RemoteGenerator, servers: Servers, weights: Weights) -> None:
    version = gen.weight_version
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gen.generate, ROWS[:6], LONG)
        until(lambda: sum(server.stats()["running"] for server in servers.servers) == 6)
        assert "requests are in flight (6)" in refusal(lambda: gen.update_weights(weights), ValueError)
        gen.pause()
        gen.update_weights(weights, in_flight="keep")
        gen.resume()
        outputs = running.result()
    spans = [[span[0] for span in each.weight_versions] for output in outputs for each in output.completions]
    assert spans == [[version, version + 1]] * 6


def test_sleep_and_wake(gen: RemoteGenerator, weights: Weights) -> None:
    assert gen.sleep(keep_weights=False) == 0  # on the CPU
    assert "asleep: kv_cache, weights" in refusal(lambda: gen.generate("a", PARAMS))
    gen.wake("weights")
    gen.update_weights(weights)
    gen.wake(["kv_cache"])
    assert gen.generate("a", PARAMS)[0].error is None


# ------------------------------------------------------------------------------------------------ engines that return


@pytest.mark.long
@pytest.mark.parametrize("way", ["copy", "folder", "next update"])
def test_an_engine_that_returns_has_the_current_weights_before_it_serves(
    way: str, servers: Servers, weights: Weights, tmp_path: Path
) -> None:
    servers.repair()
    new = changed(weights)
    save_file(new, tmp_path / "model.safetensors")
    with made(servers, timeout=20, keep_copy=way == "copy") as gen:
        version = gen.update_weights(tmp_path if way == "folder" else new, in_flight="abort")
        before = rows(gen.generate(ROWS, PARAMS))
        servers.kill(1)
        assert rows(gen.generate(ROWS, PARAMS)) == before
        assert serving(gen) == servers.urls[:1]
        servers.restart(1)
        servers.servers[1].await_ready()
        if way == "next update":
            until(lambda: members(gen)[1].answers)
            assert serving(gen) == servers.urls[:1]
            version = gen.update_weights(new)
        until(lambda: serving(gen) == servers.urls)
        assert servers.servers[1].get("/weight_version", headers=auth()).json()["weight_version"] == version
        assert rows(gen.generate(ROWS, PARAMS)) == before
        assert servers.answered()[1] > 0


@pytest.mark.long
def test_partial_updates_are_part_of_the_copy(servers: Servers, weights: Weights) -> None:
    servers.repair()
    name = next(iter(weights))
    with made(servers, timeout=20, keep_copy=True) as gen:
        gen.update_weights(changed(weights), in_flight="abort")
        gen.update_weights({name: weights[name]}, partial=True)
        before = rows(gen.generate(ROWS, PARAMS))
        servers.kill(0)
        servers.restart(0)
        assert rows(gen.generate(ROWS, PARAMS)) == before
        until(lambda: serving(gen) == servers.urls)
        assert rows(gen.generate(ROWS, PARAMS)) == before
        assert servers.answered()[0] > 0


def test_a_killed_engine_loses_no_row_and_doubles_none(
    gen: RemoteGenerator, servers: Servers, expected: list[Any], weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are counted as they arrive, and have the bits of one engine's. It is among the last tests, so that the
    engine need not be started again."""
    found = dict[Any, RequestOutput]()
    requests = [Request(row, PARAMS, number) for number, row in enumerate(ROWS)]
    for output in gen.stream(requests):
        assert output.id not in found
        found[output.id] = output
        if len(found) == 3:
            victim = max(members(gen), key=lambda member: member.running)
            assert victim.running > 1
            servers.kill(victim.number)
    assert f"{victim.url} is lost" in caplog.text
    assert sorted(found) == list(range(len(ROWS)))
    assert rows([found[number] for number in range(len(ROWS))]) == expected
    assert rows(gen.generate(ROWS, PARAMS)) == expected, "the others go on"
    assert gen.update_weights(changed(weights)) == gen.weight_version


def test_no_engine_is_left(servers: Servers) -> None:
    for number in range(COUNT):
        servers.kill(number)
    with made(servers, timeout=1, ready_timeout=0) as gen:
        message = refusal(lambda: gen.generate("a", PARAMS), ConnectionError)
        assert message.startswith("no engine is left: http://127.0.0.1:")
        assert len(re.findall("no answer from", message)) == COUNT
        assert Counter(re.findall(r":(\d+): no answer", message)) == Counter(url[-5:] for url in servers.urls)
    for wrong in ([], ["http://a", "http://a"]):
        with pytest.raises(ValueError, match="give one address or several different ones"):
            RemoteGenerator(wrong)
    with pytest.raises(ValueError, match="it must be like http"):
        RemoteGenerator(["http://a", "b"])
