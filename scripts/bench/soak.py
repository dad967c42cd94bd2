"""Floods fgserve, once or for minutes, and compares each answer with the answer to the same request on its own.

    python scripts/bench/soak.py                                           # 2,000 requests at 200 connections
    python scripts/bench/soak.py --minutes 30 --requests 400 --connections 40 --name soak
    python scripts/bench/soak.py --serve Qwen/Qwen3-8B --max-seqs 64
    python scripts/bench/soak.py --minutes 10 --requests 60 --connections 4 --pause 1.5 --serve mistral7 --kv-cache-gb 6

A round sends chats and completions, streamed or not. A third of its clients leave midway, and a tenth of its requests
are malformed. The first round warms the server up; with --minutes, rounds follow until then, else there is one more.
After each round, when the server is idle, its memory, threads, file descriptors and pages are counted: `drift` is their
change from the first round to the last, and its `mb_percent` leaves the KV pool of a CPU out. In the end, clients that
read nothing run while others read. The exit status is 1 if an answer is wrong, lost or late, or something is held.
Writes scripts/results/serve-NAME.json. --serve comes last: flags of fgserve follow its model. A model of bench.py
(mistral7, ...) has random weights and the bundled model's tokenizer. --pause lets each connection rest between two
requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from reports import RESULTS, processor, write_json
from serve_load import quantiles
from serve_process import BUNDLED, Server, model_folder

SECONDS = 120.0  # a request that takes longer counts as hung
SETTLE_SECONDS = 30.0
WRITTEN = 8  # rounds in the JSON
MEMORY = ("http_mb", "engine_mb")
POOL = 500_000  # kB of a mapping from which on it is a KV pool
SMALL = 4096  # bytes that a slow reader's connection holds
TEXT = "tell me what you know about the moon and its light on water where a small boat sails to the north"
WORDS = TEXT.split()
EXTRAS: list[dict[str, Any]] = [
    {}, {"n": 3}, {"stop": ["e ", "\n"]}, {"ignore_eos": True}, {"top_p": 0.9, "presence_penalty": 0.5},
    {"structured_outputs": {"regex": "[a-z ]{5,40}"}}, {"min_tokens": 4, "top_k": 20},
    {"structured_outputs": {"choice": ["the moon", "the sun"]}},
]  # fmt: skip
MALFORMED: list[tuple[str, bytes, int]] = [
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b'{"prompt": "\xff"}', 400),
    ("/v1/completions", b'{"prompt": 5}', 400),
    ("/v1/completions", b'{"prompt": "a", "nonsense": 1}', 400),
    ("/v1/completions", b'{"prompt": "a", "n": 1000}', 400),
    ("/v1/completions", json.dumps({"prompt": [5] * 100_000}).encode(), 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "temperature": -1}', 400),
    ("/v1/completions", b'{"prompt": "a", "structured_outputs": {"regex": "("}}', 400),
    ("/v1/nothing", b"{}", 404),
]


@dataclass(frozen=True)
class Wanted:
    """A request, without the field `stream`."""

    path: str
    body: dict[str, Any]


@dataclass
class Choice:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    reason: str | None = None


Answer = dict[int, Choice]  # by the index of the sample


@dataclass
class Round:
    """What a round has found. ends: how many requests were right, left, refused or something worse."""

    ends: Counter[str] = field(default_factory=Counter)
    trouble: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first chunk of a stream, and between two chunks
    gaps: list[float] = field(default_factory=list)


def wanted_requests() -> list[Wanted]:
    """Return three requests with each of EXTRAS, of which some share a prompt's beginning."""
    found = []
    for number in range(3 * len(EXTRAS)):
        draw = random.Random(number)
        text = " ".join(WORDS + draw.choices(WORDS, k=draw.randint(3, 40)))
        body = {"seed": number, "temperature": draw.choice([0, 0.8]), "max_tokens": draw.randint(8, 48)}
        body |= {"return_token_ids": True, **EXTRAS[number % len(EXTRAS)]}
        if number % 3:
            found.append(Wanted("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
        else:
            found.append(Wanted("/v1/completions", body | {"prompt": text}))
    return found


# ------------------------------------------------------------------------------------------------- one request


def add(reply: dict[str, Any], answer: Answer) -> None:
    """Add a complete answer, or a chunk of one, to `answer`. Raises ValueError for an error of the server."""
    if "error" in reply:
        raise ValueError(f"the server said {reply['error']}")
    for given in reply["choices"]:
        choice, said = answer.setdefault(given["index"], Choice()), given.get("message") or given.get("delta") or {}
        choice.text += said.get("content") or given.get("text") or ""
        choice.ids += given.get("token_ids") or []
        choice.reason = given["finish_reason"] or choice.reason


async def read_stream(reply: httpx.Response, answer: Answer, chunks: int | None = None) -> list[float]:
    """Read a stream, or the first `chunks` of it; return the arrival times. Raises ValueError where it breaks."""
    arrivals: list[float] = []
    async for line in reply.aiter_lines():
        if line == "data: [DONE]":
            return arrivals
        if line:
            arrivals.append(time.monotonic())
            add(json.loads(line.removeprefix("data: ")), answer)
        if chunks is not None and len(arrivals) >= chunks:
            return arrivals
    raise ValueError("the stream ended without [DONE]")


class Flood:
    """Clients of a server. pause: mean seconds that a connection rests before a request. alone: the answer that each of
    `requests` gets while no other runs."""

    def __init__(self, url: str, client: httpx.AsyncClient, pause: float = 0.0) -> None:
        self.url, self.client, self.pause = url, client, pause
        self.requests = wanted_requests()
        self.alone: list[Answer] = []

    async def ask_alone(self) -> None:
        for wanted in self.requests:
            answer: Answer = {}
            add((await self.client.post(self.url + wanted.path, json=wanted.body)).json(), answer)
            self.alone.append(answer)

    async def run(self, requests: int, connections: int, seed: int) -> Round:
        """Send so many requests, of which so many are in flight at a time."""
        draw, found = random.Random(seed), Round()
        kinds = ["leave"] * (requests // 3) + ["malformed"] * (requests // 10)
        kinds += ["stay"] * (requests - len(kinds))
        draw.shuffle(kinds)
        jobs = iter([(kind, draw.randrange(len(self.requests)), random.Random(draw.random())) for kind in kinds])

        async def work() -> None:
            for kind, number, own in jobs:
                await asyncio.sleep(own.uniform(0, 2 * self.pause))
                try:
                    async with asyncio.timeout(SECONDS):
                        found.ends[await getattr(self, f"_{kind}")(number, own, found)] += 1
                except (ValueError, OSError, httpx.HTTPError, TimeoutError) as error:
                    found.ends["hung" if isinstance(error, TimeoutError) else "lost"] += 1
                    found.trouble.append(f"{kind} {number}: {error!r}"[:300])

        await asyncio.gather(*(work() for _ in range(connections)))
        return found

    async def _stay(self, number: int, draw: random.Random, found: Round) -> str:
        wanted, answer, sent = self.requests[number], Answer(), time.monotonic()
        if draw.random() < 0.5:
            add((await self.client.post(self.url + wanted.path, json=wanted.body)).json(), answer)
        else:
            async with self.client.stream("POST", self.url + wanted.path, json=wanted.body | {"stream": True}) as reply:
                arrivals = [sent, *await read_stream(reply, answer)]
            found.first.append(arrivals[1] - sent)
            found.gaps += list(np.diff(arrivals[1:]))
        if answer == self.alone[number]:
            return "right"
        found.trouble.append(f"request {number} got {answer}, and alone {self.alone[number]}"[:600])
        return "wrong"

    async def _leave(self, number: int, draw: random.Random, found: Round) -> str:
        """Disconnect before the answer comes, in the middle of it, or in the middle of the request."""
        wanted, answer = self.requests[number], Answer()
        place = draw.randrange(3)
        if place == 0:
            try:
                async with asyncio.timeout(draw.uniform(0, 1)):
                    await self.client.post(self.url + wanted.path, json=wanted.body)
            except TimeoutError:
                pass
        elif place == 1:
            async with self.client.stream("POST", self.url + wanted.path, json=wanted.body | {"stream": True}) as reply:
                await read_stream(reply, answer, draw.randint(1, 12))
        else:
            _, writer = await connect(self.url)
            data = http_post(wanted.path, wanted.body)
            writer.write(data[: draw.randrange(1, len(data))])
            writer.close()
        alone = self.alone[number]
        if all(choice.ids == alone[index].ids[: len(choice.ids)] for index, choice in answer.items()):
            return "left"
        found.trouble.append(f"request {number} began with {answer}, and alone with {alone}"[:600])
        return "wrong"

    async def _malformed(self, number: int, draw: random.Random, found: Round) -> str:
        path, body, status = draw.choice(MALFORMED)
        reply = await self.client.post(self.url + path, content=body, headers={"Content-Type": "application/json"})
        if reply.status_code == status and reply.json()["error"]["message"]:
            return "refused"
        found.trouble.append(f"{path} {body[:60]!r} got {reply.status_code}: {reply.text[:200]}")
        return "wrong"

    # --------------------------------------------------------------------------------------------- slow readers

    async def slow_readers(self, count: int, tokens: int) -> dict[str, Any]:
        """Measure the time between the tokens of `count` streams while as many others run, of which none or all read
        nothing until these have ended."""
        fast, slow = [await self._beside(count, tokens, slow) for slow in (False, True)]
        return {"streams": count, "beside_fast": fast, "beside_slow": slow, "p99_ratio": slow["p99"] / fast["p99"]}

    async def _beside(self, count: int, tokens: int, slow: bool) -> dict[str, float]:
        # Hot, so that any model writes text in most steps.
        body = {"prompt": WORDS[0], "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 2}
        read = asyncio.Event()
        much = body | {"logprobs": 5, "n": 2, "max_tokens": 4 * tokens}  # more than the connection holds
        others = [asyncio.create_task(self._read_late(read, much)) for _ in range(count)]
        if not slow:
            read.set()
        gaps: list[float] = []

        async def measure() -> None:
            async with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as reply:
                arrivals = await read_stream(reply, {})
            gaps.extend(np.diff(arrivals))

        await asyncio.gather(*(measure() for _ in range(count)))
        read.set()
        async with asyncio.timeout(SECONDS):
            if not all(await asyncio.gather(*others)):
                raise ValueError("the answer of a slow reader is not complete")
        found = quantiles(gaps)
        assert found is not None
        return found

    async def _read_late(self, read: asyncio.Event, body: dict[str, Any]) -> bool:
        """Read an answer when `read` is set; return whether it is complete."""
        reader, writer = await connect(self.url, SMALL)
        writer.write(http_post("/v1/completions", body))
        await read.wait()
        said = await reader.read()
        writer.close()
        return b"data: [DONE]" in said


async def connect(url: str, room: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a server. room: bytes that the connection holds for a reader that does not read."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    return await asyncio.open_connection(sock=connection, limit=room or 2**16)


def http_post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(data), data)


# ------------------------------------------------------------------------------------------------- the server


async def settled(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Return what the engine holds, once it is idle or SETTLE_SECONDS are over."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        told = (await client.get(f"{url}/metrics")).text
        counts = {name: float(value) for name, value in re.findall(r"^fastgen_(\w+)\{.*\} (\S+)$", told, re.M)}
        held = {name: counts[name] for name in ("running", "waiting", "pages_used")}
        held["open"] = counts["requests_total"] - counts["finished_total"] - counts["aborted_total"]
        if not any(held.values()) or time.monotonic() > deadline:
            await asyncio.sleep(1)  # then the engine has given memory back
            return held
        await asyncio.sleep(0.1)


def footprint(server: Server) -> dict[str, float]:
    """Return the memory in MB, the threads and the file descriptors of the HTTP process and of the engine's. Linux
    only."""
    found = {}
    for name, process in (("http", server.process.pid), ("engine", server.engine)):
        place = Path(f"/proc/{process}")
        found[f"{name}_mb"], found[f"{name}_pool_mb"] = memory_mb((place / "smaps").read_text())
        found[f"{name}_threads"] = len(list((place / "task").iterdir()))
        found[f"{name}_fds"] = len(list((place / "fd").iterdir()))
    return found


def memory_mb(smaps: str) -> tuple[float, float]:
    """Return the MB of anonymous memory in small and in large mappings. A large one is the KV pool on the CPU, reserved
    at the start: its pages take memory when they are first used, and the prefix cache keeps them."""
    found = [0.0, 0.0]
    for size, anonymous in re.findall(r"^Size:\s+(\d+) kB$.*?^Anonymous:\s+(\d+) kB$", smaps, re.M | re.S):
        found[int(size) > POOL] += int(anonymous) / 1000
    return found[0], found[1]


def new_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=SECONDS, limits=limits)


async def soak(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all; return the report."""
    async with new_client() as client:
        flood = Flood(server.url, client, arguments.pause)
        await flood.ask_alone()
        rounds, end = list[dict[str, Any]](), time.monotonic() + 60 * arguments.minutes
        while len(rounds) < 2 or time.monotonic() < end:
            start = time.monotonic()
            async with new_client() as flood.client:  # whose connections end with the round
                found = await flood.run(arguments.requests, arguments.connections, len(rounds))
            seconds, held = time.monotonic() - start, await settled(client, server.url)
            rounds.append({"seconds": seconds, "ends": dict(found.ends), "trouble": found.trouble[:5], "held": held,
                           "first_chunk": quantiles(found.first), "between_chunks": quantiles(found.gaps),
                           **footprint(server)})  # fmt: skip
            print(line(rounds[-1]), flush=True)
        flood.client = client
        slow = await flood.slow_readers(arguments.slow, 4 * arguments.slow)
    return {
        "server": " ".join(arguments.serve),
        "machine": processor(),
        "requests_a_round": arguments.requests,
        "connections": arguments.connections,
        "pause": arguments.pause,
        "minutes": arguments.minutes,
        "drift": drift(rounds[0], rounds[-1]),
        "slow_readers": slow,
        "tracebacks": server.said.count("Traceback"),
        "rounds": rounds,
    }


def drift(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    """Return what has changed from one round to another."""
    found = {name: last[name] - first[name] for name in first if name.endswith(("_mb", "_threads", "_fds"))}
    memory = [sum(each[name] for name in MEMORY) for each in (first, last)]
    found["mb_percent"] = 100 * (memory[1] / memory[0] - 1)
    for name in ("first_chunk", "between_chunks"):
        found |= {f"{name}_{of}_percent": 100 * (last[name][of] / first[name][of] - 1) for of in ("p50", "p99")}
    return found


def line(found: dict[str, Any]) -> str:
    memory = " + ".join(f"{found[name]:.0f}" for name in MEMORY)
    return f"{found['seconds']:.1f} s: {found['ends']}; {memory} MB; held {found['held']}"


def faults(report: dict[str, Any]) -> list[str]:
    """Return what must not be in a report."""
    found = [trouble for each in report["rounds"] for trouble in each["trouble"]]
    found += [f"held after a round: {each['held']}" for each in report["rounds"] if any(each["held"].values())]
    if report["drift"]["mb_percent"] > 5:
        found.append(f"the memory has grown by {report['drift']['mb_percent']:.1f} %")
    if report["slow_readers"]["p99_ratio"] > 2:
        found.append(f"slow readers slow others by {report['slow_readers']['p99_ratio']:.1f}")
    return found + ["the log has a traceback"] * bool(report["tracebacks"])


def thinned(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return about WRITTEN rounds, with the first, the last and those with trouble."""
    step = max(len(rounds) // WRITTEN, 1)
    return [
        each
        for number, each in enumerate(rounds, 1)
        if number % step == 1 % step or number == len(rounds) or each["trouble"] or any(each["held"].values())
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="requests per round (default 2000)")
    parser.add_argument("--connections", type=int, default=200, help="requests in flight (default 200)")
    parser.add_argument("--pause", type=float, default=0.0, help="mean seconds between a connection's requests")
    parser.add_argument("--slow", type=int, default=16, help="clients that read nothing (default 16)")
    parser.add_argument("--minutes", type=float, default=0.0, help="time for rounds, at least two of them (default 0)")
    parser.add_argument("--name", default="flood", help="name of the file, serve-NAME.json (default: flood)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for it (default: scripts/results)")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[BUNDLED], metavar="MODEL [FLAGS]")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    name, *more = arguments.serve
    with model_folder(name) as (model, flags), Server(model, [*flags, *more]) as server:
        report = asyncio.run(soak(server, arguments))
    ends = sum((Counter(each["ends"]) for each in report["rounds"]), Counter[str]())
    written = report | {"number_of_rounds": len(report["rounds"]), "ends": ends, "rounds": thinned(report["rounds"])}
    write_json(arguments.out / f"serve-{arguments.name}.json", written)
    print(json.dumps({name: report[name] for name in ("drift", "slow_readers", "tracebacks")}, indent=2))
    for fault in (found := faults(report)):
        print(fault)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
