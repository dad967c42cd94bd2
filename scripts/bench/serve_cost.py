"""Measures the cost of HTTP: the same requests through fgserve and through Generator.stream. `bench_serve.py --cost`
runs it.

Each round starts a server, then a Generator in a process of its own, one after the other, as a GPU holds one of them.
The load comes from one thread with plain sockets, so that it takes little of the processors that it shares. Prompts are
random ids, and each token comes in a chunk of its own (return_token_ids), whatever its text.
"""

from __future__ import annotations

import json
import os
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from serve_process import Server, cpu_seconds, model_folder
from tqdm import tqdm

WARM = 8  # requests


@dataclass(frozen=True)
class Burst:
    """Requests at the same time. low, high: the range of the prompts' ids, best without special tokens."""

    requests: int
    prompt: int
    tokens: int
    low: int = 1000
    high: int = 4000

    def prompts(self, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(self.low, self.high) for _ in range(self.prompt)] for _ in range(self.requests)]

    def warm(self) -> Burst:
        return replace(self, requests=min(self.requests, WARM), tokens=min(self.tokens, 16))


@dataclass(frozen=True)
class Cost:
    """The cost of one burst. engine: CPU seconds of the engine's process; http: of the HTTP process, None without
    one."""

    tokens: int
    seconds: float
    engine: float
    http: float | None = None


# ------------------------------------------------------------------------------------------------- over HTTP


def send_burst(url: str, bodies: list[bytes]) -> int:
    """Post bodies to /completions, all at once; returns the generated tokens that the answers tell of."""
    place = urlsplit(url)
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            connection = socket.create_connection((place.hostname, place.port))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\nconnection: close\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, bytearray())
        return sum(_read_answers(selector))


def _read_answers(selector: selectors.BaseSelector) -> list[int]:
    """Read the generated tokens of each answer, in the order of their ends."""
    counts: list[int] = []
    while selector.get_map():
        for key, _ in selector.select():
            connection, answer = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            if piece := connection.recv(1 << 18):
                answer += piece
                continue
            selector.unregister(connection)
            connection.close()
            found = re.findall(rb'"completion_tokens":(\d+)', answer)
            if not answer.startswith(b"HTTP/1.1 200") or not found:
                raise RuntimeError(f"a request failed: {bytes(answer[:2000])!r}")
            counts.append(int(found[-1]))
    return counts


def serve_burst(server: Server, burst: Burst, seed: int, stream: bool) -> Cost:
    options: dict[str, Any] = {"max_tokens": burst.tokens, "ignore_eos": True, "temperature": 1, "stream": stream}
    if stream:
        options |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    bodies = [json.dumps({"model": "any", "prompt": ids, **options}).encode() for ids in burst.prompts(seed)]
    http, engine = server.cpu_seconds()
    start = time.perf_counter()
    tokens = send_burst(server.url, bodies)
    seconds = time.perf_counter() - start
    after_http, after_engine = server.cpu_seconds()
    _check(tokens, burst)
    return Cost(tokens, seconds, after_engine - engine, after_http - http)


def _check(tokens: int, burst: Burst) -> None:
    if tokens != burst.requests * burst.tokens:
        raise RuntimeError(f"{tokens} tokens were generated instead of {burst.requests * burst.tokens}")


# ------------------------------------------------------------------------------------------------- without it


def direct(model: str | None, options: dict[str, Any], burst: Burst, seeds: list[int]) -> list[Cost]:
    """Measure the bursts of these seeds by Generator.stream, in this process."""
    from fastgen import Generator, Request, SamplingParams

    def once(burst: Burst, seed: int) -> Cost:
        params = SamplingParams(max_tokens=burst.tokens, ignore_eos=True, temperature=1)
        requests = [Request(ids, params) for ids in burst.prompts(seed)]
        engine, start = cpu_seconds(os.getpid()), time.perf_counter()
        tokens = sum(len(output.completions[0].token_ids) for output in generator.stream(requests))
        seconds = time.perf_counter() - start
        _check(tokens, burst)
        return Cost(tokens, seconds, cpu_seconds(os.getpid()) - engine)

    with Generator(model, **options) as generator:
        once(burst.warm(), -1)
        return [once(burst, seed) for seed in seeds]


def direct_apart(model: str | None, options: dict[str, Any], burst: Burst, seeds: list[int]) -> list[Cost]:
    """Measure the same in a process of its own."""
    what = json.dumps([model, options, asdict(burst), seeds])
    answer = subprocess.run([sys.executable, __file__, what], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [Cost(**each) for each in json.loads(answer.splitlines()[-1])]


# ------------------------------------------------------------------------------------------------- both


def measure(name: str, burst: Burst, rounds: int, repeats: int, smoke: bool = False) -> dict[str, Any]:
    """Return a model's report; see `report`."""
    kinds: dict[str, list[Cost]] = {"streamed": [], "whole": [], "direct": []}
    random_weights: dict[str, Any] = {"load": "dummy", **({"device": "cpu"} if smoke else {})}
    with model_folder(name, smoke) as (model, flags), tqdm(total=3 * rounds * repeats, unit="burst") as bar:
        for turn in range(rounds):
            seeds = range(2 * turn * repeats, 2 * (turn + 1) * repeats)
            with Server(model, flags) as server:
                for stream in (True, False):
                    serve_burst(server, burst.warm(), -1 - stream, stream)
                for seed in seeds:  # in turns, as the machine changes with time
                    stream = seed % 2 == 0
                    kinds["streamed" if stream else "whole"].append(serve_burst(server, burst, seed, stream))
                    bar.update()
            kinds["direct"] += direct_apart(model, random_weights if flags else {}, burst, list(seeds[:repeats]))
            bar.update(repeats)
    return report(kinds) | {"burst": asdict(burst)}


def report(kinds: dict[str, list[Cost]]) -> dict[str, Any]:
    """Return medians over the bursts of each kind, and the ratios of HTTP to Generator.stream ("direct")."""
    found: dict[str, Any] = {}
    for kind, costs in kinds.items():
        rates = [cost.tokens / cost.seconds for cost in costs]
        found[kind] = {
            "tokens_per_second": statistics.median(rates),
            "spread": [min(rates), max(rates)],
            "engine_us_per_token": statistics.median(1e6 * cost.engine / cost.tokens for cost in costs),
        }
        https = [1e6 * cost.http / cost.tokens for cost in costs if cost.http is not None]
        if https:
            found[kind] |= {"http_us_per_token": statistics.median(https), "http_spread": [min(https), max(https)]}
    for kind in ("streamed", "whole"):
        mine, other = found[kind], found["direct"]
        mine["speed_of_direct"] = mine["tokens_per_second"] / other["tokens_per_second"]
        mine["engine_of_direct"] = mine["engine_us_per_token"] / other["engine_us_per_token"]
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """Return a report as text."""
    said = []
    for kind in ("direct", "streamed", "whole"):
        of = found[kind]
        low, high = of["spread"]
        text = f"{kind:9} {of['tokens_per_second']:8.1f} tok/s ({low:.1f} to {high:.1f})"
        text += f", engine {of['engine_us_per_token']:.1f} us of CPU per token"
        if "http_us_per_token" in of:
            text += f" ({of['engine_of_direct']:.3f} of direct), HTTP {of['http_us_per_token']:.1f} us;"
            text += f" {of['speed_of_direct']:.3f} of direct's speed"
        said.append(text)
    return said


if __name__ == "__main__":
    model, options, burst, seeds = json.loads(sys.argv[1])
    print(json.dumps([asdict(cost) for cost in direct(model, options, Burst(**burst), seeds)]))
