"""fgserve --replicas --rollout: a trainer finds the replicas' engines, and one that Ray replaces gets the weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from sending import KEY, refusal
from serving import FGSERVE, Server, alive, descendants, until

import fastgen
from fastgen import Generator, SamplingParams
from fastgen.cli.serve.options import ServerOptions
from fastgen.engine.seeds import seed_of
from fastgen.rl.fleet import Fleet
from fastgen.rl.remote import RemoteGenerator

pytestmark = pytest.mark.timeout(600)

ROWS = [f"what is {number} + {number + 7}?" for number in range(12)]
PARAMS = SamplingParams(n=2, max_tokens=40, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with two replicas, on less than two cores."""
    pytest.importorskip("ray", reason="needs the extra ray")
    arguments = ("--replicas=2", "--replica-cpus=0.4", "--rollout", "--api-key", KEY, "--seed", "0")
    with Server(FGSERVE, *arguments, seconds=240) as server:
        server.await_said("fgserve: ready", 240)
        yield server
        started = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        server.end()
    until(lambda: not any(map(alive, started)))


def urls(server: Server) -> list[str]:
    """Return the addresses of the replicas, as a trainer finds them."""
    answer = server.get("/engines", headers={"Authorization": f"Bearer {KEY}"})
    found: list[str] = answer.json()["urls"]
    return found


def rows(gen: Any) -> list[Any]:
    return [(each.token_ids, each.logprobs) for output in gen.generate(ROWS, PARAMS) for each in output.completions]


def kill_engine_at(url: str, server: Server) -> None:
    """Kill the engine of the replica that listens at an address."""
    port = f":{int(url.rpartition(':')[2]):04X} "
    for process in descendants(server.process.pid):
        sockets = {os.readlink(link) for link in Path(f"/proc/{process}/fd").glob("*") if link.is_symlink()}
        for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines():
            fields = line.split()
            if fields[3] == "0A" and f"{fields[1]} ".endswith(port) and f"socket:[{fields[9]}]" in sockets:
                for engine in descendants(process):
                    os.kill(engine, signal.SIGKILL)
                return
    raise AssertionError(f"no process listens at {url}")


def test_replicas_draw_different_samples(server: Server) -> None:
    until(lambda: len(urls(server)) == 2)
    with ExitStack() as stack:
        alone = [stack.enter_context(RemoteGenerator(url, api_key=KEY)) for url in urls(server)]
        seeds = [gen.generate([[5]], {"max_tokens": 1})[0].completions[0].seed for gen in alone]
    assert seeds[0] != seeds[1]
    assert seed_of(0, 0) in seeds, "the first replica draws as one engine does"
    key = {"Authorization": f"Bearer {KEY}"}
    given = {httpx.post(f"{url}/fleet_seed", json={}, headers=key).json()["seed"] for url in urls(server)}
    assert len(given) == 1, "those of a fleet do not depend on the order of the replicas"


def test_a_replaced_replica_gets_the_weights_before_it_serves(server: Server) -> None:
    weights = load_file(Path(fastgen.__file__).parent / "tiny" / "model.safetensors")
    torch.manual_seed(1)
    new = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in weights.items()}
    until(lambda: len(urls(server)) == 2)
    before = urls(server)
    with RemoteGenerator([server.url], api_key=KEY, keep_copy=True) as gen:
        assert isinstance(gen._engines, Fleet)
        members = gen._engines.members
        version = gen.update_weights(new)
        with Generator(page_size=16, num_pages=300) as here:
            here.update_weights(new)
            expected = rows(here)
        assert rows(gen) == expected
        kill_engine_at(before[1], server)
        assert rows(gen) == expected, "the other replica answers"
        until(lambda: len(urls(server)) == 2 and set(urls(server)) != set(before), 120)
        until(lambda: sum(member.serves for member in members) == 2, 120)
        state = httpx.get(urls(server)[-1] + "/weight_version", headers={"Authorization": f"Bearer {KEY}"}).json()
        assert state == {"weight_version": version, "torn": False}
        assert rows(gen) == expected
        assert gen.update_weights(weights) == gen.weight_version == (version or 0) + 1


def test_the_common_address_has_no_routes_for_a_trainer(server: Server) -> None:
    assert server.get("/engines").status_code == 401
    alone = RemoteGenerator(server.url, api_key=KEY)
    assert "give an address of replicas in a list" in refusal(lambda: alone.weight_version)
    answer = server.client(KEY).completions.create(
        model="any", prompt=[5, 6], max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_the_number_of_replicas_is_fixed() -> None:
    assert ServerOptions(rollout=True, replicas=2).rollout
    with pytest.raises(ValueError, match="leave out max_replicas"):
        ServerOptions(rollout=True, replicas=2, max_replicas=3)
