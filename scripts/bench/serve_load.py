"""Sends requests to an OpenAI-compatible server, a number at a time or at a rate, and measures their waiting times.

Several processes share a load where one client's Python falls behind the server.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

QUANTILES = (50, 90, 99, 99.9)


@dataclass(frozen=True)
class Load:
    """A load on the server at `url`, whose routes are with or without /v1.

    requests: number of prompts of `prompt` random ids from `low` up to `high`, each to be answered with `tokens`
    tokens. concurrency: number of requests that are kept in flight. rate: requests per second, which are sent at random
    times (a Poisson process); 0: each when another one has ended. long, every: one request of `every` has a prompt of
    `long` tokens. sigma: the lengths of the other prompts and of all answers are log-normal with this spread, around
    `prompt` and `tokens`. priority: of all requests.
    """

    url: str
    model: str
    requests: int
    prompt: int
    tokens: int
    concurrency: int
    low: int = 1000
    high: int = 4000
    seed: int = 0
    rate: float = 0.0
    long: int = 0
    every: int = 0
    sigma: float = 0.0
    priority: int = 0

    def shares(self, clients: int) -> list[Load]:
        """Return the share of each of several processes, of which each has something to do."""
        clients = min(clients, self.requests, self.concurrency)
        return [
            replace(
                self,
                requests=_share(self.requests, client, clients),
                concurrency=_share(self.concurrency, client, clients),
                seed=self.seed * 1000 + client,
                rate=self.rate / clients,
            )
            for client in range(clients)
        ]

    def body(self, draw: random.Random, number: int) -> bytes:
        """Return request `number`, from 1 on."""
        prompt, answer = (round(size * draw.lognormvariate(0, self.sigma)) for size in (self.prompt, self.tokens))
        if self.every and number % self.every == 0:
            prompt = self.long
        wanted: dict[str, Any] = {
            "model": self.model,
            "prompt": [draw.randrange(self.low, self.high) for _ in range(max(prompt, 1))],
            "max_tokens": max(answer, 2),
            "ignore_eos": True,
            "temperature": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"priority": self.priority} if self.priority else {}),
        }
        return json.dumps(wanted).encode()


def _share(whole: int, place: int, parts: int) -> int:
    return whole * (place + 1) // parts - whole * place // parts


@dataclass(frozen=True)
class Answer:
    """One answer. Times are on the clock of time.monotonic, which all processes share. chunks: arrival times of its
    pieces, of which a stream has several."""

    sent: float
    chunks: list[float]
    tokens: int
    error: str | None = None


# ------------------------------------------------------------------------------------------------- one process


async def _ask(client: httpx.AsyncClient, load: Load, body: bytes) -> Answer:
    sent, chunks = time.monotonic(), list[float]()
    try:
        async with client.stream("POST", f"{load.url}/completions", content=body) as reply:
            if reply.status_code != 200:
                return Answer(sent, [], 0, f"{reply.status_code}: {(await reply.aread())[:300]!r}")
            told = json.loads(await _read_stream(reply, chunks))
    except httpx.HTTPError as error:
        return Answer(sent, chunks, 0, f"{type(error).__name__}: {error}")
    if "error" in told:
        return Answer(sent, chunks, 0, str(told["error"]))
    return Answer(sent, chunks, told["usage"]["completion_tokens"])


async def _read_stream(reply: httpx.Response, chunks: list[float]) -> bytes:
    """Return the JSON of the last frame, which has the usage, or of a frame with an error. Append the arrival times of
    frames with new text to `chunks`."""
    buffer, last = b"", b""
    async for piece in reply.aiter_raw():
        now = time.monotonic()
        *frames, buffer = (buffer + piece).split(b"\n\n")
        for frame in frames:
            data = frame.removeprefix(b"data: ")
            if data == b"[DONE]":
                return last
            if data.startswith(b'{"error"'):
                return data
            if b'"choices":[]' not in data:
                chunks.append(now)
            last = data
    return b'{"error": {"message": "the stream ended without [DONE]"}}'


async def _ask_all(load: Load, answered: Callable[[], None]) -> list[Answer]:
    draw = random.Random(load.seed)
    room = asyncio.Semaphore(load.concurrency)
    timeout = httpx.Timeout(None, connect=60)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Content-Type": "application/json"}

    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as client:

        async def one(body: bytes, wait: float) -> Answer:
            await asyncio.sleep(wait)
            async with room:
                answer = await _ask(client, load, body)
            answered()
            return answer

        bodies = [load.body(draw, number) for number in range(1, load.requests + 1)]
        pauses = [draw.expovariate(load.rate) if load.rate else 0.0 for _ in bodies]
        return await asyncio.gather(*map(one, bodies, accumulate(pauses)))


def _serve(end: Connection) -> None:
    """Run a client's process: for each load that arrives, send None for each answer, then all of them."""
    gc.freeze()  # else a collection of all that was imported would delay some arrivals
    end.send(None)
    while (load := end.recv()) is not None:
        end.send(asyncio.run(_ask_all(load, lambda: end.send(None))))


# ------------------------------------------------------------------------------------------------- all of them


class Clients:
    """Client processes, which are ready when the `with` block begins."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        for _ in range(count):
            ours, its = context.Pipe()
            context.Process(target=_serve, args=(its,), daemon=True).start()
            its.close()
            self._ends.append(ours)

    def __enter__(self) -> Clients:
        for end in self._ends:
            end.recv()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        for end in self._ends:
            if e is None:
                end.send(None)
            end.close()

    def run(self, load: Load, progress: bool = True) -> list[Answer]:
        """Ask all of a load; returns the answers in no order."""
        answers: list[Answer] = []
        shares = load.shares(len(self._ends))
        working = self._ends[: len(shares)]
        for end, share in zip(working, shares, strict=True):
            end.send(share)
        with tqdm(total=load.requests, unit="request", disable=not progress) as bar:
            while working:
                for ready in connection.wait(working):
                    assert isinstance(ready, Connection)
                    told = ready.recv()
                    if told is None:
                        bar.update()
                        continue
                    answers += told
                    working.remove(ready)
        return answers


def figures(answers: list[Answer]) -> dict[str, Any]:
    """Return rates over the time from the first request to the last answer, and latencies in seconds, of the answers
    that succeeded. Of streams: ttft, to the first piece; inter_token, between two; per_token, from the first piece to
    the end per token.

    Raises RuntimeError where all failed.
    """
    good = [answer for answer in answers if answer.error is None]
    errors = [answer.error for answer in answers if answer.error is not None]
    if not good:
        raise RuntimeError(f"all {len(answers)} requests failed, the first with {errors[0]}")
    seconds = max(answer.chunks[-1] for answer in good) - min(answer.sent for answer in answers)
    tokens = sum(answer.tokens for answer in good)
    return {
        "requests": len(good),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "ttft": quantiles(answer.chunks[0] - answer.sent for answer in good),
        "per_token": quantiles(
            (answer.chunks[-1] - answer.chunks[0]) / (answer.tokens - 1) for answer in good if answer.tokens > 1
        ),
        "inter_token": quantiles(gap for answer in good for gap in np.diff(answer.chunks)),
        "end_to_end": quantiles(answer.chunks[-1] - answer.sent for answer in good),
    }


def quantiles(values: Iterable[float]) -> dict[str, float] | None:
    """Return quantiles, or None where there are no values."""
    found = np.fromiter(values, float)
    if not len(found):
        return None
    return {f"p{of}": float(np.percentile(found, of)) for of in QUANTILES} | {"mean": float(found.mean())}
